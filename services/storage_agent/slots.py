"""Owns what is known of the slots of this server: their devices, as their workers tell (never configured)."""

from __future__ import annotations

import asyncio

from whimbrel.wire.errors import Unavailable
from whimbrel.wire.messages import WorkerHeartbeat


class Slots:
    """Heard from heartbeats. A worker that is new says so within a second."""

    def __init__(self) -> None:
        self._heartbeats: dict[int, WorkerHeartbeat] = {}
        self._heard = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def hear(self, heartbeat: WorkerHeartbeat) -> None:
        is_new = heartbeat.slot not in self._heartbeats
        self._heartbeats[heartbeat.slot] = heartbeat
        if is_new:
            self._heard.set()
            self._heard = asyncio.Event()
        self._note_idle()

    def forget(self, slot: int, worker_epoch: int) -> None:
        """The process is gone; what the next one says counts."""
        known = self._heartbeats.get(slot)
        if known is not None and known.epoch == worker_epoch:
            del self._heartbeats[slot]
            self._note_idle()

    async def until_idle(self) -> None:
        """Returns when no worker runs a request."""
        await self._idle.wait()

    async def device_of(self, slot: int, timeout_s: float) -> str:
        """The device of a slot, as soon as its worker has said it. Raises Unavailable when none does."""
        try:
            async with asyncio.timeout(timeout_s):
                while slot not in self._heartbeats:
                    await self._heard.wait()
        except TimeoutError:
            raise Unavailable(what=f"slot {slot} (no worker was heard for {timeout_s:g} s)") from None
        return self._heartbeats[slot].device

    def _note_idle(self) -> None:
        if any(heartbeat.active_requests for heartbeat in self._heartbeats.values()):
            self._idle.clear()
        else:
            self._idle.set()
