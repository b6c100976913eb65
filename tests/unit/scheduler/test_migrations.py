"""Stories of running instances that move: for a model that waits, and what becomes of it when somebody fails."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import pytest
from whimbrel.wire.codec import error_of
from whimbrel.wire.events import (
    InstanceWasPreempted,
    MigrationAbandoned,
    MigrationFinished,
    MigrationHandedOver,
    MigrationRequeued,
    MigrationResuming,
    MigrationStarted,
    PublicEvent,
    ServerDrained,
)
from whimbrel.wire.messages import (
    AbandonMigration,
    CordonServer,
    ErrorReply,
    GetMigrations,
    GetMigrationsReply,
    HandOver,
    Message,
    MigrateInstance,
    MigrateModel,
    MigrateModelReply,
    MigrationState,
    RoundCompleted,
    RouteAdded,
    RouteState,
    SourceStopped,
    StartRound,
    Tier,
)
from whimbrel.wire.records import InstanceState, MigrationRecord, ResumeRecord

from services.scheduler.core.migration import (
    PAUSE_S_MAX,
    ROUNDS_MAX,
    TRANSITIONS,
    AfterRound,
    IllegalTransition,
    Migration,
    MigrationEvent,
    after_round,
    gap_tokens_max,
)
from services.scheduler.core.ready import Arrived, Reply
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster
from tests.unit.scheduler.toy_peers import GB, ToyRequest
from tests.unit.scheduler.toys import ToyCluster

RUN_S = 60.0


def figure_3(
    *, policy: str = "migration", drops: Callable[[Message], bool] = lambda message: False
) -> tuple[ToyCluster, ToyRequest]:
    """Figure 3 of the paper: A runs on the server that has B in DRAM, where A is in DRAM the other one has a free slot
    and B on its SSD."""
    settings = Settings(fair_wait_s=1000.0 if policy == "migration" else 1.0, policy=policy)
    cluster = a_cluster("a", "b", servers=2, settings=settings, drops=drops)
    for server_id, tiers in (("s0", {"a": Tier.DRAM, "b": Tier.SSD}), ("s1", {"a": Tier.DRAM, "b": Tier.DRAM})):
        agent = cluster.agents[server_id]
        agent.tiers = {(name, f"digest-of-{name}"): (tier, GB // 4) for name, tier in tiers.items()}
        agent.beat()
    cluster.kill_worker("s0", 0)
    cluster.run(4.0)
    running = cluster.router.request("q1", "a", run_s=RUN_S)
    cluster.run(1.0)
    assert running.instance_id is not None
    cluster.start_worker("s0", 0)
    cluster.run(1.5)
    cluster.said.clear()
    cluster.events.clear()
    return cluster, running


def told(cluster: ToyCluster) -> list[str]:
    """What the public heard of migrations."""
    return [event.verb for event in cluster.events if event.noun == "migration"]


E = TypeVar("E", bound=PublicEvent)


def event(cluster: ToyCluster, kind: type[E]) -> E:
    (found,) = [one for one in cluster.events if isinstance(one, kind)]
    return found


def migrations(cluster: ToyCluster) -> list[MigrationRecord]:
    return [record for record in cluster.store.values() if isinstance(record, MigrationRecord)]


def asks_for_b(cluster: ToyCluster, until: MigrationState) -> ToyRequest:
    """B is asked for, and A's migration gets as far as this state."""
    request = cluster.router.request("q2", "b")
    cluster.run_until(lambda: [record.state for record in migrations(cluster)] == [until], 10.0)
    return request


def in_the_end(cluster: ToyCluster) -> None:
    """Nobody is forgotten: no migration, no reservation, every slot has at most the instance that it serves."""
    cluster.run(5.0)
    assert not migrations(cluster)
    assert cluster.controller is not None
    state = cluster.controller.cluster
    assert not state.migrations
    assert not state.reservations
    for instance in state.instances.values():
        assert not instance.is_migrating
        assert not instance.is_closed
    for worker in cluster.workers.values():
        assert not worker.source.is_closed, "a worker goes on refusing requests"


