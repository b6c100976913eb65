"""Log probabilities in the router: with which text they are shown, what is cut off, and OpenAI's two shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.errors import ProtocolError
from whimbrel.wire.logprobs import TokenLogprob, pack_logprob
from whimbrel.wire.messages import FinishReason, TokenEntry

from services.router.core.logprobs import ShownToken, logprobs_body, token_text
from services.router.core.progress import Progress, Verdict
from services.router.outputs import Output, Text
from services.router.texts import TextStream
from services.router.token_bytes import TokenBytes
from tests.unit.router.test_texts import BYTE_FALLBACK, BYTE_LEVEL, PATIENT, TEXTS, TOKENIZERS

END = BYTE_LEVEL.token_to_id("<|im_end|>")
STOPS = st.lists(st.text("aP 日😀.", min_size=1, max_size=3), max_size=3).map(tuple)


def record(number: int) -> bytes:
    return pack_logprob(-float(number), [(number, -0.5)])


def pieces_of(tokens: list[int], stops: tuple[str, ...], *, step: int = 1) -> list[Text]:
    """What is shown of an output whose tokens arrive `step` at a time; token n has the log probability -n."""
    output = Output(TextStream(BYTE_LEVEL, []), stops, (), arrived_at=0.0, has_logprobs=True)
    records = [record(number) for number in range(len(tokens))]
    pieces: list[Text] = []
    for end in range(step, len(tokens) + step, step):
        piece = output.take(tokens[:end], "length" if end >= len(tokens) else None, records[:end])
        pieces += [] if piece is None else [piece]
        if piece is not None and piece.finish_reason is not None:
            return pieces
    raise AssertionError("the output did not end")


def encoded(text: str) -> list[int]:
    return list(BYTE_LEVEL.encode(text, add_special_tokens=False).ids)


@PATIENT
@given(text=TEXTS.filter(bool), stops=STOPS, step=st.integers(1, 9))
def test_frames_of_any_size_show_the_same_tokens_each_once(text: str, stops: tuple[str, ...], step: int) -> None:
    tokens = encoded(text)
    once = [shown for piece in pieces_of(tokens, stops) for shown in piece.tokens]
    assert [shown for piece in pieces_of(tokens, stops, step=step) for shown in piece.tokens] == once
    assert [shown.token for shown in once] == tokens[: len(once)]
    assert [shown.logprobs.logprob for shown in once] == [-float(number) for number in range(len(once))]


@PATIENT
@given(text=TEXTS.filter(bool), stops=STOPS)
def test_the_tokens_of_each_piece_begin_in_its_text(text: str, stops: tuple[str, ...]) -> None:
    """At each moment, those that were shown hold the text that was shown, and none begins behind it."""
    data = TokenBytes(BYTE_LEVEL)
    said, held = "", b""
    for piece in pieces_of(encoded(text), stops):
        offsets = [shown.offset for shown in piece.tokens]
        assert all(offset < len(said + piece.text) for offset in offsets)
        said += piece.text
        held += b"".join(data.of(shown.token) for shown in piece.tokens)
        assert held.startswith(said.encode())
    assert len(held) - len(said.encode()) < max(len(data.of(token)) for token in encoded(text))


def test_a_token_is_held_back_with_its_text() -> None:
    tokens = encoded("a😀 b")
    assert len(tokens) > 3, "the character is split"
    shown = [(piece.text, [token.offset for token in piece.tokens]) for piece in pieces_of(tokens, ("😀 x",))]
    assert "".join(text for text, _ in shown) == "a😀 b"
    assert shown[0] == ("a", [0])
    parts = len(encoded("😀"))
    assert shown[1][1][:parts] == [1] * parts, "all parts of a character come with it"


def test_a_stop_string_cuts_off_the_tokens_that_begin_in_it_or_behind_it() -> None:
    tokens = encoded("a b c d")
    (*_, last) = pieces = pieces_of(tokens, (" c",))
    assert last.finish_reason == "stop"
    assert "".join(piece.text for piece in pieces) == "a b"
    assert [shown.token for piece in pieces for shown in piece.tokens] == encoded("a b")


def test_tokens_without_text_have_their_entries() -> None:
    """A control token in the middle comes with what follows it, one at the end with the end."""
    tokens = [*encoded("a"), END, *encoded("b"), END]
    pieces = pieces_of(tokens, ())
    assert [shown.token for piece in pieces for shown in piece.tokens] == tokens
    assert "".join(piece.text for piece in pieces) == "ab"
    assert pieces[-1].tokens[-1] == ShownToken(END, 2, TokenLogprob(-3.0, ((3, -0.5),)))


def test_a_stop_token_has_its_entry_too() -> None:
    output = Output(TextStream(BYTE_LEVEL, []), (), (END,), arrived_at=0.0, has_logprobs=True)
    text = output.take([END], "stop", [record(0)])
    assert text is not None
    assert (text.text, [shown.token for shown in text.tokens]) == ("", [END])


@TOKENIZERS
@PATIENT
@given(text=TEXTS)
def test_the_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    joined = b"".join(TokenBytes(tokenizer).of(token) for token in tokens)
    if tokenizer is BYTE_LEVEL:
        assert joined == text.encode()
    elif text and "▁" not in text:
        assert joined == f" {text}".encode(), "this one writes a space before each text"


@pytest.mark.parametrize(
    ("tokenizer", "piece", "data"),
    [
        (BYTE_LEVEL, "<|im_end|>", b"<|im_end|>"),
        (BYTE_LEVEL, "Ġ", b" "),
        (BYTE_LEVEL, "ð", b"\xf0"),
        (BYTE_FALLBACK, "<s>", b"<s>"),
        (BYTE_FALLBACK, "▁Paris", b" Paris"),
        (BYTE_FALLBACK, "<0xF0>", b"\xf0"),
        (BYTE_FALLBACK, "<0x41>", b"A"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_token_has_the_bytes_that_it_stands_for(tokenizer: Tokenizer, piece: str, data: bytes) -> None:
    assert TokenBytes(tokenizer).of(tokenizer.token_to_id(piece)) == data


def test_an_id_that_only_pads_the_vocabulary_has_no_bytes() -> None:
    assert TokenBytes(BYTE_LEVEL).of(100_000) == b""


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    assert [token_text(data) for data in (b"", b" a", "é".encode(), b"\xf0\x9f")] == ["", " a", "é", "bytes:\\xf0\\x9f"]


NAMES = {1: b"a", 2: b"b", 3: b"\xf0", 4: b"a"}
TOKENS = [
    ShownToken(1, 0, TokenLogprob(-0.5, ((1, -0.5), (3, -1.0)))),
    ShownToken(2, 1, TokenLogprob(-3.0, ((4, -0.25), (1, -2.0)))),
]


def test_the_shape_of_a_chat() -> None:
    assert logprobs_body(TOKENS, NAMES.__getitem__, is_chat=True) == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "bytes:\\xf0", "logprob": -1.0, "bytes": [0xF0]},
                ],
            },
            {
                "token": "b",
                "logprob": -3.0,
                "bytes": [98],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.25, "bytes": [97]},
                    {"token": "a", "logprob": -2.0, "bytes": [97]},
                ],
            },
        ],
        "refusal": None,
    }


def test_the_shape_of_a_completion_has_the_token_itself_among_the_best() -> None:
    assert logprobs_body(TOKENS, NAMES.__getitem__, is_chat=False) == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"a": -0.5, "bytes:\\xf0": -1.0}, {"a": -0.25, "b": -3.0}],
        "text_offset": [0, 1],
    }


def an_entry(position: int, records: list[bytes], *, finish: FinishReason | None = None) -> TokenEntry:
    tokens = pack_tokens(range(position, position + len(records)))
    return TokenEntry(
        request_id="r", epoch=1, position=position, tokens=tokens, finish_reason=finish, logprobs=b"".join(records)
    )


def test_logprobs_are_accepted_by_position_with_their_tokens() -> None:
    records = [record(number) for number in range(5)]
    progress = Progress(epoch=1, now=0.0, top_logprobs=1)
    assert progress.accept(an_entry(0, records[:2]), 0.0) is Verdict.ACCEPTED
    assert progress.accept(an_entry(3, records[3:]), 0.0) is Verdict.GAP
    assert progress.accept(an_entry(1, records[1:4]), 0.0) is Verdict.ACCEPTED
    assert progress.accept(an_entry(0, records[:3]), 0.0) is Verdict.DUPLICATE
    assert progress.logprobs == records[:4]
    assert progress.accept(an_entry(4, [], finish=FinishReason.STOP), 0.0) is Verdict.ACCEPTED


@pytest.mark.parametrize("logprobs", [b"", record(0)[:-1], record(0) * 2], ids=["none", "cut off", "too many"])
def test_logprobs_that_do_not_fit_their_tokens_break_the_protocol(logprobs: bytes) -> None:
    progress = Progress(epoch=1, now=0.0, top_logprobs=1)
    entry = TokenEntry(request_id="r", epoch=1, position=0, tokens=pack_tokens([7]), logprobs=logprobs)
    with pytest.raises(ProtocolError, match="bytes of log probabilities for 1 tokens"):
        progress.accept(entry, 0.0)
    assert progress.position == 0
