"""Owns reading chunks of an SSD copy into the pool: the reader's threads, and what its errors say about a chunk."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence

import ckptio
from ckptio.manifest import partition_file
from ckptio.plan import ChunkRead
from ckptio.reader import ReadOrder
from whimbrel.wire.errors import LoadFailed

from services.storage_agent.checkpoints import Checkpoint
from services.storage_agent.config import AgentConfig
from services.storage_agent.core.chunks import ChunkId
from services.storage_agent.core.residency import DramCopy
from services.storage_agent.threads import Threads
from services.storage_agent.tiers import Tiers

_PARTITION = re.compile(r"partition_(\d+)\.bin")


class SsdReads:
    """One read at a time; the caller sees to that by its turn on the path."""

    def __init__(self, config: AgentConfig, tiers: Tiers) -> None:
        self._config = config
        self._tiers = tiers
        self._reader = ckptio.Reader(config.reader_threads)
        # Reading blocks a thread of ours while the reader's own threads work.
        self._thread = Threads(1, "agent-reader")

    def close(self) -> None:
        self._thread.close()
        self._reader.close()

    def check_chunk_size(self, checkpoint: Checkpoint) -> None:
        """Raises LoadFailed for a checkpoint whose chunks are not as large as those of the pool."""
        theirs, ours = checkpoint.index.chunk_size_bytes, self._config.chunk_size_bytes
        if theirs != ours:
            reason = f"its chunks have {theirs} bytes, those of the pool {ours}; deploy it again"
            raise LoadFailed(model_id=checkpoint.key.model_id, reason=reason)

    async def read(
        self,
        checkpoint: Checkpoint,
        copy: DramCopy,
        chunks: Sequence[ChunkId],
        arrived: Callable[[Sequence[ChunkId]], None],
    ) -> None:
        """Fill the places of `chunks`, verified, in this order; `arrived` is called in the loop with those that are
        good, also when the rest fails. Raises what `ckptio.Reader.run` raises. Can be cancelled between chunks."""
        loop, cancel = asyncio.get_running_loop(), ckptio.CancelToken()

        def hear(numbers: Sequence[int]) -> None:
            loop.call_soon_threadsafe(arrived, [chunks[number] for number in numbers])

        def read(first: int, orders: Sequence[ReadOrder]) -> None:
            self._reader.run(
                self._tiers.pool.mapping,
                [checkpoint.path / partition_file(k) for k in range(len(checkpoint.index.partitions))],
                orders,
                is_verified=True,
                is_bounced=not self._tiers.pool.report.has_huge_pages,
                # None: direct, but for chunks that are in the page cache already.
                direct=None if self._tiers.probe.is_direct else False,
                arrived=lambda numbers: hear([first + number for number in numbers]),
                cancel=cancel,
            )

        def run() -> None:
            orders = [self._order(checkpoint, copy, chunk) for chunk in chunks]
            bytes_per_s = self._config.ssd_bytes_per_s_max
            if not bytes_per_s:
                read(0, orders)
                return
            due_s = time.monotonic()
            for number, order in enumerate(orders):
                read(number, [order])
                due_s += order.chunk.size_bytes / bytes_per_s
                time.sleep(max(0.0, due_s - time.monotonic()))

        # Cancelled, the reader's threads have to stop before the chunks that they fill are given away.
        await self._thread.run_until(cancel.cancel, run)

    def damaged_chunk(self, damage: Exception) -> ChunkId | None:
        """The one chunk that an error is about: other bytes, or a device that can't read them. None when it is about
        more."""
        if not isinstance(damage, ckptio.CorruptCheckpoint | ckptio.ReadFailed) or damage.chunk_index is None:
            return None
        match = _PARTITION.fullmatch(damage.path.name)
        return None if match is None else ChunkId(int(match[1]), damage.chunk_index)

    def _order(self, checkpoint: Checkpoint, copy: DramCopy, chunk: ChunkId) -> ReadOrder:
        layout = copy.layout
        return ReadOrder(
            chunk=ChunkRead(offset_bytes=layout.offset_bytes(chunk), size_bytes=layout.bytes_of(chunk)),
            chunk_index=chunk.number,
            target_offset_bytes=copy.places[chunk] * self._config.chunk_size_bytes,
            file=chunk.partition,
            digest=checkpoint.index.partitions[chunk.partition].digests[chunk.number],
        )
