"""Owns how the number of instances follows demand: minimums, surplus, keep-alive, and drains for who waits too long."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest

from whimbrel.wire.records import InstanceState

from services.scheduler.core import lifecycle, scaling, sights
from services.scheduler.core.instances import Instance
from services.scheduler.core.models import Model, Reservation
from services.scheduler.core.servers import Server
from services.scheduler.core.settings import DRAINS_TRIED_MAX
from services.scheduler.core.step import Step


def on_tick(step: Step) -> None:
    _want_more(step)
    _end_surplus(step)
    _end_keep_alives(step)
    _drain_for_starving(step)


def want_more(step: Step, model: Model) -> None:
    """Its demand may ask for another instance; placed at the end of the step if so."""
    is_held_back = not model.waiters and step.now < model.blocked_until_s
    if step.cluster.shortfall(model) > 0 and not is_held_back:
        step.wanted[model.model_id] = None


def _want_more(step: Step) -> None:
    """Who has fewer instances than it should: those of a minimum, and those whose demand has grown."""
    for model in [*map(step.cluster.models.__getitem__, step.cluster.minimums), *_scalable(step)]:
        want_more(step, model)


def _scalable(step: Step) -> list[Model]:
    """Models with instances that may have, or do have, several. Most may have one, and there is nothing to count."""
    models = step.cluster.models
    found = {k: models[k] for k in (instance.record.model_id for instance in step.cluster.instances.values())}
    return [model for model in found.values() if model.record.scaling.max_instances > 1 or len(model.instances) > 1]


def _end_surplus(step: Step) -> None:
    """One instance at a time goes when there were more than demand asks for during a whole keep-alive. Idle ones end by
    their own keep-alive; this is for requests that are spread over more instances than they need."""
    cluster = step.cluster
    for model in _scalable(step):
        ready = [i for i in cluster.instances_of(model) if i.state is InstanceState.READY]
        if cluster.shortfall(model) >= 0 or len(ready) < 2:
            model.surplus_since_s = None
        elif model.surplus_since_s is None:
            model.surplus_since_s = step.now
        elif step.now - model.surplus_since_s >= max(keep_alive_s(step, instance) for instance in ready):
            model.surplus_since_s = None
            _end_one(step, ready)


def _end_one(step: Step, ready: Iterable[Instance]) -> None:
    chosen = scaling.choose_surplus([_as_held(step, instance) for instance in ready])
    if chosen is None:
        return
    instance = step.cluster.instances[chosen]
    if step.cluster.is_idle(instance):
        lifecycle.evict(step, instance)
    else:
        lifecycle.drain(step, instance)


def _end_keep_alives(step: Step) -> None:
    ready = [i for i in step.cluster.instances.values() if i.record.state is InstanceState.READY]
    due = [i for i in ready if not i.active and step.now - i.idle_since_s >= keep_alive_s(step, i)]
    for instance_id in scaling.expired([_as_held(step, instance) for instance in due], step.now):
        instance = step.cluster.instances[instance_id]
        # Of several that have run out together, the last ones may be its minimum by now.
        if not step.cluster.is_minimum(instance):
            lifecycle.evict(step, instance)


def keep_alive_s(step: Step, instance: Instance) -> float:
    """The model's own, else its loading time, with a floor (R6, ADR 7)."""
    own_s = step.cluster.models[instance.record.model_id].record.keep_alive_s
    if own_s is not None:
        return own_s
    load_s = 0.0 if instance.is_rebuilt else instance.ready_s - instance.placed_s
    return max(step.settings.keep_alive_s, load_s)


def _drain_for_starving(step: Step) -> None:
    """A model that has waited for `fair_wait_s` gets the slots of whoever has been ready longest. Those for which that
    was tried least lately come first, so that many that can't be helped don't keep others waiting."""
    cluster = step.cluster
    oldest_s = step.now - step.settings.fair_wait_s
    starving = [m for m in map(cluster.models.__getitem__, cluster.waiting) if m.oldest_wait_s <= oldest_s]
    starving = [model for model in starving if not _is_served_soon(step, model)]
    if not starving:
        return
    holders = {s.server_id: _as_holder(step, s) for s in cluster.live_servers() if s.takes_loads}
    for model in nsmallest(DRAINS_TRIED_MAX, starving, key=lambda m: (m.drain_tried_s, m.oldest_wait_s, m.model_id)):
        model.drain_tried_s = step.now
        drain = scaling.choose_drain(holders.values(), cluster.task_of(model))
        if drain is not None:
            _start_drain(step, model, drain)
            holders[drain.server_id] = _as_holder(step, cluster.servers[drain.server_id])


def _start_drain(step: Step, model: Model, drain: scaling.Drain) -> None:
    """What was reserved before took too long: whoever is done first serves."""
    step.cluster.release(model.model_id)
    reservation = Reservation(
        model_id=model.model_id,
        server_id=drain.server_id,
        slots=drain.slots,
        waiting_for=set(drain.instance_ids),
        is_drain=True,
        since_s=step.now,
    )
    step.cluster.reserve(reservation)
    for instance_id in drain.instance_ids:
        instance = step.cluster.instances[instance_id]
        step.cluster.models[instance.record.model_id].displaced_s = step.now
        if step.cluster.is_idle(instance):
            lifecycle.evict(step, instance)
        else:
            lifecycle.drain(step, instance)


def _is_served_soon(step: Step, model: Model) -> bool:
    cluster = step.cluster
    if cluster.standing_instances(model) or not model.is_servable:
        return True
    reservation = cluster.reservations.get(model.model_id)
    if reservation is None:
        return False
    server = cluster.servers[reservation.server_id]
    is_stuck = reservation.is_drain and step.now - reservation.since_s >= step.settings.fair_wait_s
    return server.is_alive and server.takes_loads and not is_stuck


def _as_holder(step: Step, server: Server) -> scaling.Holder:
    instances = [step.cluster.instances[instance_id] for instance_id in server.instances]
    return scaling.Holder(
        server_id=server.server_id,
        is_host=server.is_host,
        capacity_bytes=server.capacity_bytes,
        used_bytes=sum(sights.room_bytes(instance, is_host=server.is_host) for instance in instances),
        free_slots=tuple(slot.view for slot in server.slots.values() if slot.is_free),
        held=tuple(_as_held(step, instance) for instance in instances if instance.state is InstanceState.READY),
    )


def _as_held(step: Step, instance: Instance) -> scaling.Held:
    record = instance.record
    server = step.cluster.servers[record.server_id]
    return scaling.Held(
        instance_id=record.instance_id,
        model_id=record.model_id,
        slots=tuple(server.slots[slot].view for slot in record.slots),
        room_bytes=sights.room_bytes(instance, is_host=server.is_host),
        ready_s=instance.ready_s,
        idle_since_s=instance.idle_since_s,
        keep_alive_s=keep_alive_s(step, instance),
        demand=instance.demand,
        is_idle=step.cluster.is_idle(instance),
        is_promised=bool(instance.promised),
        is_reserved=instance.is_migrating or any(server.slots[slot].reserved_for is not None for slot in record.slots),
        is_minimum=step.cluster.is_minimum(instance),
    )
