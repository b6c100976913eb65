"""Owns what is heard of migrations: rounds and stops from sources, and from routers which requests have switched."""

from __future__ import annotations

from collections.abc import Callable

from whimbrel.wire.messages import MigrationEnd, MigrationEnded, RoundCompleted, SourceStopped

from services.scheduler.core import migration_words as words
from services.scheduler.core import migrations
from services.scheduler.core.migration import AfterRound, Migration, MigrationEvent, after_round
from services.scheduler.core.ready import ToWorker
from services.scheduler.core.step import Step


def on_round_completed(step: Step, message: RoundCompleted, reply_to: str | None) -> None:
    """The destination has caught up with what this round sent (G7)."""
    migration = _live(step, message.migration_id, message.instance_id)
    source = step.cluster.instances.get(message.instance_id)
    if migration is None or source is None or not migration.accepts(MigrationEvent.ROUND_COMPLETED):
        return
    record = migration.record
    if message.round < record.rounds or (message.round == record.rounds and _is_told(migration)):
        # What followed was lost on its way, or this is old: the source is told again what to do now.
        words.tell_source(step, migration)
        return
    migration.enter(MigrationEvent.ROUND_COMPLETED)
    migration.progress_s = step.now
    # Said again to a new leader, a round is compared with none.
    before_tokens = record.gap_tokens if 0 < record.rounds < message.round else None
    words.change(step, migration, rounds=message.round, gap_tokens=message.gap_tokens, sent_tokens=message.sent_tokens)
    following = after_round(
        round=message.round,
        gap_tokens=message.gap_tokens,
        before_tokens=before_tokens,
        known=migrations.resume_record(step, migration, source),
    )
    match following:
        case AfterRound.GIVE_UP:
            migrations.take(step, migration, MigrationEvent.NOT_CONVERGING, cause=f"{message.gap_tokens} tokens behind")
        case AfterRound.HAND_OVER:
            migration.is_stopping = True
            words.tell_source(step, migration)
        case AfterRound.ANOTHER_ROUND:
            migration.asked_round = message.round + 1
            words.tell_source(step, migration)


def on_source_stopped(step: Step, message: SourceStopped, reply_to: str | None) -> None:
    """Nothing runs at the source any more; routers switch (G8, G10)."""
    migration = _live(step, message.migration_id, message.instance_id)
    if migration is None or not migration.accepts(MigrationEvent.SOURCE_STOPPED):
        return
    destination = step.cluster.instances.get(migration.record.destination_instance_id)
    begun = {name for r in (destination.active.values() if destination is not None else ()) for name in r.names}
    moving = tuple((r.request_id, r.router_id) for r in message.requests if r.request_id not in begun)
    words.change(step, migration, moving=moving, sent_tokens=message.sent_tokens)
    migrations.take(step, migration, MigrationEvent.SOURCE_STOPPED, cause="")


def on_migration_ended(step: Step, message: MigrationEnded, reply_to: str | None) -> None:
    """The source says that there is nothing to move (X1), or that the destination can't resume (X5)."""
    migration = _live(step, message.migration_id, message.instance_id)
    if migration is None:
        return
    event, cause = {
        MigrationEnd.FINISHED: (MigrationEvent.INFERENCE_FINISHED, "inference finished"),
        MigrationEnd.RESUME_FAILED: (MigrationEvent.RESUME_FAILED, "resume failed"),
        # Tried again at once, it would be refused again.
        MigrationEnd.REFUSED: (MigrationEvent.RESUME_FAILED, "refused"),
    }[message.reason]
    if migration.accepts(event):
        migrations.take(step, migration, event, cause=cause if message.error is None else message.error.code)


def hear_switched(step: Step, instance_id: str, request_id: str) -> None:
    """The request began, or ended, on this instance: its router has switched if it was to go on there."""
    for migration in step.cluster.migrations.values():
        if instance_id == migration.record.destination_instance_id:
            _strike(step, migration, lambda moving, _: moving == request_id)


def hear_placed(step: Step, request_id: str) -> None:
    """The request asks for a place: if it was moving, the destination did not take it."""
    for migration in step.cluster.migrations.values():
        migration.requeued += _strike(step, migration, lambda moving, _: moving == request_id)


def hear_counts(step: Step, router_id: str, requests: dict[str, int]) -> None:
    """A router's heartbeat: whatever of its news got lost, as many requests as were moving run at the destination."""
    for migration in step.cluster.migrations.values():
        count = sum(router == router_id for _, router in migration.record.moving)
        if count and requests.get(migration.record.destination_instance_id, 0) >= count:
            _strike(step, migration, lambda _, router: router == router_id)


def forget_router(step: Step, router_id: str) -> None:
    """None of its requests is waited for: they have switched, or are gone with it."""
    for migration in step.cluster.migrations.values():
        _strike(step, migration, lambda _, router: router == router_id)


def hear_stray(step: Step, server_id: str, slot: int, migration_id: str) -> None:
    """A worker hands over for a migration that we know nothing of: it should carry on."""
    if migration_id not in step.cluster.migrations:
        words.let_go(step, ToWorker(server_id=server_id, slot=slot), migration_id)


def _strike(step: Step, migration: Migration, is_done: Callable[[str, str], bool]) -> int:
    """Those of the moving requests that are done, by request and router, are waited for no more; how many they were."""
    moving = migration.record.moving
    left = tuple(one for one in moving if not is_done(*one))
    if left != moving:
        migration.progress_s = step.now
        words.change(step, migration, moving=left)
    return len(moving) - len(left)


def _is_told(migration: Migration) -> bool:
    """Whether the source was told what follows its last round."""
    return migration.is_stopping or migration.asked_round > migration.record.rounds


def _live(step: Step, migration_id: str, instance_id: str) -> Migration | None:
    """The migration that a source speaks of. One that is over is ended there, too."""
    migration = step.cluster.migrations.get(migration_id)
    if migration is None:
        instance = step.cluster.instances.get(instance_id)
        if instance is not None:
            words.let_go(step, words.worker_of(instance), migration_id)
    return migration
