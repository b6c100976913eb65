"""The rest of what a review of migrations found: drains, slots that are kept, times and words."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from whimbrel.wire.events import MigrationStarted, ServerDrained
from whimbrel.wire.messages import (
    CordonServer,
    LoadModel,
    Message,
    MigrateInstance,
    MigrateModel,
    MigrateModelReply,
    MigrationState,
    RoundCompleted,
    ScaleModel,
    Scaling,
    Tier,
    UnloadInstance,
)
from whimbrel.wire.records import InstanceState

from tests.unit.scheduler.builders import ask, place
from tests.unit.scheduler.migration_stories import RUN_S, asks_for_b, figure_3, in_the_end, migrations, told
from tests.unit.scheduler.reviewed_stories import (
    PATIENT,
    TWO,
    holds,
    idle_ones_elsewhere,
    two_of_a,
)
from tests.unit.scheduler.toy_peers import ToyRequest
from tests.unit.scheduler.toys import ToyCluster, a_model_record

# --- 4: drains ---


def test_what_moved_to_a_server_that_is_drained_meanwhile_moves_on() -> None:
    """D8: a drain moves everything off; only what could not be moved ends there."""
    cluster, running = figure_3()
    assert isinstance(ask(cluster, MigrateModel(what="a", server_id="s0")), MigrateModelReply)
    cluster.run_until(lambda: [r.state for r in migrations(cluster)] == [MigrationState.RESUMING], 5.0)
    ask(cluster, CordonServer(server_id="s0", drain=True))
    cluster.run(15.0)
    assert running.switched == 2
    assert any(isinstance(one, ServerDrained) for one in cluster.events)


def test_a_drained_server_moves_an_instance_for_which_the_cheapest_place_is_taken() -> None:
    """D8: another place is free, though the cheapest one would take a further move."""
    cluster = ToyCluster(models=[a_model_record("a"), a_model_record("c")], servers=3, slots=1, settings=PATIENT)
    holds(cluster, "s0", a=Tier.DRAM)
    holds(cluster, "s1", a=Tier.DRAM, c=Tier.DRAM)
    holds(cluster, "s2", c=Tier.DRAM)
    cluster.kill_worker("s1", 0)
    cluster.kill_worker("s2", 0)
    cluster.run(5.0)
    running = cluster.router.request("q1", "a", run_s=RUN_S)
    cluster.run(1.0)
    cluster.start_worker("s1", 0)
    cluster.run(1.5)
    other = cluster.router.request("q2", "c", run_s=RUN_S)
    cluster.run(1.0)
    cluster.start_worker("s2", 0)
    cluster.run(1.5)
    assert {r.model_id: r.server_id for r in cluster.instances()} == {"a": "s0", "c": "s1"}
    ask(cluster, CordonServer(server_id="s0", drain=True))
    cluster.run(5.0)
    assert running.switched == 1, "s2 is free"
    assert other.switched == 0


def test_both_instances_of_a_model_leave_a_drained_server_though_each_place_must_be_left_first() -> None:
    cluster = ToyCluster(
        models=[
            a_model_record("a", scaling=TWO),
            a_model_record("c"),
            a_model_record("d"),
        ],
        servers=1,
        slots=2,
        settings=PATIENT,
    )
    cluster.run(5.0)
    running = two_of_a(cluster)
    idle_ones_elsewhere(cluster)
    ask(cluster, CordonServer(server_id="s0", drain=True))
    cluster.run(10.0)
    assert [one.switched for one in running] == [1, 1]


def test_a_drain_moves_what_was_just_not_moved_for_another_reason() -> None:
    """A move for B was given up because its destination was lost; a drain a moment later has a place again."""
    cluster, running = figure_3()
    asks_for_b(cluster, MigrationState.RESUMING)
    cluster.kill_worker("s0", 0)
    cluster.run(5.0)
    assert told(cluster)[-1] == "abandoned"
    cluster.start_worker("s0", 0)
    cluster.run(1.5)
    ask(cluster, CordonServer(server_id="s1", drain=True))
    cluster.run(15.0)
    assert running.switched == 1


# --- 5: slots that are kept for a destination ---


def one_that_must_evict(
    drops: Callable[[Message], bool] = lambda message: False,
) -> tuple[ToyCluster, ToyRequest]:
    """Figure 3, but an idle C is where A would go."""
    cluster = ToyCluster(
        models=[a_model_record("a"), a_model_record("b"), a_model_record("c")],
        servers=2,
        slots=1,
        settings=PATIENT,
        drops=drops,
    )
    holds(cluster, "s0", a=Tier.DRAM, c=Tier.DRAM)
    holds(cluster, "s1", a=Tier.DRAM, b=Tier.DRAM)
    cluster.kill_worker("s0", 0)
    cluster.run(5.0)
    running = cluster.router.request("q1", "a", run_s=RUN_S)
    cluster.run(1.0)
    cluster.start_worker("s0", 0)
    cluster.run(1.5)
    short = cluster.router.request("of-c", "c")
    cluster.run_until(lambda: short.is_done, 5.0)
    cluster.run(0.5)
    cluster.said.clear()
    cluster.events.clear()
    return cluster, running


def test_scaling_a_model_does_not_take_away_the_slots_that_its_destination_waits_for() -> None:
    held = [False]
    cluster, _ = one_that_must_evict(drops=lambda m: isinstance(m, UnloadInstance) and held[0])
    held[0] = True
    waiting = cluster.router.request("q2", "b")
    cluster.run(0.3)
    assert [r.destination_instance_id for r in migrations(cluster)] == [""], "it waits for C's slot"
    ask(cluster, ScaleModel(model_id="a", keep_alive_s=77.0))
    held[0] = False
    cluster.run(3.0)
    assert told(cluster)[-1] == "finished"
    assert waiting.is_done


def test_the_next_leader_still_moves_what_waited_for_an_eviction() -> None:
    """P2: reservations are not durable; the evicted one goes all the same."""
    held = [False]
    cluster, _ = one_that_must_evict(drops=lambda m: isinstance(m, UnloadInstance) and held[0])
    held[0] = True
    waiting = cluster.router.request("q2", "b")
    cluster.run(0.3)
    assert [r.destination_instance_id for r in migrations(cluster)] == [""], "it waits for C's slot"
    cluster.stop_scheduler()
    held[0] = False
    cluster.start_scheduler()
    cluster.run(5.0)
    in_the_end(cluster)
    assert waiting.is_done


def test_an_eviction_at_the_destination_that_is_refused_gives_the_move_up() -> None:
    cluster, _ = one_that_must_evict()
    # C is asked for at the moment in which it is to go.
    waiting = cluster.router.request("q2", "b")
    busy = cluster.router.request("q3", "c", run_s=3.0)
    cluster.run(2.0)
    assert busy.routed_s is not None
    cluster.run(15.0)
    assert waiting.is_done
    in_the_end(cluster)


def test_a_model_whose_slot_a_stuck_move_is_to_free_takes_another_one_that_is_free() -> None:
    """C4: tried the moment a slot is there. The destination's load hangs, which is noticed after 90 s."""
    is_stuck = [False]
    cluster, _ = figure_3(drops=lambda m: isinstance(m, LoadModel) and m.model_id == "a" and is_stuck[0])
    is_stuck[0] = True
    waiting = asks_for_b(cluster, MigrationState.PREPARING)
    cluster.start_agent("s2")
    cluster.start_worker("s2", 0)
    cluster.run(15.0)
    assert waiting.is_done


