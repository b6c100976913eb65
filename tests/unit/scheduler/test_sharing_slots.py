"""Stories of models that want the same slot: idle eviction, fair drains, keep-alive, scale to zero."""

from __future__ import annotations

import pytest
from whimbrel.wire.events import InstanceUnloaded
from whimbrel.wire.messages import (
    InferenceStarted,
    LoadModel,
    RouteAdded,
    RouteRemoved,
    RouteState,
    UnloadInstance,
    UnloadRefused,
)
from whimbrel.wire.records import InstanceState

from services.scheduler.core.ready import Arrived
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster, place
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import ToyCluster, a_model_record


def unloads(cluster: ToyCluster) -> list[UnloadInstance]:
    return [message for message in cluster.said_to_all(UnloadInstance) if isinstance(message, UnloadInstance)]


def test_an_idle_instance_gives_way_to_a_waiting_model_at_once() -> None:
    cluster = a_cluster("a", "b")
    first = cluster.router.request("q1", "a")
    cluster.run_until(lambda: first.is_done, 10.0)
    cluster.run(0.5)
    second = cluster.router.request("q2", "b")
    cluster.run(10.0)
    assert second.is_done
    assert second.routed_s is not None
    assert second.routed_s - second.asked_s < 1.397 + 0.02
    assert [unload.drain for unload in unloads(cluster)] == [False]
    (record,) = cluster.instances()
    assert record.model_id == "b"
    assert [type(m) for m in cluster.said_to_all(RouteRemoved)] == [RouteRemoved]


def test_a_waiting_model_is_placed_the_moment_the_last_request_of_a_busy_one_ends() -> None:
    """C4: retried when the router reports a release, not by a timer."""
    cluster = a_cluster("a", "b", settings=Settings(fair_wait_s=100.0))
    first = cluster.router.request("q1", "a", run_s=5.0)
    cluster.run(3.0)
    second = cluster.router.request("q2", "b")
    cluster.run_until(lambda: first.is_done, 10.0)
    released_s = cluster.now
    cluster.run_until(lambda: second.is_done, 10.0)
    assert second.routed_s is not None
    assert second.routed_s - released_s < 1.397 + 0.02


def test_who_waited_longest_is_placed_first() -> None:
    """C4"""
    cluster = a_cluster(*"abcdef", settings=Settings(fair_wait_s=100.0))
    cluster.router.request("q", "a", run_s=5.0)
    cluster.run(3.0)
    for waited_s, model_id in enumerate("fdbec"):
        cluster.deliver(place(f"q-{model_id}", model_id, waited_s=waited_s))
    for _ in range(40):
        cluster.run(1.0)
        for waited_s, model_id in enumerate("fdbec"):
            if not any(isinstance(m, LoadModel) and m.model_id == model_id for m in cluster.said_to_all(LoadModel)):
                cluster.deliver(place(f"q-{model_id}", model_id, waited_s=waited_s))
    loads = [message.model_id for message in cluster.said_to_all(LoadModel) if isinstance(message, LoadModel)]
    assert loads == list("acebdf")


def test_a_busy_instance_is_drained_for_a_model_that_waited_too_long_and_its_requests_end_well() -> None:
    cluster = a_cluster("a", "b", settings=Settings(fair_wait_s=2.0))
    first = cluster.router.request("q1", "a", run_s=6.0)
    cluster.run(2.0)
    second = cluster.router.request("q2", "b")
    cluster.run(2.5)
    (unload,) = unloads(cluster)
    assert unload.drain
    states = [m.route.state for m in cluster.said_to_all(RouteAdded) if isinstance(m, RouteAdded)]
    assert states == [RouteState.READY, RouteState.DRAINING]
    late = cluster.router.request("q3", "a")
    cluster.run(30.0)
    assert first.is_done
    assert second.is_done
    assert late.is_done, "new requests of the drained model wait for a new instance"
    assert late.instance_id != first.instance_id


def test_two_models_in_constant_use_share_one_slot_and_nobody_starves() -> None:
    cluster = a_cluster("a", "b", settings=Settings(fair_wait_s=2.0))
    requests = []
    for number in range(60):
        for model_id in "ab":
            requests.append(cluster.router.request(f"{model_id}{number}", model_id, run_s=0.7))
        cluster.run(0.5)
    cluster.run(30.0)
    assert all(request.is_done for request in requests)
    waits_s = [request.routed_s - request.asked_s for request in requests if request.routed_s is not None]
    assert max(waits_s) < 2.0 + 2 * (1.4 + 0.7) + 1.0
    loads = len(cluster.said_to_all(LoadModel))
    assert loads < 25, "requests are collated per model, not served in turns"


def test_an_instance_is_held_for_those_who_waited_for_it_until_they_reached_it() -> None:
    """A load is pinned until its first waiter is served."""
    cluster = a_cluster("a", "b")
    cluster.deliver(place("q1", "a"))
    cluster.deliver(place("q2", "b"))
    cluster.run(1.5)
    (record,) = cluster.instances()
    assert (record.model_id, record.state) == ("a", InstanceState.READY)
    assert unloads(cluster) == [], "the request that q1 stands for is on its way"
    started = InferenceStarted(
        request_id="q1", router_id="r0", instance_id=record.instance_id, model_id="a", prompt_tokens=1
    )
    cluster.deliver(Arrived(message=started))
    cluster.run(1.1)
    assert unloads(cluster) != [], "its router's heartbeat says that nothing runs there"


