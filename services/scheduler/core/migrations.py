"""Owns how a migration goes on: each move of its machine with the effects, and what makes it move.

What the source says is heard as it comes (`migration_news.py`); everything else (a destination that became ready,
somebody who is gone, requests that have ended) is seen at the end of each step by looking at the instances, so that it
makes no difference who noticed it first, or whether it was before or after we were started again.
"""

from __future__ import annotations

from whimbrel.wire.events import MigrationHandedOver, MigrationResuming, MigrationStarted
from whimbrel.wire.messages import MigrationState
from whimbrel.wire.records import InstanceState, MigrationRecord, ResumeRecord

from services.scheduler.core import commands, lifecycle, migration_ends, resumes, sights
from services.scheduler.core import migration_words as words
from services.scheduler.core.decisions import Move, Placement, Reasons
from services.scheduler.core.instances import Instance
from services.scheduler.core.migration import Migration, MigrationEvent
from services.scheduler.core.models import Reservation
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
    if move.into is None:
        return True
    into = step.cluster.instances.get(move.into)
    return into is not None and step.cluster.is_idle(into)


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
        is_for_reservation=for_model_id in cluster.reservations,
    )
    record = migration.record
    cluster.migrations[record.migration_id] = migration
    source.leaving = record.migration_id
    cluster.touch(source.record.server_id)
    words.tell(
        step,
        migration,
        MigrationStarted,
        reason=reason,
        for_model_id=for_model_id,
        estimate_s=record.estimate_s,
    )
    step.save(record)
    if move.into is not None:
        cluster.instances[move.into].arriving = record.migration_id
        cluster.touch(record.destination_server_id)
        take(step, migration, MigrationEvent.DESTINATION_READY, cause="")
    else:
        _prepare(step, migration, move, reasons)
    return migration


def load_destination(step: Step, migration: Migration, placement: Placement) -> None:
    """Its slots are free now."""
    instance = lifecycle.start_load(step, step.cluster.models[migration.record.model_id], placement)
    instance.arriving = migration.migration_id
    migration.progress_s = step.now
    words.change(step, migration, destination_instance_id=instance.instance_id)


def settle(step: Step) -> None:
    """The end of a step: what became of those that are on their way."""
    for migration in list(step.cluster.migrations.values()):
        # A transition may be followed by another one at once; there are no more of them than states.
        for _ in MigrationState:
            event = None if migration.is_over else _what_happened(step, migration)
            if event is None:
                break
            take(step, migration, event, cause=event.value.replace("_", " "))


def on_tick(step: Step) -> None:
    """Say again what was not answered."""
    for migration in step.cluster.migrations.values():
        if migration.state is MigrationState.RESUMING and step.now - migration.sent_s >= step.settings.repeat_s:
            words.tell_source(step, migration)


def take(step: Step, migration: Migration, event: MigrationEvent, *, cause: str) -> None:
    """One move of the machine, with its effects."""
    migration.enter(event)
    migration.progress_s = step.now
    match migration.state:
        case MigrationState.RESUMING:
            _resume(step, migration)
        case MigrationState.HANDOVER if event is MigrationEvent.SOURCE_STOPPED:
            _hand_over(step, migration)
        case MigrationState.FINISHED:
            migration_ends.finish(step, migration)
        case MigrationState.ABANDONED:
            migration_ends.abandon(step, migration, cause, is_failure=event is not MigrationEvent.CANCELLED)
        case MigrationState.REQUEUED:
            migration_ends.requeue(step, migration, cause)
        case _:
            step.save(migration.record)


def resume_record(step: Step, migration: Migration, source: Instance) -> ResumeRecord:
    """What is known of computing its requests on the device they go to; while nobody is there, on the source's."""
    return step.cluster.resume_record(step.cluster.instances.get(migration.record.destination_instance_id, source))


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
    lifecycle.displace(step, move.evict)


