"""Tokens by position: exactly once and in order, whatever the bus does to frames."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.errors import ProtocolError
from whimbrel.wire.messages import FinishReason, TokenEntry

from services.router.core.progress import Progress, Verdict

# A busy machine is no failure.
PATIENT = settings(deadline=None, database=None)


def an_entry(position: int, tokens: list[int], *, epoch: int = 1, finish: FinishReason | None = None) -> TokenEntry:
    return TokenEntry(
        request_id="req-1", epoch=epoch, position=position, tokens=pack_tokens(tokens), finish_reason=finish
    )


def a_progress(tokens: list[int] | None = None) -> Progress:
    progress = Progress(epoch=1, now=0.0)
    if tokens:
        assert progress.accept(an_entry(0, tokens), 0.0) is Verdict.ACCEPTED
    return progress


@pytest.mark.parametrize(
    ("entry", "verdict", "tokens"),
    [
        (an_entry(2, [3]), Verdict.ACCEPTED, [1, 2, 3]),
        (an_entry(0, [1, 2]), Verdict.DUPLICATE, [1, 2]),
        (an_entry(1, [2]), Verdict.DUPLICATE, [1, 2]),
        (an_entry(0, [1, 2, 3, 4]), Verdict.ACCEPTED, [1, 2, 3, 4]),
        (an_entry(3, [4]), Verdict.GAP, [1, 2]),
        (an_entry(2, [3], epoch=0), Verdict.OLD_EPOCH, [1, 2]),
        (an_entry(9, [3], epoch=0), Verdict.OLD_EPOCH, [1, 2]),
        (an_entry(2, []), Verdict.DUPLICATE, [1, 2]),
    ],
    ids=["next", "repeated", "tail repeated", "overlapping", "gap", "old epoch", "old epoch with gap", "empty"],
)
def test_an_entry_counts_for_what_is_new_of_it(entry: TokenEntry, verdict: Verdict, tokens: list[int]) -> None:
    progress = a_progress([1, 2])
    assert progress.accept(entry, 1.0) is verdict
    assert progress.tokens == tokens


def test_a_finish_without_tokens_is_accepted_at_the_next_position_only() -> None:
    progress = a_progress([1, 2])
    assert progress.accept(an_entry(3, [], finish=FinishReason.STOP), 1.0) is Verdict.GAP
    assert progress.accept(an_entry(0, [1], finish=FinishReason.STOP), 1.0) is Verdict.DUPLICATE
    assert progress.finish_reason is None
    assert progress.accept(an_entry(2, [], finish=FinishReason.STOP), 1.0) is Verdict.ACCEPTED
    assert progress.finish_reason is FinishReason.STOP


def test_nothing_is_accepted_after_the_finish() -> None:
    progress = a_progress()
    progress.accept(an_entry(0, [1], finish=FinishReason.LENGTH), 0.0)
    assert progress.accept(an_entry(1, [2]), 0.0) is Verdict.DUPLICATE
    assert progress.tokens == [1]


def test_tokens_that_are_not_packed_as_agreed_are_a_protocol_error() -> None:
    entry = TokenEntry(request_id="req-1", epoch=1, position=0, tokens=b"abc")
    with pytest.raises(ProtocolError, match="no multiple of 4"):
        a_progress().accept(entry, 0.0)


def test_duration_and_mean_token_time_give_back_the_number_of_tokens() -> None:
    """M3, R2: t_out = d / t, with d since the first token and t the mean time of those after it."""
    progress = Progress(epoch=1, now=10.0)
    for position, moment in enumerate([12.0, 12.5, 13.5, 14.0]):
        progress.accept(an_entry(position, [position]), moment)
    assert progress.duration_s == 4.0
    assert progress.token_s == pytest.approx(2.0 / 3)
    assert progress.decode_s / progress.token_s + 1 == pytest.approx(4)


def test_times_are_zero_before_there_are_any() -> None:
    progress = a_progress()
    assert (progress.duration_s, progress.token_s, progress.decode_s) == (0.0, 0.0, 0.0)
    assert progress.decoding_s(99.0) == 0.0


def test_the_time_of_decoding_goes_on_while_no_token_comes() -> None:
    """M3: d is read from the router's clock whenever it is needed."""
    progress = Progress(epoch=1, now=10.0)
    progress.accept(an_entry(0, [1]), 12.0)
    progress.accept(an_entry(1, [2]), 12.5)
    assert progress.decode_s == 0.5
    assert progress.decoding_s(15.0) == 3.0


def test_what_the_worker_says_of_the_start_comes_with_position_zero() -> None:
    progress = a_progress()
    entry = TokenEntry(request_id="req-1", epoch=1, position=0, tokens=pack_tokens([1]), queue_s=0.5, prefill_s=0.25)
    progress.accept(entry, 0.0)
    assert (progress.queue_s, progress.prefill_s) == (0.5, 0.25)


@PATIENT
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    steps=st.lists(st.integers(1, 4), min_size=1, max_size=40),
    seed=st.integers(0, 2**32),
)
def test_lost_doubled_and_reordered_frames_with_resends_give_the_exact_sequence(
    tokens: list[int], steps: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    entries, position = [], 0
    for step in steps * len(tokens):
        if position >= len(tokens):
            break
        piece = tokens[position : position + step]
        is_last = position + step >= len(tokens)
        entries.append(an_entry(position, piece, finish=FinishReason.STOP if is_last else None))
        position += step
    network = [entry for entry in entries for _ in range(chance.choice([0, 1, 1, 1, 2]))]
    chance.shuffle(network)
    network += [an_entry(0, [99] * 5, epoch=0)]
    progress = Progress(epoch=1, now=0.0)
    for entry in network:
        before = list(progress.tokens)
        verdict = progress.accept(entry, 1.0)
        assert progress.tokens[: len(before)] == before
        assert progress.tokens == tokens[: progress.position]
        if verdict is Verdict.GAP:
            resent = an_entry(progress.position, tokens[progress.position : entry.position + 1])
            assert progress.accept(resent, 1.0) is Verdict.ACCEPTED
    if progress.finish is None:  # silence: everything from here on is asked for
        rest = an_entry(progress.position, tokens[progress.position :], finish=FinishReason.STOP)
        assert progress.accept(rest, 2.0) is Verdict.ACCEPTED
    assert progress.tokens == tokens
    assert progress.finish_reason is FinishReason.STOP
