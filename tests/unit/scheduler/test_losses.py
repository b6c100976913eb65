"""Stories of what dies, returns, restarts, or is lost on the way."""

from __future__ import annotations

import pytest
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import InternalError, Unavailable
from whimbrel.wire.events import InstanceWasLost, LoadWasLost, ServerJoined, ServerLost
from whimbrel.wire.messages import (
    AgentHeartbeat,
    CancelLoad,
    GetCluster,
    GetClusterReply,
    InferenceFinished,
    InferenceStarted,
    InstanceActivity,
    InstanceEnded,
    LoadEnded,
    LoadFinished,
    LoadModel,
    LoadProgressed,
    Message,
    PlaceModelReply,
    PrepareInstance,
    ResidentModel,
    RouteRemoved,
    RouterHeartbeat,
    SchedulerHeartbeat,
    Tier,
    TierReport,
    UnloadInstance,
    WaitStage,
    WorkerHeartbeat,
    WorkerState,
)
from whimbrel.wire.records import Forget, InstanceRecord, InstanceState, Record

from services.scheduler.core.controller import Controller
from services.scheduler.core.placement import Placement
from services.scheduler.core.ready import Arrived, Tick, ToAgent, ToWorker, UnloadRefused
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.test_cold_requests import a_cluster, became_ready, load_finished, place
from tests.unit.scheduler.toys import GB, ToyCluster, a_model_record, corrupt


def served(cluster: ToyCluster, model_id: str = "a", request_id: str = "q1") -> None:
    """The model has an idle, ready instance."""
    request = cluster.router.request(request_id, model_id)
    cluster.run_until(lambda: request.is_done, 10.0)
    cluster.run(0.1)
    cluster.said.clear()


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


def test_a_worker_that_says_it_has_nothing_is_believed() -> None:
    cluster = a_cluster("a")
    served(cluster)
    worker = cluster.workers["s0", 0]
    worker.instance_id = worker.model_id = None
    worker.state = WorkerState.EMPTY
    worker.beat()
    cluster.run(0.1)
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


def test_news_of_requests_on_instances_that_are_gone_is_ignored() -> None:
    cluster = a_cluster("a")
    ended = {"request_id": "q1", "router_id": "r0", "instance_id": "gone", "model_id": "a", "prompt_tokens": 1}
    assert cluster.deliver(Arrived(message=InferenceStarted(**ended))).records == ()
    finished = InferenceFinished(**ended, output_tokens=1, duration_s=1.0, token_s=1.0)
    assert cluster.deliver(Arrived(message=finished)).records == ()


def test_an_instance_that_nobody_knows_is_unloaded_once_it_has_drained() -> None:
    cluster = a_cluster("a")
    worker = cluster.workers["s0", 0]
    worker.instance_id, worker.model_id, worker.state = "stray", "a", WorkerState.READY
    request = cluster.router.request("q1", "a")
    cluster.run(1.5)
    unloads = [message for message in cluster.said_to_all(UnloadInstance) if isinstance(message, UnloadInstance)]
    assert [(unload.instance_id, unload.drain) for unload in unloads] == [("stray", True)]
    cluster.run(5.0)
    assert request.is_done


def test_a_task_that_nobody_knows_is_cancelled() -> None:
    cluster = a_cluster("a")
    stray = LoadModel(
        task_id="stray",
        instance_id="gone",
        model_id="a",
        checkpoint_digest="d",
        size_bytes=GB * 100,
        slot=0,
        scheduler_epoch=1,
    )
    cluster.agents["s0"].on(stray)
    cluster.run(1.1)
    assert CancelLoad(task_id="stray") in cluster.said_to_all(CancelLoad)
    assert cluster.agents["s0"].tasks == []


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


def test_a_busy_step_loop_loses_nobody() -> None:
    """The store may be away for a while: whoever was alive has its time again to be heard."""
    cluster = a_cluster("a", "b")
    served(cluster)
    cluster.start_agent("s9")
    cluster.start_worker("s9", 0)
    cluster.run(0.1)
    cluster.kill_agent("s9")
    cluster.kill_worker("s9", 0)
    cluster.run(5.0)
    waiting = cluster.router.request("q2", "b")
    cluster.run(0.2)
    cluster.events.clear()
    assert cluster.controller is not None
    controller = cluster.controller
    cluster.controller = None
    cluster.run(20.0)
    cluster.controller = controller
    ready = cluster.deliver(Tick())
    assert not [event for event in ready.events if isinstance(event, ServerLost | InstanceWasLost | LoadWasLost)]
    cluster.run(10.0)
    assert waiting.is_done


