"""Owns what happens around each transition of a migration: records, commands, events, instances and slots.

What the source says is heard as it comes; everything else (a destination that became ready, somebody who is gone,
requests that have ended) is seen at the end of each step by looking at the instances, so that it makes no difference
who noticed it first, or whether it was before or after we were started again.
"""

from __future__ import annotations

import msgspec
from whimbrel.wire.events import (
    MigrationAbandoned,
    MigrationFinished,
    MigrationHandedOver,
    MigrationRequeued,
    MigrationResuming,
    MigrationStarted,
)
from whimbrel.wire.messages import (
    AbandonMigration,
    HandOver,
    Message,
    MigrateInstance,
    MigrationEnd,
    MigrationEnded,
    MigrationState,
    MigrationStatus,
    RoundCompleted,
    SourceStopped,
    StartRound,
    Tier,
)
from whimbrel.wire.records import InstanceState, MigrationRecord

from services.scheduler.core import accuracy, commands, lifecycle
from services.scheduler.core.decisions import Move, Placement, Reasons
from services.scheduler.core.instances import Instance, InstanceEvent
from services.scheduler.core.migration import AfterRound, Migration, MigrationEvent, after_round
from services.scheduler.core.models import Reservation
from services.scheduler.core.ready import ToWorker
from services.scheduler.core.settings import MOVE_AGAIN_S
from services.scheduler.core.step import Step

# A round may take so many times what it is estimated to, if that is more than the usual deadline.
ROUND_TIMES = 3.0
# Routers switch within milliseconds; one that missed the last frame asks for it after a second.
HANDOVER_S_MAX = 2.5
# Who wanted a migration.
PLACEMENT, OPERATOR, DRAIN = "placement", "operator", "drain"


def can_start(step: Step, move: Move) -> bool:
    """Whether the move is possible as things are."""
    source = step.cluster.instances.get(move.instance_id)
    if source is None or source.state is not InstanceState.READY or source.is_migrating:
        return False
    into = None if move.into is None else step.cluster.instances.get(move.into)
    if move.into is not None:
        return into is not None and step.cluster.is_idle(into)
    return True


def start(step: Step, move: Move, reasons: Reasons, *, reason: str, for_model_id: str = "") -> Migration:
    """→ PREPARING. The destination is loaded, or is there already (G3)."""
    cluster = step.cluster
    source = cluster.instances[move.instance_id]
    migration = Migration(
        record=MigrationRecord(
            migration_id=step.new_id("mig"),
            model_id=move.model_id,
            state=MigrationState.PREPARING,
            source_instance_id=move.instance_id,
            source_server_id=source.record.server_id,
            source_slot=source.record.slot,
            destination_instance_id=move.into or "",
            destination_server_id=move.server_id,
            destination_slots=move.slots,
            reason=reason,
            for_model_id=for_model_id,
            estimate_s=move.total_s,
        ),
        started_s=step.now,
        progress_s=step.now,
        resume_s=move.resume_s,
    )
    record = migration.record
    cluster.migrations[record.migration_id] = migration
    source.leaving = record.migration_id
    cluster.touch(source.record.server_id)
    step.tell(
        MigrationStarted(
            migration_id=record.migration_id,
            model_id=record.model_id,
            source_instance_id=record.source_instance_id,
            destination_server_id=record.destination_server_id,
            reason=reason,
            for_model_id=for_model_id,
            estimate_s=record.estimate_s,
        )
    )
    step.save(record)
    if move.into is not None:
        cluster.instances[move.into].arriving = record.migration_id
        cluster.touch(record.destination_server_id)
    else:
        _prepare(step, migration, move, reasons)
    return migration


def load_destination(step: Step, migration: Migration, placement: Placement) -> None:
    """Its slots are free now."""
    instance = lifecycle.start_load(step, step.cluster.models[migration.record.model_id], placement)
    instance.arriving = migration.migration_id
    migration.progress_s = step.now
    _change(step, migration, destination_instance_id=instance.instance_id)


def settle(step: Step) -> None:
    """The end of a step: what became of those that are on their way."""
    for migration in list(step.cluster.migrations.values()):
        # A transition may be followed by another one at once; there are no more of them than states.
        for _ in MigrationState:
            event = None if migration.is_over else _what_happened(step, migration)
            if event is None:
                break
            _take(step, migration, event, cause=event.value.replace("_", " "))


def on_tick(step: Step) -> None:
    """Say again what was not answered."""
    for migration in step.cluster.migrations.values():
        if migration.state is MigrationState.RESUMING and step.now - migration.sent_s >= step.settings.repeat_s:
            _tell_source(step, migration)


