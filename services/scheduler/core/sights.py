"""Owns how placement's view of a server is made from what is known of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from whimbrel.wire.messages import Tier
from whimbrel.wire.records import InstanceState, ResumeRecord

from services.scheduler.core.estimates import PathSpeed, seconds_to_load
from services.scheduler.core.instances import Instance, Seen
from services.scheduler.core.models import Model
from services.scheduler.core.resumes import joined, resume_of
from services.scheduler.core.servers import Server, Slot
from services.scheduler.core.views import Occupant, Resume, ServerView, SlotView, Task

if TYPE_CHECKING:
    from services.scheduler.core.cluster import Cluster


def task_of(model: Model) -> Task:
    """What loading the model takes."""
    record, task = model.record, model.task
    is_known = task is not None and task.checkpoint_digest == record.checkpoint_digest and task.avoid == model.avoid
    if task is None or not is_known:
        sizes = record.partition_bytes or (record.size_bytes,)
        task = model.task = Task(
            model_id=record.model_id,
            checkpoint_digest=record.checkpoint_digest,
            size_bytes=record.size_bytes,
            partition_bytes=tuple(sorted(sizes, reverse=True)),
            avoid=model.avoid,
        )
    return task


def look(cluster: Cluster, server: Server) -> ServerView:
    """The server as it is now.

    This runs whenever something happens to a server, so it asks each thing once, and makes no values that it has.
    """
    is_host, speeds, slots, instances = server.is_host, server.speeds(), server.slots, cluster.instances
    reload_speed = speeds[Tier.DRAM]
    idle: list[Occupant] = []
    running: list[Occupant] = []
    used_bytes = 0
    for instance_id in server.instances:
        instance = instances[instance_id]
        record = instance.record
        if is_host or record.state is InstanceState.LOADING:
            used_bytes += instance.size_bytes
        slot = slots[record.slot]
        if record.state is not InstanceState.READY or not slot.is_alive or slot.reserved_for is not None:
            continue
        if record.more_slots and any(slots[other].reserved_for is not None for other in record.more_slots):
            continue
        if not is_idle(instance, slot):
            running.append(_runner(cluster, instance, _occupant(cluster, server, instance, reload_speed)))
        elif instance.kept_until_s is None and not (cluster.minimums and cluster.is_minimum(instance)):
            # One that is idle, but kept, is neither idle nor running to placement.
            idle.append(_occupant(cluster, server, instance, reload_speed))
    if len(idle) > 1:
        idle.sort(key=_idle_longest)
    free = [slot.view for slot in slots.values() if slot.is_free]
    if len(free) > 1:
        free.sort(key=_smallest)
    return ServerView(
        server_id=server.server_id,
        capacity_bytes=server.capacity_bytes,
        used_bytes=used_bytes,
        free_slots=tuple(free),
        idle=tuple(idle),
        running=tuple(sorted(running, key=_name) if len(running) > 1 else running),
        waits=server.queues.waits(),
        residency=server.residency.entries,
        speeds=speeds,
        is_host=is_host,
        takes_loads=server.takes_loads,
    )


def room_bytes(instance: Instance, *, is_host: bool) -> int:
    """What it holds of the server's pool: mapped for as long as it is there, or on its way through to a GPU."""
    return instance.size_bytes if is_host or instance.state is InstanceState.LOADING else 0


def is_idle(instance: Instance, slot: Slot) -> bool:
    """Whether it could be unloaded at once, as far as we know; its worker, that of `slot`, has the last word."""
    if instance.promised or instance.held_until_s is not None or (instance.active and instance.requests):
        return False
    if instance.leaving is not None or instance.arriving is not None:
        return False
    if not slot.is_alive or instance.record.state is not InstanceState.READY:
        return False
    worker = slot.heartbeat
    return worker is None or worker.active_requests == 0 or worker.instance_id != instance.record.instance_id


def _occupant(cluster: Cluster, server: Server, instance: Instance, speed: PathSpeed) -> Occupant:
    """Made once for each time that the instance became idle, as long as the server's speeds are what they were."""
    task = task_of(cluster.models[instance.record.model_id])
    known = instance.occupant
    if known is not None and known.speed is speed:
        occupant = known.occupant
        if occupant.idle_since_s == instance.idle_since_s and occupant.task is task:
            return occupant
    occupant = Occupant(
        instance_id=instance.instance_id,
        slots=tuple([server.slots[slot].view for slot in instance.record.slots]),
        task=task,
        room_bytes=room_bytes(instance, is_host=server.is_host),
        idle_since_s=instance.idle_since_s,
        reload_s=seconds_to_load(queue_s=0.0, size_bytes=instance.size_bytes, speed=speed),
    )
    instance.occupant = Seen(occupant, speed)
    return occupant


def _runner(cluster: Cluster, instance: Instance, occupant: Occupant) -> Occupant:
    """One that runs requests, and what it would take to compute them again elsewhere, if it can be moved now."""
    if instance.is_migrating or instance.stays_until_s is not None or not instance.active:
        return occupant
    known = cluster.resume_record(instance)
    return msgspec.structs.replace(
        occupant, resume=resume_now(instance, known), pause_s=known.overhead_s + known.token_s
    )


def resume_now(instance: Instance, known: ResumeRecord) -> Resume:
    """What computing all that runs there again would take, as its routers said last, where `known` is known of it."""
    said_s = max(running.said_s for running in instance.active.values())
    parts = [
        resume_of(
            known,
            requests=running.count,
            prompt_tokens=running.prompt_tokens,
            running_s=running.running_s,
            now=running.said_s,
        )
        for running in instance.active.values()
    ]
    return joined(parts, said_s)


def _idle_longest(occupant: Occupant) -> tuple[float, str]:
    return occupant.idle_since_s, occupant.instance_id


def _name(occupant: Occupant) -> str:
    return occupant.instance_id


def _smallest(slot: SlotView) -> tuple[int, int]:
    return slot.memory_bytes, slot.slot
