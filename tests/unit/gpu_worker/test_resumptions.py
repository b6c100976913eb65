"""The destination's side of migrations: tokens by position, whatever comes late or twice, and what is kept how long."""

from __future__ import annotations

from typing import Any

import pytest
from whimbrel.wire.codec import pack_tokens, unpack_tokens
from whimbrel.wire.errors import (
    Cancelled,
    ContextLengthExceeded,
    InferenceLost,
    InternalError,
    InvalidRequest,
    QueueFull,
)
from whimbrel.wire.messages import InferenceResumed, ResumeInference

from services.gpu_worker.core.resumptions import (
    RESUMPTION_KEEP_S,
    RESUMPTIONS_MAX,
    Resumptions,
    check_resume,
)
from tests.unit.gpu_worker.builders import a_request


def a_round(position: int, *tokens: int, request_id: str = "a", **changes: Any) -> ResumeInference:
    fields: dict[str, Any] = {
        "migration_id": "m1",
        "instance_id": "inst-1",
        "source_server_id": "server-1",
        "source_slot": 3,
        "request_id": request_id,
        "position": position,
        "tokens": pack_tokens(tokens),
    }
    return ResumeInference(**(fields | changes))


def compute(resumptions: Resumptions, now: float = 1.0) -> InferenceResumed | None:
    """Everything that is due, in one piece per resumption; the last answer."""
    answer = None
    while (resumption := resumptions.next()) is not None:
        answer = resumptions.advance(resumption, resumption.piece_end(512), 0.25, now)
    return answer


def resumed(*tokens: int) -> Resumptions:
    resumptions = Resumptions()
    resumptions.hear(a_round(0, *tokens), 0.0)
    compute(resumptions)
    return resumptions


def test_the_answer_comes_when_everything_is_computed_piece_by_piece() -> None:
    """G6: the last token is computed by the step that gives the next one."""
    resumptions = Resumptions()
    assert resumptions.hear(a_round(0, *range(10, 20)), 0.0) is None
    ends = []
    while (resumption := resumptions.next()) is not None:
        ends.append(resumption.piece_end(4))
        answer = resumptions.advance(resumption, ends[-1], 0.25, 1.0)
    assert ends == [4, 8, 9]
    assert answer == InferenceResumed(migration_id="m1", request_id="a", tokens=10, prefill_s=0.75)


def test_a_round_computes_only_what_is_new() -> None:
    resumptions = resumed(10, 11, 12)
    assert resumptions.hear(a_round(3, 13, 14), 2.0) is None
    resumption = resumptions.next()
    assert resumption is not None
    assert (resumption.computed, resumption.piece_end(512)) == (2, 4)
    answer = compute(resumptions)
    assert answer is not None
    assert (answer.tokens, answer.prefill_s) == (5, 0.25)


def test_one_token_needs_no_computing() -> None:
    answer = Resumptions().hear(a_round(0, 10), 0.0)
    assert answer is not None
    assert (answer.tokens, answer.prefill_s) == (1, 0.0)


@pytest.mark.parametrize(
    "again", [a_round(0, 10, 11, 12), a_round(0, 10), a_round(1, 11, 12), a_round(3), a_round(1)], ids=str
)
def test_what_comes_twice_is_not_computed_twice_and_answered_again(again: ResumeInference) -> None:
    resumptions = resumed(10, 11, 12)
    answer = resumptions.hear(again, 2.0)
    assert answer is not None
    assert answer.tokens == 3
    assert resumptions.next() is None


def test_what_comes_twice_while_it_is_computed_is_answered_once() -> None:
    resumptions = Resumptions()
    assert resumptions.hear(a_round(0, 10, 11, 12), 0.0) is None
    assert resumptions.hear(a_round(0, 10, 11, 12), 0.0) is None
    answer = compute(resumptions)
    assert answer is not None
    assert answer.tokens == 3
    assert resumptions.next() is None


def test_rounds_that_overlap_are_taken_by_position() -> None:
    resumptions = resumed(10, 11, 12)
    resumptions.hear(a_round(1, 11, 12, 13, 14), 2.0)
    answer = compute(resumptions)
    assert answer is not None
    assert answer.tokens == 5