def on_round_completed(step: Step, message: RoundCompleted, reply_to: str | None) -> None:
    """The destination has caught up with what this round sent (G7)."""
    migration = _live(step, message.migration_id, message.instance_id)
    source = step.cluster.instances.get(message.instance_id)
    if migration is None or source is None or not migration.accepts(MigrationEvent.ROUND_COMPLETED):
        return
    record = migration.record
    if message.round < record.rounds or (message.round == record.rounds and _is_told(migration)):
        # What followed was lost on its way, or this is old: the source is told again what to do now.
        _tell_source(step, migration)
        return
    migration.enter(MigrationEvent.ROUND_COMPLETED)
    migration.progress_s = step.now
    # Said again to a new leader, a round is compared with none.
    before_tokens = record.gap_tokens if 0 < record.rounds < message.round else None
    _change(step, migration, rounds=message.round, gap_tokens=message.gap_tokens, sent_tokens=message.sent_tokens)
    following = after_round(
        round=message.round,
        gap_tokens=message.gap_tokens,
        before_tokens=before_tokens,
        known=step.cluster.resume_record(source),
    )
    match following:
        case AfterRound.GIVE_UP:
            _take(step, migration, MigrationEvent.NOT_CONVERGING, cause=f"{message.gap_tokens} tokens behind")
        case AfterRound.HAND_OVER:
            migration.is_stopping = True
            _tell_source(step, migration)
        case AfterRound.ANOTHER_ROUND:
            migration.asked_round = message.round + 1
            _tell_source(step, migration)


def on_source_stopped(step: Step, message: SourceStopped, reply_to: str | None) -> None:
    """Nothing runs at the source any more; routers switch (G8, G10)."""
    migration = _live(step, message.migration_id, message.instance_id)
    if migration is None or not migration.accepts(MigrationEvent.SOURCE_STOPPED):
        return
    destination = step.cluster.instances.get(migration.record.destination_instance_id)
    begun = {name for r in (destination.active.values() if destination is not None else ()) for name in r.names}
    moving = tuple((r.request_id, r.router_id) for r in message.requests if r.request_id not in begun)
    _change(step, migration, moving=moving, sent_tokens=message.sent_tokens)
    _take(step, migration, MigrationEvent.SOURCE_STOPPED, cause="")


def on_migration_ended(step: Step, message: MigrationEnded, reply_to: str | None) -> None:
    """The source says that there is nothing to move (X1), or that the destination can't resume (X5)."""
    migration = _live(step, message.migration_id, message.instance_id)
    if migration is None:
        return
    event = {
        MigrationEnd.FINISHED: MigrationEvent.INFERENCE_FINISHED,
        MigrationEnd.RESUME_FAILED: MigrationEvent.RESUME_FAILED,
        MigrationEnd.REFUSED: MigrationEvent.CANCELLED,
    }[message.reason]
    if migration.accepts(event):
        cause = message.error.code if message.error is not None else event.value.replace("_", " ")
        _take(step, migration, event, cause=cause)


def hear_switched(step: Step, instance_id: str, request_id: str) -> None:
    """The request began, or ended, on this instance: its router has switched if it was to go on there."""
    for migration in step.cluster.migrations.values():
        if instance_id == migration.record.destination_instance_id:
            _switched(step, migration, request_id)


def hear_placed(step: Step, request_id: str) -> None:
    """The request asks for a place: if it was moving, the destination did not take it."""
    for migration in step.cluster.migrations.values():
        if any(request_id == moving for moving, _ in migration.record.moving):
            migration.requeued += 1
            _switched(step, migration, request_id)


def hear_counts(step: Step, router_id: str, requests: dict[str, int]) -> None:
    """A router's heartbeat: whatever of its news got lost, as many requests as were moving run at the destination."""
    for migration in step.cluster.migrations.values():
        moving = [name for name, router in migration.record.moving if router == router_id]
        if moving and requests.get(migration.record.destination_instance_id, 0) >= len(moving):
            for request_id in moving:
                _switched(step, migration, request_id)


def forget_router(step: Step, router_id: str) -> None:
    """Its requests are gone with it; nobody switches them."""
    for migration in step.cluster.migrations.values():
        left = tuple(one for one in migration.record.moving if one[1] != router_id)
        if left != migration.record.moving:
            _change(step, migration, moving=left)


def hear_stray(step: Step, server_id: str, slot: int, migration_id: str) -> None:
    """A worker hands over for a migration that we know nothing of: it should carry on."""
    if migration_id not in step.cluster.migrations:
        step.send(ToWorker(server_id=server_id, slot=slot), _abandon(step, migration_id))


