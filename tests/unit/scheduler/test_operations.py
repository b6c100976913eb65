"""Stories of operators: servers are taken out and brought back, models are scaled."""

from __future__ import annotations

import itertools

import pytest
from whimbrel.wire.events import ModelScaled, PublicEvent, ServerCordoned, ServerDrained, ServerUncordoned
from whimbrel.wire.messages import (
    CordonServer,
    CordonServerReply,
    DeleteModel,
    ErrorReply,
    GetCluster,
    GetClusterReply,
    ScaleModel,
    ScaleModelReply,
    Scaling,
    UncordonServer,
)
from whimbrel.wire.records import InstanceState

from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster, ask, served
from tests.unit.scheduler.toys import ToyCluster, a_model_record


def cordon(cluster: ToyCluster, server_id: str, *, drain: bool = False) -> CordonServerReply:
    reply = ask(cluster, CordonServer(server_id=server_id, drain=drain))
    assert isinstance(reply, CordonServerReply)
    return reply


def of_kind(cluster: ToyCluster, *kinds: type[PublicEvent]) -> list[type[PublicEvent]]:
    return [type(event) for event in cluster.events if isinstance(event, kinds)]


def test_nothing_is_placed_on_a_cordoned_server_until_it_takes_part_again() -> None:
    cluster = a_cluster("a", "b", servers=1)
    assert cordon(cluster, "s0").is_cordoned
    request = cluster.router.request("q1", "a")
    cluster.run(10.0)
    assert not request.is_over
    reply = ask(cluster, UncordonServer(server_id="s0"))
    assert isinstance(reply, CordonServerReply)
    assert not reply.is_cordoned
    cluster.run(3.0)
    assert request.is_done
    assert of_kind(cluster, ServerCordoned, ServerUncordoned) == [ServerCordoned, ServerUncordoned]


def test_what_runs_on_a_cordoned_server_serves_on() -> None:
    cluster = a_cluster("a")
    served(cluster)
    cordon(cluster, "s0")
    request = cluster.router.request("q2", "a")
    cluster.run(1.0)
    assert request.is_done


def test_a_cordon_outlives_the_scheduler_the_server_and_its_return() -> None:
    """P2: what an operator decided is durable."""
    cluster = a_cluster("a", servers=1)
    cordon(cluster, "s0")
    cluster.stop_scheduler()
    cluster.kill_agent("s0")
    cluster.start_scheduler()
    cluster.run(10.0)
    cluster.start_agent("s0")
    request = cluster.router.request("q1", "a")
    cluster.run(10.0)
    assert not request.is_over
    summary = ask(cluster, GetCluster())
    assert isinstance(summary, GetClusterReply)
    assert [(server.is_cordoned, server.is_draining) for server in summary.servers] == [(True, False)]


def test_a_drained_server_is_empty_and_its_requests_end_well() -> None:
    cluster = a_cluster("a", "b", "c", servers=1, slots=2)
    served(cluster, "a", "q1")
    running = cluster.router.request("q2", "b", run_s=6.0)
    cluster.run(2.0)
    assert set(cordon(cluster, "s0", drain=True).instances) == {record.instance_id for record in cluster.instances()}
    cluster.run(1.0)
    assert [(record.model_id, record.state) for record in cluster.instances()] == [("b", InstanceState.DRAINING)]
    cluster.run(10.0)
    assert running.is_done
    assert cluster.instances() == []
    assert of_kind(cluster, ServerDrained) == [ServerDrained], "it is said once"


def test_a_load_on_a_server_that_is_drained_goes_elsewhere() -> None:
    cluster = a_cluster("a", servers=2)
    request = cluster.router.request("q1", "a")
    cluster.run(0.5)
    (record,) = cluster.instances()
    assert record.state is InstanceState.LOADING
    cordon(cluster, record.server_id, drain=True)
    cluster.run(5.0)
    assert request.is_done
    assert [other.server_id != record.server_id for other in cluster.instances()] == [True]


def test_whoever_was_given_a_route_of_a_drained_server_arrives_first() -> None:
    cluster = a_cluster("a", servers=1)
    request = cluster.router.request("q1", "a", run_s=3.0)
    cluster.run_until(lambda: request.instance_id is not None, 5.0)
    cordon(cluster, "s0", drain=True)
    cluster.run(6.0)
    assert request.is_done
    assert cluster.instances() == []


def test_an_unknown_server_can_not_be_cordoned_and_the_answer_names_those_that_are_known() -> None:
    cluster = a_cluster("a", servers=2)
    for message in (CordonServer(server_id="s9"), UncordonServer(server_id="s9")):
        reply = ask(cluster, message)
        assert isinstance(reply, ErrorReply)
        assert (reply.code, reply.fields["known"]) == ("server_not_found", "s0, s1")


def test_cordoning_twice_is_cordoning_once() -> None:
    cluster = a_cluster("a")
    cordon(cluster, "s0", drain=True)
    records = len(cluster.journal)
    assert cordon(cluster, "s0").is_draining, "a cordon does not end a drain"
    assert len(cluster.journal) == records


def scale(cluster: ToyCluster, **changes: object) -> ScaleModelReply | ErrorReply:
    reply = ask(cluster, ScaleModel(model_id="a", **changes))  # type: ignore[arg-type]
    assert isinstance(reply, ScaleModelReply | ErrorReply)
    return reply