def test_a_scheduler_that_restarts_in_a_load_goes_on_with_it() -> None:
    """P2"""
    cluster = a_cluster("a")
    request = cluster.router.request("q1", "a")
    cluster.run(0.5)
    cluster.stop_scheduler()
    cluster.run(0.2)
    cluster.start_scheduler()
    cluster.run(10.0)
    assert request.is_done
    assert len(cluster.said_to_all(LoadModel)) == 1, "the agent's heartbeat says that it has the task"


def test_a_scheduler_that_restarts_knows_its_ready_instances() -> None:
    """P2"""
    cluster = a_cluster("a")
    served(cluster)
    cluster.stop_scheduler()
    cluster.start_scheduler()
    (reply,) = cluster.deliver(place("q2")).messages
    assert isinstance(reply.message, PlaceModelReply)
    assert reply.message.route is not None
    cluster.run(10.0)
    assert len(cluster.instances()) == 1
    assert cluster.said_to_all(LoadModel) == []


def test_instances_whose_worker_does_not_have_them_are_gone_after_a_restart() -> None:
    """P2: agents and workers are the truth about themselves."""
    cluster = a_cluster("a")
    served(cluster)
    cluster.stop_scheduler()
    cluster.kill_worker("s0", 0)
    cluster.start_worker("s0", 0)
    cluster.start_scheduler()
    cluster.run(0.1)
    assert cluster.instances() == []


def test_nothing_is_placed_on_servers_that_are_known_from_records_only() -> None:
    """P2: they are presumed alive, but what they have is not known yet."""
    cluster = a_cluster("a", "b")
    served(cluster)
    cluster.stop_scheduler()
    cluster.run(0.1)
    cluster.start_scheduler()
    ready = cluster.deliver(place("q2", "b"))
    assert ready.records == ()
    cluster.run(0.1)
    assert [record.model_id for record in cluster.instances()] == ["b"]


@pytest.mark.parametrize("state", [InstanceState.DRAINING, InstanceState.UNLOADING, InstanceState.LOADING], ids=str)
def test_whatever_was_going_on_is_taken_up_after_a_restart(state: InstanceState) -> None:
    """P2"""
    cluster = a_cluster("a", "b", settings=Settings(fair_wait_s=1.0))
    first = cluster.router.request("q1", "a", run_s=4.0 if state is InstanceState.DRAINING else 0.1)
    cluster.run_until(lambda: bool(cluster.instances()), 1.0)
    if state is not InstanceState.LOADING:
        cluster.run(2.0)
        second = cluster.router.request("q2", "b")
        cluster.drops = lambda message: isinstance(message, UnloadInstance)
        cluster.run_until(lambda: [record.state for record in cluster.instances()] == [state], 5.0)
    else:
        second = cluster.router.request("q2", "a")
    cluster.stop_scheduler()
    cluster.drops = lambda message: False
    cluster.run(0.3)
    cluster.start_scheduler()
    cluster.run(20.0)
    assert first.is_done
    assert second.is_done


def test_a_step_is_forgotten_nowhere_records_replay_to_the_state_after_every_one() -> None:
    """P2: whatever the moment of a crash, the next life starts with what the last one knew."""
    cluster = a_cluster("a", "b", servers=2)
    prefixes: list[tuple[int, dict[tuple[str, str], Record]]] = []
    initial = dict(cluster.store)

    def check(cluster: ToyCluster, ready: object) -> None:
        assert cluster.controller is not None
        prefixes.append((len(cluster.journal), cluster.controller.cluster.durable()))

    start = len(cluster.journal)
    cluster.check = check
    requests = [cluster.router.request(f"q{n}", "ab"[n % 2], run_s=0.5) for n in range(6)]
    cluster.run(4.0)
    cluster.kill_worker("s1", 0)
    cluster.run(10.0)
    assert all(request.is_over for request in requests)
    assert len({length for length, _ in prefixes}) > 4
    for length, state in prefixes:
        replayed = _replay(initial, cluster.journal[start:length])
        assert replayed == state
        again = Controller(
            records=replayed.values(), settings=Settings(), epoch=9, now=0.0, new_id=lambda prefix: prefix
        )
        assert again.cluster.durable() == state


