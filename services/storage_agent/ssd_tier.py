"""Owns the SSD tier of a server: the account of its copies and, always together with it, their files.

Everything here belongs to the thread of the event loop; file work runs in threads and its result is entered afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

import ckptio
import structlog
from ckptio.manifest import MANIFEST_FILE
from whimbrel.wire.errors import ModelTooLarge, Unavailable
from whimbrel.wire.messages import Tier

from services.storage_agent import metrics
from services.storage_agent.checkpoints import Checkpoint, OpenCheckpoints, footprint_bytes, layout_of, open_checkpoint
from services.storage_agent.core.chunks import CheckpointKey, ChunkId
from services.storage_agent.core.eviction import Evict, NeverFits, Wait, choose_victims
from services.storage_agent.core.residency import Residency, SsdCopy
from services.storage_agent.fetch import Published
from services.storage_agent.ssd import SsdDirectory, SsdWriter
from services.storage_agent.threads import Threads

log = structlog.get_logger()


# Who uses a copy whose directory is being made.
BEGINNING = "beginning"


class SsdTier:
    """The copies in one directory. `free` takes back the chunks of the pool that go with a copy."""

    def __init__(
        self,
        path: Path,
        residency: Residency,
        threads: Threads,
        *,
        free: Callable[[tuple[int, ...]], None],
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._directory = SsdDirectory(path)
        self._residency = residency
        self._threads = threads
        self._free = free
        self._on_change = on_change
        self._clock = clock
        self._open = OpenCheckpoints()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._pins = asyncio.Lock()  # the last list written is the newest

    async def open(self) -> None:
        """Find what is there; raises FileExistsError when another agent that lives has the directory."""
        await self._threads.run(self._directory.lock)
        for model_id in await self._threads.run(self._directory.read_pins):
            self._residency.pin(model_id, Tier.SSD)
        for found in await self._threads.run(self._directory.scan):
            self._residency.add_ssd(
                found.key,
                layout=found.layout,
                size_bytes=found.size_bytes,
                missing=found.missing,
                now=self._clock() - found.idle_s,
            )

    def close(self) -> None:
        self._directory.unlock()

    def path_of(self, key: CheckpointKey) -> Path:
        return self._directory.path_of(key.model_id)

    def confirm(self, key: CheckpointKey) -> None:
        """Believe the account only if the directory is still there: somebody may have cleaned the disk."""
        copy = self._residency.ssd(key)
        if copy is not None and BEGINNING not in copy.users and not (self.path_of(key) / MANIFEST_FILE).exists():
            log.warning("ssd_copy_vanished", model_id=key.model_id, path=str(self.path_of(key)))
            self._forget(key)

    async def begin(self, published: Published, files: dict[str, bytes]) -> SsdCopy:
        """Reserve the space of a copy and put its small files there; its chunks are all missing.

        Copies of the model with other content leave. Raises ModelTooLarge, Unavailable, OSError (disk full).
        """
        key, size_bytes = published.key, footprint_bytes(published.manifest)
        for stale in self._residency.ssd_copies(key.model_id):
            await self.remove(stale.key)
        await self._make_room(key, size_bytes)
        layout = layout_of(published.index)
        copy = self._residency.add_ssd(
            key, layout=layout, size_bytes=size_bytes, missing=layout.chunks(), now=self._clock()
        )
        copy.users.add(BEGINNING)
        try:
            async with self._turn(key.model_id):
                await self._threads.run(self._directory.begin, key, published.manifest, files)
        except BaseException:
            # Also when it was cancelled: the thread has made the directory by now, and nobody would account for it.
            self._residency.remove_ssd(key)
            await self._remove_files(key.model_id)
            raise
        finally:
            copy.users.discard(BEGINNING)
        self._on_change()
        return copy

    async def writer(self, copy: SsdCopy) -> SsdWriter:
        """For storing what is missing."""
        opened: list[SsdWriter] = []
        try:
            await self._threads.run(lambda: opened.append(SsdWriter(self.path_of(copy.key), copy.layout)))
        except asyncio.CancelledError:
            for writer in opened:
                writer.close()
            raise
        return opened[0]

    async def finish(self, copy: SsdCopy) -> None:
        """Nothing is missing any more; nothing happens when the copy was removed meanwhile."""
        assert copy.is_whole
        async with self._turn(copy.key.model_id):
            if self._residency.ssd(copy.key) is copy:
                await self._threads.run(self._directory.publish, copy.key.model_id)
                self._on_change()

    async def checkpoint(self, key: CheckpointKey) -> Checkpoint:
        """The parsed small files of the SSD copy; raises ckptio's errors and OSError when they are no good."""
        checkpoint = self._open.get(key)
        if checkpoint is None:
            path = self.path_of(key)
            checkpoint = await self._threads.run(open_checkpoint, path, key.model_id)
            if checkpoint.key != key:
                raise ckptio.CorruptCheckpoint(path / MANIFEST_FILE, "belongs to another content of the model")
            self._open.put(checkpoint)
        return checkpoint

    async def damaged(self, key: CheckpointKey, chunk: ChunkId) -> None:
        """One chunk of the SSD copy is bad: from now on it is missing there, and is fetched again."""
        copy = self._residency.ssd(key)
        if copy is None:
            return
        metrics.CHUNKS_REJECTED.inc()
        copy.missing.add(chunk)
        async with self._turn(key.model_id):
            if self._residency.ssd(key) is copy:
                stored = [each for each in copy.layout.chunks() if each not in copy.missing]
                await self._threads.run(self._directory.demote, key.model_id, stored)
        self._on_change()

    async def reject(self, key: CheckpointKey) -> None:
        """The SSD copy is bad: remove it, but leave the chunks that are in DRAM."""
        metrics.COPIES_REJECTED.inc()
        self._residency.remove_ssd(key)
        self._open.forget(key)
        await self._remove_files(key.model_id)
        self._on_change()

    def use(self, key: CheckpointKey) -> None:
        """The checkpoint was wanted now; also noted on the disk, for the order of eviction after a restart."""
        self._residency.use_ssd(key, now=self._clock())
        if self._residency.ssd(key) is not None:
            # Nobody waits for this: a busy journal can hold it up for tens of milliseconds.
            self._threads.submit(self._directory.touch, key.model_id)

    async def remove(self, key: CheckpointKey) -> None:
        """Take a copy away, and what DRAM holds of it."""
        self._forget(key)
        await self._remove_files(key.model_id)

    async def remove_model(self, model_id: str) -> None:
        """Take every copy of a model away."""
        for copy in self._residency.ssd_copies(model_id):
            self._forget(copy.key)
        await self._remove_files(model_id)

    async def save_pins(self) -> None:
        """Note on the disk what is pinned now; raises Unavailable when that can't be: it holds until the agent ends."""
        async with self._pins:
            try:
                await self._threads.run(self._directory.write_pins, self._residency.pinned_in(Tier.SSD))
            except OSError as error:
                raise Unavailable(what=f"the list of pins on the SSD ({error})") from error

    async def _remove_files(self, model_id: str) -> None:
        """In its turn, and not when another copy of the model has taken the place: that begins by clearing it."""
        async with self._turn(model_id):
            if not self._residency.ssd_copies(model_id):
                await self._threads.run(self._directory.remove, model_id)

    def _turn(self, model_id: str) -> asyncio.Lock:
        """Directories go by model: what is done to one is done in the order in which it was decided."""
        return self._turns.setdefault(model_id, asyncio.Lock())

    def _forget(self, key: CheckpointKey) -> None:
        self._open.forget(key)
        self._free(self._residency.evict(key))
        self._on_change()

    async def _make_room(self, key: CheckpointKey, need_bytes: int) -> None:
        """One victim at a time: while one is being removed, the next may be pinned, or wanted by a load."""
        while True:
            free_bytes = await self._threads.run(self._directory.free_bytes)
            # Others may use the same disk: the budget is a promise that the disk may not be able to keep.
            capacity_bytes = min(self._residency.ssd_size_bytes, self._residency.ssd_used_bytes() + free_bytes)
            match choose_victims(self._residency.ssd_candidates(), need=need_bytes, capacity=capacity_bytes):
                case Evict(victims=()):
                    return
                case Evict(victims=victims):
                    await self.remove(victims[0].key)
                    metrics.EVICTIONS.labels(Tier.SSD).inc()
                case NeverFits() if need_bytes > self._residency.ssd_size_bytes:
                    raise ModelTooLarge(
                        model_id=key.model_id, need_bytes=need_bytes, capacity_bytes=self._residency.ssd_size_bytes
                    )
                case NeverFits():
                    raise Unavailable(
                        what=f"SSD space for {key.model_id} ({need_bytes} bytes; others left {free_bytes} on the disk)"
                    )
                case Wait(held=held):
                    raise Unavailable(what=f"SSD space for {key.model_id} ({held} bytes are in use or pinned)")
