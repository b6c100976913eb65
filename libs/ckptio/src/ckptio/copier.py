"""Chunks of a pool on their way to devices, in whatever order they become ready (L1, L4, L5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckptio.devices import DeviceBuffer, device_error
from ckptio.errors import Cancelled
from ckptio.index import Index
from ckptio.load_plan import TierReport
from ckptio.native import require_native
from ckptio.plan import chunk_count, plan_chunks
from ckptio.pool import ChunkPool

if TYPE_CHECKING:
    from ckptio import _native


class ChunkCopier:
    """Copies a checkpoint from a pool to devices, partition k to `buffers[k]`, each with a copier of its own.

    For whoever fills the pool himself: chunks are named as they become ready, each once, and must stay as
    they are until `finish` or `abandon` has returned. `deliver` and the properties may be used from any
    thread.
    """

    def __init__(self, pool: ChunkPool, index: Index, buffers: Sequence[DeviceBuffer]) -> None:
        check_buffers(index, buffers)
        chunk_size_bytes = pool.chunk_size_bytes
        copies: list[tuple[int, int, int]] = []
        self._first: list[int] = []
        for number, part in enumerate(index.partitions):
            self._first.append(len(copies))
            for chunk in plan_chunks(part.padded_bytes, chunk_size_bytes):
                # A buffer may end where the true bytes do; the padding of the file stays behind.
                left_bytes = max(part.size_bytes - chunk.offset_bytes, 0)
                copies.append((number, chunk.offset_bytes, min(chunk.size_bytes, left_bytes)))
        self._counts = [chunk_count(part.padded_bytes, chunk_size_bytes) for part in index.partitions]
        self._left = set(range(len(copies)))
        self._pool = pool
        self._is_over = False
        self.size_bytes = sum(size_bytes for *_, size_bytes in copies)
        self._pipeline: _native.CopyPipeline = require_native().CopyPipeline(
            [buffer.memory for buffer in buffers], copies, pool.mapping, [], chunk_size_bytes, True
        )

    @property
    def copied_bytes(self) -> int:
        """What has arrived on the devices; 0 after the end."""
        return self._pipeline.copied_bytes

    @property
    def has_failed(self) -> bool:
        """Whether there is no use in delivering more; `finish` raises the cause."""
        return self._pipeline.has_failed

    def deliver(self, partition: int, chunk_index: int, pool_index: int) -> None:
        """Chunk `chunk_index` of a partition is in the pool's chunk `pool_index`, for good.

        Raises ValueError for a chunk that does not exist, or was delivered before.
        """
        if not 0 <= partition < len(self._first) or not 0 <= chunk_index < self._counts[partition]:
            raise ValueError(f"chunk {chunk_index} of partition {partition} is not of this checkpoint")
        number = self._first[partition] + chunk_index
        if number not in self._left:
            raise ValueError(f"chunk {chunk_index} of partition {partition} was delivered before")
        self._pipeline.deliver(number, pool_index * self._pool.chunk_size_bytes)
        self._left.discard(number)

    def finish(
        self,
        *,
        cancel: _native.CancelToken | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> TierReport:
        """Waits for every copy.

        Raises `DeviceError`, `Cancelled`, and ValueError when chunks were not delivered.
        """
        if self._left:
            raise ValueError(f"{len(self._left)} chunks were never delivered")
        self._is_over = True
        code, operation, copied_bytes, seconds, was_cancelled = self._pipeline.finish(False, cancel, progress)
        if code:
            raise device_error(code, operation)
        if was_cancelled:
            raise Cancelled(self._pool.path, done_bytes=copied_bytes)
        return TierReport(tier="GPU", size_bytes=copied_bytes, seconds=seconds)

    def abandon(self) -> None:
        """Drops what has not started, and waits for what has; the buffers then hold anything. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._pipeline.finish(True, None, None)


def check_buffers(index: Index, buffers: Sequence[DeviceBuffer]) -> None:
    """Raises ValueError unless there is one buffer for each partition, large enough."""
    partitions = index.partitions
    if len(buffers) != len(partitions):
        raise ValueError(f"{len(buffers)} buffers for {len(partitions)} partitions")
    for number, (buffer, part) in enumerate(zip(buffers, partitions, strict=True)):
        if buffer.size_bytes < part.size_bytes:
            raise ValueError(
                f"buffer {number} has {buffer.size_bytes} bytes, its partition {part.size_bytes}"
            )