# --- 6: time ---


def twins() -> tuple[ToyCluster, ToyRequest]:
    """A runs on s1, where B is in DRAM; an idle twin of it is on s0."""
    cluster = ToyCluster(
        models=[
            a_model_record("a", scaling=Scaling(max_instances=2, target_concurrency=1)),
            a_model_record("b"),
        ],
        servers=2,
        slots=1,
        settings=PATIENT,
    )
    holds(cluster, "s0", a=Tier.DRAM)
    holds(cluster, "s1", a=Tier.DRAM, b=Tier.DRAM)
    cluster.kill_worker("s0", 0)
    cluster.run(5.0)
    running = cluster.router.request("q1", "a", run_s=RUN_S)
    cluster.run(1.0)
    cluster.start_worker("s0", 0)
    cluster.run(1.5)
    short = cluster.router.request("q0", "a", run_s=0.1)
    cluster.run(3.0)
    assert short.is_done
    assert len(cluster.instances()) == 2
    cluster.said.clear()
    cluster.events.clear()
    return cluster, running


def test_a_move_into_an_idle_twin_begins_in_the_step_that_decides_it() -> None:
    """Nothing on the path of a request waits for a tick."""
    cluster, _ = twins()
    ready = cluster.deliver(place("qb", "b"))
    assert any(isinstance(one, MigrationStarted) for one in ready.events)
    assert any(isinstance(o.message, MigrateInstance) for o in ready.messages)