# --- the machine ---


def test_the_table_is_total_and_three_states_are_terminal() -> None:
    """G13"""
    assert set(TRANSITIONS) == set(MigrationState)
    terminal = {state for state, row in TRANSITIONS.items() if not row}
    assert terminal == {MigrationState.FINISHED, MigrationState.ABANDONED, MigrationState.REQUEUED}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(MigrationState, MigrationEvent)))
def test_every_pair_of_state_and_event_is_legal_or_raises(state: MigrationState, event: MigrationEvent) -> None:
    """G13"""
    record = MigrationRecord(
        migration_id="mig-1",
        model_id="a",
        state=state,
        source_instance_id="i1",
        source_server_id="s0",
        source_slot=0,
        destination_instance_id="i2",
        destination_server_id="s1",
        destination_slots=(0,),
        reason="placement",
    )
    migration = Migration(record=record, started_s=0.0, progress_s=0.0)
    if event in TRANSITIONS[state]:
        assert migration.accepts(event)
        migration.enter(event)
        assert migration.state is TRANSITIONS[state][event]
    else:
        assert not migration.accepts(event)
        with pytest.raises(IllegalTransition):
            migration.enter(event)
        assert migration.state is state


def test_until_the_handover_every_end_leaves_the_source_as_it_was_and_from_then_on_none_does() -> None:
    """X2, X3, X4, X5"""
    for state in (MigrationState.PREPARING, MigrationState.RESUMING):
        assert MigrationState.REQUEUED not in TRANSITIONS[state].values()
        assert MigrationState.FINISHED not in TRANSITIONS[state].values()
    assert MigrationState.ABANDONED not in TRANSITIONS[MigrationState.HANDOVER].values()


KNOWN = ResumeRecord(
    model_id="a",
    device="cpu",
    seconds_per_token=0.002,
    overhead_s=0.01,
    covariance=(0.0, 0.0, 0.0, 0.0),
    observations=10,
    token_s=0.02,
)


@pytest.mark.parametrize(
    ("round_number", "gap_tokens", "before_tokens", "expected"),
    [
        pytest.param(1, 10, None, AfterRound.HAND_OVER, id="a gap that costs a decode step"),
        pytest.param(1, 11, None, AfterRound.ANOTHER_ROUND, id="a gap that costs more"),
        pytest.param(2, 40, 400, AfterRound.ANOTHER_ROUND, id="it shrinks"),
        pytest.param(2, 40, 40, AfterRound.HAND_OVER, id="it does not shrink, but is small"),
        pytest.param(2, 4000, 40, AfterRound.GIVE_UP, id="it grows, and would pause clients for long"),
        pytest.param(ROUNDS_MAX, 40, 41, AfterRound.HAND_OVER, id="the last round, bearable"),
        pytest.param(ROUNDS_MAX, 4000, 4001, AfterRound.GIVE_UP, id="the last round, unbearable"),
    ],
)
def test_rounds_end_when_the_gap_is_small_or_does_not_shrink(
    round_number: int, gap_tokens: int, before_tokens: int | None, expected: AfterRound
) -> None:
    """G7"""
    decided = after_round(round=round_number, gap_tokens=gap_tokens, before_tokens=before_tokens, known=KNOWN)
    assert decided is expected
    if decided is AfterRound.HAND_OVER:
        assert KNOWN.seconds_per_token * gap_tokens + KNOWN.overhead_s <= PAUSE_S_MAX


def test_a_gap_of_two_is_always_small_enough() -> None:
    slow = ResumeRecord(
        model_id="a",
        device="cpu",
        seconds_per_token=1.0,
        overhead_s=0.0,
        covariance=(0.0, 0.0, 0.0, 0.0),
        observations=0,
    )
    assert gap_tokens_max(slow) == 2


# --- the story of Figure 3 ---


