"""Owns storing what was fetched on the SSD, behind the fetch: nobody who waits for the bytes in DRAM waits for this."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.storage_agent.core.chunks import ChunkId
from services.storage_agent.core.residency import SsdCopy
from services.storage_agent.ssd import SsdWriter
from services.storage_agent.tiers import Tiers

# Writes at once. One keeps a disk busy; the second covers its pauses.
STORERS = 2


class Storing:
    """Chunks of one copy on their way to the SSD. The chunks of the pool that are added stay as they are until `run`
    has returned: the filling holds them. `on_moved` is called after each."""

    def __init__(self, tiers: Tiers, ssd: SsdCopy, writer: SsdWriter, on_moved: Callable[[], None]) -> None:
        self._on_moved = on_moved
        self._tiers = tiers
        self._ssd = ssd
        self._writer = writer
        self._todo: asyncio.Queue[tuple[ChunkId, int] | None] = asyncio.Queue()

    def add_from_pool(self, chunk: ChunkId, place: int) -> None:
        """The pool's chunk `place` has the bytes of `chunk`."""
        self._todo.put_nowait((chunk, place))

    def end(self) -> None:
        """Nothing will be added any more."""
        for _ in range(STORERS):
            self._todo.put_nowait(None)

    async def run(self) -> None:
        """Until everything that was added is stored; raises OSError."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(STORERS):
                    group.create_task(self._store_added())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def store(self, chunk: ChunkId, view: memoryview) -> None:
        """Store a chunk that is not in the pool."""
        await self._tiers.threads.run(self._writer.store, chunk, view)
        self._ssd.missing.discard(chunk)
        self._on_moved()

    async def close(self) -> None:
        await self._tiers.threads.run(self._writer.close)

    async def _store_added(self) -> None:
        while (added := await self._todo.get()) is not None:
            chunk, place = added
            with self._tiers.pool.chunk(place)[: self._ssd.layout.bytes_of(chunk)] as view:
                await self.store(chunk, view)