def status(step: Step, migration: Migration) -> MigrationStatus:
    """As people see it."""
    record = migration.record
    return MigrationStatus(
        migration_id=record.migration_id,
        model_id=record.model_id,
        state=record.state,
        source_instance_id=record.source_instance_id,
        source_server_id=record.source_server_id,
        source_slot=record.source_slot,
        destination_server_id=record.destination_server_id,
        destination_slots=record.destination_slots,
        reason=record.reason,
        for_model_id=record.for_model_id,
        rounds=record.rounds,
        gap_tokens=record.gap_tokens,
        sent_tokens=record.sent_tokens,
        estimate_s=record.estimate_s,
        age_s=max(0.0, step.now - migration.started_s),
        end=migration.end,
    )


def _prepare(step: Step, migration: Migration, move: Move, reasons: Reasons) -> None:
    assert move.load is not None, "without an instance there, one is loaded"
    placement = Placement(
        model_id=move.model_id,
        server_id=move.server_id,
        slots=move.slots,
        estimate=move.load,
        evict=move.evict,
        moves=(),
        stopped=(),
        cost_s=move.load.total_s,
        reasons=reasons,
    )
    if not move.evict:
        load_destination(step, migration, placement)
        return
    step.cluster.reserve(
        Reservation(
            model_id=move.model_id,
            server_id=move.server_id,
            slots=move.slots,
            waiting_for=set(move.evict),
            is_drain=False,
            placement=placement,
            migration_id=migration.migration_id,
        )
    )
    for instance_id in move.evict:
        instance = step.cluster.instances[instance_id]
        step.cluster.models[instance.record.model_id].displaced_s = step.now
        lifecycle.evict(step, instance)


def _what_happened(step: Step, migration: Migration) -> MigrationEvent | None:
    """What the instances, and the time, say of a migration that is on its way; None when nothing new."""
    record, state = migration.record, migration.state
    source = step.cluster.instances.get(record.source_instance_id)
    destination = step.cluster.instances.get(record.destination_instance_id)
    is_destination_lost = not _is_expected(step, migration) if destination is None else _is_useless(destination)
    if state is MigrationState.HANDOVER:
        is_shunned = migration.requeued > 0 and not record.moving and (destination is None or not destination.demand)
        if is_destination_lost or is_shunned:
            return MigrationEvent.DESTINATION_LOST
        if not record.moving:
            return MigrationEvent.ROUTES_SWITCHED
        if step.now - migration.progress_s < HANDOVER_S_MAX:
            return None
        # Whoever has not been heard by now has left, or asks for a place: the others should not wait.
        is_there = destination is not None and destination.state is InstanceState.READY
        return MigrationEvent.ROUTES_SWITCHED if is_there else MigrationEvent.DEADLINE_EXCEEDED
    if source is None:
        return MigrationEvent.SOURCE_LOST
    if is_destination_lost:
        return MigrationEvent.DESTINATION_LOST
    if source.state is not InstanceState.READY:
        return MigrationEvent.CANCELLED
    if state is MigrationState.PREPARING:
        # Later on it is the source that says so: requests that leave it may be those that have moved.
        if _has_finished(step, source):
            return MigrationEvent.INFERENCE_FINISHED
        is_ready = destination is not None and destination.state is InstanceState.READY
        return MigrationEvent.DESTINATION_READY if is_ready else None
    return MigrationEvent.DEADLINE_EXCEEDED if _is_stalled(step, migration) else None


def _switched(step: Step, migration: Migration, request_id: str) -> None:
    left = tuple(one for one in migration.record.moving if one[0] != request_id)
    if left != migration.record.moving:
        migration.progress_s = step.now
        _change(step, migration, moving=left)


def _is_told(migration: Migration) -> bool:
    """Whether the source was told what follows its last round."""
    return migration.is_stopping or migration.asked_round > migration.record.rounds


def _is_expected(step: Step, migration: Migration) -> bool:
    """Whether a destination that is not there yet is still to come: its slots are kept until idle ones have gone."""
    return migration.migration_id in step.cluster.reservations


def _has_finished(step: Step, source: Instance) -> bool:
    """Nothing runs there, as its routers and its worker say; right after our start, neither may have spoken yet."""
    worker = step.cluster.slot_of(source).heartbeat
    return not source.demand and worker is not None and worker.active_requests == 0


def _is_useless(destination: Instance) -> bool:
    return destination.state not in (InstanceState.LOADING, InstanceState.READY)


