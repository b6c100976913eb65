"""Owns one-way messages on their way out: told without waiting, sent in order, dropped when too many wait."""

from __future__ import annotations

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.chassis.inbox import Inbox
from whimbrel.wire.errors import QueueFull, WhimbrelError
from whimbrel.wire.messages import Message

from services.router import metrics

log = structlog.get_logger()

# Four for every request that may be running.
NOTES_MAX = 4096
NOTES_PER_STEP_MAX = 256


class Notes:
    """What a router says without needing an answer. Lost notes are repaired by heartbeats and frames."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: Inbox[tuple[str, Message]] = Inbox(NOTES_MAX, name="router notes")

    def tell_scheduler(self, message: Message) -> None:
        self._tell(self._bus.subjects.to_scheduler(message), message)

    def tell_worker(self, worker: tuple[str, int], message: Message) -> None:
        """`worker` is named by server and slot."""
        self._tell(self._bus.subjects.to_worker(*worker, message), message)

    def close(self) -> None:
        """Take nothing more; `run` ends when all that waits has left."""
        self._waiting.close()

    async def run(self) -> None:
        async for notes in self._waiting.batches(NOTES_PER_STEP_MAX):
            for subject, message in notes:
                try:
                    await self._bus.publish(subject, message)
                except WhimbrelError as error:
                    metrics.NOTES_DROPPED.inc()
                    log.info("note_lost", subject=subject, reason=str(error))

    def _tell(self, subject: str, message: Message) -> None:
        try:
            self._waiting.put_nowait((subject, message))
        except WhimbrelError as error:
            metrics.NOTES_DROPPED.inc()
            if not isinstance(error, QueueFull):
                log.info("note_lost", subject=subject, reason=str(error))
