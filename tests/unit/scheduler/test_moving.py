"""Stories of instances that move, or stop, on somebody's wish: operators, drains, and the preemption policy."""

from __future__ import annotations

import pytest
from whimbrel.wire.codec import error_of
from whimbrel.wire.events import (
    InstanceWasPreempted,
    MigrationStarted,
    ServerDrained,
)
from whimbrel.wire.messages import (
    CordonServer,
    ErrorReply,
    GetMigrations,
    GetMigrationsReply,
    InferenceFinished,
    MigrateModel,
    MigrateModelReply,
    MigrationState,
)
from whimbrel.wire.records import ResumeRecord

from services.scheduler.core.ready import Arrived, Tick
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster, ask
from tests.unit.scheduler.migration_stories import RUN_S, event, figure_3, in_the_end, migrations, told
from tests.unit.scheduler.toy_migrating import ROUND_S
from tests.unit.scheduler.toys import ToyCluster

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


def stop_agent(cluster: ToyCluster, server_id: str, *, is_stopping: bool = True) -> None:
    cluster.agents[server_id].is_stopping = is_stopping
    cluster.agents[server_id].beat()


def test_an_agent_that_stops_has_the_requests_of_its_server_moved_away() -> None:
    cluster, running = figure_3()
    stop_agent(cluster, "s1")
    cluster.run(5.0)
    assert running.switched == 1
    assert not running.is_over
    assert event(cluster, MigrationStarted).reason == "drain"
    assert told(cluster).count("started") == 1
    in_the_end(cluster)


def test_nothing_is_placed_where_an_agent_stops_until_its_next_life() -> None:
    cluster, _ = figure_3()
    stop_agent(cluster, "s0")
    stop_agent(cluster, "s1")
    request = cluster.router.request("q2", "b")
    cluster.run(10.0)
    assert not request.is_over
    stop_agent(cluster, "s0", is_stopping=False)
    cluster.run_until(lambda: request.is_done, 20.0)


def test_without_another_place_what_runs_where_an_agent_stops_is_left_alone() -> None:
    """Its worker lives on, and serves: also who comes later."""
    cluster, running = figure_3()
    cluster.kill_worker("s0", 0)
    cluster.run(4.0)
    stop_agent(cluster, "s1")
    cluster.run(5.0)
    late = cluster.router.request("q2", "a")
    cluster.run_until(lambda: running.is_done and late.is_done, RUN_S + 10.0)
    assert running.switched == 0
    assert late.instance_id == running.instance_id
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


def test_every_migration_teaches_what_the_next_one_takes_and_is_held_against_its_estimate() -> None:
    """M1: a and b are those of resumes; prefills of ordinary requests only stand in until there was one."""
    cluster, running = figure_3()
    reply = ask(cluster, MigrateModel(what="a", server_id="s0"))
    assert isinstance(reply, MigrateModelReply)
    cluster.run(2.0)
    assert running.switched == 1
    listed = ask(cluster, GetMigrations())
    assert isinstance(listed, GetMigrationsReply)
    (one,) = listed.migrations
    assert one.resume_estimate_s > 0.0
    assert ROUND_S <= one.resume_s < one.age_s
    (learned,) = [record for record in cluster.store.values() if isinstance(record, ResumeRecord)]
    assert learned.migrations == 1
    cluster.run_until(lambda: running.is_done, RUN_S + 5.0)
    assert cluster.controller is not None
    assert [known.migrations for known in cluster.controller.cluster.resumes.values()] == [1]
    in_the_end(cluster)


def test_a_move_during_which_nats_was_away_teaches_nothing() -> None:
    cluster, running = figure_3()
    assert isinstance(ask(cluster, MigrateModel(what="a", server_id="s0")), MigrateModelReply)
    cluster.run_until(lambda: [one.state for one in migrations(cluster)] == [MigrationState.RESUMING], 5.0)
    cluster.deliver(Tick(was_away=True))
    cluster.run(2.0)
    assert running.switched == 1
    assert cluster.controller is not None
    assert all(known.migrations == 0 for known in cluster.controller.cluster.resumes.values())
    in_the_end(cluster)


def test_token_times_are_learned_and_kept_after_a_migration_too() -> None:
    """M3: prefills teach nothing more then, and must not be what decides when it is made durable."""
    cluster, running = figure_3()
    assert isinstance(ask(cluster, MigrateModel(what="a", server_id="s0")), MigrateModelReply)
    cluster.run(2.0)
    assert running.switched == 1

    def saved() -> ResumeRecord:
        (record,) = [one for one in cluster.store.values() if isinstance(one, ResumeRecord)]
        return record

    before = saved()
    for number in range(50):
        ended = InferenceFinished(
            request_id=f"other-{number}", router_id="r0", instance_id=running.instance_id or "", model_id="a",
            prompt_tokens=5, output_tokens=9, duration_s=1.0, token_s=0.05, prefill_s=0.01,
        )  # fmt: skip
        cluster.deliver(Arrived(message=ended))
    after = saved()
    assert after.token_observations > before.token_observations
    assert after.observations == before.observations
