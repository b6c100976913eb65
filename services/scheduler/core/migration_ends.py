"""Owns what the end of a migration leaves behind: two instances that are like any others again, and nobody waiting."""

from __future__ import annotations

from whimbrel.wire.events import MigrationAbandoned, MigrationFinished, MigrationRequeued
from whimbrel.wire.messages import Tier
from whimbrel.wire.records import InstanceState, MigrationRecord

from services.scheduler.core import lifecycle
from services.scheduler.core import migration_words as words
from services.scheduler.core.instances import Instance, InstanceEvent
from services.scheduler.core.migration import Migration
from services.scheduler.core.settings import MOVE_AGAIN_S
from services.scheduler.core.step import Step


def finish(step: Step, migration: Migration) -> None:
    """→ FINISHED. The destination is an instance like any other."""
    record = migration.record
    actual_s = migration.observed_resume_s
    if actual_s is not None and migration.resume_s > 0.0:
        server_id = record.destination_server_id
        lifecycle.keep_accuracy(step, server_id, Tier.GPU, estimate_s=migration.resume_s, actual_s=actual_s)
    words.tell(
        step,
        migration,
        MigrationFinished,
        destination_instance_id=record.destination_instance_id,
        rounds=record.rounds,
        sent_tokens=record.sent_tokens,
        estimate_s=record.estimate_s,
        observed_s=step.now - migration.started_s,
    )
    _end(step, migration, "")
    _open_destination(step, migration)
    destination = step.cluster.instances.get(record.destination_instance_id)
    if destination is not None:
        # Its clients have had one pause.
        destination.stays_until_s = step.now + min(step.settings.fair_wait_s, MOVE_AGAIN_S)


def abandon(step: Step, migration: Migration, cause: str, *, is_failure: bool) -> None:
    """→ ABANDONED. The source carries on as if nothing had been; the destination is kept if somebody needs it. After a
    failure, the source is left alone for a while."""
    record, cluster = migration.record, step.cluster
    words.tell(step, migration, MigrationAbandoned, cause=cause)
    _end(step, migration, cause)
    cluster.release(record.migration_id)
    source = cluster.instances.get(record.source_instance_id)
    if source is not None:
        words.let_go(step, words.worker_of(source), record.migration_id)
        if is_failure:
            source.moves_failed += 1
            source.stays_until_s = step.now + MOVE_AGAIN_S
        _reopen_source(step, source)
    _release_target(step, record)
    destination = cluster.instances.get(record.destination_instance_id)
    if destination is None:
        return
    words.let_go(step, words.worker_of(destination), record.migration_id)
    # Those of a source that is gone are about to ask for a place. One that is there already goes as soon as anybody
    # needs its slot, or when its keep-alive ends.
    is_wanted = source is None or destination.demand > 0
    if is_wanted or destination.state is InstanceState.READY or cluster.shortfall(cluster.models[record.model_id]) > 0:
        _open_destination(step, migration)
        return
    destination.arriving = None
    if destination.state is InstanceState.LOADING:
        lifecycle.end_load(step, destination, InstanceEvent.LOAD_FAILED)


def requeue(step: Step, migration: Migration, cause: str) -> None:
    """→ REQUEUED. Nobody runs the requests any more: routers start them again from the tokens that they hold."""
    words.tell(step, migration, MigrationRequeued, cause=cause)
    _end(step, migration, cause)
    _open_destination(step, migration)


def _end(step: Step, migration: Migration, cause: str) -> None:
    """Terminal: its record is forgotten, and people can still ask for a while how it went."""
    migration.end = cause
    step.cluster.ended_migrations.append(words.status(step, migration))
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
    if destination.state is InstanceState.READY:
        lifecycle.serve_or_drain(step, destination)


def _reopen_source(step: Step, source: Instance) -> None:
    was_closed, source.is_closed = source.is_closed, False
    step.cluster.touch_peers(source)
    if was_closed and source.state is InstanceState.READY:
        lifecycle.serve_or_drain(step, source)


def _release_target(step: Step, record: MigrationRecord) -> None:
    """Whoever was to have the source's slots is placed anew."""
    reservation = step.cluster.reservations.get(record.for_model_id)
    if reservation is not None and record.source_instance_id in reservation.waiting_for:
        step.cluster.release(record.for_model_id)
        step.wanted[record.for_model_id] = None
