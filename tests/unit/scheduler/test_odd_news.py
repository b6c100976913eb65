"""News that is late, repeated, unknown or out of place: it is heard, and changes nothing that it should not."""

from __future__ import annotations

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.messages import (
    CancelLoad,
    InferenceFinished,
    InferenceStarted,
    InstanceActivity,
    InstanceEnded,
    LoadEnded,
    LoadFinished,
    LoadModel,
    LoadProgressed,
    Message,
    RouterHeartbeat,
    SchedulerHeartbeat,
    Tier,
    TierReport,
    UnloadInstance,
    UnloadRefused,
    WaitStage,
    WorkerState,
)
from whimbrel.wire.records import InstanceState

from services.scheduler.core.ready import Arrived, ToAgent
from tests.unit.scheduler.builders import a_cluster, became_ready, load_finished, place, served
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import corrupt


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
        slots=(0,),
        scheduler_epoch=1,
    )
    cluster.agents["s0"].on(stray)
    cluster.run(1.1)
    assert CancelLoad(task_id="stray") in cluster.said_to_all(CancelLoad)
    assert cluster.agents["s0"].tasks == []


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
    cluster.deliver(Arrived(message=UnloadRefused(instance_id=victim)))
    assert list(cluster.controller.cluster.reservations) == ["d"]


def test_an_agent_that_is_not_there_is_told_nothing_twice() -> None:
    cluster = a_cluster("a", servers=2)
    cluster.router.request("q1", "a")
    cluster.run(0.2)
    loads = [o for o in cluster.said if isinstance(o.message, LoadModel)]
    assert [o.to for o in loads] == [ToAgent(server_id="s0")]
