"""Stories of workers, agents, servers and routers that die, return and restart."""

from __future__ import annotations

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import InternalError
from whimbrel.wire.events import InstanceWasLost, LoadWasLost, ServerJoined, ServerLost
from whimbrel.wire.messages import (
    GetCluster,
    GetClusterReply,
    InferenceFinished,
    InferenceStarted,
    LoadModel,
    Message,
    PlaceModelReply,
    PrepareInstance,
    RouteRemoved,
    Tier,
    UnloadInstance,
    WorkerHeartbeat,
    WorkerState,
)
from whimbrel.wire.records import InstanceRecord, InstanceState

from services.scheduler.core.ready import Arrived, Tick, ToWorker
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster, place, served
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import ToyCluster, a_model_record


def test_a_worker_that_restarts_takes_its_instance_with_it_and_routers_hear_so() -> None:
    cluster = a_cluster("a")
    served(cluster)
    cluster.kill_worker("s0", 0)
    cluster.start_worker("s0", 0)
    cluster.run(0.1)
    assert cluster.instances() == []
    (removed,) = cluster.said_to_all(RouteRemoved)
    assert isinstance(removed, RouteRemoved)
    (lost,) = cluster.happened(InstanceWasLost)
    assert isinstance(lost, InstanceWasLost)
    assert "restarted" in lost.reason
    again = cluster.router.request("q2", "a")
    cluster.run(0.5)
    assert again.is_done


def test_a_worker_that_is_silent_for_three_heartbeats_is_lost() -> None:
    cluster = a_cluster("a")
    served(cluster)
    cluster.kill_worker("s0", 0)
    cluster.run(3.0)
    assert [record.state for record in cluster.instances()] == [InstanceState.READY]
    cluster.run(1.5)
    assert cluster.instances() == []
    assert len(cluster.happened(InstanceWasLost)) == 1


def test_silence_from_before_we_could_not_hear_counts_for_nothing() -> None:
    """NATS stood still for less than a second that we know of, and for two that we do not."""
    cluster = a_cluster("a")
    served(cluster)
    cluster.kill_worker("s0", 0)
    cluster.run(Settings().lost_after_s - 0.5)
    cluster.deliver(Tick(was_away=True))
    cluster.run(Settings().lost_after_s - 0.5)
    assert not cluster.happened(InstanceWasLost)
    cluster.run(1.5)
    assert cluster.happened(InstanceWasLost), "it is gone, after all"


def test_a_worker_that_says_it_has_nothing_is_believed() -> None:
    cluster = a_cluster("a")
    served(cluster)
    worker = cluster.workers["s0", 0]
    worker.instance_id = worker.model_id = None
    worker.state = WorkerState.EMPTY
    worker.beat()
    cluster.run(0.1)
    assert cluster.instances() == []


def test_what_runs_on_a_worker_that_stops_goes_on_elsewhere() -> None:
    """SIGTERM to a worker: nothing waits for long answers to end."""
    cluster = a_cluster("a", servers=2)
    running = cluster.router.request("q1", "a", run_s=50.0)
    cluster.run(2.0)
    worker = cluster.workers["s0", 0]
    worker.state = WorkerState.DRAINING
    worker.beat()
    cluster.run(3.0)
    assert running.switched == 1
    assert [record.server_id for record in cluster.instances()] == ["s1"]
    other = cluster.router.request("q2", "a")
    cluster.run(1.0)
    assert other.is_done


def test_a_worker_that_stops_ends_its_requests_where_no_place_is_left_and_takes_no_new_ones() -> None:
    cluster = a_cluster("a")
    running = cluster.router.request("q1", "a", run_s=5.0)
    cluster.run(2.0)
    worker = cluster.workers["s0", 0]
    worker.state = WorkerState.DRAINING
    worker.beat()
    cluster.run(0.1)
    assert [record.state for record in cluster.instances()] == [InstanceState.DRAINING]
    other = cluster.router.request("q2", "a")
    cluster.run(1.0)
    assert not other.is_done
    cluster.run(5.0)
    assert running.is_done
    assert running.switched == 0


def test_nothing_is_placed_on_a_worker_that_is_about_to_stop() -> None:
    cluster = a_cluster("a", servers=2)
    for key in (("s0", 0), ("s1", 0)):
        cluster.workers[key].state = WorkerState.DRAINING
        cluster.workers[key].beat()
    cluster.run(0.1)
    cluster.router.request("q1", "a")
    cluster.run(1.0)
    assert cluster.instances() == []


