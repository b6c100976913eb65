"""Stories of running instances that move for a model that waits, and what becomes of it when somebody fails."""

from __future__ import annotations

import pytest
from whimbrel.wire.events import (
    MigrationAbandoned,
    MigrationFinished,
    MigrationHandedOver,
    MigrationRequeued,
    MigrationResuming,
    MigrationStarted,
)
from whimbrel.wire.messages import (
    AbandonMigration,
    HandOver,
    Message,
    MigrateInstance,
    MigrationEnd,
    MigrationEnded,
    MigrationState,
    RoundCompleted,
    RouteAdded,
    RouteState,
    SourceStopped,
    StartRound,
    Tier,
)
from whimbrel.wire.records import InstanceState

from services.scheduler.core.settings import Settings
from tests.unit.scheduler.migration_stories import RUN_S, asks_for_b, event, figure_3, in_the_end, migrations, told
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import ToyCluster, a_model_record


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


@pytest.mark.parametrize("state", [MigrationState.PREPARING, MigrationState.RESUMING])
def test_a_move_whose_reason_has_left_is_cancelled_and_its_source_may_be_moved_again_at_once(
    state: MigrationState,
) -> None:
    """Clients of the source see a pause for somebody's sake, or none."""
    cluster, running = figure_3()
    gone = asks_for_b(cluster, state)
    gone.cancel()
    cluster.run_until(lambda: told(cluster)[-1] == "abandoned", 3.0)
    assert event(cluster, MigrationAbandoned).cause == "cancelled"
    assert running.switched == 0
    later = cluster.router.request("q3", "b")
    cluster.run_until(lambda: later.is_done, 10.0)
    assert running.switched == 1
    in_the_end(cluster)


def test_clients_without_patience_find_the_load_that_those_before_them_began() -> None:
    """If each who leaves ended it, the model would be cold for ever: B fits on s1 only, and A takes 1.3 s to load
    elsewhere."""
    models = [a_model_record("a"), a_model_record("b", size_bytes=2 * GB)]
    cluster = ToyCluster(models=models, servers=2)
    cluster.run(0.5)
    cluster.agents["s0"].pool_bytes = GB
    cluster.agents["s1"].tiers = {("a", "digest-of-a"): (Tier.DRAM, GB // 4), ("b", "digest-of-b"): (Tier.DRAM, 2 * GB)}
    for agent in cluster.agents.values():
        agent.beat()
    cluster.kill_worker("s0", 0)
    cluster.run(4.0)
    running = cluster.router.request("q1", "a", run_s=RUN_S)
    cluster.run(1.0)
    cluster.start_worker("s0", 0)
    cluster.run(1.5)
    tries = 0
    while tries < 5:
        tries += 1
        impatient = cluster.router.request(f"q{tries + 10}", "b")
        cluster.run(1.0)
        if impatient.is_done or impatient.instance_id is not None:
            break
        impatient.cancel()
        cluster.run(0.1)
    assert 1 < tries < 5, "the first one can't be served, and one of the next ones is"
    assert running.switched == 1
    cluster.run(5.0)
    in_the_end(cluster)


def test_a_source_that_refuses_to_move_is_left_alone_for_a_while() -> None:
    refusals: list[Message] = []

    def refuses(message: Message) -> bool:
        """The source never hears what it should do, and says that it refuses."""
        if isinstance(message, MigrateInstance):
            refusals.append(message)
        return isinstance(message, MigrateInstance)

    cluster, running = figure_3(drops=refuses)
    asks_for_b(cluster, MigrationState.RESUMING)
    (record,) = migrations(cluster)
    ended = MigrationEnded(
        migration_id=record.migration_id, instance_id=record.source_instance_id, reason=MigrationEnd.REFUSED
    )
    cluster.to_scheduler(ended)
    cluster.run(5.0)
    assert event(cluster, MigrationAbandoned).cause == "refused"
    assert told(cluster).count("started") == 1
    assert running.switched == 0


@pytest.mark.parametrize("tier", [Tier.REMOTE, Tier.DRAM])
def test_while_a_slot_is_emptied_by_a_move_a_free_one_is_taken_only_if_the_model_starts_sooner_there(
    tier: Tier,
) -> None:
    """C2: the cheapest server, also when things have changed since."""
    cluster, running = figure_3()
    waiting = asks_for_b(cluster, MigrationState.PREPARING)
    cluster.start_agent("s2", tiers={("b", "digest-of-b"): (tier, GB // 4)} if tier is Tier.DRAM else {})
    cluster.start_worker("s2", 0)
    cluster.run_until(lambda: waiting.is_done, 15.0)
    (of_b,) = [record for record in cluster.instances() if record.model_id == "b"]
    assert of_b.server_id == ("s2" if tier is Tier.DRAM else "s1")
    assert running.switched == (0 if tier is Tier.DRAM else 1)
    in_the_end(cluster)
