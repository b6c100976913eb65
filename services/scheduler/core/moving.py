"""Owns moves that nobody's placement asks for: those that operators want, and those that empty a server."""

from __future__ import annotations

import msgspec
from whimbrel.wire.errors import Conflict, ModelNotFound, ServerNotFound
from whimbrel.wire.messages import GetMigrations, GetMigrationsReply, MigrateModel, MigrateModelReply
from whimbrel.wire.records import InstanceState

from services.scheduler.core import lifecycle, migration_words, migrations, plans, sentences
from services.scheduler.core.decisions import Candidate, Move, Placement, Reasons
from services.scheduler.core.instances import Instance
from services.scheduler.core.policies import POLICIES
from services.scheduler.core.step import Step
from services.scheduler.core.views import Occupant, ServerView, Task

NAMED_MAX = 20
# An instance that is to go ends its requests where it is when moving it has failed so often.
MOVES_FAILED_MAX = 2


def on_migrate_model(step: Step, message: MigrateModel, reply_to: str | None) -> None:
    """Raises ModelNotFound, ServerNotFound, and Conflict that says why the instance, or the server, can't."""
    source = _find(step, message.what)
    view = _destination(step, message.server_id, message.slot)
    if source.is_migrating:
        raise Conflict(reason=f"instance {source.instance_id} is being migrated; see `whimbrel migrations`")
    occupant = _occupant(step, source)
    if source.stays_until_s is not None:
        left_s = max(0.0, source.stays_until_s - step.now)
        reason = f"instance {source.instance_id} was moved, or could not be, a moment ago; try again in {left_s:.0f} s"
        raise Conflict(reason=reason)
    if occupant is None or occupant.resume is None:
        reason = f"instance {source.instance_id} runs nothing that could be moved; unload it, and load it elsewhere"
        raise Conflict(reason=reason)
    reasons = _reasons(step, occupant.task)
    move = _move(step, occupant, view, reasons)
    if not migrations.can_start(step, move):
        raise Conflict(reason=f"slots are kept for {move.model_id} already; try again when it is loaded")
    migration = migrations.start(step, move, reasons, reason=migrations.OPERATOR)
    step.answer(reply_to, MigrateModelReply(migration=migration_words.status(step, migration)))


def on_get_migrations(step: Step, message: GetMigrations, reply_to: str | None) -> None:
    running = [migration_words.status(step, migration) for migration in step.cluster.migrations.values()]
    ended = list(step.cluster.ended_migrations)
    step.answer(reply_to, GetMigrationsReply(migrations=(*running, *reversed(ended))))


def move_away(step: Step, instance: Instance) -> bool:
    """Have the instance go on on another server: in an idle twin, else in any free slot. False when there is no place
    for it, or nothing that can be moved now."""
    occupant = _occupant(step, instance)
    if occupant is None or occupant.resume is None:
        return False
    snapshot = step.cluster.snapshot(step.now)
    reasons = _reasons(step, occupant.task)
    twins = (_into_twin(occupant, view, step.now) for view in snapshot.servers if view.takes_loads)
    move = next((twin for twin in twins if twin is not None), None)
    if move is None:
        # Any free slot will do, before others have to move for it in their turn.
        decision = POLICIES["availability"](snapshot, occupant.task, step.now)
        if not isinstance(decision, Placement):
            return False
        move = _to(occupant, decision, step.now)
    if not migrations.can_start(step, move):
        return False
    migrations.start(step, move, reasons, reason=migrations.DRAIN)
    return True


def leave(step: Step, instance: Instance) -> None:
    """What runs there goes on elsewhere; where there is no place for it, it ends there, and nothing new begins."""
    if instance.is_migrating:
        return
    if instance.stays_until_s is not None:
        if instance.moves_failed < MOVES_FAILED_MAX:
            return  # it was just moved, or could not be: soon it can be tried again
    elif move_away(step, instance):
        return
    if not instance.promised:
        # Whoever was given its route arrives first: a draining instance takes no new request.
        lifecycle.drain(step, instance)