def test_a_minimum_is_loaded_without_a_request_stays_and_is_restored_after_a_loss() -> None:
    """R6: min_instances."""
    cluster = a_cluster("a", servers=2, settings=Settings(keep_alive_s=2.0))
    reply = scale(cluster, min_instances=2, max_instances=2)
    assert isinstance(reply, ScaleModelReply)
    assert (reply.desired_instances, reply.scaling) == (2, Scaling(min_instances=2, max_instances=2))
    cluster.run(15.0)
    assert sorted((r.server_id, r.state) for r in cluster.instances()) == [
        ("s0", InstanceState.READY),
        ("s1", InstanceState.READY),
    ]
    cluster.kill_worker("s0", 0)
    cluster.start_worker("s0", 0)
    cluster.run(5.0)
    assert len(cluster.instances()) == 2
    cluster.stop_scheduler()
    cluster.start_scheduler()
    cluster.run(10.0)
    assert len(cluster.instances()) == 2, "the next leader knows"
    scale(cluster, min_instances=0)
    cluster.run(10.0)
    assert cluster.instances() == []
    assert of_kind(cluster, ModelScaled) == [ModelScaled, ModelScaled]


def test_an_instance_of_a_minimum_does_not_give_way_to_another_model() -> None:
    """R6"""
    cluster = a_cluster("a", "b", servers=1, settings=Settings(fair_wait_s=1.0))
    scale(cluster, min_instances=1)
    cluster.run(5.0)
    request = cluster.router.request("q1", "b")
    cluster.run(10.0)
    assert not request.is_over
    scale(cluster, min_instances=0)
    cluster.run(10.0)
    assert request.is_done


def test_demand_beyond_the_target_starts_more_instances_up_to_the_maximum() -> None:
    """R6: desired = ceil(demand / target), within the bounds."""
    cluster = ToyCluster(
        models=[a_model_record("a", scaling=Scaling(max_instances=3, target_concurrency=2))], servers=4
    )
    cluster.run(5.0)
    requests = [cluster.router.request(f"q{k}", "a", run_s=30.0) for k in range(4)]
    cluster.run(6.0)
    assert len(cluster.instances()) == 2
    requests += [cluster.router.request(f"r{k}", "a", run_s=10.0) for k in range(9)]
    cluster.run(6.0)
    assert len(cluster.instances()) == 3, "13 requests ask for 7"
    assert {record.server_id for record in cluster.instances()} == {r.server_id for r in cluster.instances()}
    cluster.run(60.0)
    assert all(request.is_done for request in requests)


def test_too_many_running_instances_are_kept_for_a_keep_alive_and_then_go_one_at_a_time() -> None:
    """R6: hysteresis."""
    cluster = ToyCluster(
        models=[a_model_record("a", scaling=Scaling(max_instances=3, target_concurrency=1))],
        servers=3,
        settings=Settings(keep_alive_s=8.0),
    )
    cluster.run(5.0)
    requests = [cluster.router.request(f"q{k}", "a", run_s=60.0) for k in range(3)]
    cluster.run(6.0)
    requests += [cluster.router.request(f"r{k}", "a", run_s=60.0) for k in range(2)]
    cluster.run(1.0)
    ready = [record.state for record in cluster.instances()]
    assert ready == [InstanceState.READY] * 3
    scale(cluster, target_concurrency=8)
    draining = []
    for _ in range(20):
        cluster.run(1.0)
        draining.append(sum(record.state is InstanceState.DRAINING for record in cluster.instances()))
    assert draining[:7] == [0] * 7, "not at once"
    assert draining[-1] == 2
    assert all(after - before <= 1 for before, after in itertools.pairwise(draining))
    cluster.run(60.0)
    assert all(request.is_done for request in requests)


@pytest.mark.parametrize("changes", [{"min_instances": 2}, {"min_instances": 5, "max_instances": 4}])
def test_a_minimum_above_the_maximum_is_refused(changes: dict[str, int]) -> None:
    reply = scale(a_cluster("a"), **changes)
    assert isinstance(reply, ErrorReply)
    assert (reply.code, reply.fields["field"]) == ("invalid_request", "min_instances")


def test_a_model_that_is_not_there_can_not_be_scaled() -> None:
    reply = ask(a_cluster("b"), ScaleModel(model_id="a", min_instances=1))
    assert isinstance(reply, ErrorReply)
    assert reply.code == "model_not_found"


def test_a_model_with_a_minimum_that_is_being_deleted_is_forgotten_by_the_next_leader_too() -> None:
    """Found by the simulation: the next leader looked for the minimum of a model that was gone."""
    cluster = a_cluster("a")
    scale(cluster, min_instances=1)
    cluster.run(5.0)
    agent = cluster.kill_agent("s0")
    ask(cluster, DeleteModel(model_id="a"))
    cluster.stop_scheduler()
    cluster.start_scheduler()
    cluster.start_agent("s0", tiers=agent.tiers)
    cluster.run(10.0)
    assert cluster.controller is not None
    assert "a" not in cluster.controller.cluster.models
    assert cluster.instances() == []