def _replay(initial: dict[tuple[str, str], Record], records: list[Record]) -> dict[tuple[str, str], Record]:
    state = dict(initial)
    for record in records:
        if isinstance(record, Forget):
            state.pop((record.forgotten_table, record.forgotten_key), None)
        else:
            state[record.table, record.key()] = record
    return state


def the_story(drops: object = None, *, drop_at: int | None = None) -> tuple[int, float]:
    """A cold request, then one of another model that takes the slot. How many messages there were, and how long the
    second one waited; message number `drop_at` is lost."""
    count = 0

    def lose(message: Message) -> bool:
        nonlocal count
        count += 1
        return count - 1 == drop_at

    cluster = ToyCluster(models=[a_model_record("a"), a_model_record("b")], settings=Settings(fair_wait_s=1.0))
    cluster.run(1.5)
    cluster.drops = lose
    first = cluster.router.request("q1", "a", run_s=0.5)
    cluster.run_until(lambda: first.is_done, 15.0)
    second = cluster.router.request("q2", "b", run_s=0.5)
    cluster.run_until(lambda: second.is_done, 15.0)
    assert second.routed_s is not None
    return count, second.routed_s - second.asked_s


def test_no_single_lost_message_keeps_a_request_from_its_route() -> None:
    """P2: whatever is lost once is said again, or was not needed."""
    count, undisturbed_s = the_story()
    assert count > 20
    for number in range(count):
        _, waited_s = the_story(drop_at=number)
        assert waited_s < undisturbed_s + 3.0, f"message {number} was lost"


def test_commands_are_repeated_until_they_are_heard() -> None:
    cluster = a_cluster("a", drops=lambda message: isinstance(message, LoadModel | PrepareInstance))
    cluster.router.request("q1", "a")
    cluster.run(3.5)
    for kind in (LoadModel, PrepareInstance):
        assert 3 <= len(cluster.said_to_all(kind)) <= 4, "about once a second"
    cluster.drops = lambda message: False
    cluster.run(5.0)
    assert cluster.router.requests["q1"].is_done
    for kind in (LoadModel, PrepareInstance):
        assert len(cluster.said_to_all(kind)) <= 5


def test_late_and_repeated_news_changes_nothing() -> None:
    cluster = a_cluster("a")
    cluster.router.request("q1", "a")
    cluster.run(5.0)
    (record,) = cluster.instances()
    late: list[Message] = [
        became_ready(record),
        load_finished(record),
        InstanceEnded(instance_id="gone", model_id="a", server_id="s0", slot=0),
    ]
    for message in late:
        assert cluster.deliver(Arrived(message=message)).records == ()
    assert cluster.instances() == [record]


def test_a_load_that_finished_after_its_instance_was_ready_still_teaches_bandwidth() -> None:
    """L10"""
    cluster = a_cluster("a")
    cluster.kill_agent("s0")
    cluster.deliver(place("q1"))
    (record,) = cluster.instances()
    cluster.deliver(Arrived(message=became_ready(record)))
    cluster.run(0.3)
    assert [r.state for r in cluster.instances()] == [InstanceState.READY]
    ready = cluster.deliver(Arrived(message=load_finished(record)))
    assert [type(r).__name__ for r in ready.records] == ["BandwidthRecord", "BandwidthRecord"]


def test_a_message_that_is_not_for_the_scheduler_is_answered_as_a_protocol_error() -> None:
    cluster = a_cluster("a")
    ready = cluster.deliver(Arrived(message=SchedulerHeartbeat(scheduler_id="x", epoch=1), reply_to="r"))
    assert [type(o.message).__name__ for o in ready.messages] == ["ErrorReply"]


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
    assert {i.record.model_id: dict(i.active) for i in state.instances.values()} == {"a": {}, "b": {"r1": 1}}


def test_a_router_may_name_instances_that_are_gone() -> None:
    cluster = a_cluster("a")
    heartbeat = RouterHeartbeat(
        router_id="r0",
        epoch=cluster.router.epoch,
        active=(InstanceActivity(instance_id="gone", requests=3),),
        waiting_requests=0,
        oldest_wait_s=0.0,
    )
    assert cluster.deliver(Arrived(message=heartbeat)).records == ()


