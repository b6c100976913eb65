"""A request's tokens: positions, ends, what is said again, and what is refused."""

from __future__ import annotations

import pytest
from whimbrel.wire.codec import pack_tokens, unpack_tokens
from whimbrel.wire.errors import ContextLengthExceeded, InvalidRequest
from whimbrel.wire.messages import FinishReason, Sampling

from services.gpu_worker.core.sequence import check_request, prefill_ends
from tests.unit.gpu_worker.builders import a_request, a_sequence


def test_positions_count_output_tokens_from_zero() -> None:
    sequence = a_sequence(prompt=(5, 6, 7), output_tokens_max=9)
    entries = [sequence.advance(token, 1.0) for token in (40, 41)]
    assert [(entry.position, unpack_tokens(entry.tokens)) for entry in entries if entry] == [(0, [40]), (1, [41])]
    assert sequence.position == 2
    assert list(sequence.output) == [40, 41]


def test_the_last_token_carries_the_finish_when_the_output_is_long_enough() -> None:
    sequence = a_sequence(output_tokens_max=2)
    first, last = sequence.advance(40, 1.0), sequence.advance(41, 1.0)
    assert first is not None
    assert last is not None
    assert (first.finish_reason, last.finish_reason) == (None, FinishReason.LENGTH)
    assert sequence.is_finished


def test_a_stop_ends_the_output_and_is_no_part_of_it() -> None:
    sequence = a_sequence(stop_tokens=(2, 3))
    assert sequence.is_stop(3)
    assert not sequence.is_stop(4)
    sequence.advance(40, 1.0)
    entry = sequence.advance(None, 1.0)
    assert entry is not None
    assert (entry.position, entry.tokens, entry.finish_reason) == (1, b"", FinishReason.STOP)


def test_a_request_that_asks_for_nothing_is_finished_at_once() -> None:
    assert a_sequence(output_tokens_max=0).finish_reason is FinishReason.LENGTH


def test_a_request_that_was_begun_elsewhere_goes_on_at_its_position() -> None:
    """D8: the state of an inference is its tokens."""
    sequence = a_sequence(prompt=(5, 6), output=(40, 41, 42), output_tokens_max=4)
    assert sequence.position == 3
    entry = sequence.advance(43, 1.0)
    assert entry is not None
    assert (entry.position, entry.finish_reason) == (3, FinishReason.LENGTH)
    assert unpack_tokens(sequence.entry(1).tokens) == [41, 42, 43]


def test_times_come_with_the_first_token_and_again_when_it_is_sent_again() -> None:
    sequence = a_sequence(now=10.0, output_tokens_max=9)
    sequence.start(12.0)
    first, second = sequence.advance(40, 12.5), sequence.advance(41, 13.0)
    assert first is not None
    assert second is not None
    assert (first.queue_s, first.prefill_s) == (2.0, 0.5)
    assert (second.queue_s, second.prefill_s) == (None, None)
    assert sequence.entry(0).prefill_s == 0.5


def test_everything_from_a_position_on_can_be_sent_again_with_its_end() -> None:
    sequence = a_sequence(output_tokens_max=3)
    for token in (40, 41, 42):
        sequence.advance(token, 1.0)
    entry = sequence.entry(1)
    assert unpack_tokens(entry.tokens) == [41, 42]
    assert entry.finish_reason is FinishReason.LENGTH
    assert sequence.entry(3).tokens == b""


def test_a_position_that_is_ahead_cannot_be_sent() -> None:
    with pytest.raises(InvalidRequest, match="1 is ahead of 0"):
        a_sequence().entry(1)


def test_nothing_changes_after_the_end() -> None:
    sequence = a_sequence()
    sequence.finish(FinishReason.ABORTED, 5.0)
    sequence.finish(FinishReason.FAILED, 6.0)
    assert sequence.advance(40, 7.0) is None
    assert (sequence.finish_reason, sequence.finished_at, sequence.position) == (FinishReason.ABORTED, 5.0, 0)


def test_a_request_that_never_had_its_turn_waited_and_computed_nothing() -> None:
    sequence = a_sequence(now=3.0)
    assert (sequence.queue_s, sequence.prefill_s) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"prompt": ()}, InvalidRequest, "at least one"),
        ({"prompt_tokens": 4}, InvalidRequest, "4 of 3 tokens"),
        ({"prompt": (5, 100)}, InvalidRequest, "token 100 is not in the model's vocabulary of 100"),
        ({"sampling": Sampling(temperature=0.0, logit_bias={100: 1.0})}, InvalidRequest, "logit_bias: token 100"),
        ({"sampling": Sampling(temperature=0.0, logit_bias={-1: 1.0})}, InvalidRequest, "logit_bias: token -1"),
        ({"output_tokens_max": 30}, ContextLengthExceeded, "context is 32 tokens; the prompt has 3 and 30"),
    ],
    ids=["no prompt", "fewer tokens than prompt", "token", "bias", "negative bias", "context"],
)
def test_what_the_model_cannot_compute_is_refused(changes: dict, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_request(a_request(**changes), context_tokens=32, vocabulary_size=100)


def test_a_request_that_just_fits_is_taken() -> None:
    check_request(a_request(prompt=(5, 6, 99), output_tokens_max=29), context_tokens=32, vocabulary_size=100)


@pytest.mark.parametrize(
    ("tokens", "ends"), [(1, []), (4, []), (5, [4]), (8, [4]), (9, [4, 8])], ids=lambda value: str(value)
)
def test_a_long_prefill_is_cut_and_its_last_piece_is_never_empty(tokens: int, ends: list[int]) -> None:
    assert list(prefill_ends(a_sequence(prompt=range(1, tokens + 1)), 4)) == ends


def test_tokens_that_are_not_packed_as_agreed_are_refused() -> None:
    with pytest.raises(Exception, match="no multiple of 4"):
        check_request(a_request(tokens=pack_tokens([1]) + b"x"), context_tokens=32, vocabulary_size=100)
