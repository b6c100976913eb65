"""Stories of loads that end badly: what is tried again, what is not, and who hears of it."""

from __future__ import annotations

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Conflict, Unavailable
from whimbrel.wire.events import LoadWasLost
from whimbrel.wire.messages import (
    LoadEnded,
    LoadModel,
    Message,
    PlacementFailed,
    UnloadInstance,
)
from whimbrel.wire.records import InstanceRecord, InstanceState

from services.scheduler.core.ready import Arrived, ToRouter, ToWorker
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster, place
from tests.unit.scheduler.toys import corrupt


def test_a_corrupt_checkpoint_fails_all_who_wait_at_once() -> None:
    cluster = a_cluster("a", servers=2)
    for agent in cluster.agents.values():
        agent.errors.append(corrupt("a"))
    requests = [cluster.router.request(f"q{n}", "a") for n in range(3)]
    cluster.run(3.0)
    assert [request.error for request in requests] == [corrupt("a")] * 3
    assert len(cluster.said_to_all(LoadModel)) == 1
    (lost,) = cluster.happened(LoadWasLost)
    assert isinstance(lost, LoadWasLost)
    assert "offset 4096" in lost.message
    assert cluster.instances() == []


def test_a_passing_trouble_is_tried_once_more_on_another_server() -> None:
    cluster = a_cluster("a", servers=2)
    cluster.agents["s0"].errors.append(error_reply(Unavailable(what="the disk")))
    request = cluster.router.request("q1", "a")
    cluster.run(10.0)
    assert request.is_done
    assert cluster.instances()[0].server_id == "s1"


def test_with_one_server_the_same_one_is_tried_again_then_whoever_waits_hears_why() -> None:
    cluster = a_cluster("a")
    trouble = error_reply(Conflict(reason="no chunk is free"))
    cluster.agents["s0"].errors += [trouble, trouble]
    request = cluster.router.request("q1", "a")
    cluster.run(10.0)
    assert request.error == trouble
    assert len({m.task_id for m in cluster.said_to_all(LoadModel) if isinstance(m, LoadModel)}) == 2
    again = cluster.router.request("q2", "a")
    cluster.run(10.0)
    assert again.is_done, "later requests have all their tries"


def test_a_failed_load_that_nobody_waits_for_is_not_tried_again() -> None:
    cluster = a_cluster("a")
    cluster.agents["s0"].errors.append(error_reply(Unavailable(what="the disk")))
    cluster.router.request("q1", "a").cancel()
    cluster.router.request("q2", "a").cancel()
    cluster.run(10.0)
    assert len(cluster.said_to_all(LoadModel)) <= 1
    assert cluster.instances() == []


def test_a_worker_that_fails_to_prepare_ends_the_load_with_its_error() -> None:
    cluster = a_cluster("a")
    request = cluster.router.request("q1", "a")
    cluster.run(0.5)
    cluster.workers["s0", 0].end(corrupt("a"))
    cluster.run(3.0)
    assert request.error == corrupt("a")
    assert cluster.agents["s0"].tasks == [], "the agent was told to stop"


def test_the_slot_of_a_failed_load_is_used_again_only_once_its_worker_let_go() -> None:
    """Whether the worker heard what it should prepare is not known: until it says that it has nothing, it may."""
    cluster = a_cluster("a")
    cluster.kill_agent("s0")
    cluster.deliver(place("q1"))
    (record,) = cluster.instances()
    ready = cluster.deliver(Arrived(message=_ended(record)))
    assert [type(o.message) for o in ready.messages if o.to == ToWorker(server_id="s0", slot=0)] == [UnloadInstance]
    assert cluster.instances() == [], "deferred"
    cluster.run(0.01)
    (again,) = cluster.instances()
    assert again.state is InstanceState.LOADING
    assert again.instance_id != record.instance_id


def test_a_load_without_progress_ends_and_is_tried_again() -> None:
    cluster = a_cluster("a", settings=Settings(load_stall_s=3.0))
    agent = cluster.agents["s0"]
    agent.is_alive = False
    request = cluster.router.request("q1", "a")
    for _ in range(8):
        agent.is_alive = True
        agent.beat()
        agent.is_alive = False
        cluster.run(0.5)
    (lost,) = cluster.happened(LoadWasLost)
    assert isinstance(lost, LoadWasLost)
    assert "progress" in lost.message
    assert not request.is_over
    cluster.run(4.0)
    cluster.kill_agent("s0")
    cluster.start_agent("s0")
    cluster.run(10.0)
    assert request.is_over


def test_a_load_that_waits_its_turn_makes_progress() -> None:
    """E4: it is not stalled because others are before it."""
    cluster = a_cluster(*"abc", slots=3, settings=Settings(load_stall_s=2.0))
    requests = [cluster.router.request(f"q-{model_id}", model_id) for model_id in "abc"]
    cluster.run(10.0)
    assert all(request.is_done for request in requests)
    assert not cluster.happened(LoadWasLost)


def test_several_routers_hear_of_routes_and_failures() -> None:
    cluster = a_cluster("a")
    cluster.start_router("r1")
    cluster.run(0.1)
    cluster.agents["s0"].errors.append(corrupt("a"))
    requests = [cluster.routers[r].request(f"q-{r}", "a") for r in ("r0", "r1")]
    cluster.run(3.0)
    assert all(request.error == corrupt("a") for request in requests)
    failed = [o for o in cluster.said if isinstance(o.message, PlacementFailed)]
    assert {o.to for o in failed} == {ToRouter(router_id="r0"), ToRouter(router_id="r1")}


def _ended(record: InstanceRecord) -> Message:
    return LoadEnded(
        task_id=record.task_id,
        instance_id=record.instance_id,
        model_id=record.model_id,
        server_id=record.server_id,
        error=error_reply(Unavailable(what="the disk")),
    )
