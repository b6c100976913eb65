"""Owns what happens around each transition of an instance: records, messages, events, slots and queues.

Every function here is one move of the state machine in `instances.py` with its effects; nobody else calls `enter`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from whimbrel.wire.events import (
    InstanceStarted,
    InstanceUnloaded,
    InstanceWasLost,
    InstanceWasPreempted,
    LoadStarted,
    LoadSucceeded,
)
from whimbrel.wire.messages import (
    CancelLoad,
    RouteRemoved,
    Stages,
    Tier,
)
from whimbrel.wire.records import InstanceRecord, InstanceState

from services.scheduler.core import accuracy, commands
from services.scheduler.core.bandwidth import explained_s, observe_overhead
from services.scheduler.core.decisions import Placement
from services.scheduler.core.instances import Instance, InstanceEvent
from services.scheduler.core.models import Model
from services.scheduler.core.ready import ToAgent
from services.scheduler.core.settings import PROMISE_S, REFUSED_HOLD_S, THRASH_LOADS_MAX
from services.scheduler.core.step import Step

# Why an instance ends that was asked to.
UNLOADED = "unloaded"


def start_load(step: Step, model: Model, placement: Placement) -> Instance:
    """→ LOADING. Agent and worker are told at the same moment, so that the skeleton is built while bytes move (L6)."""
    estimate = placement.estimate
    slot, *more_slots = _in_partition_order(model, placement.slots)
    instance = Instance(
        record=InstanceRecord(
            instance_id=step.new_id("ins"),
            model_id=model.model_id,
            checkpoint_digest=model.record.checkpoint_digest,
            server_id=placement.server_id,
            slot=slot,
            more_slots=tuple(more_slots),
            state=InstanceState.LOADING,
            task_id=step.new_id("task"),
            source_tier=estimate.source_tier,
            estimate_s=estimate.total_s,
            stages=None,
        ),
        size_bytes=model.record.size_bytes,
        placed_s=step.now,
        progress_s=step.now,
        first_wait_s=max(0.0, step.now - model.oldest_wait_s),
    )
    record = instance.record
    step.cluster.add_instance(instance, now=step.now)
    queues = step.cluster.servers[record.server_id].queues
    queues.enqueue(record.source_tier, record.task_id, estimate.load_s, now=step.now)
    step.save(record)
    commands.command_load(step, instance)
    commands.command_prepare(step, instance)
    step.tell(
        LoadStarted(
            task_id=record.task_id,
            model_id=record.model_id,
            server_id=record.server_id,
            slot=record.slot,
            source_tier=record.source_tier,
            size_bytes=instance.size_bytes,
            estimate_s=record.estimate_s,
        )
    )
    return instance


def become_ready(step: Step, instance: Instance) -> None:
    """LOADING → READY. Routers learn the route; whoever waited is promised it."""
    cluster = step.cluster
    instance.enter(InstanceEvent.BECAME_READY)
    instance.ready_s = instance.idle_since_s = step.now
    _keep_against_thrash(step, instance)
    if step.settings.policy == "preemption":
        # Two models that want one slot take turns; they don't stop each other at every request.
        instance.stays_until_s = step.now + step.settings.fair_wait_s
    instance.record = _with_stages(instance)
    _learn_overhead(step, instance)
    cluster.servers[instance.record.server_id].queues.remove(instance.record.task_id, now=step.now)
    step.save(instance.record)
    cluster.touch(instance.record.server_id)
    _tell_ready(step, instance)
    if instance.arriving is None:
        # The destination of a migration takes nobody else before everything has moved.
        serve_waiters(step, instance)


def serve_waiters(step: Step, instance: Instance) -> None:
    """READY: say so to routers, and hold the instance for those who wait until they have reached it."""
    step.send_routers(commands.route_added(instance))
    model = step.cluster.models[instance.record.model_id]
    for request_id in model.waiters:
        instance.promised[request_id] = step.now + PROMISE_S
    step.cluster.waiting_requests -= len(model.waiters)
    step.cluster.waiting.pop(model.model_id, None)
    model.remove_all_waiters()
    model.forgive()
    step.cluster.release(model.model_id)


def evict(step: Step, instance: Instance) -> None:
    """READY → UNLOADING. The worker may refuse: it knows best whether it is idle."""
    instance.enter(InstanceEvent.EVICTED)
    step.save(instance.record)
    step.cluster.touch_peers(instance)
    commands.command_unload(step, instance)


def displace(step: Step, instance_ids: Iterable[str]) -> None:
    """Evict these for another model; one that comes back soon shows thrash."""
    for instance_id in instance_ids:
        instance = step.cluster.instances[instance_id]
        step.cluster.models[instance.record.model_id].displaced_s = step.now
        evict(step, instance)


def refuse_unload(step: Step, instance: Instance) -> None:
    """UNLOADING → READY. Whoever waited for its slot looks elsewhere; whoever waited for its model is served."""
    instance.enter(InstanceEvent.UNLOAD_REFUSED)
    instance.held_until_s = step.now + REFUSED_HOLD_S
    step.save(instance.record)
    step.cluster.touch(instance.record.server_id)
    for reservation in list(step.cluster.reservations.values()):
        if instance.instance_id in reservation.waiting_for:
            step.cluster.release(reservation.key)
    serve_or_drain(step, instance)


def serve_or_drain(step: Step, instance: Instance) -> None:
    """READY again, after a time in which it took no request: its model may be another one by now, or on its way out."""
    model = step.cluster.models[instance.record.model_id]
    if model.is_servable and model.record.checkpoint_digest == instance.record.checkpoint_digest:
        serve_waiters(step, instance)
    else:
        drain(step, instance)


def drain(step: Step, instance: Instance) -> None:
    """READY → DRAINING. Running requests end, new ones wait for another instance of the model."""
    instance.enter(InstanceEvent.DRAINED)
    step.save(instance.record)
    step.cluster.touch_peers(instance)
    step.send_routers(commands.route_added(instance))
    commands.command_unload(step, instance)


def preempt(step: Step, instance: Instance) -> None:
    """READY → DRAINING. What runs is stopped; routers start it again from its tokens wherever there is a place."""
    instance.enter(InstanceEvent.PREEMPTED)
    instance.record = msgspec.structs.replace(instance.record, is_preempted=True)
    step.save(instance.record)
    step.cluster.touch_peers(instance)
    step.send_routers(commands.route_added(instance))
    commands.command_unload(step, instance)
    step.tell(
        InstanceWasPreempted(
            instance_id=instance.record.instance_id,
            model_id=instance.record.model_id,
            server_id=instance.record.server_id,
            slot=instance.record.slot,
            requests=instance.requests,
        )
    )


def end_load(step: Step, instance: Instance, event: InstanceEvent) -> None:
    """LOADING → GONE. The agent is told to stop, the worker to let go of what it prepared."""
    record = instance.record
    _leave(step, instance, event)
    step.cluster.servers[record.server_id].queues.remove(record.task_id, now=step.now)
    step.send(ToAgent(server_id=record.server_id), CancelLoad(task_id=record.task_id))
    if event is InstanceEvent.LOAD_FAILED and instance.detached_s is None:
        # Until the worker says otherwise, it has what we told it to prepare: the slot is not free yet.
        step.cluster.occupy(instance)
        step.cluster.slot_of(instance).unload_sent_s = step.now
        commands.unload_instance(step, record.server_id, record.slot, record.instance_id, is_drain=True)


def end_instance(step: Step, instance: Instance, event: InstanceEvent, reason: str) -> None:
    """READY, DRAINING or UNLOADING → GONE. Routers forget the route. Every reason but UNLOADED is a loss."""
    record = instance.record
    _leave(step, instance, event)
    step.send_routers(RouteRemoved(instance_id=record.instance_id, model_id=record.model_id, reason=reason))
    step.tell(
        (InstanceUnloaded if reason == UNLOADED else InstanceWasLost)(
            instance_id=record.instance_id,
            model_id=record.model_id,
            server_id=record.server_id,
            slot=record.slot,
            reason=reason,
        )
    )


def _leave(step: Step, instance: Instance, event: InstanceEvent) -> None:
    record = instance.record
    instance.enter(event)
    step.forget(record)
    step.cluster.remove_instance(instance)
    for router in step.cluster.routers.values():
        router.counted.pop(record.instance_id, None)
    for reservation in step.cluster.reservations.values():
        reservation.waiting_for.discard(record.instance_id)


def _in_partition_order(model: Model, slots: tuple[int, ...]) -> tuple[int, ...]:
    """Placement counts partitions from the largest, checkpoints in their own order."""
    sizes = model.record.partition_bytes
    if len(slots) < len(sizes):
        return slots
    by_size = sorted(range(len(sizes)), key=lambda k: -sizes[k])
    return tuple(slots[by_size.index(k)] for k in range(len(sizes))) or slots


def _keep_against_thrash(step: Step, instance: Instance) -> None:
    """A model that comes back right after it had to go for another is kept for as long as that one may wait, so that
    requests collate: two models that share a slot swap once per `fair_wait_s`, not once per request."""
    model = step.cluster.models[instance.record.model_id]
    load_s = instance.ready_s - instance.placed_s
    if instance.placed_s - model.displaced_s <= THRASH_LOADS_MAX * load_s:
        instance.kept_until_s = step.now + min(step.settings.fair_wait_s, load_s)


def _with_stages(instance: Instance) -> InstanceRecord:
    """The record with where the time went: what waited before the placement counts as queueing."""
    record, load = instance.record, instance.load
    seconds = {report.tier: report.seconds for report in load.reports} if load else {}
    stages = Stages(
        tier=load.source_tier if load else record.source_tier,
        queue_s=instance.first_wait_s + (load.queue_s if load else 0.0),
        fetch_s=seconds.get(Tier.REMOTE, 0.0),
        load_s=seconds.get(Tier.SSD, 0.0) + seconds.get(Tier.DRAM, 0.0),
        bind_s=instance.bind_s,
    )
    return msgspec.structs.replace(record, source_tier=stages.tier, stages=stages)


def _learn_overhead(step: Step, instance: Instance) -> None:
    """Overhead is what neither the queue nor the slowest tier of this load explains (E6)."""
    if instance.load is None or instance.is_rebuilt:
        return
    server = step.cluster.servers[instance.record.server_id]
    slowest_s = max(
        (
            explained_s(server.bandwidth(report.tier), size_bytes=report.size_bytes, seconds=report.seconds)
            for report in instance.load.reports
            if report.tier is not Tier.GPU
        ),
        default=0.0,
    )
    overhead_s = step.now - instance.placed_s - instance.load.queue_s - slowest_s
    tier = instance.load.source_tier
    record = observe_overhead(server.bandwidth(tier), overhead_s)
    server.learn(record)
    step.cluster.doubt(server.server_id)
    step.save(record)


def keep_accuracy(step: Step, server_id: str, tier: Tier, *, estimate_s: float, actual_s: float) -> None:
    """Estimate and actual of a load from this tier, or of a move to a GPU (E7)."""
    known = step.cluster.accuracies.get(f"{server_id}/{tier}") or accuracy.unknown(server_id, tier)
    kept = accuracy.observe(known, estimate_s=estimate_s, actual_s=actual_s)
    step.cluster.accuracies[kept.key()] = kept
    step.save(kept)


def _tell_ready(step: Step, instance: Instance) -> None:
    """Estimate and actual of the load, unless it began before we did."""
    record = instance.record
    startup_s = step.now - instance.placed_s
    if not instance.is_rebuilt:
        keep_accuracy(step, record.server_id, record.source_tier, estimate_s=record.estimate_s, actual_s=startup_s)
        step.tell(
            LoadSucceeded(
                task_id=record.task_id,
                model_id=record.model_id,
                server_id=record.server_id,
                source_tier=record.source_tier,
                estimate_s=record.estimate_s,
                observed_s=startup_s,
                queue_s=instance.load.queue_s if instance.load else 0.0,
                size_bytes=instance.size_bytes,
            )
        )
    step.tell(
        InstanceStarted(
            instance_id=record.instance_id,
            model_id=record.model_id,
            server_id=record.server_id,
            slot=record.slot,
            startup_s=startup_s,
        )
    )
