"""Owns heartbeats: a service's summary of itself, sent every second and at once whenever it changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from whimbrel.chassis.bus import Bus
from whimbrel.wire.errors import WhimbrelError
from whimbrel.wire.messages import (
    AgentHeartbeat,
    Message,
    RouterHeartbeat,
    SchedulerHeartbeat,
    WorkerHeartbeat,
)

log = structlog.get_logger()

HEARTBEAT_S = 1.0
# Two can get lost by bad luck; three in a row mean that a service is gone.
HEARTBEATS_MISSED_MAX = 3
# Changes come in bursts; each burst costs one heartbeat, and a hundred a second is the most a service sends.
BEAT_GAP_S_MIN = 0.01


class Heart:
    """Publishes what `make_message` says on the subject of its kind of heartbeat, also after each reconnection."""

    def __init__(self, bus: Bus, make_message: Callable[[], Message], interval_s: float = HEARTBEAT_S) -> None:
        self._bus = bus
        self._make_message = make_message
        self._interval_s = interval_s
        self._is_due = asyncio.Event()
        bus.on_reconnect(self.beat)

    def beat(self) -> None:
        """Send one now; several calls before it leaves are one."""
        self._is_due.set()

    async def run(self) -> None:
        """Beats until cancelled. A bus that is away costs heartbeats, nothing else."""
        while True:
            self._is_due.clear()
            await self._send()
            await asyncio.sleep(BEAT_GAP_S_MIN)
            try:
                async with asyncio.timeout(self._interval_s - BEAT_GAP_S_MIN):
                    await self._is_due.wait()
            except TimeoutError:
                continue

    async def _send(self) -> None:
        message = self._make_message()
        assert isinstance(message, AgentHeartbeat | WorkerHeartbeat | RouterHeartbeat | SchedulerHeartbeat)
        try:
            await self._bus.publish(self._bus.subjects.heartbeat(message), message)
        except WhimbrelError as error:
            log.debug("heartbeat_lost", code=error.code, reason=str(error))