def test_tokens_beyond_a_gap_are_answered_with_what_is_there() -> None:
    answer = Resumptions().hear(a_round(7, 10), 0.0)
    assert answer is not None
    assert answer.tokens == 0
    answer = resumed(10, 11, 12).hear(a_round(4, 14), 2.0)
    assert answer is not None
    assert answer.tokens == 3


def test_another_text_under_the_same_name_begins_anew() -> None:
    resumptions = resumed(10, 11, 12)
    assert resumptions.hear(a_round(0, 10, 77, 12), 2.0) is None
    assert list(resumptions.dropped) == ["a"]
    resumption = resumptions.next()
    assert resumption is not None
    assert (resumption.computed, resumption.tokens) == (0, [10, 77, 12])
    answer = resumed(10, 11, 12).hear(a_round(1, 77), 2.0)
    assert answer is not None
    assert answer.tokens == 0


def test_another_migration_of_the_request_begins_anew() -> None:
    resumptions = resumed(10, 11, 12)
    assert resumptions.hear(a_round(0, 10, 11, migration_id="m2"), 2.0) is None
    assert list(resumptions.dropped) == ["a"]
    answer = compute(resumptions)
    assert answer is not None
    assert (answer.migration_id, answer.tokens) == ("m2", 2)


def test_a_start_with_a_base_gets_the_tokens_that_are_kept() -> None:
    resumptions = resumed(10, 11, 12, 13)
    request = a_request("a", epoch=2, prompt=(), tokens=pack_tokens([14]), prompt_tokens=2, base_tokens=4)
    whole = resumptions.complete(request)
    tokens = unpack_tokens(whole.tokens)
    assert (tokens, whole.base_tokens) == ([10, 11, 12, 13, 14], 0)
    assert resumptions.take(whole, tokens) == 3
    assert (len(resumptions), list(resumptions.dropped)) == (0, [])


def test_a_start_with_a_smaller_base_goes_on_from_all_that_is_there() -> None:
    """A handover may come before the last answer was heard."""
    resumptions = resumed(10, 11, 12, 13)
    whole = resumptions.complete(
        a_request("a", prompt=(), tokens=pack_tokens([12, 13, 14]), prompt_tokens=2, base_tokens=2)
    )
    assert resumptions.take(whole, unpack_tokens(whole.tokens)) == 3
    assert not resumptions.dropped


@pytest.mark.parametrize("rest", [(12, 99, 14), (12,)], ids=["others", "fewer"])
def test_what_was_computed_beyond_the_base_is_dropped_when_it_went_on_otherwise(rest: tuple[int, ...]) -> None:
    resumptions = resumed(10, 11, 12, 13)
    whole = resumptions.complete(a_request("a", prompt=(), tokens=pack_tokens(rest), prompt_tokens=2, base_tokens=2))
    tokens = unpack_tokens(whole.tokens)
    assert tokens == [10, 11, *rest]
    assert resumptions.take(whole, tokens) == 0
    assert list(resumptions.dropped) == ["a"]


def test_a_start_without_a_base_goes_on_from_what_there_is() -> None:
    """X3: the source is lost, and the request is sent here all the same."""
    resumptions = resumed(10, 11, 12)
    assert resumptions.take(a_request("a"), [10, 11, 12, 13]) == 2
    assert resumptions.take(a_request("b"), [10, 11]) == 0


@pytest.mark.parametrize(
    ("request_id", "base_tokens", "instance_id"),
    [("b", 3, "inst-1"), ("a", 5, "inst-1"), ("a", 3, "inst-9")],
    ids=["unknown", "more than there is", "another instance"],
)
def test_a_base_that_is_not_here_is_lost(request_id: str, base_tokens: int, instance_id: str) -> None:
    request = a_request(
        request_id, prompt=(), tokens=pack_tokens([14, 15]), prompt_tokens=2, base_tokens=base_tokens,
        instance_id=instance_id,
    )  # fmt: skip
    with pytest.raises(InferenceLost, match=f"first {base_tokens} tokens are not here.* after {base_tokens} tokens"):
        resumed(10, 11, 12, 13).complete(request)