def test_an_instance_that_its_worker_ends_with_an_error_is_lost() -> None:
    cluster = a_cluster("a")
    served(cluster)
    cluster.workers["s0", 0].end(error_reply(InternalError(service="worker")))
    cluster.run(0.1)
    (lost,) = cluster.happened(InstanceWasLost)
    assert isinstance(lost, InstanceWasLost)
    assert lost.reason == "internal_error"


def test_a_worker_that_restarts_during_a_load_has_the_model_placed_again() -> None:
    cluster = a_cluster("a")
    request = cluster.router.request("q1", "a")
    cluster.run(0.5)
    cluster.kill_worker("s0", 0)
    cluster.start_worker("s0", 0)
    cluster.run(10.0)
    assert request.is_done
    assert len(cluster.happened(LoadWasLost)) == 1


def test_a_model_that_kills_its_workers_is_not_tried_for_ever() -> None:
    cluster = a_cluster("a")
    request = cluster.router.request("q1", "a")
    for _ in range(10):
        cluster.run(0.3)
        cluster.kill_worker("s0", 0)
        cluster.start_worker("s0", 0)
    cluster.run(1.0)
    assert request.error is not None
    assert request.error.code == "unavailable"
    assert len(cluster.happened(LoadWasLost)) == 4


def test_an_agent_that_restarts_during_a_load_is_told_again_at_once() -> None:
    cluster = a_cluster("a")
    request = cluster.router.request("q1", "a")
    cluster.run(0.5)
    cluster.kill_agent("s0")
    cluster.start_agent("s0")
    restarted_s = cluster.now
    cluster.run_until(lambda: request.is_done, 10.0)
    assert request.routed_s is not None
    assert request.routed_s - restarted_s < 1.397 + 0.02
    tasks = [message.task_id for message in cluster.said_to_all(LoadModel) if isinstance(message, LoadModel)]
    assert len(tasks) == 2
    assert len(set(tasks)) == 1, "the same task: it was never given up"


def test_a_load_on_a_server_that_is_lost_goes_elsewhere() -> None:
    cluster = a_cluster("a", servers=2)
    request = cluster.router.request("q1", "a")
    cluster.run(0.5)
    cluster.kill_agent("s0")
    cluster.run(10.0)
    assert request.is_done
    assert [record.server_id for record in cluster.instances()] == ["s1"]
    assert [type(event) for event in cluster.happened(ServerLost)] == [ServerLost]
    assert cluster.workers["s0", 0].instance_id is None, "its worker was told to let go"


def test_a_ready_instance_serves_on_without_its_agent() -> None:
    cluster = a_cluster("a")
    served(cluster)
    cluster.kill_agent("s0")
    cluster.run(10.0)
    assert [record.state for record in cluster.instances()] == [InstanceState.READY]
    assert cluster.deliver(place("q2")).messages[0].message != PlaceModelReply()
    cluster.start_agent("s0")
    cluster.run(0.1)
    joined = [event for event in cluster.happened(ServerJoined) if isinstance(event, ServerJoined)]
    assert len(joined) == 2
    assert joined[0].epoch < joined[1].epoch


def test_a_server_that_returns_with_the_same_epoch_was_only_unheard() -> None:
    cluster = a_cluster("a")
    served(cluster)
    agent = cluster.agents["s0"]
    agent.is_alive = False
    cluster.run(5.0)
    agent.is_alive = True
    agent.beat()
    cluster.run(0.1)
    assert len(cluster.happened(ServerJoined)) == 2
    assert len(cluster.instances()) == 1


def test_lost_servers_are_forgotten_after_a_while_with_their_slots() -> None:
    cluster = a_cluster("a", servers=2)
    cluster.kill_agent("s1")
    cluster.kill_worker("s1", 0)
    cluster.run(5.0)

    def seen() -> dict[str, int]:
        (reply,) = cluster.deliver(Arrived(message=GetCluster(), reply_to="r")).messages
        assert isinstance(reply.message, GetClusterReply)
        return {server.server_id: len(server.slots) for server in reply.message.servers}

    assert seen() == {"s0": 1, "s1": 1}
    cluster.run(301.0)
    assert seen() == {"s0": 1, "s1": 0}
    assert cluster.controller is not None
    assert cluster.controller.cluster.servers["s1"].heartbeat is None
    assert cluster.controller.cluster.servers["s1"].capacity_bytes == 0


def test_a_router_that_restarts_leaves_no_waiter_and_no_running_request_behind() -> None:
    cluster = a_cluster("a", "b", settings=Settings(keep_alive_s=3.0))
    cluster.router.request("q1", "a", run_s=500.0)
    cluster.run(2.0)
    cluster.router.request("q2", "b")
    cluster.run(0.1)
    cluster.kill_router("r0")
    cluster.start_router("r0")
    cluster.run(0.1)
    assert cluster.controller is not None
    assert cluster.controller.cluster.waiting_requests == 0
    cluster.run(4.0)
    assert cluster.instances() == [], "nobody uses it any more: keep-alive ran out"


