"""Stop strings: never seen, in whole or in part, and never a reason to hold back more than may be one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.core.stops import StopMatcher

# A busy machine is no failure.
PATIENT = settings(deadline=None, database=None)

# Few letters, so that stop strings occur, overlap and nearly occur.
TEXTS = st.text(alphabet="abé😀", max_size=30)
STOPS = st.lists(st.text(alphabet="abé😀", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """What the output is by definition: up to the beginning of the stop string that is complete first."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({place % (len(text) + 1) for place in cuts})
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@PATIENT
@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 1000), max_size=12))
def test_any_split_of_any_text_gives_the_text_before_the_first_stop(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    expected, is_stopped = cut(text, stops)
    matcher, said, seen = StopMatcher(stops), "", ""
    for piece in pieces_of(text, cuts):
        seen += piece
        said += matcher.feed(piece)
        assert expected.startswith(said), "something leaked that is no part of the output"
        held = seen[len(said) :]
        assert matcher.is_stopped or held == "" or any(stop.startswith(held) for stop in stops)
    said += matcher.flush()
    assert said == expected
    assert matcher.is_stopped is is_stopped


@pytest.mark.parametrize(
    ("stops", "pieces", "said"),
    [
        (("END",), ["abcE", "N", "Dxyz", "more"], ["abc", "", "", ""]),
        (("END",), ["abcE", "NO", "!"], ["abc", "ENO", "!"]),
        (("abcd", "bc"), ["ab", "c", "d"], ["", "a", ""]),
        (("aab",), ["aa", "a", "b"], ["", "a", ""]),
        ((), ["a", "b"], ["a", "b"]),
    ],
    ids=["found", "nearly found", "complete first wins", "overlapping with itself", "none"],
)
def test_text_is_held_back_only_while_a_stop_may_be_coming(
    stops: tuple[str, ...], pieces: list[str], said: list[str]
) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.feed(piece) for piece in pieces] == said


def test_what_was_held_back_comes_at_the_end() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.feed("the EN") == "the "
    assert matcher.flush() == "EN"
    assert not matcher.is_stopped
