"""Stories of requests for models that no instance serves, and of loads that end well or badly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Conflict, Unavailable
from whimbrel.wire.events import InstanceStarted, LoadSucceeded, LoadWasLost
from whimbrel.wire.messages import (
    CancelPlacement,
    ErrorReply,
    InstanceBecameReady,
    InstanceEnded,
    LoadEnded,
    LoadFinished,
    LoadModel,
    LoadProgressed,
    Message,
    PlacementFailed,
    PlaceModel,
    PlaceModelReply,
    PrepareInstance,
    RouteAdded,
    Tier,
    TierReport,
    UnloadInstance,
    WaitStage,
)
from whimbrel.wire.records import InstanceRecord, InstanceState

from services.scheduler.core.placement import Deferred, NeverFits, Placement
from services.scheduler.core.ready import Arrived, Reply, ToAgent, ToRouter, ToWorker
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.toys import GB, ToyCluster, a_model_record, corrupt


def a_cluster(
    *models: str,
    servers: int = 1,
    slots: int = 1,
    pool_bytes: int = 10 * GB,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    drops: Callable[[Message], bool] = lambda message: False,
) -> ToyCluster:
    """One that has been up for a while."""
    cluster = ToyCluster(
        models=[a_model_record(model_id) for model_id in models],
        servers=servers,
        slots=slots,
        pool_bytes=pool_bytes,
        settings=settings,
        drops=drops,
    )
    cluster.run(5.0)
    cluster.said.clear()
    return cluster


def place(request_id: str, model_id: str = "a", *, waited_s: float = 0.0, router_id: str = "r0") -> Arrived:
    message = PlaceModel(request_id=request_id, model_id=model_id, router_id=router_id, waited_s=waited_s)
    return Arrived(message=message, reply_to=f"{router_id}/{request_id}")


def became_ready(record: InstanceRecord) -> InstanceBecameReady:
    return InstanceBecameReady(
        instance_id=record.instance_id,
        model_id=record.model_id,
        server_id=record.server_id,
        slot=record.slot,
        worker_epoch=1,
        skeleton_s=0.01,
        bind_s=0.005,
    )


def load_finished(record: InstanceRecord, *, queue_s: float = 0.0) -> LoadFinished:
    return LoadFinished(
        task_id=record.task_id,
        instance_id=record.instance_id,
        model_id=record.model_id,
        server_id=record.server_id,
        source_tier=Tier.REMOTE,
        queue_s=queue_s,
        reports=(
            TierReport(tier=Tier.REMOTE, size_bytes=GB // 4, seconds=1.25),
            TierReport(tier=Tier.SSD, size_bytes=GB // 4, seconds=0.125),
        ),
    )


def test_a_cold_request_is_recorded_then_agent_and_worker_are_told_in_the_same_step() -> None:
    """P1, L6: the decision is in the record before anything is said, and the skeleton is built while bytes move."""
    cluster = a_cluster("a")
    ready = cluster.deliver(place("q1"))
    (record,) = ready.records
    assert isinstance(record, InstanceRecord)
    assert record.state is InstanceState.LOADING
    assert (record.server_id, record.slot, record.source_tier) == ("s0", 0, Tier.REMOTE)
    load, prepare, reply = ready.messages
    assert load.to == ToAgent(server_id="s0")
    assert isinstance(load.message, LoadModel)
    assert (load.message.instance_id, load.message.task_id) == (record.instance_id, record.task_id)
    assert (load.message.checkpoint_digest, load.message.size_bytes) == ("digest-of-a", GB // 4)
    assert prepare.to == ToWorker(server_id="s0", slot=0)
    assert isinstance(prepare.message, PrepareInstance)
    assert prepare.message.model_config == b"{}"
    assert reply.to == Reply(reply_to="r0/q1")
    assert isinstance(reply.message, PlaceModelReply)
    assert reply.message.waiting_for is WaitStage.QUEUED
    assert reply.message.remaining_s == pytest.approx(record.estimate_s)
    (decision,) = ready.decisions
    assert isinstance(decision, Placement)
    assert decision.estimate.total_s == record.estimate_s
    assert decision.estimate.is_prior


def test_a_cold_request_gets_its_route_as_soon_as_its_instance_is_ready() -> None:
    """R1"""
    cluster = a_cluster("a")
    request = cluster.router.request("q1", "a")
    cluster.run(10.0)
    assert request.is_done
    assert request.routed_s is not None
    assert request.routed_s - request.asked_s < 1.25 + 0.125 + 0.02 + 0.01
    (record,) = cluster.instances()
    assert record.state is InstanceState.READY
    (started,) = cluster.happened(InstanceStarted)
    assert isinstance(started, InstanceStarted)
    assert started.startup_s == pytest.approx(1.397, abs=0.01)


def test_a_request_for_a_ready_model_is_answered_in_the_same_step_and_counts_as_warm() -> None:
    """R1"""
    cluster = a_cluster("a")
    cluster.router.request("q1", "a")
    cluster.run(10.0)
    ready = cluster.deliver(place("q2"))
    assert not ready.records
    (reply,) = ready.messages
    assert isinstance(reply.message, PlaceModelReply)
    assert reply.message.route is not None
    assert reply.message.route.instance_id == cluster.instances()[0].instance_id
    assert reply.message.stages is not None
    assert reply.message.stages.tier is Tier.GPU


def test_two_requests_for_one_cold_model_cause_one_load() -> None:
    cluster = a_cluster("a", servers=3)
    requests = [cluster.router.request(f"q{n}", "a") for n in range(20)]
    cluster.run(10.0)
    assert all(request.is_done for request in requests)
    assert len(cluster.said_to_all(LoadModel)) == 1
    assert len(cluster.said_to_all(PrepareInstance)) == 1


def test_what_a_request_waits_for_is_told_as_the_load_goes_on() -> None:
    cluster = a_cluster("a", "b")
    stages = []

    def ask() -> None:
        ready = cluster.deliver(place("q1"))
        (reply,) = [o.message for o in ready.messages if isinstance(o.message, PlaceModelReply)]
        stages.append((reply.waiting_for, reply.remaining_s))

    agent = cluster.kill_agent("s0")
    ask()
    (record,) = cluster.instances()
    for stage in (WaitStage.FETCHING, WaitStage.LOADING):
        progressed = LoadProgressed(task_id=record.task_id, server_id="s0", stage=stage, done_bytes=10, total_bytes=100)
        cluster.deliver(Arrived(message=progressed))
        ask()
    cluster.deliver(Arrived(message=load_finished(record)))
    ask()
    assert [stage for stage, _ in stages] == [
        WaitStage.QUEUED, WaitStage.FETCHING, WaitStage.LOADING, WaitStage.BINDING,
    ]  # fmt: skip
    assert all(remaining_s == pytest.approx(record.estimate_s) for _, remaining_s in stages)
    assert agent.server_id == "s0"
    ready = cluster.deliver(place("q2", "b"))
    assert ready.messages[0].message == PlaceModelReply(waiting_for=WaitStage.DEFERRED)
    assert isinstance(ready.decisions[0], Deferred)


def test_the_route_waits_for_both_reports_so_that_its_stages_are_whole() -> None:
    """R4: agent and worker speak at about the same time, in any order."""
    for is_agent_first in (True, False):
        cluster = a_cluster("a")
        cluster.kill_agent("s0")
        cluster.deliver(place("q1", waited_s=0.5))
        (record,) = cluster.instances()
        messages = [load_finished(record, queue_s=0.25), became_ready(record)]
        first, second = messages if is_agent_first else reversed(messages)
        ready = cluster.deliver(Arrived(message=first))
        assert not [o for o in ready.messages if isinstance(o.message, RouteAdded)]
        ready = cluster.deliver(Arrived(message=second))
        (added,) = [o.message for o in ready.messages if isinstance(o.message, RouteAdded)]
        assert added.stages.tier is Tier.REMOTE
        assert added.stages.queue_s == pytest.approx(0.5 + 0.25)
        assert (added.stages.fetch_s, added.stages.load_s, added.stages.bind_s) == (1.25, 0.125, 0.005)


def test_a_lost_report_of_the_agent_holds_the_route_back_for_a_moment_only() -> None:
    cluster = a_cluster("a", drops=lambda message: isinstance(message, LoadFinished))
    request = cluster.router.request("q1", "a")
    cluster.run(10.0)
    assert request.routed_s is not None
    assert request.routed_s - request.asked_s < 1.4 + 0.4
    (added,) = [m for m in cluster.said_to_all(RouteAdded) if isinstance(m, RouteAdded)]
    assert added.stages.tier is Tier.REMOTE


def test_the_heartbeat_of_a_worker_says_ready_as_well() -> None:
    cluster = a_cluster("a", drops=lambda message: isinstance(message, InstanceBecameReady))
    request = cluster.router.request("q1", "a")
    cluster.run(10.0)
    assert request.routed_s is not None
    assert request.routed_s - request.asked_s < 1.4 + 0.4


def test_every_load_is_learned_from_and_its_error_is_told() -> None:
    """E6, E7, L10"""
    cluster = a_cluster(*"abcdef")
    for model_id in "abcdef":
        request = cluster.router.request(f"q-{model_id}", model_id)
        cluster.run_until(lambda: request.is_done, 10.0)  # noqa: B023
    told = [event for event in cluster.happened(LoadSucceeded) if isinstance(event, LoadSucceeded)]
    errors_s = [abs(event.estimate_s - event.observed_s) for event in told]
    assert errors_s[0] > 0.5, "the prior is wrong"
    assert max(errors_s[1:]) < 0.04


def test_a_request_is_told_apart_from_its_repetitions() -> None:
    cluster = a_cluster("a", "b")
    cluster.kill_agent("s0")
    assert cluster.controller is not None
    for _ in range(3):
        cluster.deliver(place("q1"))
    assert cluster.controller.cluster.waiting_requests == 1


def test_a_cancelled_request_waits_no_more_but_its_load_goes_on() -> None:
    """The bytes are worth having, and somebody may come for them."""
    cluster = a_cluster("a")
    request = cluster.router.request("q1", "a")
    cluster.run(0.5)
    request.cancel()
    cluster.run(3.0)
    assert cluster.controller is not None
    assert cluster.controller.cluster.waiting_requests == 0
    (record,) = cluster.instances()
    assert record.state is InstanceState.READY


def test_cancelling_what_is_unknown_is_harmless() -> None:
    cluster = a_cluster("a")
    for model_id in ("a", "never-deployed"):
        ready = cluster.deliver(Arrived(message=CancelPlacement(request_id="q9", model_id=model_id)))
        assert ready.messages == ()


@pytest.mark.parametrize("repeats", [True, False], ids=["router repeats", "router is silent"])
def test_a_waiter_stays_as_long_as_its_router_repeats_it(repeats: bool) -> None:
    cluster = a_cluster("a", "b")
    blocker = cluster.router.request("q1", "a", run_s=1000.0)
    cluster.run(3.0)
    assert blocker.routed_s is not None
    assert cluster.controller is not None
    cluster.deliver(place("q2", "b"))
    for _ in range(12):
        cluster.run(1.0)
        if repeats:
            cluster.deliver(place("q2", "b"))
    assert cluster.controller.cluster.waiting_requests == (1 if repeats else 0)


def test_a_full_waiting_line_is_a_typed_refusal() -> None:
    settings = Settings(waiting_per_model_max=2, waiting_max=3)
    cluster = a_cluster("a", "b", "c", settings=settings)
    cluster.kill_agent("s0")

    def answer(request_id: str, model_id: str) -> Message:
        return cluster.deliver(place(request_id, model_id)).messages[-1].message

    for request_id, model_id in (("q1", "a"), ("q2", "a"), ("q3", "b")):
        assert isinstance(answer(request_id, model_id), PlaceModelReply)
    refused = answer("q4", "a")
    assert isinstance(refused, ErrorReply)
    assert (refused.code, refused.fields["limit"]) == ("queue_full", 2)
    assert refused.fields["retry_after_s"] == 3, "the rest of the load's estimate"
    refused = answer("q5", "c")
    assert isinstance(refused, ErrorReply)
    assert (refused.code, refused.fields["queue"]) == ("queue_full", "the cluster")
    assert isinstance(answer("q1", "a"), PlaceModelReply), "who waits may repeat"


def test_a_full_line_of_a_deferred_model_says_when_to_come_again() -> None:
    cluster = a_cluster("a", servers=0, settings=Settings(waiting_per_model_max=1, fair_wait_s=2.0))
    cluster.deliver(place("q1"))
    (reply,) = cluster.deliver(place("q2")).messages
    assert isinstance(reply.message, ErrorReply)
    assert reply.message.fields["retry_after_s"] == 2


def test_an_instance_that_becomes_ready_in_the_same_step_is_the_answer() -> None:
    cluster = a_cluster("a")
    cluster.kill_agent("s0")
    cluster.deliver(place("q1"))
    (record,) = cluster.instances()
    events = [place("q2"), Arrived(message=load_finished(record)), Arrived(message=became_ready(record))]
    ready = cluster.deliver(*events)
    (reply,) = [o.message for o in ready.messages if o.to == Reply(reply_to="r0/q2")]
    assert isinstance(reply, PlaceModelReply)
    assert reply.route is not None
    assert reply.stages is not None
    assert reply.stages.tier is Tier.REMOTE, "it waited for this load"


def test_an_unknown_model_is_not_found() -> None:
    cluster = a_cluster("a")
    (reply,) = cluster.deliver(place("q1", "b")).messages
    assert isinstance(reply.message, ErrorReply)
    assert reply.message.code == "model_not_found"


def test_a_model_that_can_never_fit_is_refused_at_once_naming_need_and_capacity() -> None:
    cluster = a_cluster("a", pool_bytes=GB // 8)
    ready = cluster.deliver(place("q1"))
    failed, reply = ready.messages
    assert isinstance(failed.message, PlacementFailed)
    assert isinstance(reply.message, ErrorReply)
    assert reply.message == failed.message.error
    assert reply.message.code == "model_too_large"
    assert reply.message.fields == {"model_id": "a", "need_bytes": GB // 4, "capacity_bytes": GB // 8}
    assert isinstance(ready.decisions[0], NeverFits)
    assert not ready.records


def test_a_model_is_too_large_only_once_every_server_had_the_time_to_be_heard() -> None:
    cluster = ToyCluster(models=[a_model_record("a")], pool_bytes=GB // 8)
    cluster.run(0.5)
    assert cluster.deliver(place("q1")).messages[0].message == PlaceModelReply(waiting_for=WaitStage.DEFERRED)
    cluster.pool_bytes = GB
    cluster.start_agent("s9")
    cluster.start_worker("s9", 0)
    cluster.run(0.5)
    (record,) = cluster.instances()
    assert record.server_id == "s9"


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
    cluster = a_cluster("a", drops=lambda message: isinstance(message, InstanceEnded))
    cluster.kill_agent("s0")
    cluster.deliver(place("q1"))
    (record,) = cluster.instances()
    cluster.run(0.01)
    assert cluster.workers["s0", 0].instance_id == record.instance_id
    failed = cluster.start_agent("s0")
    ready = cluster.deliver(Arrived(message=_ended(record)))
    assert [type(o.message) for o in ready.messages if o.to == ToWorker(server_id="s0", slot=0)] == [UnloadInstance]
    assert cluster.instances() == [], "deferred until the worker says that it is empty"
    cluster.run(0.01)
    (record,) = cluster.instances()
    assert record.state is InstanceState.LOADING
    assert failed.is_alive


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