def test_news_of_loads_that_nobody_knows_is_ignored() -> None:
    cluster = a_cluster("a")
    cluster.router.request("q1", "a")
    cluster.run(0.5)
    (record,) = cluster.instances()
    error = error_reply(Unavailable(what="the disk"))
    names = {"task_id": "gone", "model_id": "a", "server_id": "s0"}
    progress = {"stage": WaitStage.LOADING, "done_bytes": 1, "total_bytes": 2}
    for message in (
        LoadProgressed(task_id="gone", server_id="s0", **progress),
        LoadProgressed(task_id=record.task_id, server_id="unheard", **progress),
        LoadEnded(instance_id=record.instance_id, error=error, **names),
        LoadEnded(instance_id="gone", error=error, **names),
    ):
        assert cluster.deliver(Arrived(message=message)).records == ()
    cluster.run(5.0)
    ended = LoadEnded(task_id=record.task_id, instance_id=record.instance_id, model_id="a", server_id="s0", error=error)
    assert cluster.deliver(Arrived(message=ended)).records == (), "it is ready: this is old"


def test_a_worker_that_lets_go_twice_is_heard_once_and_the_agent_says_why() -> None:
    cluster = a_cluster("a")
    request = cluster.router.request("q1", "a")
    cluster.run(0.5)
    (record,) = cluster.instances()
    ended = InstanceEnded(instance_id=record.instance_id, model_id="a", server_id="s0", slot=0)
    for _ in range(2):
        assert cluster.deliver(Arrived(message=ended)).records == ()
    error = corrupt("a")
    cluster.agents["s0"].errors.append(error)
    cluster.run(2.0)
    assert request.error == error


def test_a_tier_that_is_no_tier_of_the_path_teaches_nothing() -> None:
    cluster = a_cluster("a")
    cluster.kill_agent("s0")
    cluster.deliver(place("q1"))
    (record,) = cluster.instances()
    finished = LoadFinished(
        task_id=record.task_id,
        instance_id=record.instance_id,
        model_id="a",
        server_id="s0",
        source_tier=Tier.SSD,
        queue_s=0.0,
        reports=(
            TierReport(tier=Tier.GPU, size_bytes=5, seconds=1.0),
            TierReport(tier=Tier.SSD, size_bytes=0, seconds=1.0),
        ),
    )
    assert cluster.deliver(Arrived(message=finished)).records == ()


def test_a_refused_unload_frees_only_those_who_waited_for_it() -> None:
    cluster = a_cluster(*"abcd", slots=2)
    for number, model_id in enumerate("ab"):
        served(cluster, model_id, f"q{number}")
    cluster.kill_worker("s0", 0)
    cluster.kill_worker("s0", 1)
    cluster.deliver(place("q5", "c"), place("q6", "d"))
    assert cluster.controller is not None
    assert sorted(cluster.controller.cluster.reservations) == ["c", "d"]
    victim = cluster.controller.cluster.reservations["c"].waiting_for.copy().pop()
    cluster.deliver(UnloadRefused(instance_id=victim))
    assert list(cluster.controller.cluster.reservations) == ["d"]


def test_an_agent_lists_the_fastest_tier_that_counts() -> None:
    """C1: a model that is in DRAM is on the SSD as well."""
    cluster = a_cluster("a")
    key = {"model_id": "a", "checkpoint_digest": "digest-of-a", "size_bytes": GB // 4}
    agent = cluster.kill_agent("s0")
    heartbeat = AgentHeartbeat(
        server_id="s0",
        epoch=agent.epoch,
        resident=(
            ResidentModel(tier=Tier.SSD, **key),
            ResidentModel(tier=Tier.DRAM, **key),
            ResidentModel(tier=Tier.SSD, **key),
        ),
        tasks=(),
        jobs=(),
        attached=(),
        pool_size_bytes=GB,
        pool_free_bytes=GB,
        ssd_size_bytes=GB,
        ssd_used_bytes=0,
        probe_bandwidth_bytes_per_s=0.0,
    )
    cluster.deliver(Arrived(message=heartbeat))
    (decision,) = cluster.deliver(place("q1")).decisions
    assert isinstance(decision, Placement)
    assert decision.estimate.source_tier is Tier.DRAM


def test_an_agent_that_is_not_there_is_told_nothing_twice() -> None:
    cluster = a_cluster("a", servers=2)
    cluster.router.request("q1", "a")
    cluster.run(0.2)
    loads = [o for o in cluster.said if isinstance(o.message, LoadModel)]
    assert [o.to for o in loads] == [ToAgent(server_id="s0")]