def test_in_figure_3_a_moves_away_and_b_starts_from_dram() -> None:
    """C7, G3, G4, G7, G8, G9, G10"""
    cluster, running = figure_3()
    (source,) = cluster.instances()
    waiting = cluster.router.request("q2", "b")
    cluster.run_until(lambda: waiting.is_done, 5.0)
    assert waiting.routed_s is not None
    assert waiting.routed_s - waiting.asked_s < 0.5, "it did not wait for A's end"
    assert not running.is_over
    assert running.switched == 1
    placed = {record.model_id: record for record in cluster.instances()}
    assert (placed["a"].server_id, placed["b"].server_id) == ("s0", "s1")
    assert placed["b"].source_tier is Tier.DRAM
    assert told(cluster) == ["started", "resuming", "handed_over", "finished"]
    started, finished = event(cluster, MigrationStarted), event(cluster, MigrationFinished)
    assert (started.reason, started.for_model_id, started.source_instance_id) == ("placement", "b", source.instance_id)
    assert finished.rounds == event(cluster, MigrationHandedOver).rounds >= 1
    assert event(cluster, MigrationResuming).destination_instance_id == placed["a"].instance_id
    cluster.run_until(lambda: running.is_done, RUN_S + 5.0)
    in_the_end(cluster)


def test_routers_hear_that_the_source_is_closed_before_it_is_asked_and_of_the_destination_when_all_has_moved() -> None:
    """G5, G10"""
    cluster, _ = figure_3()
    (source,) = cluster.instances()
    waiting = cluster.router.request("q2", "b")
    cluster.run_until(lambda: waiting.is_done, 5.0)
    words: list[object] = []
    for message in [outgoing.message for outgoing in cluster.said]:
        if isinstance(message, RouteAdded) and message.route.model_id == "a":
            words.append((message.route.instance_id == source.instance_id, message.route.state))
        elif isinstance(message, MigrateInstance | HandOver):
            words.append(type(message))
    expected = [(True, RouteState.DRAINING), MigrateInstance, HandOver, (False, RouteState.READY)]
    assert sorted(expected, key=words.index) == expected


def test_a_new_request_for_a_model_on_the_move_waits_for_the_destination() -> None:
    """G5: the source takes no new request, and the destination none before everything has moved."""
    cluster, _ = figure_3()
    asks_for_b(cluster, MigrationState.RESUMING)
    cluster.run(0.005)
    late = cluster.router.request("q3", "a")
    cluster.run_until(lambda: late.is_done, 10.0)
    cluster.run(0.5)
    (placed,) = [record for record in cluster.instances() if record.model_id == "a"]
    assert late.instance_id == placed.instance_id
    assert placed.server_id == "s0"
    in_the_end(cluster)


def test_a_move_is_recorded_before_it_is_spoken_of() -> None:
    """P1: each state is in the store before the command that belongs to it leaves."""
    cluster, _ = figure_3()
    seen: list[tuple[str, list[MigrationState]]] = []

    def check(cluster: ToyCluster, ready: object) -> None:
        states = [record.state for record in migrations(cluster)]
        seen.extend(
            (type(outgoing.message).__name__, states)
            for outgoing in ready.messages  # type: ignore[attr-defined]
            if isinstance(outgoing.message, MigrateInstance | StartRound | HandOver)
        )

    cluster.check = check
    waiting = cluster.router.request("q2", "b")
    cluster.run_until(lambda: waiting.is_done, 5.0)
    names = [name for name, _ in seen]
    assert (names[0], names[-1]) == ("MigrateInstance", "HandOver")
    assert all(states == [MigrationState.RESUMING] for _, states in seen)


# --- what goes wrong ---


@pytest.mark.parametrize("state", [MigrationState.PREPARING, MigrationState.RESUMING])
def test_the_source_carries_on_when_the_destination_is_lost_before_the_handover(state: MigrationState) -> None:
    """X4, X5"""
    cluster, running = figure_3()
    waiting = asks_for_b(cluster, state)
    cluster.kill_worker("s0", 0)
    cluster.run(5.0)
    assert running.switched == 0
    assert not running.is_over
    assert told(cluster)[-1] == "abandoned"
    assert event(cluster, MigrationAbandoned).cause == "destination lost"
    late = cluster.router.request("q3", "a", run_s=0.1)
    cluster.run_until(lambda: late.is_done, 5.0)
    assert late.instance_id == running.instance_id, "the source takes requests again"
    assert not waiting.is_done, "B waits for a slot, as it would have without a move"
    cluster.run_until(lambda: running.is_done, RUN_S + 5.0)
    cluster.run_until(lambda: waiting.is_done, 10.0)
    in_the_end(cluster)


