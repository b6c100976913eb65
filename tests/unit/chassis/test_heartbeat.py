"""Heartbeats: regular, prompt, coalesced, and careless of a bus that is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from whimbrel.chassis.bus import Received
from whimbrel.chassis.heartbeat import Heart
from whimbrel.chassis.testing import InMemoryBus, InMemoryHub
from whimbrel.wire.messages import Message, SchedulerHeartbeat

PATIENCE_S = 5.0
NEVER_S = 1000.0


class Listener:
    def __init__(self) -> None:
        self.heard: list[Message] = []
        self._changed = asyncio.Event()

    async def __call__(self, received: Received) -> None:
        assert received.subject == "wb.hb.scheduler.a"
        self.heard.append(received.message)
        self._changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.heard) < count:
                self._changed.clear()
                await self._changed.wait()


class Life:
    def __init__(self, interval_s: float) -> None:
        self.hub = InMemoryHub()
        self.bus: InMemoryBus = self.hub.bus()
        self.listener = Listener()
        self.epoch = 0
        self.heart = Heart(self.bus, self._message, interval_s)

    def _message(self) -> SchedulerHeartbeat:
        self.epoch += 1
        return SchedulerHeartbeat(scheduler_id="a", epoch=self.epoch)


@asynccontextmanager
async def a_life(interval_s: float) -> AsyncIterator[Life]:
    life = Life(interval_s)
    await life.bus.subscribe(life.bus.subjects.all_heartbeats("scheduler"), life.listener)
    beating = asyncio.ensure_future(life.heart.run())
    try:
        yield life
    finally:
        assert not beating.done()
        beating.cancel()
        await asyncio.wait({beating})
        await life.bus.drain()


async def test_the_first_heartbeat_is_sent_at_once_and_more_follow() -> None:
    async with a_life(interval_s=0.02) as life:
        await life.listener.until(4)
    assert life.listener.heard[:4] == [SchedulerHeartbeat(scheduler_id="a", epoch=n) for n in (1, 2, 3, 4)]


async def test_a_change_is_told_at_once_and_many_changes_as_one() -> None:
    async with a_life(NEVER_S) as life:
        await life.listener.until(1)
        for _ in range(100):
            life.heart.beat()
        await life.listener.until(2)
        life.heart.beat()
        await life.listener.until(3)
        assert len(life.listener.heard) == 3


async def test_a_change_right_after_a_heartbeat_is_told_by_the_next_one() -> None:
    async with a_life(NEVER_S) as life:
        await life.listener.until(1)
        life.heart.beat()
        await asyncio.sleep(0)
        life.epoch = 100
        life.heart.beat()
        await life.listener.until(2)
    assert life.listener.heard[-1] == SchedulerHeartbeat(scheduler_id="a", epoch=101)


async def test_a_heart_beats_on_while_the_bus_is_away_and_at_once_when_it_is_back() -> None:
    async with a_life(NEVER_S) as life:
        await life.listener.until(1)
        life.hub.go_down()
        life.hub.come_back()
        await life.listener.until(2)


async def test_a_bus_that_takes_nothing_does_not_stop_the_heart() -> None:
    async with a_life(interval_s=0.02) as life:
        await life.listener.until(1)
        await life.bus.drain()
        beats = life.epoch
        async with asyncio.timeout(PATIENCE_S):
            while life.epoch < beats + 3:  # noqa: ASYNC110  nothing else tells of a heartbeat that was lost
                await asyncio.sleep(0.01)