def test_after_the_start_nothing_of_the_migration_is_computed_any_more() -> None:
    resumptions = resumed(10, 11, 12)
    resumptions.hear(a_round(0, 20, 21, request_id="b"), 0.0)
    resumptions.take(a_request("a"), [10, 11, 12])
    with pytest.raises(Cancelled, match="migration m1"):
        resumptions.hear(a_round(3, 13), 2.0)
    assert resumptions.take(a_request("b"), [20, 21]) == 0, "it waits for its own start"
    assert not resumptions.dropped


def test_what_is_abandoned_is_dropped_and_not_begun_again() -> None:
    """X5: only what belongs to that migration."""
    resumptions = resumed(10, 11, 12)
    resumptions.hear(a_round(0, 20, 21, 22, request_id="b", migration_id="m2"), 0.0)
    resumptions.abandon("m1")
    resumptions.abandon("m1")
    assert (len(resumptions), list(resumptions.dropped)) == (1, ["a"])
    with pytest.raises(Cancelled):
        resumptions.hear(a_round(0, 10, 11, 12), 2.0)


def test_a_piece_of_what_was_abandoned_or_started_meanwhile_is_not_answered() -> None:
    for end in (lambda each: each.abandon("m1"), lambda each: each.take(a_request("a"), [10, 11, 12])):
        resumptions = Resumptions()
        resumptions.hear(a_round(0, 10, 11, 12), 0.0)
        resumption = resumptions.next()
        assert resumption is not None
        end(resumptions)
        assert resumptions.advance(resumption, 2, 0.25, 1.0) is None
        assert resumptions.fail(resumption, InternalError(service="gpu_worker")) is None


def test_what_cannot_be_computed_is_dropped_and_answered_with_the_error() -> None:
    resumptions = Resumptions()
    resumptions.hear(a_round(0, 10, 11, 12), 0.0)
    resumption = resumptions.next()
    assert resumption is not None
    answer = resumptions.fail(resumption, InternalError(service="gpu_worker"))
    assert answer is not None
    assert answer.error is not None
    assert (len(resumptions), list(resumptions.dropped)) == (0, ["a"])


def test_what_nobody_speaks_of_goes_away_by_itself() -> None:
    """X3: a KV cache of a dead migration."""
    resumptions = resumed(10, 11, 12)
    resumptions.hear(a_round(3, 13), 10.0)
    compute(resumptions, now=11.0)
    resumptions.expire(11.0 + RESUMPTION_KEEP_S - 0.1)
    assert len(resumptions) == 1
    resumptions.expire(11.0 + RESUMPTION_KEEP_S)
    assert (len(resumptions), list(resumptions.dropped)) == (0, ["a"])


def test_resumptions_are_bounded_in_number() -> None:
    resumptions = Resumptions()
    for number in range(RESUMPTIONS_MAX):
        resumptions.hear(a_round(0, 10, 11, request_id=f"req-{number}"), 0.0)
    with pytest.raises(QueueFull):
        resumptions.hear(a_round(0, 10, 11, request_id="one more"), 0.0)
    resumptions.clear()
    assert len(resumptions.dropped) == RESUMPTIONS_MAX
    assert resumptions.hear(a_round(0, 10, request_id="one more"), 0.0) is not None


def test_what_the_model_cannot_compute_is_refused() -> None:
    check_resume(a_round(0, 10, 11), context_tokens=2, vocabulary_size=12)
    check_resume(a_round(2), context_tokens=2, vocabulary_size=12)
    with pytest.raises(InvalidRequest, match="token 11 is not in the model's vocabulary of 11"):
        check_resume(a_round(0, 10, 11), context_tokens=2, vocabulary_size=11)
    with pytest.raises(ContextLengthExceeded):
        check_resume(a_round(1, 10, 11), context_tokens=2, vocabulary_size=12)
