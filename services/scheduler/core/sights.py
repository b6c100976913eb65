"""Owns how placement's view of a server is made from what is known of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from whimbrel.wire.messages import Tier
from whimbrel.wire.records import InstanceState

from services.scheduler.core.estimates import seconds_to_load
from services.scheduler.core.instances import Instance
from services.scheduler.core.models import Model
from services.scheduler.core.servers import Server, Slot
from services.scheduler.core.views import Occupant, ServerView, SlotView, Task

if TYPE_CHECKING:
    from services.scheduler.core.cluster import Cluster


def task_of(model: Model) -> Task:
    """What loading the model takes."""
    record = model.record
    return Task(
        model_id=record.model_id,
        checkpoint_digest=record.checkpoint_digest,
        size_bytes=record.size_bytes,
        partition_bytes=record.partition_bytes or (record.size_bytes,),
        avoid=model.avoid,
    )


def look(cluster: Cluster, server: Server) -> ServerView:
    """The server as it is now. What its workers run can't be handed over yet, so no running instance has a `resume`."""
    is_host = server.is_host
    instances = [cluster.instances[instance_id] for instance_id in server.instances]
    goers = [instance for instance in instances if _may_go(cluster, server, instance)]
    idle = [instance for instance in goers if cluster.is_evictable(instance)]
    idle.sort(key=lambda instance: (instance.idle_since_s, instance.instance_id))
    # One that is idle but kept (for its minimum, or against thrash) is neither idle nor running to placement.
    running = [instance for instance in goers if not cluster.is_idle(instance)]
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


def _may_go(cluster: Cluster, server: Server, instance: Instance) -> bool:
    """Whether it is ready, and its slots are not kept for somebody already."""
    if instance.state is not InstanceState.READY:
        return False
    return all(_is_unreserved(server.slots[slot]) for slot in instance.record.slots)


def _is_unreserved(slot: Slot) -> bool:
    return slot.is_alive and slot.reserved_for is None


def _sorted(slots: Iterable[SlotView]) -> tuple[SlotView, ...]:
    return tuple(sorted(slots, key=lambda slot: (slot.memory_bytes, slot.slot)))


def _occupant(cluster: Cluster, server: Server, instance: Instance, *, is_host: bool) -> Occupant:
    speed = server.speeds()[Tier.DRAM]
    return Occupant(
        instance_id=instance.instance_id,
        slots=tuple(server.slots[slot].view() for slot in instance.record.slots),
        task=task_of(cluster.models[instance.record.model_id]),
        room_bytes=room_bytes(instance, is_host=is_host),
        idle_since_s=instance.idle_since_s,
        reload_s=seconds_to_load(queue_s=0.0, size_bytes=instance.size_bytes, speed=speed),
    )
