"""Owns what happens because time passed: losses, stalls, expiry. All on ticks."""

from __future__ import annotations

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.events import ServerLost
from whimbrel.wire.records import InstanceState

from services.scheduler.core import counts, heartbeats, jobs, loading, migrations, operations, routers, waiting
from services.scheduler.core.servers import Server
from services.scheduler.core.settings import FORGET_SERVER_S
from services.scheduler.core.step import Step


def on_tick(step: Step) -> None:
    _lose_silent(step)
    waiting.expire(step)
    _end_promises(step)
    _check_loads(step)
    migrations.on_tick(step)
    counts.on_tick(step)
    operations.on_tick(step)


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
    for migration in cluster.migrations.values():
        migration.progress_s = now
        # What it takes now says nothing of computing.
        migration.ready_s = None
    for reservation in cluster.reservations.values():
        reservation.since_s = now


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
        step.cluster.reshape(server.server_id)
    for slot in list(server.slots.values()):
        if not slot.is_alive and slot.seen_s < oldest_s and slot.owner is None and slot.reserved_for is None:
            del server.slots[slot.slot]
            step.cluster.reshape(server.server_id)


def _end_promises(step: Step) -> None:
    """Requests that were given a route and never arrived; holds of instances that are over."""
    for instance in step.cluster.instances.values():
        for request_id, until_s in list(instance.promised.items()):
            if until_s <= step.now:
                waiting.keep_promise(step, instance, request_id)
        if instance.held_until_s is not None and instance.held_until_s <= step.now:
            instance.held_until_s = None
            step.cluster.touch(instance.record.server_id)
        if instance.stays_until_s is not None and instance.stays_until_s <= step.now:
            instance.stays_until_s = None
            step.cluster.touch(instance.record.server_id)
        if instance.kept_until_s is not None and instance.kept_until_s <= step.now:
            instance.kept_until_s = None
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
