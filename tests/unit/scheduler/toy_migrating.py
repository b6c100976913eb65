"""How a toy worker hands over: it answers each command as a real source does, and the requests' routers switch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whimbrel.wire.messages import (
    AbandonMigration,
    HandOver,
    Message,
    MigrateInstance,
    MigrationEnd,
    MigrationEnded,
    RoundCompleted,
    Route,
    SourceStopped,
    StartRound,
    StoppedRequest,
)

if TYPE_CHECKING:
    from tests.unit.scheduler.toy_peers import ToyRequest, ToyWorker

#: What the toys really need for a round, and how far the destination is behind after each.
ROUND_S = 0.05
GAPS_TOKENS = (40, 4, 1)


@dataclass(eq=False)
class ToyMigration:
    """What a source knows of the migration that it is in; `word` is what it said last."""

    migration_id: str
    destination: Route
    word: Message | None = None
    is_stopped: bool = False


@dataclass(eq=False)
class ToySource:
    """The migrating side of a worker."""

    worker: ToyWorker
    migration: ToyMigration | None = None
    gaps_tokens: tuple[int, ...] = GAPS_TOKENS
    heard: list[Message] = field(default_factory=list)

    @property
    def is_closed(self) -> bool:
        return self.migration is not None and not self.migration.is_stopped

    def on(self, message: Message) -> None:
        self.heard.append(message)
        match message:
            case MigrateInstance():
                self._migrate(message)
            case StartRound() | HandOver() if not self._is(message.migration_id):
                self._say(self._ended(message.migration_id, message.instance_id, MigrationEnd.REFUSED))
            case StartRound():
                self._round(message.round)
            case HandOver():
                self._hand_over()
            case AbandonMigration() if self._is(message.migration_id):
                self.migration = None

    def _is(self, migration_id: str) -> bool:
        return self.migration is not None and self.migration.migration_id == migration_id

    def _migrate(self, message: MigrateInstance) -> None:
        if self._is(message.migration_id):
            assert self.migration is not None
            if self.migration.word is not None:
                self._say(self.migration.word)
            return
        if self.worker.instance_id != message.instance_id:
            self._say(self._ended(message.migration_id, message.instance_id, MigrationEnd.REFUSED))
        elif not self.worker.requests:
            self._say(self._ended(message.migration_id, message.instance_id, MigrationEnd.FINISHED))
        else:
            self.migration = ToyMigration(message.migration_id, message.destination)
            self._round(1)

    def _round(self, number: int) -> None:
        migration, instance_id = self.migration, self.worker.instance_id
        assert migration is not None
        assert instance_id is not None
        gap_tokens = self.gaps_tokens[min(number, len(self.gaps_tokens)) - 1]
        completed = RoundCompleted(
            migration_id=migration.migration_id,
            instance_id=instance_id,
            round=number,
            requests=max(1, len(self.worker.requests)),
            gap_tokens=gap_tokens,
            round_tokens=gap_tokens,
            sent_tokens=100 * number,
            round_s=ROUND_S,
        )
        self.worker.cluster.after(ROUND_S, self.worker, lambda: self._complete(migration, completed))

    def _complete(self, migration: ToyMigration, completed: RoundCompleted) -> None:
        if self.migration is not migration or migration.is_stopped:
            return
        if not self.worker.requests:
            self.migration = None
            self._say(self._ended(migration.migration_id, completed.instance_id, MigrationEnd.FINISHED))
            return
        there = self.worker.cluster.workers.get((migration.destination.server_id, migration.destination.slot))
        if there is None or there.instance_id != migration.destination.instance_id:
            self.worker.cluster.after(1.0, self.worker, lambda: self._complete(migration, completed))
            return
        migration.word = completed
        self._say(completed)

    def _hand_over(self) -> None:
        migration, worker = self.migration, self.worker
        assert migration is not None
        if migration.is_stopped:
            assert migration.word is not None
            self._say(migration.word)
            return
        migration.is_stopped = True
        moved = list(worker.requests.values())
        worker.requests.clear()
        migration.word = SourceStopped(
            migration_id=migration.migration_id,
            instance_id=worker.instance_id or "",
            requests=tuple(
                StoppedRequest(request_id=r.request_id, router_id=r.router.router_id, position=5) for r in moved
            ),
            sent_tokens=142,
        )
        self._say(migration.word)
        worker.beat()
        for request in moved:
            worker.cluster.after(0.002, request.router, lambda request=request: _switch(request, migration.destination))  # type: ignore[misc]

    def _ended(self, migration_id: str, instance_id: str, reason: MigrationEnd) -> MigrationEnded:
        return MigrationEnded(migration_id=migration_id, instance_id=instance_id, reason=reason)

    def _say(self, message: Message) -> None:
        self.worker.say(message)


def _switch(request: ToyRequest, destination: Route) -> None:
    """Its router does what the source's last frame says."""
    request.leave()
    request.switched += 1
    request.take(destination)
    if request.instance_id is None:
        request.ask()
