"""Owns the moving of this worker's requests elsewhere: does what `core.rounds` decides, and tells who has to know."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.errors import WhimbrelError
from whimbrel.wire.messages import (
    AbandonMigration,
    HandOver,
    InferenceResumed,
    Message,
    MigrateInstance,
    MigrationEnded,
    ResumeInference,
    RoundCompleted,
    Route,
    SourceStopped,
    StartRound,
)

from services.gpu_worker import metrics
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.core.requests import Requests
from services.gpu_worker.core.rounds import Output, Rounds
from services.gpu_worker.core.sequence import Sequence

log = structlog.get_logger()


class Migrating:
    """`tell` publishes a message to the scheduler; `on_stop` is called when requests have to stop between two steps,
    `on_change` when the heartbeat has news."""

    def __init__(
        self,
        config: WorkerConfig,
        bus: Bus,
        requests: Requests,
        *,
        tell: Callable[[Message], Awaitable[None]],
        on_stop: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._tell = tell
        self._on_stop = on_stop
        self._on_change = on_change
        self._rounds = Rounds(requests, server_id=config.server_id, slot=config.slot)
        self._destination: Route | None = None

    @property
    def migration_id(self) -> str | None:
        """Of the migration that goes on, also after the stop: meanwhile no request is taken."""
        return self._rounds.migration_id

    @property
    def is_stopping(self) -> bool:
        return self._rounds.is_stopping

    async def migrate(self, message: MigrateInstance, *, is_here: bool) -> None:
        known = self.migration_id
        outputs = self._rounds.migrate(message, time.monotonic(), is_here=is_here)
        if self.migration_id != known:
            self._destination = message.destination
            log.info("migration_started", migration_id=message.migration_id, instance_id=message.instance_id)
            self._on_change()
        await self.say(outputs)

    async def start_round(self, message: StartRound) -> None:
        await self.say(self._rounds.start_round(message, time.monotonic()))

    async def hand_over(self, message: HandOver) -> None:
        outputs = self._rounds.hand_over(message)
        self._on_stop()
        await self.say(outputs)

    def abandon(self, message: AbandonMigration) -> None:
        self._rounds.abandon(message)
        self._on_change()

    async def on_resumed(self, message: InferenceResumed) -> None:
        await self.say(self._rounds.on_resumed(message, time.monotonic()))

    async def tick(self) -> None:
        await self.say(self._rounds.tick(time.monotonic()))

    def on_requests_ended(self) -> list[Output]:
        """To be said after what routers are told of the end."""
        return self._rounds.on_requests_ended(time.monotonic())

    def stop(self) -> tuple[list[Sequence], SourceStopped]:
        """Only while `is_stopping`, between two steps. The answer are the requests that moved, and what to say."""
        moved, stopped = self._rounds.stop(time.monotonic())
        metrics.MIGRATION_MOVED_REQUESTS.inc(len(moved))
        return moved, stopped

    def leave(self) -> None:
        """The instance goes, or is gone."""
        self._rounds.leave()

    async def say(self, outputs: Iterable[Output]) -> None:
        """What is lost is asked for again: by the scheduler, or after a while by this worker."""
        for output in outputs:
            if isinstance(output, ResumeInference):
                await self._send(output)
            else:
                _note(output)
                self._on_change()
                await self._tell(output)

    async def _send(self, message: ResumeInference) -> None:
        destination = self._destination
        assert destination is not None
        metrics.MIGRATION_SENT_TOKENS.inc(len(message.tokens) // 4)
        try:
            await self._bus.publish(
                self._bus.subjects.to_worker(destination.server_id, destination.slot, message), message
            )
        except WhimbrelError as error:
            log.warning("news_lost", message=type(message).__name__, code=error.code)


def _note(output: RoundCompleted | SourceStopped | MigrationEnded) -> None:
    match output:
        case RoundCompleted():
            metrics.MIGRATION_ROUNDS.inc()
            metrics.MIGRATION_GAP_TOKENS.observe(output.gap_tokens)
            log.info(
                "round_completed",
                migration_id=output.migration_id,
                round=output.round,
                gap_tokens=output.gap_tokens,
                round_tokens=output.round_tokens,
                round_s=round(output.round_s, 4),
            )
        case SourceStopped():
            log.info(
                "source_stopped",
                migration_id=output.migration_id,
                requests=len(output.requests),
                sent_tokens=output.sent_tokens,
            )
        case MigrationEnded():
            code = None if output.error is None else output.error.code
            log.info("migration_ended", migration_id=output.migration_id, reason=output.reason, code=code)