@pytest.mark.parametrize("state", [MigrationState.PREPARING, MigrationState.RESUMING])
def test_requests_of_a_source_that_is_lost_go_on_at_the_destination(state: MigrationState) -> None:
    """X2, X3: the destination's partial state is dropped, and it serves who comes."""
    cluster, running = figure_3()
    waiting = asks_for_b(cluster, state)
    source = cluster.workers["s1", 0]
    cluster.kill_worker("s1", 0)
    cluster.run(5.0)
    assert told(cluster)[-1] == "abandoned"
    assert running.instance_id is not None
    assert source.requests
    (placed,) = [record for record in cluster.instances() if record.model_id == "a"]
    assert (placed.server_id, placed.instance_id) == ("s0", running.instance_id)
    cluster.start_worker("s1", 0)
    cluster.run_until(lambda: waiting.is_done, 10.0)
    cluster.run_until(lambda: running.is_done, RUN_S + 5.0)
    in_the_end(cluster)


@pytest.mark.parametrize("state", [MigrationState.PREPARING, MigrationState.RESUMING])
def test_a_source_that_finishes_first_ends_the_migration(state: MigrationState) -> None:
    """X1: normal completion; the destination goes, and B gets the slot that is free anyway."""
    cluster, running = figure_3()
    waiting = asks_for_b(cluster, state)
    worker = cluster.workers["s1", 0]
    worker._finish(running)
    cluster.run_until(lambda: waiting.is_done, 5.0)
    assert running.is_done
    assert running.switched == 0
    assert told(cluster)[-1] == "abandoned"
    assert event(cluster, MigrationAbandoned).cause == "inference finished"
    cluster.run(1.0)
    assert [record.server_id for record in cluster.instances() if record.model_id == "b"] == ["s1"]
    in_the_end(cluster)


def test_a_destination_that_is_lost_in_the_handover_leaves_its_requests_to_their_routers() -> None:
    """X6: nobody runs them; routers start them again from their tokens, and B has its slot all the same."""
    cluster, running = figure_3()
    waiting = asks_for_b(cluster, MigrationState.HANDOVER)
    cluster.kill_worker("s0", 0)
    cluster.run_until(lambda: waiting.is_done, 10.0)
    assert told(cluster)[-1] == "requeued"
    assert event(cluster, MigrationRequeued).cause == "destination lost"
    cluster.start_worker("s0", 0)
    cluster.run_until(lambda: running.is_done, RUN_S + 10.0)
    in_the_end(cluster)


def test_a_source_that_is_lost_in_the_handover_changes_nothing() -> None:
    """X6: it had stopped already."""
    cluster, running = figure_3()
    asks_for_b(cluster, MigrationState.HANDOVER)
    cluster.kill_worker("s1", 0)
    cluster.run(2.0)
    assert told(cluster)[-1] == "finished"
    assert running.switched == 1
    cluster.run_until(lambda: running.is_done, RUN_S + 5.0)
    cluster.start_worker("s1", 0)
    in_the_end(cluster)


@pytest.mark.parametrize(
    "lost",
    [MigrateInstance, RoundCompleted, StartRound, HandOver, SourceStopped],
    ids=lambda kind: kind.__name__,
)
def test_a_message_that_is_lost_once_is_said_again(lost: type[Message]) -> None:
    """X6"""
    is_lost = [False]

    def drops(message: Message) -> bool:
        if isinstance(message, lost) and not is_lost[0]:
            is_lost[0] = True
            return True
        return False

    cluster, running = figure_3(drops=drops)
    for worker in cluster.workers.values():
        worker.source.gaps_tokens = (400, 40, 1)
    waiting = cluster.router.request("q2", "b")
    cluster.run_until(lambda: waiting.is_done, 10.0)
    assert is_lost[0]
    assert told(cluster)[-1] == "finished"
    assert running.switched == 1
    cluster.run_until(lambda: running.is_done, RUN_S + 5.0)
    in_the_end(cluster)


