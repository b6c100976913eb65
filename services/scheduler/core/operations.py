"""Owns what operators ask for: taking servers out and back in, and how a model is scaled."""

from __future__ import annotations

import msgspec
from whimbrel.wire.errors import InvalidRequest, ModelNotFound, ServerNotFound
from whimbrel.wire.events import ModelScaled, ServerCordoned, ServerDrained, ServerUncordoned
from whimbrel.wire.messages import (
    CordonServer,
    CordonServerReply,
    ModelState,
    ScaleModel,
    ScaleModelReply,
    Scaling,
    UncordonServer,
)
from whimbrel.wire.records import InstanceState, ServerRecord

from services.scheduler.core import counts, lifecycle, moving, scaling
from services.scheduler.core.instances import Instance, InstanceEvent
from services.scheduler.core.models import Model
from services.scheduler.core.servers import Server
from services.scheduler.core.step import Step

SERVERS_NAMED_MAX = 20


def on_cordon_server(step: Step, message: CordonServer, reply_to: str | None) -> None:
    """Nothing is placed there from now on, also after it or we were started again. To drain includes to cordon."""
    server = _known_server(step, message.server_id)
    _decide(step, server, is_cordoned=True, is_draining=message.drain or server.is_draining)
    _advance_drain(step, server)
    step.answer(reply_to, _reply(server))


def on_uncordon_server(step: Step, message: UncordonServer, reply_to: str | None) -> None:
    """What was drained does not come back by itself; the server is a candidate again."""
    server = _known_server(step, message.server_id)
    _decide(step, server, is_cordoned=False, is_draining=False)
    step.answer(reply_to, _reply(server))


def on_scale_model(step: Step, message: ScaleModel, reply_to: str | None) -> None:
    """Raises ModelNotFound, InvalidRequest for bounds that exclude each other."""
    model = step.cluster.models.get(message.model_id)
    if model is None or model.record.state is ModelState.DELETING:
        raise ModelNotFound(model_id=message.model_id)
    known = model.record.scaling
    wanted = check_scaling(
        Scaling(
            min_instances=_or(message.min_instances, known.min_instances),
            max_instances=_or(message.max_instances, known.max_instances),
            target_concurrency=_or(message.target_concurrency, known.target_concurrency),
        )
    )
    keep_alive_s = model.record.keep_alive_s if message.keep_alive_s is None else message.keep_alive_s
    if (wanted, keep_alive_s) != (known, model.record.keep_alive_s):
        model.record = msgspec.structs.replace(model.record, scaling=wanted, keep_alive_s=keep_alive_s)
        step.save(model.record)
        note_minimum(step, model)
        step.tell(
            ModelScaled(
                model_id=model.model_id,
                min_instances=wanted.min_instances,
                max_instances=wanted.max_instances,
                target_concurrency=wanted.target_concurrency,
                keep_alive_s=model_keep_alive_s(step, model),
            )
        )
    counts.want_more(step, model)
    reply = ScaleModelReply(
        model_id=model.model_id,
        scaling=wanted,
        keep_alive_s=model_keep_alive_s(step, model),
        desired_instances=desired_instances(step, model),
    )
    step.answer(reply_to, reply)


def check_scaling(wanted: Scaling) -> Scaling:
    """The same; raises InvalidRequest for a minimum above the maximum."""
    if wanted.min_instances > wanted.max_instances:
        reason = f"is {wanted.min_instances}, above max_instances, which is {wanted.max_instances}"
        raise InvalidRequest(field="min_instances", reason=reason)
    return wanted


def note_minimum(step: Step, model: Model) -> None:
    """The model's minimum may have changed: who looks after minimums hears of it, and so does placement."""
    if model.record.scaling.min_instances and model.is_servable:
        step.cluster.minimums[model.model_id] = None
    else:
        step.cluster.minimums.pop(model.model_id, None)
    for instance in step.cluster.instances_of(model):
        step.cluster.touch(instance.record.server_id)
    if step.cluster.shortfall(model) <= 0:
        step.cluster.release(model.model_id)


def desired_instances(step: Step, model: Model) -> int:
    """What its present demand asks for."""
    return scaling.desired(step.cluster.demand(model), model.record.scaling) if model.is_servable else 0


def model_keep_alive_s(step: Step, model: Model) -> float:
    """What people are told: its own, else the floor that the cluster has."""
    own_s = model.record.keep_alive_s
    return step.settings.keep_alive_s if own_s is None else own_s


def on_tick(step: Step) -> None:
    for server in step.cluster.servers.values():
        if server.is_draining:
            _advance_drain(step, server)
        elif server.is_stopping:
            _move_off(step, server)


def _advance_drain(step: Step, server: Server) -> None:
    """What can go goes: loads are placed elsewhere, idle instances unloaded, running ones move, or end their requests
    where there is no place for them."""
    if not server.is_draining:
        return
    for instance_id in list(server.instances):
        _send_away(step, step.cluster.instances[instance_id])
    is_held = any(slot.occupant is not None for slot in server.slots.values())
    if not server.instances and not is_held and not server.is_drain_told:
        server.is_drain_told = True
        step.tell(ServerDrained(server_id=server.server_id))


def _move_off(step: Step, server: Server) -> None:
    """Its agent waits for this before it ends. What has no other place stays, and is served by its worker."""
    for instance_id in list(server.instances):
        moving.move_away(step, step.cluster.instances[instance_id])


def _send_away(step: Step, instance: Instance) -> None:
    model = step.cluster.models[instance.record.model_id]
    if instance.state is InstanceState.LOADING:
        lifecycle.end_load(step, instance, InstanceEvent.LOAD_FAILED)
        step.wanted[model.model_id] = None
    if instance.state is not InstanceState.READY or instance.is_migrating:
        return
    if step.cluster.is_idle(instance):
        lifecycle.evict(step, instance)
        return
    moving.leave(step, instance)


def _decide(step: Step, server: Server, *, is_cordoned: bool, is_draining: bool) -> None:
    if (server.is_cordoned, server.is_draining) == (is_cordoned, is_draining):
        return
    if is_cordoned or is_draining:
        server.record = ServerRecord(server_id=server.server_id, is_cordoned=is_cordoned, is_draining=is_draining)
        step.save(server.record)
        step.tell(ServerCordoned(server_id=server.server_id, is_draining=is_draining))
    else:
        assert server.record is not None, "what is cordoned has a record"
        step.forget(server.record)
        server.record = None
        step.tell(ServerUncordoned(server_id=server.server_id))
    server.is_drain_told = False
    step.cluster.touch(server.server_id)


def _known_server(step: Step, server_id: str) -> Server:
    server = step.cluster.servers.get(server_id)
    if server is None:
        names = ", ".join(sorted(step.cluster.servers)[:SERVERS_NAMED_MAX])
        raise ServerNotFound(server_id=server_id[:64], known=names or "none yet")
    return server


def _reply(server: Server) -> CordonServerReply:
    return CordonServerReply(
        server_id=server.server_id,
        is_cordoned=server.is_cordoned,
        is_draining=server.is_draining,
        instances=tuple(server.instances),
    )


def _or(given: int | None, known: int) -> int:
    return known if given is None else given
