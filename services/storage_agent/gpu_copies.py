"""Owns copying a checkpoint from the pool into memory that a worker allocated on GPUs, chunk by chunk (L4, L5)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import ckptio

from services.storage_agent.core.chunks import ChunkId
from services.storage_agent.core.residency import DramCopy
from services.storage_agent.filling import Filling
from services.storage_agent.threads import Threads

# A thread waits for the end of each load's copies; more GPUs than this in one server are not built.
COPIES_MAX = 32


class GpuCopies:
    """The copies to the GPUs of one server: loads to different GPUs run at the same time."""

    def __init__(self, pool: ckptio.ChunkPool) -> None:
        self._pool = pool
        self._threads = Threads(COPIES_MAX, "agent-copies")

    def close(self) -> None:
        self._threads.close()

    @asynccontextmanager
    async def copying(
        self,
        index: ckptio.Index,
        copy: DramCopy,
        filling: Filling | None,
        devices: Sequence[str],
        handles: Sequence[bytes],
    ) -> AsyncIterator[ckptio.ChunkCopier]:
        """A copier that gets every chunk as soon as DRAM has it, from `filling` if bytes are still on their way.

        Partition k goes to `devices[k]`, into the memory that `handles[k]` describes. When the block ends before
        `finish`, what is under way is waited for. Raises DeviceError, ValueError for handles that do not fit.
        """
        buffers: list[ckptio.DeviceBuffer] = []
        try:
            await self._threads.run(self._open, buffers, index, devices, handles)
            copier = ckptio.ChunkCopier(self._pool, index, buffers)

            def deliver(chunk: ChunkId) -> None:
                copier.deliver(chunk.partition, chunk.number, copy.places[chunk])

            for chunk in sorted(copy.ready, key=lambda chunk: chunk.number):
                deliver(chunk)
            if filling is not None:
                filling.listen(deliver)
            try:
                yield copier
            finally:
                if filling is not None:
                    filling.unlisten(deliver)
                await self._threads.run(copier.abandon)
        finally:
            await self._threads.run(_close_all, buffers)

    async def finish(self, copier: ckptio.ChunkCopier) -> ckptio.TierReport:
        """Wait for every copy; raises DeviceError."""
        cancel = ckptio.CancelToken()
        return await self._threads.run_until(cancel.cancel, lambda: copier.finish(cancel=cancel))

    def _open(
        self,
        buffers: list[ckptio.DeviceBuffer],
        index: ckptio.Index,
        devices: Sequence[str],
        handles: Sequence[bytes],
    ) -> None:
        """Into `buffers`, which the caller closes however far this came."""
        for part, device, handle in zip(index.partitions, devices, handles, strict=True):
            buffers.append(ckptio.DeviceBuffer.open(device, handle, part.size_bytes))


def _close_all(buffers: Sequence[ckptio.DeviceBuffer]) -> None:
    for buffer in buffers:
        buffer.close()
