"""Requests of a worker: turns, bounds, repetitions, aborts, and what is kept for routers that missed something."""

from __future__ import annotations

import pytest
from whimbrel.wire.codec import unpack_tokens
from whimbrel.wire.errors import InferenceLost, InvalidRequest, QueueFull, StaleEpoch
from whimbrel.wire.messages import FinishReason

from services.gpu_worker.core import requests as requests_module
from services.gpu_worker.core.requests import FINISHED_KEEP_S, Requests
from services.gpu_worker.core.sequence import Sequence
from tests.unit.gpu_worker.builders import a_request


def some_requests(*request_ids: str, active_max: int = 8) -> Requests:
    requests = Requests(active_max=active_max, queue="worker s/0")
    for request_id in request_ids:
        requests.start(a_request(request_id), 0.0)
    return requests


def finish(requests: Requests, tokens: tuple[int, ...] = (40,), now: float = 1.0) -> Sequence:
    """Run the next request to its end."""
    sequence = requests.next(now)
    assert sequence is not None
    for token in tokens:
        sequence.advance(token, now)
    sequence.advance(None, now)
    requests.end_turn()
    return sequence


def test_requests_have_their_turn_in_order_of_arrival() -> None:
    requests = some_requests("a", "b")
    assert requests.active == 2
    assert [finish(requests).request_id for _ in range(2)] == ["a", "b"]
    assert requests.next(2.0) is None
    assert requests.active == 0


def test_starting_twice_is_starting_once() -> None:
    requests = some_requests("a", active_max=1)
    assert requests.start(a_request("a"), 1.0) is None
    finish(requests)
    assert requests.start(a_request("a"), 2.0) is None
    assert requests.active == 0


def test_a_full_queue_refuses_and_says_how_many_it_holds() -> None:
    requests = some_requests("a", "b", active_max=2)
    requests.next(0.0)
    with pytest.raises(QueueFull, match="worker s/0 already holds 2 requests"):
        requests.start(a_request("c"), 0.0)


def test_a_higher_epoch_replaces_a_waiting_start() -> None:
    requests = some_requests("a", active_max=1)
    assert requests.start(a_request("a", epoch=2), 1.0) is not None
    with pytest.raises(StaleEpoch, match="epoch 1 is over; the current one is 2"):
        requests.start(a_request("a", epoch=1), 1.0)
    sequence = requests.next(2.0)
    assert sequence is not None
    assert sequence.epoch == 2


def test_a_higher_epoch_replaces_a_finished_start() -> None:
    requests = some_requests("a")
    finish(requests)
    assert requests.start(a_request("a", epoch=2), 1.0) is not None
    requests.expire(1.0 + FINISHED_KEEP_S)
    with pytest.raises(StaleEpoch):
        requests.resend("a", 1, 0)


def test_a_higher_epoch_replaces_a_running_start_whose_end_then_changes_nothing() -> None:
    requests = some_requests("a")
    old = requests.next(0.0)
    assert old is not None
    new = requests.start(a_request("a", epoch=2), 1.0)
    assert old.finish_reason is FinishReason.ABORTED
    requests.end_turn()
    assert requests.next(2.0) is new
    assert requests.resend("a", 2, 0) == ([], "router-a")


def test_a_waiting_request_is_aborted_at_once() -> None:
    requests = some_requests("a", "b")
    requests.next(0.0)
    sequence = requests.abort("b", 1, 1.0)
    assert sequence is not None
    assert sequence.finish_reason is FinishReason.ABORTED
    assert requests.active == 1


def test_a_running_request_is_aborted_with_the_step_it_is_in() -> None:
    requests = some_requests("a")
    running = requests.next(0.0)
    assert requests.abort("a", 1, 1.0) is running
    assert running is not None
    assert running.advance(40, 2.0) is None
    requests.end_turn()
    assert requests.active == 0


def test_aborting_what_is_unknown_finished_or_started_again_does_nothing() -> None:
    requests = some_requests("a")
    assert requests.abort("b", 1, 0.0) is None
    requests.start(a_request("a", epoch=2), 0.0)
    assert requests.abort("a", 1, 0.0) is None
    assert finish(requests).finish_reason is FinishReason.STOP
    assert requests.abort("a", 2, 0.0) is None


def test_the_requests_of_a_lost_router_are_aborted_and_no_others() -> None:
    requests = some_requests("a", "b")
    requests.start(a_request("c", router_id="router-b"), 0.0)
    requests.next(0.0)
    assert [sequence.request_id for sequence in requests.abort_router("router-a", 1.0)] == ["a", "b"]
    assert requests.abort_router("router-a", 1.0) == []
    requests.end_turn()
    assert finish(requests).request_id == "c"


def test_a_router_that_started_anew_keeps_the_requests_of_its_new_life() -> None:
    requests = some_requests("a")
    requests.start(a_request("b", router_epoch=11), 0.0)
    assert [sequence.request_id for sequence in requests.abort_router("router-a", 1.0, epoch=11)] == ["a"]


def test_who_asks_for_a_request_that_waits_hears_that_the_engine_is_at_work_as_long_as_it_is() -> None:
    """It may wait for minutes behind a long answer; behind an engine that hangs it waits in vain."""
    requests = some_requests("a", "b")
    assert requests.next(0.0) is not None
    for steps in (0, 3, 0, 1, 0):
        for _ in range(steps):
            requests.note_step()
        entries, _ = requests.resend("b", 1, 0)
        assert [(entry.tokens, entry.finish_reason) for entry in entries] == ([(b"", None)] if steps else [])


def test_tokens_are_sent_again_while_the_request_runs_and_after_its_end() -> None:
    requests = some_requests("a")
    running = requests.next(0.0)
    assert running is not None
    assert requests.resend("a", 1, 0) == ([], "router-a")
    running.advance(40, 1.0)
    (entry,), router_id = requests.resend("a", 1, 0)
    assert (unpack_tokens(entry.tokens), entry.finish_reason, router_id) == ([40], None, "router-a")
    running.advance(None, 1.0)
    requests.end_turn()
    (entry,), _ = requests.resend("a", 1, 1)
    assert (entry.tokens, entry.finish_reason) == (b"", FinishReason.STOP)


def test_what_is_not_known_cannot_be_sent_again() -> None:
    requests = some_requests("a")
    with pytest.raises(InferenceLost, match="after 3 tokens"):
        requests.resend("b", 1, 3)
    with pytest.raises(InferenceLost):
        requests.resend("a", 2, 0)
    with pytest.raises(StaleEpoch):
        requests.resend("a", 0, 0)
    with pytest.raises(InvalidRequest):
        requests.resend("a", 1, 1)


def test_finished_requests_are_forgotten_after_a_while() -> None:
    requests = some_requests("a", "b")
    finish(requests, now=1.0)
    finish(requests, now=2.0)
    requests.expire(1.0 + FINISHED_KEEP_S)
    with pytest.raises(InferenceLost):
        requests.resend("a", 1, 0)
    assert requests.resend("b", 1, 0)[0]


def test_finished_requests_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "FINISHED_MAX", 2)
    requests = some_requests("a", "b", "c")
    for _ in range(3):
        finish(requests)
    with pytest.raises(InferenceLost):
        requests.resend("a", 1, 0)
    assert requests.resend("b", 1, 0)[0]


def test_a_request_that_was_finished_when_it_came_is_kept_too() -> None:
    requests = some_requests()
    sequence = requests.start(a_request("a", output_tokens_max=0), 0.0)
    assert sequence is not None
    assert sequence.finish_reason is FinishReason.LENGTH
    assert requests.active == 0
    assert requests.resend("a", 1, 0)[0]
