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
        (an_entry(2, []), Verdict.BUSY, [1, 2]),
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
    assert progress.start.duration_s == 4.0
    assert progress.token_s == pytest.approx(2.0 / 3)
    assert progress.decode_s / progress.token_s + 1 == pytest.approx(4)


def test_times_are_zero_before_there_are_any() -> None:
    progress = a_progress()
    assert (progress.start.duration_s, progress.token_s, progress.decode_s) == (0.0, 0.0, 0.0)
    assert progress.start.token_s == 0.0
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


def test_a_new_start_keeps_the_tokens_and_hears_nothing_of_the_old_one() -> None:
    """G11: exactly once, whoever computes it."""
    progress = a_progress([1, 2])
    progress.accept(an_entry(2, [], finish=FinishReason.MOVED), 0.0)
    progress.restart(2, 7, 1.0)
    assert (progress.epoch, progress.tokens, progress.finish) == (2, [1, 2], None)
    for late in (
        an_entry(2, [99]),
        an_entry(0, [1, 2, 99]),
        an_entry(5, [99]),
        an_entry(2, [], finish=FinishReason.STOP),
    ):
        assert progress.accept(late, 1.0) is Verdict.OLD_EPOCH
    assert progress.accept(an_entry(2, [3], epoch=2), 1.0) is Verdict.ACCEPTED
    assert progress.tokens == [1, 2, 3]
    with pytest.raises(AssertionError, match="an epoch of its own"):
        progress.restart(2, 8, 2.0)


def test_a_pause_is_what_a_switch_adds_and_no_time_of_decoding() -> None:
    """M3: tokens at 10, 11, 12, then a switch, then at 17, 18, 19: the pause is 4 s, and d and t are as without it."""
    progress = Progress(epoch=1, now=9.0)
    for position, moment in enumerate([10.0, 11.0, 12.0]):
        progress.accept(an_entry(position, [position]), moment)
    assert progress.pause_s == 0.0
    progress.restart(2, 8, 13.0)
    assert progress.decoding_s(16.0) == progress.decode_s == 2.0, "nothing is decoded in a pause"
    for position, moment in enumerate([17.0, 18.0, 19.0], start=3):
        progress.accept(an_entry(position, [position], epoch=2), moment)
    assert progress.pause_s == pytest.approx(4.0)
    assert progress.token_s == pytest.approx(1.0)
    assert progress.decode_s / progress.token_s + 1 == pytest.approx(6)
    assert progress.decoding_s(20.0) == pytest.approx(6.0)
    progress.restart(3, 11, 19.0)
    progress.accept(an_entry(6, [6], epoch=3), 19.5)
    assert progress.pause_s == 0.0, "a switch faster than a token is no pause"


def test_a_start_tells_of_its_own_tokens_only() -> None:
    """M3: what is learned of an instance is what happened there."""
    progress = Progress(epoch=1, now=9.0)
    first = TokenEntry(request_id="req-1", epoch=1, position=0, tokens=pack_tokens([0]), queue_s=0.5, prefill_s=0.25)
    progress.accept(first, 10.0)
    progress.accept(an_entry(1, [1]), 11.0)
    assert (progress.start.duration_s, progress.start.token_s, progress.start.output_tokens) == (2.0, 1.0, 2)
    progress.restart(2, 7, 20.0)
    again = TokenEntry(request_id="req-1", epoch=2, position=2, tokens=pack_tokens([2]), queue_s=0.1, prefill_s=0.125)
    progress.accept(again, 21.0)
    progress.accept(an_entry(3, [3], epoch=2), 21.5)
    progress.accept(an_entry(4, [], epoch=2, finish=FinishReason.STOP), 22.0)
    start = progress.start
    assert (start.duration_s, start.token_s, start.output_tokens) == (2.0, 0.5, 2)
    assert (start.prefill_s, start.prefill_tokens) == (0.125, 7)
    assert (progress.queue_s, progress.prefill_s) == (0.5, 0.25), "the client is told of the first token"


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
