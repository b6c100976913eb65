"""Corners of moves that a review found: leaders between rounds, handovers that nobody ends, slots kept twice."""

from __future__ import annotations

from whimbrel.wire.messages import (
    DeleteModel,
    HandOver,
    InferenceStarted,
    LoadModel,
    Message,
    MigrateInstance,
    MigrationState,
    ScaleModel,
    SourceStopped,
    StartRound,
    Tier,
)
from whimbrel.wire.records import AccuracyRecord

from services.scheduler.core.ready import Arrived
from tests.unit.scheduler.builders import ask, place
from tests.unit.scheduler.migration_stories import RUN_S, asks_for_b, figure_3, in_the_end, migrations, told
from tests.unit.scheduler.reviewed_stories import (
    PATIENT,
    TWO,
    b_takes_over,
    idle_ones_elsewhere,
    is_served_soon,
    two_of_a,
)
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import ToyCluster, a_model_record

# --- 1: the scheduler dies ---


def test_two_instances_of_one_model_move_at_once_into_slots_that_idle_ones_must_leave() -> None:
    """D4: one plan may move several instances of a model."""
    cluster = ToyCluster(
        models=[
            a_model_record("a", scaling=TWO),
            a_model_record("b", size_bytes=8 * GB // 10),
            a_model_record("c"),
            a_model_record("d"),
        ],
        servers=1,
        slots=2,
        pool_bytes=GB,
        settings=PATIENT,
    )
    cluster.run(5.0)
    running = two_of_a(cluster)
    cluster.pool_bytes = GB // 2
    idle_ones_elsewhere(cluster)
    waiting = cluster.router.request("qb", "b")
    cluster.run_until(lambda: waiting.is_done, 15.0)
    assert [one.switched for one in running] == [1, 1]
    in_the_end(cluster)


# --- 2: leaders that change ---


def test_the_next_leader_goes_on_after_a_round_that_was_answered_to_nobody() -> None:
    """P2: the round is recorded, what should follow it was never heard by the source."""
    lost: list[type[Message]] = [StartRound, HandOver]
    cluster, running = figure_3(drops=lambda message: isinstance(message, tuple(lost)))
    cluster.router.request("q2", "b")
    cluster.run_until(lambda: [record.rounds for record in migrations(cluster)] == [1], 10.0)
    cluster.stop_scheduler()
    lost.clear()
    cluster.said.clear()
    cluster.start_scheduler()
    cluster.run(3.0)
    assert len(cluster.said_to_all(MigrateInstance)) < 20, "the two tell each other the same again and again"
    assert running.switched == 1
    assert told(cluster)[-1] == "finished"


def test_a_model_is_served_soon_after_the_leader_was_away_in_its_handover() -> None:
    """P2: the router told nobody that it has switched; its heartbeats say so."""
    cluster, running = figure_3()
    b_takes_over(cluster)
    cluster.stop_scheduler()
    cluster.run(1.5)
    cluster.start_scheduler()
    cluster.run(2.5)
    assert running.switched == 1
    is_served_soon(cluster)
    assert told(cluster)[-1] == "finished"


def test_the_accuracy_of_resumes_knows_nothing_of_those_that_began_under_another_leader() -> None:
    """E7: an estimate that is not known any more is not taken for one of 0 s."""
    cluster, _ = figure_3()
    waiting = asks_for_b(cluster, MigrationState.PREPARING)
    cluster.stop_scheduler()
    cluster.start_scheduler()
    cluster.run_until(lambda: waiting.is_done, 15.0)
    assert told(cluster)[-1] == "finished"
    kept = [r for r in cluster.store.values() if isinstance(r, AccuracyRecord) and r.tier is Tier.GPU]
    assert all(estimate_s > 0.0 for record in kept for estimate_s, _ in record.recent)


# --- 3: handovers ---


def test_a_model_that_is_asked_for_in_its_handover_is_not_loaded_once_more() -> None:
    """R6: max_instances is 1, and the destination is about to serve."""
    cluster, _ = figure_3()
    cluster.start_agent("s2")
    cluster.start_worker("s2", 0)
    cluster.run(1.5)
    asks_for_b(cluster, MigrationState.HANDOVER)
    ready = cluster.deliver(place("q3", "a"))
    loads = [o.message for o in ready.messages if isinstance(o.message, LoadModel)]
    assert not loads, "a second instance of A"
    cluster.run(3.0)
    assert len([record for record in cluster.instances() if record.model_id == "a"]) == 1


def test_a_minimum_is_not_loaded_once_more_while_a_handover_lasts() -> None:
    """R6: min_instances is 1; the router is slow to say that it has switched."""
    is_slow = [False]
    cluster, _ = figure_3(drops=lambda m: isinstance(m, InferenceStarted) and is_slow[0])
    cluster.start_agent("s2")
    cluster.start_worker("s2", 0)
    cluster.run(1.5)
    ask(cluster, ScaleModel(model_id="a", min_instances=1))
    asks_for_b(cluster, MigrationState.HANDOVER)
    is_slow[0] = True
    cluster.run(0.5)
    assert len([record for record in cluster.instances() if record.model_id == "a"]) == 1


def test_a_client_that_leaves_in_the_handover_does_not_close_its_model() -> None:
    """G10: its router has left the source, and never says that it is at the destination."""
    cluster, running = figure_3()
    b_takes_over(cluster)
    running.is_cancelled = True
    cluster.run(1.0)
    is_served_soon(cluster)
    assert told(cluster)[-1] == "finished"


def test_a_start_at_the_destination_that_was_told_to_nobody_does_not_close_its_model() -> None:
    """R2: heartbeats of routers repair what got lost."""
    is_lost = [False]

    def drops(message: Message) -> bool:
        return isinstance(message, InferenceStarted) and is_lost[0]

    cluster, running = figure_3(drops=drops)
    b_takes_over(cluster)
    is_lost[0] = True
    cluster.run(2.0)
    is_lost[0] = False
    assert running.switched == 1
    is_served_soon(cluster)
    assert told(cluster)[-1] == "finished"


def test_a_request_that_ended_at_the_destination_before_the_stop_was_heard_does_not_close_its_model() -> None:
    """X6: SourceStopped was lost once, and the request had little left to do."""
    is_lost = [False]

    def drops(message: Message) -> bool:
        if isinstance(message, SourceStopped) and not is_lost[0]:
            is_lost[0] = True
            return True
        return False

    cluster, running = figure_3(drops=drops)
    cluster.router.request("q2", "b", run_s=RUN_S)
    cluster.run_until(lambda: running.switched == 1 and running.instance_id is not None, 5.0)
    cluster.workers["s0", 0]._finish(running)
    cluster.run(2.0)
    assert running.is_done
    is_served_soon(cluster)
    assert told(cluster)[-1] == "finished"


def test_requests_survive_the_deletion_of_their_model_in_the_handover_as_they_do_without_one() -> None:
    """Invariant 6: what runs ends on a draining instance; what is about to start there does, too."""

    def drops(message: Message) -> bool:
        if isinstance(message, SourceStopped):
            events = [Arrived(message=message), Arrived(message=DeleteModel(model_id="a"))]
            cluster.after(0.0, None, lambda: cluster.deliver(*events))
            return True
        return False

    cluster, running = figure_3(drops=drops)
    cluster.router.request("q2", "b")
    cluster.run(5.0)
    assert running.error is None
    assert running.instance_id is not None, "it runs nowhere"