def test_an_idle_twin_stays_for_its_keep_alive_when_the_move_into_it_is_given_up() -> None:
    """R6: it was there before."""
    cluster, running = twins()
    assert isinstance(ask(cluster, MigrateModel(what="q1", server_id="s0")), MigrateModelReply)
    cluster.workers["s1", 0]._finish(running)
    cluster.run(2.0)
    assert told(cluster)[-1] == "abandoned"
    assert len(cluster.instances()) == 2


def test_a_later_round_has_the_time_that_its_tokens_are_estimated_to_take() -> None:
    """G7: the first round of a slow model leaves many tokens, whose prefill may take longer than the usual deadline."""
    held: list[Message] = []
    is_held = [True]

    def drops(message: Message) -> bool:
        if isinstance(message, RoundCompleted) and message.round == 2 and is_held[0]:
            held.append(message)
            return True
        return False

    cluster, _ = figure_3(drops=drops)
    for worker in cluster.workers.values():
        worker.source.gaps_tokens = (1000, 1)
    assert cluster.controller is not None
    state = cluster.controller.cluster
    (source,) = state.instances.values()
    slow = msgspec.structs.replace(state.resume_record(source), seconds_per_token=0.02, token_s=0.03)
    state.resumes[slow.key()] = slow
    assert isinstance(ask(cluster, MigrateModel(what="a", server_id="s0")), MigrateModelReply)
    cluster.run_until(lambda: bool(held), 5.0)
    cluster.run(15.0)  # 1000 tokens take 20 s
    assert told(cluster)[-1] != "abandoned"


# --- 7: words ---


def test_an_operator_hears_that_an_instance_was_just_moved_not_that_it_runs_nothing() -> None:
    cluster, _ = figure_3()
    assert isinstance(ask(cluster, MigrateModel(what="a", server_id="s0")), MigrateModelReply)
    cluster.run_until(lambda: told(cluster)[-1:] == ["finished"], 5.0)
    cluster.run(0.2)
    reply = ask(cluster, MigrateModel(what="a", server_id="s1"))
    assert "runs nothing" not in str(reply)


def test_a_preempted_instance_is_stopped_by_the_next_leader_when_the_command_was_lost() -> None:
    """P1, C8: that it is to be stopped, not drained, lasts."""
    held = [True]
    cluster, _ = figure_3(policy="preemption", drops=lambda m: isinstance(m, UnloadInstance) and held[0])
    cluster.router.request("q2", "b")
    cluster.run(0.3)
    (stopped,) = [r for r in cluster.instances() if r.server_id == "s1"]
    assert stopped.state is InstanceState.DRAINING
    cluster.stop_scheduler()
    held[0] = False
    cluster.start_scheduler()
    cluster.run(2.0)
    assert stopped.instance_id not in [record.instance_id for record in cluster.instances()]
