"""Owns the move REMOTE → DRAM and SSD: ranges at once, each chunk verified, used and stored in one pass (L1, L4)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import ckptio

from services.storage_agent.core.chunks import ChunkId
from services.storage_agent.core.path import Fetch
from services.storage_agent.core.residency import DramCopy, SsdCopy
from services.storage_agent.fetch import Source
from services.storage_agent.storing import Storing
from services.storage_agent.tiers import Tiers

# Ranges in flight: two fill a fast network while others are verified; more brings little and, where there is no chunk
# of the pool to fill, costs a chunk of memory each.
RANGES_IN_FLIGHT = 4


class Fetching:
    """Fetches for one filling. `on_bytes` hears of bytes as they come, `arrived` of chunks that are good in DRAM,
    `stored` of the bytes of those that went to the SSD alone."""

    def __init__(
        self,
        tiers: Tiers,
        source: Source,
        *,
        on_bytes: Callable[[int], None],
        arrived: Callable[[Sequence[ChunkId]], None],
        stored: Callable[[int], None],
    ) -> None:
        self._tiers = tiers
        self._source = source
        self._on_bytes = on_bytes
        self._arrived = arrived
        self._stored = stored

    async def run(
        self,
        index: ckptio.Index,
        ssd: SsdCopy,
        copy: DramCopy | None,
        resident: Mapping[ChunkId, int],
        move: Fetch,
        storing: Storing,
    ) -> None:
        """Everything that the move says, until it is stored: into the places of `copy` where there is one. `resident`
        are the places of what is in DRAM already. Raises the first failure, when nothing is under way any more."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(storing.run())
                for chunk in move.store:
                    storing.add_from_pool(chunk, resident[chunk])
                await self._fetch_all(index, ssd, copy, move.chunks, storing)
                storing.end()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _fetch_all(
        self, index: ckptio.Index, ssd: SsdCopy, copy: DramCopy | None, chunks: Sequence[ChunkId], storing: Storing
    ) -> None:
        left = iter(chunks)

        async def take() -> None:
            for chunk in left:
                if copy is None:
                    await self._fetch_to_ssd(index, ssd, chunk, storing)
                else:
                    await self._fetch_to_dram(index, copy, chunk)
                    storing.add_from_pool(chunk, copy.places[chunk])

        async with asyncio.TaskGroup() as group:
            for _ in range(RANGES_IN_FLIGHT):
                group.create_task(take())

    async def _fetch_to_dram(self, index: ckptio.Index, copy: DramCopy, chunk: ChunkId) -> None:
        with self._tiers.pool.chunk(copy.places[chunk])[: copy.layout.bytes_of(chunk)] as view:
            await self._source.read_chunk(index, copy.key.model_id, chunk, view, self._on_bytes)
        self._arrived([chunk])

    async def _fetch_to_ssd(self, index: ckptio.Index, ssd: SsdCopy, chunk: ChunkId, storing: Storing) -> None:
        size_bytes = ssd.layout.bytes_of(chunk)
        with memoryview(bytearray(size_bytes)) as view:
            await self._source.read_chunk(index, ssd.key.model_id, chunk, view, self._on_bytes)
            await storing.store(chunk, view)
        self._stored(size_bytes)
