"""Owns what the slot holds of the agent: an instance's chunks, and those they replaced until nothing sees them."""

from __future__ import annotations

import asyncio
import gc

import structlog

from services.gpu_worker.chunks import LentChunks

log = structlog.get_logger()


class Holding:
    """At most one instance's chunks. Everything that was put here is given back exactly once."""

    def __init__(self) -> None:
        self.current: LentChunks | None = None
        self._replaced: list[LentChunks] = []

    def put(self, chunks: LentChunks) -> None:
        """These are the instance's chunks now; those that were stay until `give_back_replaced`."""
        if self.current is not None:
            chunks.adopt(self.current)
            self._replaced.append(self.current)
        self.current = chunks

    def take_replaced(self) -> list[LentChunks]:
        """What the current chunks replaced, for the caller to give back: the engine has let go of it."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def take_all(self) -> list[LentChunks]:
        """All of it, for the caller to give back; this is empty then."""
        chunks = self.take_replaced()
        if self.current is not None:
            chunks.append(self.current)
        self.current = None
        return chunks


async def give_back(chunks: list[LentChunks]) -> None:
    """Unmap, free, and let go of the leases. Taking the pages of a large model apart takes tens of milliseconds."""
    for lent in chunks:
        await asyncio.to_thread(_close, lent)


def _close(chunks: LentChunks) -> None:
    try:
        chunks.close()
    except BufferError:
        # Only a failure inside the engine can leave a view, in the frames of its exception. A normal unload never does:
        # it would pay for a collection each time.
        log.warning("views_outlived_the_model")
        gc.collect()
        chunks.close()