@pytest.mark.parametrize("lost", [RoundCompleted, SourceStopped], ids=lambda kind: kind.__name__)
def test_a_migration_in_which_nothing_moves_any_more_is_abandoned(lost: type[Message]) -> None:
    """Invariant 4: always a terminal state within a bounded time."""
    cluster, running = figure_3(drops=lambda message: isinstance(message, lost))
    cluster.router.request("q2", "b")
    cluster.run(1.5 * Settings().migration_stall_s)
    assert told(cluster)[-1] == "abandoned"
    assert event(cluster, MigrationAbandoned).cause == "deadline exceeded"
    cluster.drops = lambda message: False
    cluster.run_until(lambda: running.is_done, RUN_S + 5.0)
    in_the_end(cluster)


@pytest.mark.parametrize("state", [MigrationState.PREPARING, MigrationState.RESUMING, MigrationState.HANDOVER])
@pytest.mark.parametrize("away_s", [0.0, 1.5], ids=["at once", "later"])
def test_the_next_leader_goes_on_where_the_last_one_was(state: MigrationState, away_s: float) -> None:
    """P2: leader change in the middle of any state."""
    cluster, running = figure_3()
    waiting = asks_for_b(cluster, state)
    cluster.stop_scheduler()
    cluster.run(away_s)
    cluster.start_scheduler()
    cluster.run_until(lambda: waiting.is_done, 15.0)
    assert running.switched == 1
    cluster.run_until(lambda: running.is_done, RUN_S + 10.0)
    in_the_end(cluster)


def test_a_worker_that_hands_over_for_a_migration_nobody_knows_is_told_to_carry_on() -> None:
    cluster, running = figure_3()
    asks_for_b(cluster, MigrationState.RESUMING)
    cluster.stop_scheduler()
    cluster.store = {key: record for key, record in cluster.store.items() if key[0] != "migrations"}
    cluster.start_scheduler()
    cluster.run(3.0)
    assert cluster.said_to_all(AbandonMigration)
    late = cluster.router.request("q3", "a", run_s=0.1)
    cluster.run_until(lambda: late.is_done, 10.0)
    cluster.run_until(lambda: running.is_done, RUN_S + 10.0)
    in_the_end(cluster)


# --- preemption, for comparison ---


def test_preemption_stops_what_runs_and_starts_it_again_elsewhere() -> None:
    """C8: B starts at once; A waits for a load, and all of it is computed again."""
    cluster, running = figure_3(policy="preemption")
    waiting = cluster.router.request("q2", "b")
    cluster.run_until(lambda: waiting.is_done, 5.0)
    assert waiting.routed_s is not None
    assert waiting.routed_s - waiting.asked_s < 0.5
    assert event(cluster, InstanceWasPreempted).requests == 1
    cluster.run(1.0)
    placed = {record.model_id: record.server_id for record in cluster.instances()}
    assert placed == {"a": "s0", "b": "s1"}
    assert not running.is_over
    cluster.run_until(lambda: running.is_done, RUN_S + 10.0)
    in_the_end(cluster)


def test_two_models_that_want_one_slot_take_turns_under_preemption() -> None:
    """No model stops another one at every request."""
    cluster = a_cluster("a", "b", settings=Settings(policy="preemption"))
    for number in range(20):
        cluster.router.request(f"q{number}", "ab"[number % 2], run_s=5.0)
        cluster.run(0.5)
    stops = [one for one in cluster.events if isinstance(one, InstanceWasPreempted)]
    assert len(stops) <= 10.0 / Settings().fair_wait_s + 1


# --- operators ---


def ask(cluster: ToyCluster, message: Message) -> Message:
    ready = cluster.deliver(Arrived(message=message, reply_to="op"))
    (answer,) = [o.message for o in ready.messages if isinstance(o.to, Reply) and o.to.reply_to == "op"]
    return answer


