"""What the scheduler answers about models, routes and the cluster."""

from __future__ import annotations

from whimbrel.wire.messages import (
    GetCluster,
    GetClusterReply,
    GetJob,
    GetModels,
    GetModelsReply,
    GetRoutes,
    GetRoutesReply,
    ModelSummary,
    RouteState,
    Tier,
    WorkerState,
)

from services.scheduler.core.ready import Arrived
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster, ask, place
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import ToyCluster


def models(cluster: ToyCluster) -> dict[str, ModelSummary]:
    reply = ask(cluster, GetModels())
    assert isinstance(reply, GetModelsReply)
    return {summary.model_id: summary for summary in reply.models}


def test_models_are_listed_cold_and_warm_with_where_their_bytes_are() -> None:
    cluster = a_cluster("b", "a", "c", servers=2, settings=Settings(keep_alive_s=33.0))
    request = cluster.router.request("q1", "a", run_s=2.0)
    cluster.run(1.5)
    cluster.agents["s1"].tiers["a", "digest-of-a"] = (Tier.SSD, GB // 4)
    cluster.deliver(place("q2", "b"))
    cluster.deliver(place("q3", "c"))
    cluster.run(1.0)
    listed = models(cluster)
    assert list(listed) == ["a", "b", "c"]
    (instance,) = [record for record in cluster.instances() if record.model_id == "a"]
    assert listed["a"].instances == (instance.instance_id,)
    assert listed["a"].residency == {"s0": Tier.GPU, "s1": Tier.SSD}
    assert listed["a"].keep_alive_s == 33.0
    assert (listed["c"].waiting_requests, listed["c"].instances, listed["c"].residency) == (1, (), {})
    assert not request.is_done


def test_routes_are_told_to_a_router_that_starts_and_it_hears_of_later_ones() -> None:
    cluster = a_cluster("a", "b", settings=Settings(fair_wait_s=1.0))
    cluster.router.request("q1", "a", run_s=50.0)
    cluster.run(2.0)
    reply = ask(cluster, GetRoutes(router_id="r7"))
    assert isinstance(reply, GetRoutesReply)
    (added,) = reply.routes
    assert (added.route.model_id, added.route.state) == ("a", RouteState.READY)
    assert added.stages.tier is Tier.REMOTE
    cluster.router.request("q2", "b")
    cluster.run(2.0)
    reply = ask(cluster, GetRoutes(router_id="r7"))
    assert isinstance(reply, GetRoutesReply)
    assert [added.route.state for added in reply.routes] == [RouteState.DRAINING]


def test_the_cluster_is_shown_with_its_slots_tiers_and_learned_bandwidths() -> None:
    cluster = a_cluster("a", servers=2)
    request = cluster.router.request("q1", "a", run_s=0.1)
    cluster.run(3.0)
    assert request.is_done
    cluster.kill_agent("s1")
    cluster.kill_worker("s1", 0)
    cluster.run(5.0)
    reply = ask(cluster, GetCluster())
    assert isinstance(reply, GetClusterReply)
    first, second = reply.servers
    assert (first.server_id, first.is_alive, second.is_alive) == ("s0", True, False)
    assert second.last_seen_s > 4.0
    (slot,) = first.slots
    assert (slot.state, slot.model_id, slot.is_alive) == (WorkerState.READY, "a", True)
    assert not second.slots[0].is_alive
    assert first.bandwidth_bytes_per_s == {"remote": 0.2e9, "ssd": 2e9} or (
        abs(first.bandwidth_bytes_per_s["ssd"] / 2e9 - 1) < 0.01
    )
    assert [resident.model_id for resident in first.resident] == ["a"]
    assert reply.routers == ("r0",)
    assert reply.waiting_requests == 0


def test_a_server_known_only_by_its_worker_or_its_records_is_shown_too() -> None:
    cluster = a_cluster("a", servers=0)
    cluster.start_worker("s0", 0)
    cluster.run(0.1)
    reply = ask(cluster, GetCluster())
    assert isinstance(reply, GetClusterReply)
    (server,) = reply.servers
    assert (server.is_alive, server.pool_size_bytes, server.tasks) == (False, 0, ())
    cluster.stop_scheduler()
    cluster.start_agent("s0")
    request = cluster.router.request("q1", "a")
    cluster.start_scheduler()
    cluster.run(5.0)
    assert request.is_done
    cluster.stop_scheduler()
    cluster.kill_worker("s0", 0)
    cluster.start_scheduler()
    reply = ask(cluster, GetCluster())
    assert isinstance(reply, GetClusterReply)
    (slot,) = reply.servers[0].slots
    assert (slot.is_alive, slot.state, slot.device) == (False, WorkerState.EMPTY, "")


def test_questions_without_a_place_for_the_answer_are_not_answered() -> None:
    cluster = a_cluster("a")
    for message in (GetModels(), GetCluster(), GetJob(job_id="x")):
        assert cluster.deliver(Arrived(message=message)).messages == ()
