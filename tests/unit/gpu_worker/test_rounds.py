"""The source's side of a migration: every state with every event, what a round sends, and what comes late or twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from whimbrel.wire.codec import error_reply, unpack_tokens
from whimbrel.wire.errors import InstanceGone
from whimbrel.wire.messages import (
    AbandonMigration,
    FinishReason,
    HandOver,
    InferenceResumed,
    MigrateInstance,
    MigrationEnd,
    MigrationEnded,
    Moved,
    ResumeInference,
    RoundCompleted,
    Route,
    RouteState,
    SourceStopped,
    StartRound,
    StoppedRequest,
)

from services.gpu_worker.core import rounds as rounds_module
from services.gpu_worker.core.requests import Requests
from services.gpu_worker.core.round_states import FOLLOWED, TRANSITIONS, Event, IllegalTransition, State
from services.gpu_worker.core.rounds import REPEAT_S, Output, Rounds
from services.gpu_worker.core.sequence import Sequence
from tests.unit.gpu_worker.builders import a_request

DESTINATION = Route(instance_id="inst-2", model_id="m", server_id="server-2", slot=1, state=RouteState.READY)
WAYS: dict[State, tuple[Event, ...]] = {
    State.IDLE: (),
    State.ROUND: (Event.MIGRATION_ASKED,),
    State.BETWEEN: (Event.MIGRATION_ASKED, Event.ROUND_RESUMED),
    State.STOPPING: (Event.MIGRATION_ASKED, Event.HANDOVER_ASKED),
    State.STOPPED: (Event.MIGRATION_ASKED, Event.HANDOVER_ASKED, Event.STEP_FINISHED),
}


class Source:
    """Some requests, of which the first runs, and their rounds; `now` passes as the test says."""

    def __init__(self, *request_ids: str) -> None:
        self.requests = Requests(active_max=8, queue="worker s/0")
        self.rounds = Rounds(self.requests, server_id="server-1", slot=3)
        self.now = 10.0
        for request_id in request_ids or ("a",):
            self.requests.start(a_request(request_id, output_tokens_max=100), self.now)
        self.running = self.next()

    def next(self) -> Sequence:
        sequence = self.requests.next(self.now)
        assert sequence is not None
        return sequence

    def generate(self, *tokens: int) -> None:
        for token in tokens:
            self.running.advance(token, self.now)

    def end(self) -> list[Output]:
        self.running.advance(None, self.now)
        self.requests.end_turn()
        return self.rounds.on_requests_ended(self.now)

    def migrate(self, migration_id: str = "m1", *, is_here: bool = True) -> list[Output]:
        command = MigrateInstance(
            migration_id=migration_id, instance_id="inst-1", destination=DESTINATION, scheduler_epoch=1
        )
        return self.rounds.migrate(command, self.now, is_here=is_here)

    def start_round(self, number: int, migration_id: str = "m1") -> list[Output]:
        command = StartRound(migration_id=migration_id, instance_id="inst-1", round=number, scheduler_epoch=1)
        return self.rounds.start_round(command, self.now)

    def hand_over(self, migration_id: str = "m1") -> list[Output]:
        return self.rounds.hand_over(HandOver(migration_id=migration_id, instance_id="inst-1", scheduler_epoch=1))

    def abandon(self, migration_id: str = "m1") -> None:
        self.rounds.abandon(AbandonMigration(migration_id=migration_id, scheduler_epoch=1))

    def resumed(self, tokens: int, request_id: str = "a", migration_id: str = "m1", **changes: Any) -> list[Output]:
        message = InferenceResumed(migration_id=migration_id, request_id=request_id, tokens=tokens, **changes)
        return self.rounds.on_resumed(message, self.now)

    def stop(self) -> tuple[list[Sequence], SourceStopped]:
        return self.rounds.stop(self.now)


def sent(outputs: list[Output]) -> tuple[int, list[int]]:
    """The position and the tokens of the only message."""
    (message,) = outputs
    assert isinstance(message, ResumeInference)
    return message.position, unpack_tokens(message.tokens)


def completed(outputs: list[Output]) -> RoundCompleted:
    (message,) = outputs
    assert isinstance(message, RoundCompleted)
    return message


def ended(outputs: list[Output]) -> MigrationEnd:
    (message,) = outputs
    assert isinstance(message, MigrationEnded)
    return message.reason


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)), ids=str)
def test_every_state_takes_exactly_the_events_of_its_row(state: State, event: Event) -> None:
    """G13: the table is the machine."""
    rounds = Source().rounds
    for step in WAYS[state]:
        rounds._enter(step)
    assert rounds.state is state
    expected = TRANSITIONS[state].get(event)
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"{event} in state {state}"):
            rounds._enter(event)
        assert rounds.state is state
    else:
        rounds._enter(event)
        assert rounds.state is expected


def test_the_table_is_total_and_every_migration_can_end_in_every_state() -> None:
    assert set(TRANSITIONS) == set(State) == set(WAYS)
    assert {event for row in TRANSITIONS.values() for event in row} == set(Event)
    for state in set(State) - {State.IDLE}:
        assert TRANSITIONS[state][Event.ABANDONED] is TRANSITIONS[state][Event.INSTANCE_LEFT] is State.IDLE
    assert all(TRANSITIONS[state][Event.REQUESTS_ENDED] is State.IDLE for state in FOLLOWED)


def test_the_first_round_sends_all_tokens_and_the_next_ones_only_what_is_new() -> None:
    """G5-G7: the state is the tokens, and none travels twice."""
    source = Source()
    source.generate(40, 41)
    (first,) = source.migrate()
    assert first == ResumeInference(
        migration_id="m1",
        instance_id="inst-2",
        source_server_id="server-1",
        source_slot=3,
        request_id="a",
        position=0,
        tokens=b"".join(token.to_bytes(4, "little") for token in (5, 6, 7, 40, 41)),
    )
    source.generate(42, 43, 44)
    source.now += 0.5
    assert completed(source.resumed(5)) == RoundCompleted(
        migration_id="m1",
        instance_id="inst-1",
        round=1,
        requests=1,
        gap_tokens=3,
        round_tokens=5,
        sent_tokens=5,
        round_s=0.5,
    )
    assert sent(source.start_round(2)) == (5, [42, 43, 44])
    source.generate(45)
    second = completed(source.resumed(8))
    assert (second.round, second.gap_tokens, second.round_tokens, second.sent_tokens) == (2, 1, 3, 8)


def test_a_round_in_which_nothing_was_generated_is_completed_at_once() -> None:
    source = Source()
    source.migrate()
    source.resumed(3)
    again = completed(source.start_round(2))
    assert (again.gap_tokens, again.round_tokens, again.sent_tokens) == (0, 0, 3)


def test_at_the_handover_every_request_moves_with_what_the_destination_has_of_it() -> None:
    """G8: the running one with its base, those that wait without."""
    source = Source("a", "b")
    source.generate(40)
    source.migrate()
    source.generate(41)
    source.resumed(4)
    assert source.hand_over() == []
    assert source.rounds.is_stopping
    source.generate(42)
    moved, stopped = source.stop()
    assert [sequence.moved for sequence in moved] == [
        Moved(route=DESTINATION, base_tokens=4),
        Moved(route=DESTINATION, base_tokens=0),
    ]
    assert {sequence.finish_reason for sequence in moved} == {FinishReason.MOVED}
    assert stopped == SourceStopped(
        migration_id="m1",
        instance_id="inst-1",
        requests=(
            StoppedRequest(request_id="a", router_id="router-a", position=3),
            StoppedRequest(request_id="b", router_id="router-a", position=0),
        ),
        sent_tokens=4,
    )
    source.requests.end_turn()
    assert source.requests.active == 0
    (entry,), _ = source.requests.resend("a", 1, 0)
    assert (unpack_tokens(entry.tokens), entry.finish_reason) == ([40, 41, 42], FinishReason.MOVED)
    assert entry.moved == Moved(route=DESTINATION, base_tokens=4)


def test_a_handover_before_the_destination_has_answered_moves_what_it_is_known_to_have() -> None:
    source = Source()
    source.migrate()
    source.hand_over()
    assert source.resumed(2) == [], "no more is sent"
    (moved,), _ = source.stop()
    assert moved.moved is not None
    assert moved.moved.base_tokens == 2


def test_a_request_whose_turn_comes_during_a_round_joins_the_next_one() -> None:
    source = Source("a", "b")
    source.migrate()
    assert source.end() != []
    source.running = source.next()
    source.generate(50)
    # Its turn came before the scheduler answered.
    assert sent(source.start_round(2)) == (0, [5, 6, 7, 50])
    assert completed(source.resumed(4, "b")).requests == 1


def test_a_round_is_completed_by_the_end_of_the_request_it_waits_for() -> None:
    source = Source("a", "b")
    source.migrate()
    after = completed(source.end())
    assert (after.requests, after.gap_tokens) == (1, 0)


def test_the_gap_of_a_request_that_was_never_sent_is_all_of_it() -> None:
    source = Source("a", "b")
    source.migrate()
    source.running.advance(None, source.now)
    source.requests.end_turn()
    source.running = source.next()
    assert completed(source.rounds.on_requests_ended(source.now)).gap_tokens == 3


def test_a_migration_of_requests_that_all_ended_is_finished() -> None:
    """X1: they ended as usual, and the instance serves on."""
    source = Source()
    source.migrate()
    assert ended(source.end()) is MigrationEnd.FINISHED
    assert source.rounds.migration_id is None
    assert ended(source.migrate()) is MigrationEnd.FINISHED
    assert source.resumed(3) == source.rounds.tick(99.0) == []


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_the_last_request_may_end_with_the_step_that_the_handover_waits_for(is_handed_over: bool) -> None:
    source = Source()
    source.migrate()
    source.resumed(3)
    if is_handed_over:
        source.hand_over()
    assert ended(source.end()) is MigrationEnd.FINISHED
    assert not source.rounds.is_stopping


def test_an_instance_without_requests_has_nothing_to_move() -> None:
    source = Source()
    source.end()
    assert ended(source.migrate()) is MigrationEnd.FINISHED


def test_an_instance_that_is_not_here_cannot_be_migrated() -> None:
    source = Source()
    assert ended(source.migrate(is_here=False)) is MigrationEnd.REFUSED
    assert source.rounds.migration_id is None


@pytest.mark.parametrize("is_handed_over", [False, True])
def test_a_destination_that_cannot_resume_ends_the_migration_and_nothing_else(is_handed_over: bool) -> None:
    """X5: the source carries on."""
    source = Source()
    source.migrate()
    if is_handed_over:
        source.hand_over()
    error = error_reply(InstanceGone(instance_id="inst-2"))
    (message,) = source.resumed(0, error=error)
    assert message == MigrationEnded(
        migration_id="m1", instance_id="inst-1", reason=MigrationEnd.RESUME_FAILED, error=error
    )
    source.generate(40)
    assert not source.running.is_finished
    assert source.migrate() == [message]


@pytest.mark.parametrize("state", [State.ROUND, State.BETWEEN, State.STOPPING, State.STOPPED])
def test_an_abandoned_migration_leaves_an_ordinary_instance(state: State) -> None:
    source = at(state)
    source.abandon()
    assert (source.rounds.state, source.rounds.migration_id) == (State.IDLE, None)
    late = [*source.migrate(), *source.start_round(2), *source.hand_over(), *source.resumed(3)]
    assert late == [], "what comes late begins nothing and says nothing"
    assert source.rounds.state is State.IDLE
    if state is not State.STOPPED:
        assert sent(source.migrate("m2")) == (0, [5, 6, 7])


def test_a_migration_that_was_abandoned_before_it_was_heard_of_never_begins() -> None:
    source = Source()
    source.abandon()
    assert source.migrate() == []
    assert source.rounds.state is State.IDLE


def at(state: State) -> Source:
    source = Source()
    if state is not State.IDLE:
        source.migrate()
    if state in (State.BETWEEN, State.STOPPING, State.STOPPED):
        source.resumed(3)
    if state in (State.STOPPING, State.STOPPED):
        source.hand_over()
    if state is State.STOPPED:
        source.stop()
        source.requests.end_turn()
    assert source.rounds.state is state
    return source


def test_who_asks_again_hears_again_what_was_said_last() -> None:
    source = at(State.ROUND)
    assert source.migrate() == source.start_round(1) == []
    said = source.resumed(3)
    assert source.migrate() == source.start_round(1) == said
    source.hand_over()
    assert source.migrate() == source.start_round(2) == source.hand_over() == []
    _, stopped = source.stop()
    assert source.migrate() == source.start_round(2) == source.hand_over() == [stopped]
    source.requests.end_turn()
    source.rounds.leave()
    assert source.rounds.migration_id is None
    assert source.hand_over() == [stopped], "the news may have been lost with the instance gone"


def test_a_second_start_of_a_round_does_not_send_it_twice() -> None:
    source = at(State.BETWEEN)
    source.generate(40)
    assert sent(source.start_round(2)) == (3, [40])
    assert source.start_round(2) == []


def test_answers_of_other_migrations_and_of_unknown_requests_change_nothing() -> None:
    source = at(State.ROUND)
    assert source.resumed(3, migration_id="m0") == source.resumed(3, "z") == []
    assert source.rounds.state is State.ROUND


def test_a_destination_that_has_less_than_was_sent_gets_all_from_there_on() -> None:
    source = at(State.BETWEEN)
    source.generate(40, 41)
    source.start_round(2)
    assert sent(source.resumed(1)) == (1, [6, 7, 40, 41])
    again = completed(source.resumed(5))
    assert (again.round_tokens, again.sent_tokens) == (6, 9)


def test_a_late_answer_that_says_less_costs_no_tokens_of_the_request() -> None:
    """At worst the destination is sent again what it has."""
    source = at(State.BETWEEN)
    assert source.resumed(2) == []
    source.hand_over()
    (moved,), _ = source.stop()
    assert moved.moved is not None
    assert moved.moved.base_tokens == 2


def test_a_destination_never_has_more_than_there_is() -> None:
    source = at(State.ROUND)
    assert completed(source.resumed(99)).gap_tokens == 0


def test_silence_is_asked_about_without_tokens() -> None:
    source = Source()
    source.migrate()
    source.now += REPEAT_S - 0.01
    assert source.rounds.tick(source.now) == []
    source.now += 0.01
    assert sent(source.rounds.tick(source.now)) == (3, [])
    assert source.rounds.tick(source.now) == [], "once a second"
    assert sent(source.resumed(0)) == (0, [5, 6, 7]), "the message was lost"
    assert completed(source.resumed(3)).sent_tokens == 6


@pytest.mark.parametrize("state", [State.IDLE, State.BETWEEN, State.STOPPING, State.STOPPED])
def test_nothing_is_asked_when_no_round_goes_on(state: State) -> None:
    assert at(state).rounds.tick(99.0) == []


@pytest.mark.parametrize("state", [State.ROUND, State.BETWEEN])
def test_another_migration_replaces_one_that_has_not_stopped(state: State) -> None:
    source = at(state)
    assert sent(source.migrate("m2")) == (0, [5, 6, 7]), "to whom it may never have been sent"
    assert source.rounds.migration_id == "m2"
    assert source.migrate("m1") == source.resumed(3) == []
    assert completed(source.resumed(3, migration_id="m2")).sent_tokens == 3


@pytest.mark.parametrize("state", [State.STOPPING, State.STOPPED])
def test_another_migration_is_refused_by_one_that_hands_over(state: State) -> None:
    source = at(state)
    assert ended(source.migrate("m2")) is MigrationEnd.REFUSED
    assert source.rounds.migration_id == "m1"


@pytest.mark.parametrize("state", [State.ROUND, State.BETWEEN, State.STOPPING, State.STOPPED, State.IDLE])
def test_an_instance_that_leaves_ends_its_migration(state: State) -> None:
    source = at(state)
    source.rounds.leave()
    assert (source.rounds.state, source.rounds.migration_id) == (State.IDLE, None)


def test_ended_migrations_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "ENDED_MAX", 2)
    source = Source()
    for migration_id in ("m1", "m2", "m3"):
        source.abandon(migration_id)
    assert source.migrate("m3") == []
    assert source.migrate("m1") != []
