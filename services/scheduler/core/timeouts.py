"""Owns what happens because time passed: losses, stalls, expiry, keep-alive, fair drains. All on ticks."""

from __future__ import annotations

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.events import ServerLost
from whimbrel.wire.records import InstanceState

from services.scheduler.core import heartbeats, jobs, lifecycle, loading, routers, scaling, waiting
from services.scheduler.core.instances import Instance
from services.scheduler.core.models import Model, Reservation
from services.scheduler.core.servers import Server
from services.scheduler.core.settings import FORGET_SERVER_S
from services.scheduler.core.step import Step


def on_tick(step: Step) -> None:
    _lose_silent(step)
    waiting.expire(step)
    _end_promises(step)
    _check_loads(step)
    _end_keep_alives(step)
    _drain_for_starving(step)


def pardon(step: Step) -> None:
    """We were not listening for a while: whoever was alive has its full time again to be heard."""
    cluster, now = step.cluster, step.now
    for server in cluster.servers.values():
        if server.is_alive:
            server.seen_s = now
    for slot in cluster.slots():
        if slot.is_alive:
            slot.seen_s = now
    for router in cluster.routers.values():
        router.seen_s = now
    for model_id in cluster.waiting:
        for waiter in cluster.models[model_id].waiters.values():
            waiter.repeated_s = now
    for instance in cluster.instances.values():
        instance.progress_s = now


def _lose_silent(step: Step) -> None:
    """Three heartbeats missed: gone, until heard again."""
    oldest_s = step.now - step.settings.lost_after_s
    for router in list(step.cluster.routers.values()):
        if router.seen_s < oldest_s:
            routers.forget_router(step, router)
    for slot in list(step.cluster.slots()):
        if slot.is_alive and slot.seen_s < oldest_s:
            heartbeats.lose_slot(step, slot)
    for server in list(step.cluster.servers.values()):
        if server.is_alive and server.seen_s < oldest_s:
            _lose_server(step, server)
        _forget_long_lost(step, server)


def _lose_server(step: Step, server: Server) -> None:
    """Its agent is gone: loads there go elsewhere. What is loaded serves on, as long as its workers live."""
    server.is_alive = False
    step.cluster.touch(server.server_id)
    step.tell(ServerLost(server_id=server.server_id, last_seen_s=step.now - server.seen_s))
    for instance_id in list(server.instances):
        instance = step.cluster.instances[instance_id]
        if instance.state is InstanceState.LOADING:
            loading.lose_load(step, instance, f"server {server.server_id} (its storage agent is gone)")
    jobs.lose_agent(step, server.server_id)


def _forget_long_lost(step: Step, server: Server) -> None:
    """A server that never came back counts no more for what may fit; what was learned of its tiers is kept."""
    oldest_s = step.now - FORGET_SERVER_S
    if server.heartbeat is not None and not server.is_alive and server.seen_s < oldest_s:
        server.forget()
        step.cluster.touch(server.server_id)
    for slot in list(server.slots.values()):
        if not slot.is_alive and slot.seen_s < oldest_s and slot.owner is None and slot.reserved_for is None:
            del server.slots[slot.slot]


def _end_promises(step: Step) -> None:
    """Requests that were given a route and never arrived; unloads that were refused a while ago."""
    for instance in step.cluster.instances.values():
        for request_id, until_s in list(instance.promised.items()):
            if until_s <= step.now:
                waiting.keep_promise(step, instance, request_id)
        if instance.held_until_s is not None and instance.held_until_s <= step.now:
            instance.held_until_s = None
            step.cluster.touch(instance.record.server_id)


def _check_loads(step: Step) -> None:
    """Loads without progress, and workers that were ready before their agent said so."""
    for instance in list(step.cluster.instances.values()):
        if instance.state is not InstanceState.LOADING:
            continue
        if instance.ready_heard_s is not None:
            loading.hear_ready(step, instance)
        elif step.now - instance.progress_s >= step.settings.load_stall_s:
            stall_s = step.settings.load_stall_s
            what = f"server {instance.record.server_id} (its load made no progress for {stall_s:g} s)"
            loading.fail_load(step, instance, error_reply(Unavailable(what=what)))


def _end_keep_alives(step: Step) -> None:
    for instance_id in scaling.expired(_held(step), step.now):
        lifecycle.evict(step, step.cluster.instances[instance_id])


def _drain_for_starving(step: Step) -> None:
    """A model that has waited for `fair_wait_s` gets the slot of whoever has been ready longest."""
    cluster = step.cluster
    oldest_s = step.now - step.settings.fair_wait_s
    starving = [m for m in map(cluster.models.__getitem__, cluster.waiting) if m.oldest_wait_s <= oldest_s]
    for model in sorted(starving, key=lambda model: (model.oldest_wait_s, model.model_id)):
        if _is_served_soon(step, model):
            continue
        chosen = scaling.choose_drain(_held(step), model_id=model.model_id, size_bytes=model.record.size_bytes)
        if chosen is None:
            continue
        instance = cluster.instances[chosen]
        record = instance.record
        cluster.reserve(
            Reservation(
                model_id=model.model_id,
                server_id=record.server_id,
                slot=record.slot,
                waiting_for={chosen},
                is_drain=True,
            )
        )
        lifecycle.drain(step, instance)


def _is_served_soon(step: Step, model: Model) -> bool:
    cluster = step.cluster
    has_instance = cluster.standing_instance(model) is not None
    return has_instance or model.model_id in cluster.reservations or not model.is_servable


def _held(step: Step) -> list[scaling.Held]:
    instances = step.cluster.instances.values()
    return [_as_held(step, instance) for instance in instances if instance.state is InstanceState.READY]


def _as_held(step: Step, instance: Instance) -> scaling.Held:
    record = instance.record
    server = step.cluster.servers[record.server_id]
    own_keep_alive_s = step.cluster.models[record.model_id].record.keep_alive_s
    return scaling.Held(
        instance_id=record.instance_id,
        model_id=record.model_id,
        capacity_bytes=server.capacity_bytes if server.is_alive else 0,
        ready_s=instance.ready_s,
        idle_since_s=instance.idle_since_s,
        keep_alive_s=step.settings.keep_alive_s if own_keep_alive_s is None else own_keep_alive_s,
        is_idle=step.cluster.is_idle(instance),
        is_promised=bool(instance.promised),
        is_reserved=step.cluster.slot_of(instance).reserved_for is not None,
    )