def test_a_router_that_is_silent_is_gone_with_its_requests() -> None:
    cluster = a_cluster("a", settings=Settings(keep_alive_s=1.0))
    cluster.router.request("q1", "a", run_s=500.0)
    cluster.run(2.0)
    cluster.kill_router("r0")
    cluster.workers["s0", 0].beat()
    cluster.run(3.0)
    assert len(cluster.instances()) == 1
    cluster.run(3.0)
    assert cluster.instances() == []


def test_a_heartbeat_of_a_router_repairs_lost_news_of_its_requests() -> None:
    """R5"""
    lost = (InferenceStarted, InferenceFinished)
    cluster = a_cluster("a", settings=Settings(keep_alive_s=2.0), drops=lambda message: isinstance(message, lost))
    cluster.router.request("q1", "a", run_s=6.0)
    cluster.run(7.0)
    assert [record.state for record in cluster.instances()] == [InstanceState.READY]
    cluster.run(5.0)
    assert cluster.instances() == []


def test_a_load_that_its_worker_let_go_of_without_a_word_ends_too() -> None:
    """The agent's report of the cause is waited for, but not for ever."""
    cluster = a_cluster("a")
    cluster.deliver(place("q1"))
    cluster.run(0.1)
    cluster.kill_agent("s0").is_alive = False
    worker = cluster.workers["s0", 0]
    worker.instance_id = worker.model_id = None
    worker.state = WorkerState.EMPTY
    cluster.run(2.6)
    lost = [event for event in cluster.happened(LoadWasLost) if isinstance(event, LoadWasLost)]
    assert "let go" in lost[0].message


def test_a_worker_is_not_prepared_while_it_still_has_something_else() -> None:
    cluster = a_cluster("a", drops=lambda message: isinstance(message, PrepareInstance))
    cluster.deliver(place("q1"))
    (record,) = cluster.instances()
    cluster.said.clear()

    def says(instance_id: str | None, state: WorkerState) -> list[type[Message]]:
        heartbeat = WorkerHeartbeat(
            server_id="s0",
            slot=0,
            epoch=cluster.workers["s0", 0].epoch,
            device="cpu",
            state=state,
            instance_id=instance_id,
            model_id=None if instance_id is None else "x",
            active_requests=0,
        )
        cluster.now += 1.0
        ready = cluster.deliver(Arrived(message=heartbeat))
        return [type(o.message) for o in ready.messages if o.to == ToWorker(server_id="s0", slot=0)]

    assert says("stray", WorkerState.READY) == [UnloadInstance]
    cluster.now -= 0.9
    assert says("stray", WorkerState.READY) == [], "it was told a moment ago"
    assert says(None, WorkerState.EMPTY) == [PrepareInstance]
    assert says(record.instance_id, WorkerState.LOADING) == []


def test_a_worker_that_is_heard_before_its_agent_offers_nothing_yet() -> None:
    cluster = ToyCluster(models=[a_model_record("a")], servers=0)
    cluster.start_worker("s0", 0)
    request = cluster.router.request("q1", "a")
    cluster.run(5.0)
    assert not request.is_over
    cluster.start_agent("s0", tiers={("a", "digest-of-a"): (Tier.SSD, GB // 4)})
    cluster.run(1.0)
    assert request.is_done
    (record,) = cluster.instances()
    assert isinstance(record, InstanceRecord)
    assert record.source_tier is Tier.SSD


def test_only_the_waiters_and_requests_of_the_router_that_died_go() -> None:
    cluster = a_cluster("a", "b", "c", slots=2)
    cluster.start_router("r1")
    cluster.run(0.1)
    cluster.router.request("q1", "a", run_s=50.0)
    cluster.routers["r1"].request("q2", "b", run_s=50.0)
    cluster.run(4.0)
    cluster.router.request("q3", "c")
    cluster.routers["r1"].request("q4", "c")
    cluster.run(0.1)
    cluster.kill_router("r0")
    cluster.run(0.5)
    cluster.start_router("r0")
    cluster.run(0.1)
    assert cluster.controller is not None
    state = cluster.controller.cluster
    assert list(state.models["c"].waiters) == ["q4"]
    running = {i.record.model_id: {k: n.count for k, n in i.active.items()} for i in state.instances.values()}
    assert running == {"a": {}, "b": {"r1": 1}}
