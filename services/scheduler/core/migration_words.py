"""Owns what is said of a migration: to its source, to both workers, to the public, and to the store."""

from __future__ import annotations

from typing import Any

import msgspec
from whimbrel.wire.events import PublicEvent
from whimbrel.wire.messages import AbandonMigration, HandOver, Message, MigrateInstance, MigrationStatus, StartRound

from services.scheduler.core import commands
from services.scheduler.core.instances import Instance
from services.scheduler.core.migration import Migration
from services.scheduler.core.ready import ToWorker
from services.scheduler.core.step import Step


def tell(step: Step, migration: Migration, kind: type[PublicEvent], **more: Any) -> None:
    """An event; all of them name the migration, its model and where it goes."""
    record = migration.record
    step.tell(
        kind(
            migration_id=record.migration_id,
            model_id=record.model_id,
            source_instance_id=record.source_instance_id,
            destination_server_id=record.destination_server_id,
            **more,
        )
    )


def tell_source(step: Step, migration: Migration) -> None:
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
    step.send(worker_of(source), message)


def let_go(step: Step, to: ToWorker, migration_id: str) -> None:
    """Carry on, or forget what was resumed."""
    step.send(to, AbandonMigration(migration_id=migration_id, scheduler_epoch=step.epoch))


def worker_of(instance: Instance) -> ToWorker:
    return ToWorker(server_id=instance.record.server_id, slot=instance.record.slot)


def change(step: Step, migration: Migration, **changes: object) -> None:
    """Some fields of its record."""
    migration.record = msgspec.structs.replace(migration.record, **changes)
    step.save(migration.record)


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
        resume_estimate_s=migration.resume_s,
        resume_s=migration.observed_resume_s or 0.0,
        age_s=max(0.0, step.now - migration.started_s),
        end=migration.end,
    )