@pytest.mark.parametrize("what", ["a", "q1", "the instance"])
def test_an_operator_moves_an_instance_by_model_request_or_instance(what: str) -> None:
    cluster, running = figure_3()
    what = running.instance_id or "" if what == "the instance" else what
    reply = ask(cluster, MigrateModel(what=what, server_id="s0", slot=0))
    assert isinstance(reply, MigrateModelReply)
    assert (reply.migration.state, reply.migration.reason) == (MigrationState.PREPARING, "operator")
    cluster.run(2.0)
    assert running.switched == 1
    assert told(cluster)[-1] == "finished"
    listed = ask(cluster, GetMigrations())
    assert isinstance(listed, GetMigrationsReply)
    (one,) = listed.migrations
    assert (one.migration_id, one.state) == (reply.migration.migration_id, MigrationState.FINISHED)
    in_the_end(cluster)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        pytest.param(MigrateModel(what="nothing", server_id="s0"), "model_not_found", id="no such thing"),
        pytest.param(MigrateModel(what="b", server_id="s0"), "conflict", id="a model without an instance"),
        pytest.param(MigrateModel(what="a", server_id="s9"), "server_not_found", id="no such server"),
        pytest.param(MigrateModel(what="a", server_id="s0", slot=7), "conflict", id="no such slot"),
        pytest.param(MigrateModel(what="a", server_id="s1"), "conflict", id="where it is already"),
    ],
)
def test_what_cannot_be_moved_is_refused_with_the_reason(message: MigrateModel, says: str) -> None:
    cluster, _ = figure_3()
    reply = ask(cluster, message)
    assert isinstance(reply, ErrorReply)
    assert reply.code == says
    assert not migrations(cluster)


def test_an_idle_instance_has_nothing_to_move_and_one_on_the_move_is_not_moved_again() -> None:
    cluster, running = figure_3()
    assert isinstance(ask(cluster, MigrateModel(what="a", server_id="s0")), MigrateModelReply)
    again = ask(cluster, MigrateModel(what="q1", server_id="s0"))
    assert isinstance(again, ErrorReply)
    cluster.run_until(lambda: running.is_done, RUN_S + 5.0)
    cluster.run(0.5)
    idle = ask(cluster, MigrateModel(what="a", server_id="s1"))
    assert isinstance(idle, ErrorReply)
    assert "runs nothing that could be moved" in str(error_of(idle))


def test_a_server_that_is_drained_has_its_requests_moved_away() -> None:
    """Nothing waits for long answers to end."""
    cluster, running = figure_3()
    ask(cluster, CordonServer(server_id="s1", drain=True))
    cluster.run_until(lambda: any(isinstance(e, ServerDrained) for e in cluster.events), 5.0)
    assert running.switched == 1
    assert not running.is_over
    assert event(cluster, MigrationStarted).reason == "drain"
    in_the_end(cluster)


def test_without_another_place_a_drained_server_lets_its_requests_end() -> None:
    cluster, running = figure_3()
    cluster.kill_worker("s0", 0)
    cluster.run(4.0)
    ask(cluster, CordonServer(server_id="s1", drain=True))
    cluster.run(5.0)
    assert not running.is_over
    assert running.switched == 0
    cluster.run_until(lambda: running.is_done, RUN_S + 5.0)
    cluster.run_until(lambda: any(isinstance(e, ServerDrained) for e in cluster.events), 5.0)


def test_every_instance_state_is_as_expected_after_a_move() -> None:
    """Invariant 3: slots and instances return to what is used."""
    cluster, running = figure_3()
    waiting = cluster.router.request("q2", "b")
    cluster.run_until(lambda: waiting.is_done and running.is_done, RUN_S + 10.0)
    cluster.run(2.0)
    assert {record.state for record in cluster.instances()} == {InstanceState.READY}
    cluster.run(Settings().keep_alive_s + 10.0)
    assert cluster.instances() == []
    in_the_end(cluster)