def _is_stalled(step: Step, migration: Migration) -> bool:
    source = step.cluster.instances.get(migration.record.source_instance_id)
    round_s = migration.resume_s
    if migration.record.rounds and source is not None:
        known = step.cluster.resume_record(source)
        round_s = known.seconds_per_token * migration.record.gap_tokens + known.overhead_s
    return step.now - migration.progress_s >= max(step.settings.migration_stall_s, ROUND_TIMES * round_s)


def _take(step: Step, migration: Migration, event: MigrationEvent, *, cause: str) -> None:
    """One move of the machine, with its effects."""
    migration.enter(event)
    migration.progress_s = step.now
    match migration.state:
        case MigrationState.RESUMING:
            _resume(step, migration)
        case MigrationState.HANDOVER if event is MigrationEvent.SOURCE_STOPPED:
            _hand_over(step, migration)
        case MigrationState.FINISHED:
            _finish(step, migration)
        case MigrationState.ABANDONED:
            _abandon_both(step, migration, event, cause)
        case MigrationState.REQUEUED:
            _requeue(step, migration, cause)
        case _:
            step.save(migration.record)


def _resume(step: Step, migration: Migration) -> None:
    """→ RESUMING. The source sends tokens, and takes no new request from now on (G4, G5)."""
    record = migration.record
    step.save(record)
    migration.ready_s = step.now
    source = step.cluster.instances[record.source_instance_id]
    source.is_closed = True
    step.send_routers(commands.route_added(source))
    step.cluster.touch(source.record.server_id)
    _tell_source(step, migration)
    step.tell(
        MigrationResuming(
            migration_id=record.migration_id,
            model_id=record.model_id,
            source_instance_id=record.source_instance_id,
            destination_server_id=record.destination_server_id,
            destination_instance_id=record.destination_instance_id,
        )
    )


def _hand_over(step: Step, migration: Migration) -> None:
    """→ HANDOVER. The source has nothing to do any more: it is unloaded while routers switch (G9)."""
    record = migration.record
    step.save(record)
    migration.stopped_s = step.now
    source = step.cluster.instances.get(record.source_instance_id)
    if source is not None and source.state is InstanceState.READY:
        lifecycle.drain(step, source)
    step.tell(
        MigrationHandedOver(
            migration_id=record.migration_id,
            model_id=record.model_id,
            source_instance_id=record.source_instance_id,
            destination_server_id=record.destination_server_id,
            destination_instance_id=record.destination_instance_id,
            requests=len(record.moving),
            rounds=record.rounds,
            gap_tokens=record.gap_tokens,
            sent_tokens=record.sent_tokens,
        )
    )


def _finish(step: Step, migration: Migration) -> None:
    """→ FINISHED. The destination is an instance like any other."""
    record = migration.record
    observed_s = step.now - migration.started_s
    if migration.ready_s is not None and migration.stopped_s is not None and migration.resume_s > 0.0:
        known = step.cluster.accuracies.get(f"{record.destination_server_id}/{Tier.GPU}")
        known = known or accuracy.unknown(record.destination_server_id, Tier.GPU)
        resumed_s = migration.stopped_s - migration.ready_s
        kept = accuracy.observe(known, estimate_s=migration.resume_s, actual_s=resumed_s)
        step.cluster.accuracies[kept.key()] = kept
        step.save(kept)
    step.tell(
        MigrationFinished(
            migration_id=record.migration_id,
            model_id=record.model_id,
            source_instance_id=record.source_instance_id,
            destination_server_id=record.destination_server_id,
            destination_instance_id=record.destination_instance_id,
            rounds=record.rounds,
            sent_tokens=record.sent_tokens,
            estimate_s=record.estimate_s,
            observed_s=observed_s,
        )
    )
    _end(step, migration, "")
    _open_destination(step, migration)
    destination = step.cluster.instances.get(record.destination_instance_id)
    if destination is not None:
        # Its clients have had one pause.
        destination.stays_until_s = step.now + min(step.settings.fair_wait_s, MOVE_AGAIN_S)


def _abandon_both(step: Step, migration: Migration, event: MigrationEvent, cause: str) -> None:
    """→ ABANDONED. The source carries on as if nothing had been; the destination is kept if somebody needs it."""
    record, cluster = migration.record, step.cluster
    step.tell(
        MigrationAbandoned(
            migration_id=record.migration_id,
            model_id=record.model_id,
            source_instance_id=record.source_instance_id,
            destination_server_id=record.destination_server_id,
            cause=cause,
        )
    )
    _end(step, migration, cause)
    cluster.release(record.migration_id)
    source = cluster.instances.get(record.source_instance_id)
    if source is not None:
        step.send(_worker_of(source), _abandon(step, record.migration_id))
        source.moves_failed += 1
        source.stays_until_s = step.now + MOVE_AGAIN_S
        _reopen_source(step, source)
    _release_target(step, record)
    destination = cluster.instances.get(record.destination_instance_id)
    if destination is None:
        return
    step.send(_worker_of(destination), _abandon(step, record.migration_id))
    # Those of a source that is gone are about to ask for a place.
    is_wanted = source is None or destination.demand > 0
    if is_wanted or cluster.shortfall(cluster.models[record.model_id]) > 0:
        _open_destination(step, migration)
        return
    destination.arriving = None
    if destination.state is InstanceState.LOADING:
        lifecycle.end_load(step, destination, InstanceEvent.LOAD_FAILED)
    else:
        # Idle, it goes as soon as anybody needs its slot, or when its keep-alive ends.
        _open_destination(step, migration)


