"""Owns the turns of a server's shared paths: one load at a time on each, in the order they came (E4, E5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from whimbrel.wire.messages import Tier


class Paths:
    """The path from the repository, the path from the SSD, and one to each slot. What DRAM has waits for nobody but
    its slot."""

    def __init__(self) -> None:
        self._paths = {Tier.REMOTE: asyncio.Lock(), Tier.SSD: asyncio.Lock()}
        self._slots: dict[int, asyncio.Lock] = {}

    @asynccontextmanager
    async def turn(self, tier: Tier) -> AsyncIterator[None]:
        """Wait for the turn on the path from `tier`, first come, first served. Nobody waits for one while it has
        another: that is what keeps two loads from waiting for each other."""
        async with self._paths[tier]:
            yield

    @asynccontextmanager
    async def slot(self, slot: int) -> AsyncIterator[None]:
        """The same for the way to a slot."""
        lock = self._slots.setdefault(slot, asyncio.Lock())
        async with lock:
            yield
