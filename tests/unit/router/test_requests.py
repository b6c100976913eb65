"""The request machine: every state with every event, and what the clock asks for."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from whimbrel.wire.errors import ColdStartTimeout, InferenceLost, ModelNotFound, RequestTimeout, Unavailable
from whimbrel.wire.messages import Stages, Tier, WaitStage

from services.router.core.requests import (
    PLACE_EVERY_S,
    REFUSED_S,
    RESEND_AFTER_S,
    STARTS_LOST_MAX,
    TRANSITIONS,
    Due,
    IllegalTransition,
    Limits,
    Request,
    RequestEvent,
    RequestState,
)
from tests.unit.router.peers import a_route

LIMITS = Limits(cold_start_s=100.0, idle_s=20.0, unanswered_s=10.0)
ROUTE = a_route("tiny")

TELL: dict[RequestEvent, Callable[[Request], None]] = {
    RequestEvent.ROUTE_CHOSEN: lambda request: request.on_route(ROUTE, 0.0),
    RequestEvent.START_REFUSED: lambda request: request.on_refused(0.0),
    RequestEvent.TOKENS_ARRIVED: lambda request: request.on_tokens(0.0),
    RequestEvent.OUTPUT_ENDED: lambda request: request.on_ended(),
    RequestEvent.INSTANCE_LOST: lambda request: request.on_lost("test", 3, 0.0),
    RequestEvent.ERROR_RAISED: lambda request: request.on_error(ModelNotFound(model_id="tiny")),
    RequestEvent.CLIENT_LEFT: lambda request: request.on_client_left(),
}

PATHS: dict[RequestState, tuple[RequestEvent, ...]] = {
    RequestState.WAITING: (),
    RequestState.STARTING: (RequestEvent.ROUTE_CHOSEN,),
    RequestState.STREAMING: (RequestEvent.ROUTE_CHOSEN, RequestEvent.TOKENS_ARRIVED),
    RequestState.FINISHED: (RequestEvent.ROUTE_CHOSEN, RequestEvent.OUTPUT_ENDED),
    RequestState.FAILED: (RequestEvent.ERROR_RAISED,),
    RequestState.CANCELLED: (RequestEvent.CLIENT_LEFT,),
}


def a_request(state: RequestState = RequestState.WAITING) -> Request:
    request = Request(request_id="req-1", model_id="tiny", limits=LIMITS, now=0.0)
    for event in PATHS[state]:
        TELL[event](request)
    assert request.state is state
    return request


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RequestState, RequestEvent)), ids=str)
def test_every_event_in_every_state_moves_as_the_table_says_or_not_at_all(
    state: RequestState, event: RequestEvent
) -> None:
    request = a_request(state)
    if event in TRANSITIONS[state]:
        TELL[event](request)
        assert request.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(IllegalTransition, match=f"{event} cannot happen to a request that is {state}"):
            TELL[event](request)
        assert request.state is state


def test_the_table_has_a_row_for_every_state_and_terminal_rows_are_empty() -> None:
    assert TRANSITIONS.keys() == set(RequestState)
    terminal = {state for state, row in TRANSITIONS.items() if not row}
    assert terminal == {RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED}


def test_a_waiting_request_is_placed_at_once_and_then_every_second() -> None:
    request = a_request()
    assert request.due(0.0) is Due.PLACE
    request.on_asked(0.0)
    assert request.due(PLACE_EVERY_S - 0.01) is None
    assert request.due(PLACE_EVERY_S) is Due.PLACE


def test_a_new_scheduler_is_asked_at_once() -> None:
    request = a_request()
    request.on_asked(0.0)
    request.ask_again()
    assert request.due(0.1) is Due.PLACE


def test_a_placement_that_nobody_answers_becomes_unavailable() -> None:
    request = a_request()
    request.on_asked(LIMITS.unanswered_s)
    assert isinstance(request.due(LIMITS.unanswered_s), Unavailable)


def test_an_unanswered_placement_says_why_it_was_unanswered() -> None:
    request = a_request()
    why = Unavailable(what="scheduler.place_model (nobody listens)")
    request.on_unanswered(why)
    assert request.due(LIMITS.unanswered_s) is why


def test_an_answered_placement_may_wait_for_the_cold_start_limit() -> None:
    request = a_request()
    for second in range(1, int(LIMITS.cold_start_s)):
        request.on_waiting(WaitStage.FETCHING, 3.0, float(second))
        assert request.due(float(second)) is Due.PLACE
    error = request.due(LIMITS.cold_start_s)
    assert isinstance(error, ColdStartTimeout)
    assert (error.waited_s, error.stage) == (LIMITS.cold_start_s, "fetching")


def test_a_request_that_was_started_but_never_speaks_hits_the_cold_start_limit() -> None:
    request = a_request(RequestState.STARTING)
    assert request.due(LIMITS.cold_start_s - 1) is Due.RESEND
    assert isinstance(request.due(LIMITS.cold_start_s), ColdStartTimeout)


@pytest.mark.parametrize("state", [RequestState.STARTING, RequestState.STREAMING])
def test_silence_asks_for_a_resend_once_a_second(state: RequestState) -> None:
    request = a_request(state)
    assert request.due(RESEND_AFTER_S - 0.01) is None
    assert request.due(RESEND_AFTER_S) is Due.RESEND
    request.on_heard(RESEND_AFTER_S)
    assert request.due(RESEND_AFTER_S + 0.5) is None


def test_a_stream_without_tokens_hits_the_idle_limit_however_often_it_asked() -> None:
    request = a_request(RequestState.STREAMING)
    request.on_heard(LIMITS.idle_s)
    error = request.due(LIMITS.idle_s)
    assert isinstance(error, RequestTimeout)
    assert error.waited_s == LIMITS.idle_s


def test_a_long_stream_that_speaks_has_no_limit() -> None:
    request = a_request(RequestState.STREAMING)
    for moment in range(0, 1000, 10):
        request.on_tokens(float(moment))
        assert request.due(moment + 0.5) is None


@pytest.mark.parametrize("state", [RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED])
def test_nothing_is_due_for_a_request_that_is_over(state: RequestState) -> None:
    request = a_request(state)
    assert request.is_over
    assert not request.is_running
    assert request.due(1e9) is None


def test_an_instance_that_refused_is_left_alone_for_a_while_and_others_are_not() -> None:
    request = a_request(RequestState.STARTING)
    request.on_refused(5.0)
    assert not request.usable_at(5.0)(ROUTE.instance_id)
    assert request.usable_at(5.0)("instance-2")
    assert request.usable_at(5.0 + REFUSED_S)(ROUTE.instance_id)
    assert request.due(5.0) is Due.PLACE


def test_a_request_that_loses_its_instance_before_a_token_waits_again_under_a_new_epoch() -> None:
    request = a_request(RequestState.STARTING)
    request.on_lost("gone", 0, 1.0)
    assert (request.state, request.route) == (RequestState.WAITING, None)
    request.on_route(a_route("tiny", "instance-2"), 2.0)
    assert request.epoch == 2


def test_a_request_that_kills_its_instances_is_not_started_for_ever() -> None:
    request = a_request()
    for _ in range(STARTS_LOST_MAX):
        request.on_route(ROUTE, 0.0)
        request.on_lost("the worker died", 0, 0.0)
    assert request.state is RequestState.FAILED
    assert isinstance(request.error, InferenceLost)


def test_refusals_do_not_count_as_lost_starts() -> None:
    request = a_request()
    for _ in range(STARTS_LOST_MAX * 3):
        request.on_route(ROUTE, 0.0)
        request.on_refused(0.0)
    assert request.state is RequestState.WAITING


def test_an_instance_lost_after_tokens_ends_the_request_with_their_number() -> None:
    request = a_request(RequestState.STREAMING)
    request.on_lost("its server is gone", 7, 1.0)
    assert request.error is not None
    assert str(request.error) == (
        "the instance that ran this request went away (its server is gone) after 7 tokens; send it again"
    )


def test_stages_belong_to_those_who_waited_for_them() -> None:
    loaded = Stages(tier=Tier.SSD, load_s=1.0)
    warm, cold = a_request(), a_request()
    warm.on_placed(loaded, 0.0)
    cold.on_waiting(WaitStage.LOADING, None, 0.0)
    cold.on_placed(loaded, 1.0)
    assert (warm.stages.tier, warm.is_cold) == (Tier.GPU, False)
    assert (cold.stages, cold.is_cold) == (loaded, True)
