"""The request machine: every state with every event, and what the clock asks for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from whimbrel.wire.errors import (
    ColdStartTimeout,
    InferenceLost,
    InstanceGone,
    LoadFailed,
    ModelNotFound,
    ModelTooLarge,
    QueueFull,
    RequestTimeout,
    Unavailable,
    WhimbrelError,
)
from whimbrel.wire.messages import Stages, Tier, WaitStage

from services.router.core.request_states import NEEDS_ROUTE, TRANSITIONS, IllegalTransition, RequestEvent, RequestState
from services.router.core.requests import (
    LOSSES_MAX,
    PLACE_EVERY_S,
    REFUSED_S,
    RESEND_AFTER_S,
    START_STALLED_TIMES,
    Due,
    Limits,
    Request,
    SwitchKind,
)
from tests.unit.router.peers import a_route

LIMITS = Limits(cold_start_s=100.0, idle_s=20.0, unanswered_s=10.0, stalled_s=5.0)
ROUTE = a_route("tiny")
OTHER = a_route("tiny", "instance-2", slot=1)

TELL: dict[RequestEvent, Callable[[Request], None]] = {
    RequestEvent.ROUTE_CHOSEN: lambda request: request.on_route(ROUTE, 0.0),
    RequestEvent.START_REFUSED: lambda request: request.on_refused("test", 3, 0.0),
    RequestEvent.TOKENS_ARRIVED: lambda request: request.on_tokens(0.0),
    RequestEvent.OUTPUT_ENDED: lambda request: request.on_ended(),
    RequestEvent.INSTANCE_LOST: lambda request: request.on_lost("test", 3, 0.0),
    RequestEvent.HANDED_OVER: lambda request: request.on_handed_over("test", 3, 0.0),
    RequestEvent.ERROR_RAISED: lambda request: request.on_error(ModelNotFound(model_id="tiny")),
    RequestEvent.CLIENT_LEFT: lambda request: request.on_client_left(),
}

STREAMED = (RequestEvent.ROUTE_CHOSEN, RequestEvent.TOKENS_ARRIVED)
PATHS: dict[RequestState, tuple[RequestEvent, ...]] = {
    RequestState.WAITING: (),
    RequestState.STARTING: (RequestEvent.ROUTE_CHOSEN,),
    RequestState.STREAMING: STREAMED,
    RequestState.SWITCHING: (*STREAMED, RequestEvent.INSTANCE_LOST),
    RequestState.FINISHED: (RequestEvent.ROUTE_CHOSEN, RequestEvent.OUTPUT_ENDED),
    RequestState.FAILED: (RequestEvent.ERROR_RAISED,),
    RequestState.CANCELLED: (RequestEvent.CLIENT_LEFT,),
}
# Every state, and SWITCHING in the four ways that there are.
SITUATIONS = {
    **{str(state): (state, path) for state, path in PATHS.items()},
    "failing over": (RequestState.SWITCHING, PATHS[RequestState.SWITCHING]),
    "failing over on a route": (RequestState.SWITCHING, (*PATHS[RequestState.SWITCHING], RequestEvent.ROUTE_CHOSEN)),
    "migrating": (RequestState.SWITCHING, (*STREAMED, RequestEvent.HANDED_OVER)),
    "migrating on a route": (RequestState.SWITCHING, (*STREAMED, RequestEvent.HANDED_OVER, RequestEvent.ROUTE_CHOSEN)),
}


def a_request(state: RequestState = RequestState.WAITING, *, may_fail_over: bool = True) -> Request:
    return a_request_after(PATHS[state], state, may_fail_over=may_fail_over)


def a_request_after(path: tuple[RequestEvent, ...], state: RequestState, *, may_fail_over: bool = True) -> Request:
    request = Request(request_id="req-1", model_id="tiny", limits=LIMITS, now=0.0, may_fail_over=may_fail_over)
    for event in path:
        TELL[event](request)
    assert request.state is state
    return request


@pytest.mark.parametrize("event", RequestEvent, ids=str)
@pytest.mark.parametrize(("state", "path"), SITUATIONS.values(), ids=SITUATIONS)
def test_every_event_in_every_state_moves_as_the_tables_say_or_not_at_all(
    state: RequestState, path: tuple[RequestEvent, ...], event: RequestEvent
) -> None:
    request = a_request_after(path, state)
    has_route = request.route is not None
    if event in TRANSITIONS[state] and NEEDS_ROUTE.get(event, has_route) is has_route:
        TELL[event](request)
        assert request.state is TRANSITIONS[state][event]
    else:
        with pytest.raises(IllegalTransition, match=f"{event} cannot happen to a request that is {state}"):
            TELL[event](request)
        assert (request.state, request.route is not None) == (state, has_route)


@pytest.mark.parametrize(("state", "path"), SITUATIONS.values(), ids=SITUATIONS)
def test_a_request_runs_or_waits_or_is_over(state: RequestState, path: tuple[RequestEvent, ...]) -> None:
    request = a_request_after(path, state)
    assert [request.is_running, request.is_waiting, request.is_over].count(True) == 1
    assert request.is_starting == (request.is_running and state is not RequestState.STREAMING)
    assert request.is_over or request.is_running == (request.route is not None)


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


def test_one_whose_worker_is_at_work_is_neither_cold_nor_stalled() -> None:
    """It may compute a long prompt, or wait behind others on a worker that computes one after the other."""
    queued = a_request(RequestState.STARTING)
    queued.on_busy(80.0)
    assert queued.due(LIMITS.cold_start_s) is Due.RESEND
    assert isinstance(queued.due(80.0 + LIMITS.cold_start_s), ColdStartTimeout)
    moved = a_request_after((*STREAMED, RequestEvent.HANDED_OVER, RequestEvent.ROUTE_CHOSEN), RequestState.SWITCHING)
    moved.on_busy(99.0)
    assert moved.due(LIMITS.cold_start_s) is Due.RESEND
    assert moved.due(99.0 + START_STALLED_TIMES * LIMITS.stalled_s) is Due.FAIL_OVER


def test_one_that_waited_long_behind_others_and_loses_its_worker_has_time_to_be_placed_again() -> None:
    queued = a_request(RequestState.STARTING)
    late = LIMITS.cold_start_s + 50.0
    queued.on_busy(late - 1.0)
    queued.on_lost("its worker is gone", 0, late)
    assert queued.due(late) is Due.PLACE


def test_a_stream_that_stands_still_has_no_excuse_in_a_worker_that_is_at_work() -> None:
    streaming = a_request(RequestState.STREAMING)
    streaming.on_busy(4.0)
    assert streaming.due(LIMITS.stalled_s) is Due.FAIL_OVER


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
    request.on_refused("busy", 0, 5.0)
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
    for _ in range(LOSSES_MAX):
        request.on_route(ROUTE, 0.0)
        request.on_lost("the worker died", 0, 0.0)
    assert request.state is RequestState.FAILED
    assert isinstance(request.error, InferenceLost)


ANSWERS = {
    InstanceGone(instance_id="i"): (True, True),
    Unavailable(what="x"): (True, True),
    QueueFull(queue="the instance", limit=1): (False, True),
    InferenceLost(reason="r", output_tokens=3): (False, True),
    ModelNotFound(model_id="tiny"): (False, False),
}


@pytest.mark.parametrize("error", ANSWERS, ids=lambda error: error.code)
def test_a_refused_start_is_tried_elsewhere_if_the_instance_is_gone_or_the_client_has_tokens(
    error: WhimbrelError,
) -> None:
    states = (RequestState.STARTING, RequestState.SWITCHING)
    assert tuple(a_request(state).may_try_after(error) for state in states) == ANSWERS[error]


def test_refusals_do_not_count_as_losses() -> None:
    request = a_request()
    for _ in range(LOSSES_MAX * 3):
        request.on_route(ROUTE, 0.0)
        request.on_refused("busy", 0, 0.0)
    assert request.state is RequestState.WAITING


def test_a_request_that_kills_its_instances_after_tokens_is_not_started_for_ever_either() -> None:
    request = a_request()
    for number in range(LOSSES_MAX):
        request.on_route(ROUTE, 0.0)
        request.on_tokens(0.0)
        request.on_lost("the worker died", number + 1, 0.0)
    assert isinstance(request.error, InferenceLost)
    assert f"the worker died, the last of {LOSSES_MAX} that were lost under it" in str(request.error)


def test_a_planned_handover_counts_as_no_loss() -> None:
    request = a_request(RequestState.STREAMING)
    for _ in range(LOSSES_MAX * 3):
        request.on_handed_over("to server-1/0", 3, 0.0)
        request.on_route(OTHER, 0.0)
        request.on_tokens(0.0)
    assert request.state is RequestState.STREAMING


def test_without_failover_an_instance_lost_after_tokens_ends_the_request_with_their_number() -> None:
    request = a_request(RequestState.STREAMING, may_fail_over=False)
    request.on_lost("its server is gone", 7, 1.0)
    assert request.error is not None
    assert str(request.error) == (
        "the instance that ran this request went away (its server is gone) after 7 tokens; send it again"
    )


def test_without_failover_an_instance_lost_before_a_token_is_replaced_all_the_same() -> None:
    request = a_request(RequestState.STARTING, may_fail_over=False)
    request.on_lost("gone", 0, 1.0)
    assert request.state is RequestState.WAITING


def test_without_failover_a_handover_is_followed_but_a_destination_that_refuses_ends_the_request() -> None:
    request = a_request(RequestState.STREAMING, may_fail_over=False)
    request.on_handed_over("to server-1/0", 3, 1.0)
    request.on_route(OTHER, 1.0)
    request.on_refused("it is gone", 3, 1.0)
    assert isinstance(request.error, InferenceLost)


def test_an_instance_lost_after_tokens_is_switched_from_and_left_alone_for_a_while() -> None:
    request = a_request(RequestState.STREAMING)
    request.on_lost("its server is gone", 3, 6.0)
    assert (request.state, request.route) == (RequestState.SWITCHING, None)
    assert not request.usable_at(6.0)(ROUTE.instance_id)
    assert request.due(6.0) is Due.PLACE
    assert request.waiting_since == 6.0, "it did not need an instance before"
    assert request.switch is not None
    assert (request.switch.kind, request.switch.reason) == (SwitchKind.FAILOVER, "its server is gone")
    request.on_route(OTHER, 7.0)
    assert (request.epoch, request.due(7.5)) == (2, None)
    assert request.due(7.0 + RESEND_AFTER_S) is Due.RESEND
    request.on_tokens(9.0)
    assert (request.state, request.switch) == (RequestState.STREAMING, None)


def test_a_switch_has_as_long_as_a_cold_start_and_then_says_for_how_long_nobody_could_go_on() -> None:
    request = a_request(RequestState.STREAMING)
    request.on_lost("its server is gone", 3, 50.0)
    request.on_waiting(WaitStage.DEFERRED, None, 60.0)
    assert request.due(50.0 + LIMITS.cold_start_s - 1) is Due.PLACE, "a silent scheduler may come back"
    error = request.due(50.0 + LIMITS.cold_start_s)
    assert isinstance(error, InferenceLost)
    assert error.output_tokens == 3
    assert "its server is gone, and nobody could go on with it for 100 s; stage: deferred; free a slot" in str(error)
    request.on_route(OTHER, 60.0)
    error = request.due(50.0 + LIMITS.cold_start_s)
    assert isinstance(error, InferenceLost)
    assert "stage: first token" in str(error), "however often it was started meanwhile"


def test_a_destination_that_is_lost_makes_a_migration_a_failover_that_began_with_it() -> None:
    request = a_request(RequestState.STREAMING)
    request.on_handed_over("to server-1/0", 3, 1.0)
    request.on_route(OTHER, 1.0)
    assert request.switch is not None
    assert request.switch.kind is SwitchKind.MIGRATION
    request.on_lost("its worker is silent", 3, 4.0)
    assert (request.switch.kind, request.switch.began_at) == (SwitchKind.FAILOVER, 1.0)
    request.on_route(ROUTE, 5.0)
    request.on_handed_over("to server-1/1", 3, 6.0)
    assert request.switch.kind is SwitchKind.FAILOVER, "the client has been waiting since then"


def test_a_request_that_goes_on_nowhere_is_tried_elsewhere_before_its_limit_has_passed() -> None:
    """A worker that lives, takes it, and hangs."""
    request = a_request(RequestState.STREAMING)
    request.on_lost("its server is gone", 3, 1.0)
    request.on_route(OTHER, 2.0)
    stalled_s = 2.0 + START_STALLED_TIMES * LIMITS.stalled_s
    assert stalled_s < LIMITS.cold_start_s
    assert request.due(stalled_s - 0.1) is Due.RESEND
    assert request.due(stalled_s) is Due.FAIL_OVER
    assert request.stalled_s == stalled_s - 2.0, "what the client is told"
    request.forgive(stalled_s)
    assert request.due(stalled_s) is Due.RESEND, "we could not hear"


def test_a_preempted_request_starts_again_elsewhere_however_often() -> None:
    """C8: that another model needed the slot is no fault of the request."""
    request = a_request(RequestState.STREAMING)
    for number in range(2 * LOSSES_MAX):
        request.on_preempted(3, float(number))
        assert (request.state, request.is_waiting) == (RequestState.SWITCHING, True)
        request.on_route(OTHER, float(number))
    assert request.switch is not None
    assert request.switch.kind is SwitchKind.PREEMPTION


def test_a_preempted_request_without_failover_ends_if_it_has_begun() -> None:
    begun = a_request(RequestState.STREAMING, may_fail_over=False)
    begun.on_preempted(3, 1.0)
    assert isinstance(begun.error, InferenceLost)
    new = a_request(RequestState.STARTING, may_fail_over=False)
    new.on_preempted(0, 1.0)
    assert new.state is RequestState.WAITING


def test_a_request_handed_over_before_its_first_token_was_promised_to_nobody() -> None:
    request = a_request(RequestState.STARTING, may_fail_over=False)
    request.on_handed_over("to server-1/0", 0, 1.0)
    request.on_route(OTHER, 1.0)
    request.on_lost("gone", 0, 2.0)
    assert request.state is RequestState.SWITCHING


def test_a_stream_that_stands_still_goes_on_elsewhere_and_its_instance_is_avoided_for_as_long() -> None:
    request = a_request(RequestState.STREAMING)
    request.on_heard(LIMITS.stalled_s)
    assert request.due(LIMITS.stalled_s - 0.01) is None
    assert request.due(LIMITS.stalled_s) is Due.FAIL_OVER
    request.on_lost("it stands still", 3, 5.0, avoided_s=LIMITS.stalled_s)
    assert not request.usable_at(9.9)(ROUTE.instance_id)
    assert request.usable_at(10.0)(ROUTE.instance_id)


def test_nobody_stands_still_while_we_could_not_hear() -> None:
    request = a_request(RequestState.STREAMING)
    request.forgive(4.0)
    request.on_heard(LIMITS.stalled_s)
    assert request.due(LIMITS.stalled_s) is None
    assert request.due(4.0 + LIMITS.stalled_s) is Due.FAIL_OVER


def test_the_idle_limit_holds_above_that_of_standing_still() -> None:
    request = a_request(RequestState.STREAMING)
    assert isinstance(request.due(LIMITS.idle_s), RequestTimeout)


PASSING = (
    QueueFull(queue="the load queue", limit=1),
    LoadFailed(model_id="tiny", reason="disk"),
    Unavailable(what="x"),
)


@pytest.mark.parametrize("error", [*PASSING, ModelNotFound(model_id="tiny")], ids=lambda error: error.code)
def test_a_placement_that_fails_ends_a_request_that_waits(error: WhimbrelError) -> None:
    request = a_request()
    request.on_not_placed(error)
    assert request.error is error


def test_a_placement_that_fails_ends_no_stream_that_has_begun_unless_it_fails_for_good() -> None:
    request = a_request(RequestState.SWITCHING)
    for _ in range(10):
        request.on_not_placed(PASSING[0])
        request.on_not_placed(ModelTooLarge(model_id="tiny", need_bytes=9, capacity_bytes=5))
    for _ in range(LOSSES_MAX - 2):
        request.on_not_placed(PASSING[1])
    assert request.state is RequestState.SWITCHING
    request.on_not_placed(PASSING[2])
    assert request.error is PASSING[2], "a load that fails is a loss like others"
    other = a_request(RequestState.SWITCHING)
    other.on_not_placed(ModelNotFound(model_id="tiny"))
    assert other.state is RequestState.FAILED


def test_who_served_a_request_is_who_gave_its_first_token() -> None:
    request = a_request(RequestState.STREAMING)
    request.on_lost("gone", 3, 0.0)
    assert request.server_id == ROUTE.server_id


def test_a_switch_is_no_cold_start() -> None:
    request = a_request(RequestState.SWITCHING)
    request.on_waiting(WaitStage.LOADING, None, 1.0)
    request.on_placed(Stages(tier=Tier.SSD, load_s=1.0), 2.0)
    assert (request.is_cold, request.stages.tier) == (False, Tier.GPU)


def test_stages_belong_to_those_who_waited_for_them() -> None:
    loaded = Stages(tier=Tier.SSD, load_s=1.0)
    warm, cold = a_request(), a_request()
    warm.on_placed(loaded, 0.0)
    cold.on_waiting(WaitStage.LOADING, None, 0.0)
    cold.on_placed(loaded, 1.0)
    assert (warm.stages.tier, warm.is_cold) == (Tier.GPU, False)
    assert (cold.stages, cold.is_cold) == (loaded, True)