def _find(step: Step, what: str) -> Instance:
    """An instance by its id, that of a request that runs on it, or its model, of which the busiest is meant."""
    cluster = step.cluster
    if what in cluster.instances:
        return _ready(cluster.instances[what])
    for instance in cluster.instances.values():
        if any(what in running.names for running in instance.active.values()):
            return _ready(instance)
    model = cluster.models.get(what)
    if model is None:
        raise ModelNotFound(model_id=what[:128])
    ready = [i for i in cluster.instances_of(model) if i.state is InstanceState.READY and not i.is_migrating]
    if not ready:
        raise Conflict(reason=f"model {what!r} has no instance that is ready and not on the move")
    return max(ready, key=lambda instance: (instance.demand, instance.instance_id))


def _ready(instance: Instance) -> Instance:
    if instance.state is not InstanceState.READY:
        raise Conflict(reason=f"instance {instance.instance_id} is {instance.state}; only one that is ready moves")
    return instance


def _destination(step: Step, server_id: str, slot: int | None) -> ServerView:
    """The server, or that slot of it alone."""
    view = step.cluster.view(server_id)
    if view is None:
        names = ", ".join(sorted(step.cluster.servers)[:NAMED_MAX])
        raise ServerNotFound(server_id=server_id[:64], known=names or "none yet")
    if slot is None:
        return view
    free = tuple(one for one in view.free_slots if one.slot == slot)
    idle = tuple(one for one in view.idle if slot in [place.slot for place in one.slots])
    return msgspec.structs.replace(view, free_slots=free, idle=idle)


def _occupant(step: Step, instance: Instance) -> Occupant | None:
    """What placement sees of it, if it runs something."""
    view = step.cluster.view(instance.record.server_id)
    if view is None:
        return None
    return next((one for one in view.running if one.instance_id == instance.instance_id), None)


def _reasons(step: Step, task: Task) -> Reasons:
    return Reasons(snapshot=step.cluster.snapshot(step.now), task=task, now=step.now, consider=plans.consider)


def _move(step: Step, occupant: Occupant, view: ServerView, reasons: Reasons) -> Move:
    twin = _into_twin(occupant, view, step.now)
    if twin is not None:
        return twin
    candidate = plans.consider(view, occupant.task, reasons.snapshot, step.now)
    if candidate.refusal is not None:
        why = sentences.refusal(candidate.refusal, view, occupant.task)
        raise Conflict(reason=f"server {view.server_id} can't take {occupant.task.model_id}: {why}")
    return _to(occupant, candidate, step.now)


def _into_twin(occupant: Occupant, view: ServerView, now: float) -> Move | None:
    """To an idle instance of the same model, if the server has one."""
    twin = next((idle for idle in view.idle if idle.task.model_id == occupant.task.model_id), None)
    if twin is None:
        return None
    assert occupant.resume is not None, "it was asked whether it can be resumed"
    return Move(
        instance_id=occupant.instance_id,
        model_id=occupant.task.model_id,
        server_id=view.server_id,
        slots=tuple(slot.slot for slot in twin.slots),
        load=None,
        into=twin.instance_id,
        resume_s=occupant.resume.seconds(now),
        pause_s=occupant.pause_s,
    )


def _to(occupant: Occupant, where: Candidate | Placement, now: float) -> Move:
    """To a place where the model is loaded first."""
    assert occupant.resume is not None, "it was asked whether it can be resumed"
    return Move(
        instance_id=occupant.instance_id,
        model_id=occupant.task.model_id,
        server_id=where.server_id,
        slots=where.slots,
        load=where.estimate,
        into=None,
        resume_s=occupant.resume.seconds(now),
        pause_s=occupant.pause_s,
        evict=where.evict,
    )
