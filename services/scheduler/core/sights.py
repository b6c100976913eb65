"""Owns how placement's view of a server is made from what is known of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whimbrel.wire.messages import Tier
from whimbrel.wire.records import InstanceState

from services.scheduler.core.estimates import seconds_to_load
from services.scheduler.core.instances import Instance
from services.scheduler.core.models import Model
from services.scheduler.core.servers import Server
from services.scheduler.core.views import Occupant, ServerView, SlotView, Task

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
    """The server as it is now. What its workers run can't be handed over yet, so no running instance has a `resume`."""
    is_host = server.is_host
    instances = [cluster.instances[instance_id] for instance_id in server.instances]
    idle: list[Instance] = []
    running: list[Instance] = []
    for instance in instances:
        if instance.state is not InstanceState.READY or not _is_unreserved(server, instance):
            continue
        if not cluster.is_idle(instance):
            running.append(instance)
        elif not instance.is_kept and not cluster.is_minimum(instance):
            # One that is idle, but kept, is neither idle nor running to placement.
            idle.append(instance)
    idle.sort(key=lambda instance: (instance.idle_since_s, instance.instance_id))
    running.sort(key=lambda instance: instance.instance_id)
    return ServerView(
        server_id=server.server_id,
        capacity_bytes=server.capacity_bytes,
        used_bytes=sum(room_bytes(instance, is_host=is_host) for instance in instances),
        free_slots=_sorted(slot.view() for slot in server.slots.values() if slot.is_free),
        idle=tuple(_occupant(cluster, server, instance, is_host=is_host) for instance in idle),
        running=tuple(_occupant(cluster, server, instance, is_host=is_host) for instance in running),
        waits=server.queues.waits(),
        residency=server.residency.entries,
        speeds=server.speeds(),
        is_host=is_host,
        is_cordoned=server.is_cordoned,
    )


def room_bytes(instance: Instance, *, is_host: bool) -> int:
    """What it holds of the server's pool: mapped for as long as it is there, or on its way through to a GPU."""
    return instance.size_bytes if is_host or instance.state is InstanceState.LOADING else 0


def _is_unreserved(server: Server, instance: Instance) -> bool:
    """Whether its slots live, and are not kept for somebody already."""
    for number in instance.record.slots:
        slot = server.slots[number]
        if not slot.is_alive or slot.reserved_for is not None:
            return False
    return True


def _sorted(slots: Iterable[SlotView]) -> tuple[SlotView, ...]:
    return tuple(sorted(slots, key=lambda slot: (slot.memory_bytes, slot.slot)))


def _occupant(cluster: Cluster, server: Server, instance: Instance, *, is_host: bool) -> Occupant:
    """Made once for each time that the instance became idle, as long as the server's speeds are what they were."""
    speed = server.speeds()[Tier.DRAM]
    known = instance.occupant
    task = task_of(cluster.models[instance.record.model_id])
    if known is not None and known[0] == (instance.idle_since_s, speed) and known[1].task is task:
        return known[1]
    occupant = Occupant(
        instance_id=instance.instance_id,
        slots=tuple([server.slots[slot].view() for slot in instance.record.slots]),
        task=task,
        room_bytes=room_bytes(instance, is_host=is_host),
        idle_since_s=instance.idle_since_s,
        reload_s=seconds_to_load(queue_s=0.0, size_bytes=instance.size_bytes, speed=speed),
    )
    instance.occupant = ((instance.idle_since_s, speed), occupant)
    return occupant