def _requeue(step: Step, migration: Migration, cause: str) -> None:
    """→ REQUEUED. Nobody runs the requests any more: routers start them again from the tokens that they hold."""
    record = migration.record
    step.tell(
        MigrationRequeued(
            migration_id=record.migration_id,
            model_id=record.model_id,
            source_instance_id=record.source_instance_id,
            destination_server_id=record.destination_server_id,
            cause=cause,
        )
    )
    _end(step, migration, cause)
    _open_destination(step, migration)


def _end(step: Step, migration: Migration, cause: str) -> None:
    """Terminal: its record is forgotten, and people can still ask for a while how it went."""
    migration.end = cause
    step.cluster.ended_migrations.append(status(step, migration))
    del step.cluster.migrations[migration.migration_id]
    step.forget(migration.record)
    source = step.cluster.instances.get(migration.record.source_instance_id)
    if source is not None:
        source.leaving = None


def _open_destination(step: Step, migration: Migration) -> None:
    """It takes requests like any other instance, if it is there."""
    destination = step.cluster.instances.get(migration.record.destination_instance_id)
    if destination is None:
        return
    destination.arriving = None
    destination.idle_since_s = max(destination.idle_since_s, step.now)
    step.cluster.touch_peers(destination)
    model = step.cluster.models[destination.record.model_id]
    if destination.state is not InstanceState.READY:
        return
    if model.is_servable and model.record.checkpoint_digest == destination.record.checkpoint_digest:
        lifecycle.serve_waiters(step, destination)
    else:
        lifecycle.drain(step, destination)


def _reopen_source(step: Step, source: Instance) -> None:
    was_closed, source.is_closed = source.is_closed, False
    step.cluster.touch_peers(source)
    if was_closed and source.state is InstanceState.READY:
        lifecycle.serve_waiters(step, source)


def _release_target(step: Step, record: MigrationRecord) -> None:
    """Whoever was to have the source's slots is placed anew."""
    reservation = step.cluster.reservations.get(record.for_model_id)
    if reservation is not None and record.source_instance_id in reservation.waiting_for:
        step.cluster.release(record.for_model_id)
        step.wanted[record.for_model_id] = None


def _tell_source(step: Step, migration: Migration) -> None:
    """What it should do now. When either of the two is gone in this very step, its end sees to that."""
    record = migration.record
    source = step.cluster.instances.get(record.source_instance_id)
    destination = step.cluster.instances.get(record.destination_instance_id)
    if source is None or destination is None:
        return
    common = {"migration_id": record.migration_id, "instance_id": source.instance_id, "scheduler_epoch": step.epoch}
    message: Message
    if migration.is_stopping:
        message = HandOver(**common)  # type: ignore[arg-type]
    elif migration.asked_round > 1:
        message = StartRound(round=migration.asked_round, **common)  # type: ignore[arg-type]
    else:
        message = MigrateInstance(destination=commands.route_added(destination).route, **common)  # type: ignore[arg-type]
    migration.sent_s = step.now
    step.send(_worker_of(source), message)


def _worker_of(instance: Instance) -> ToWorker:
    return ToWorker(server_id=instance.record.server_id, slot=instance.record.slot)


def _abandon(step: Step, migration_id: str) -> AbandonMigration:
    return AbandonMigration(migration_id=migration_id, scheduler_epoch=step.epoch)


def _live(step: Step, migration_id: str, instance_id: str) -> Migration | None:
    """The migration that a source speaks of. One that is over is ended there, too."""
    migration = step.cluster.migrations.get(migration_id)
    if migration is None:
        instance = step.cluster.instances.get(instance_id)
        if instance is not None:
            step.send(_worker_of(instance), _abandon(step, migration_id))
    return migration


def _change(step: Step, migration: Migration, **changes: object) -> None:
    migration.record = msgspec.structs.replace(migration.record, **changes)
    step.save(migration.record)