def _what_happened(step: Step, migration: Migration) -> MigrationEvent | None:
    """What the instances, and the time, say of a migration that is on its way; None when nothing new."""
    record, state = migration.record, migration.state
    source = step.cluster.instances.get(record.source_instance_id)
    destination = step.cluster.instances.get(record.destination_instance_id)
    is_destination_lost = not _is_expected(step, migration) if destination is None else _is_going(destination)
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
    is_unwanted = destination is not None and _is_unwanted(step, migration, destination)
    if source.state is not InstanceState.READY or is_unwanted:
        return MigrationEvent.CANCELLED
    if state is MigrationState.PREPARING:
        # Later on it is the source that says so: requests that leave it may be those that have moved.
        if _has_finished(step, source):
            return MigrationEvent.INFERENCE_FINISHED
        is_ready = destination is not None and destination.state is InstanceState.READY
        return MigrationEvent.DESTINATION_READY if is_ready else None
    return MigrationEvent.DEADLINE_EXCEEDED if _is_stalled(step, migration) else None


def _is_unwanted(step: Step, migration: Migration, destination: Instance) -> bool:
    """Whether those whom it was begun for have left, or are served elsewhere. A load goes on for whoever comes next: if
    each who leaves ended it, clients without patience would find the model cold for ever. And once the source was told
    to stop, it may have done so."""
    if destination.state is not InstanceState.READY or migration.is_stopping:
        return False
    reservation = step.cluster.reservations.get(migration.record.for_model_id)
    is_awaited = reservation is not None and migration.record.source_instance_id in reservation.waiting_for
    return migration.is_for_reservation and not is_awaited


def _is_expected(step: Step, migration: Migration) -> bool:
    """Whether a destination that is not there yet is still to come: its slots are kept until idle ones have gone."""
    return migration.migration_id in step.cluster.reservations


def _has_finished(step: Step, source: Instance) -> bool:
    """Nothing runs there, as its routers and its worker say; right after our start, neither may have spoken yet."""
    worker = step.cluster.slot_of(source).heartbeat
    return not source.demand and worker is not None and worker.active_requests == 0


def _is_going(destination: Instance) -> bool:
    return destination.state not in (InstanceState.LOADING, InstanceState.READY)


def _is_stalled(step: Step, migration: Migration) -> bool:
    source = step.cluster.instances.get(migration.record.source_instance_id)
    round_s = migration.resume_s
    if migration.record.rounds and source is not None:
        known = resume_record(step, migration, source)
        round_s = known.seconds_per_token * migration.record.gap_tokens + known.overhead_s
    return step.now - migration.progress_s >= max(step.settings.migration_stall_s, ROUND_TIMES * round_s)


def _resume(step: Step, migration: Migration) -> None:
    """→ RESUMING. The source sends tokens, and takes no new request from now on (G4, G5)."""
    record = migration.record
    step.save(record)
    migration.ready_s = step.now
    source = step.cluster.instances[record.source_instance_id]
    if source.active:
        # It has gone on since it was decided.
        migration.resume_s = sights.resume_now(source, resume_record(step, migration, source)).seconds(step.now)
    source.is_closed = True
    step.send_routers(commands.route_added(source))
    step.cluster.touch(source.record.server_id)
    words.tell_source(step, migration)
    words.tell(
        step,
        migration,
        MigrationResuming,
        destination_instance_id=record.destination_instance_id,
    )


def _hand_over(step: Step, migration: Migration) -> None:
    """→ HANDOVER. The source has nothing to do any more: it is unloaded while routers switch (G9)."""
    record = migration.record
    step.save(record)
    migration.stopped_s = step.now
    _learn(step, migration)
    source = step.cluster.instances.get(record.source_instance_id)
    if source is not None and source.state is InstanceState.READY:
        lifecycle.drain(step, source)
    words.tell(
        step,
        migration,
        MigrationHandedOver,
        destination_instance_id=record.destination_instance_id,
        requests=len(record.moving),
        rounds=record.rounds,
        gap_tokens=record.gap_tokens,
        sent_tokens=record.sent_tokens,
    )


def _learn(step: Step, migration: Migration) -> None:
    """What it took to compute all that again."""
    destination = step.cluster.instances.get(migration.record.destination_instance_id)
    observed_s = migration.observed_resume_s
    if destination is None or observed_s is None:
        return
    known = step.cluster.resume_record(destination)
    record = resumes.observe_migration(known, tokens=migration.record.sent_tokens, seconds=observed_s)
    if record is not known:
        step.cluster.learn_resume(record)
        step.cluster.saved_resumes[record.key()] = record
        step.save(record)
