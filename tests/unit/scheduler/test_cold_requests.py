"""Stories of requests for models that no instance serves."""

from __future__ import annotations

import pytest
from whimbrel.wire.events import InstanceStarted, LoadSucceeded
from whimbrel.wire.messages import (
    CancelPlacement,
    ErrorReply,
    InstanceBecameReady,
    LoadFinished,
    LoadModel,
    LoadProgressed,
    Message,
    PlacementFailed,
    PlaceModelReply,
    PrepareInstance,
    RouteAdded,
    Tier,
    WaitStage,
)
from whimbrel.wire.records import InstanceRecord, InstanceState

from services.scheduler.core.decisions import Deferred, NeverFits, Placement
from services.scheduler.core.ready import Arrived, Reply, ToAgent, ToWorker
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster, became_ready, load_finished, place
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import ToyCluster, a_model_record


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