def test_a_promise_that_nobody_keeps_runs_out() -> None:
    cluster = a_cluster("a", "b", settings=Settings(fair_wait_s=100.0))
    cluster.deliver(place("q1", "a"))
    cluster.run(1.5)
    cluster.deliver(place("q2", "b"))
    cluster.run(3.0)
    (record,) = cluster.instances()
    assert record.model_id == "b"


def test_an_unload_that_is_refused_gives_the_instance_back_and_is_not_repeated_at_once() -> None:
    """The worker has the last word on whether it is idle."""
    cluster = a_cluster("a", "b", settings=Settings(fair_wait_s=100.0))
    first = cluster.router.request("q1", "a")
    cluster.run_until(lambda: first.is_done, 10.0)
    cluster.run(0.1)
    worker = cluster.workers["s0", 0]
    hidden = cluster.router.request("q2", "a", run_s=4.0)
    assert hidden.request_id in worker.requests, "it went straight to the worker; the scheduler has not heard of it"
    ready = cluster.deliver(place("q3", "b"))
    assert [type(record) for record in ready.records]
    cluster.run(0.1)
    (record,) = cluster.instances()
    assert (record.model_id, record.state) == ("a", InstanceState.READY)
    assert len(unloads(cluster)) == 1
    cluster.run(6.0)
    assert hidden.is_done
    assert {record.model_id for record in cluster.instances()} == {"b"}


def test_a_request_that_arrives_while_its_instance_unloads_is_served_if_the_unload_is_refused() -> None:
    cluster = a_cluster("a", "b")
    first = cluster.router.request("q1", "a")
    cluster.run_until(lambda: first.is_done, 10.0)
    cluster.run(0.5)
    cluster.kill_worker("s0", 0)
    cluster.deliver(place("q2", "b"))
    (record,) = cluster.instances()
    assert record.state is InstanceState.UNLOADING
    waiting = cluster.deliver(place("q3", "a"))
    assert not [o for o in waiting.messages if isinstance(o.message, RouteAdded)]
    ready = cluster.deliver(Arrived(message=UnloadRefused(instance_id=record.instance_id)))
    assert [o for o in ready.messages if isinstance(o.message, RouteAdded)]
    assert cluster.deliver(Arrived(message=UnloadRefused(instance_id=record.instance_id))).records == (), "late news"
    assert cluster.deliver(Arrived(message=UnloadRefused(instance_id="gone"))).records == ()


def test_keep_alive_counts_from_the_end_of_the_last_request_and_ends_at_zero_instances() -> None:
    """R6"""
    cluster = a_cluster("a", settings=Settings(keep_alive_s=4.0))
    cluster.router.request("q1", "a", run_s=3.0)
    cluster.run(1.5)
    cluster.router.request("q2", "a", run_s=5.0)
    cluster.run_until(lambda: not cluster.router.waiting("a") and bool(cluster.instances()), 5.0)
    cluster.run_until(lambda: all(r.is_done for r in cluster.router.requests.values()), 10.0)
    cluster.run(3.7)
    assert [record.state for record in cluster.instances()] == [InstanceState.READY]
    cluster.run(0.7)
    assert cluster.instances() == []
    (unloaded,) = cluster.happened(InstanceUnloaded)
    assert isinstance(unloaded, InstanceUnloaded)
    again = cluster.router.request("q3", "a")
    cluster.run(1.0)
    assert again.is_done, "its bytes stayed in DRAM"


@pytest.mark.parametrize(("keep_alive_s", "is_there"), [(0.0, False), (30.0, True)])
def test_a_model_has_its_own_keep_alive(keep_alive_s: float, is_there: bool) -> None:
    """R6"""
    cluster = ToyCluster(models=[a_model_record("a", keep_alive_s=keep_alive_s)], settings=Settings(keep_alive_s=10.0))
    cluster.run(5.0)
    cluster.router.request("q1", "a")
    cluster.run(20.0)
    assert bool(cluster.instances()) is is_there


def test_a_small_pool_makes_idle_instances_of_other_slots_give_way() -> None:
    cluster = a_cluster("a", "b", "c", slots=3, pool_bytes=GB * 6 // 10)
    for number, model_id in enumerate("abc"):
        request = cluster.router.request(f"q{number}", model_id)
        cluster.run_until(lambda: request.is_done, 10.0)  # noqa: B023
        cluster.run(0.1)
    assert sorted(record.model_id for record in cluster.instances()) == ["b", "c"]


def test_a_model_that_waits_for_a_drain_takes_another_slot_that_becomes_free_before() -> None:
    cluster = a_cluster("a", "b", settings=Settings(fair_wait_s=1.0))
    cluster.router.request("q1", "a", run_s=500.0)
    cluster.run(3.0)
    waiting = cluster.router.request("q2", "b")
    cluster.run(3.0)
    assert [record.state for record in cluster.instances()] == [InstanceState.DRAINING]
    cluster.start_agent("s1")
    cluster.start_worker("s1", 0)
    cluster.run(3.0)
    assert waiting.is_done
    assert cluster.controller is not None
    assert cluster.controller.cluster.reservations == {}


def test_without_anything_to_drain_a_starving_model_waits_on() -> None:
    cluster = a_cluster("a", "b", settings=Settings(fair_wait_s=1.0))
    cluster.kill_worker("s0", 0)
    cluster.run(5.0)
    waiting = cluster.router.request("q1", "a")
    cluster.run(5.0)
    assert not waiting.is_over
    cluster.start_worker("s0", 0)
    cluster.run(3.0)
    assert waiting.is_done
