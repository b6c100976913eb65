"""Owns the storage of a server at run time: the residency account and, always together with it, pool, files and leases.

Everything here belongs to the thread of the event loop; file work runs in threads and its result is entered afterwards.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import ckptio
import structlog
from ckptio.manifest import MANIFEST_FILE
from whimbrel.wire.errors import ModelTooLarge, Unavailable
from whimbrel.wire.messages import Tier

from services.storage_agent import metrics
from services.storage_agent.checkpoints import Checkpoint, OpenCheckpoints, open_checkpoint
from services.storage_agent.config import AgentConfig
from services.storage_agent.core.eviction import Evict, NeverFits, Wait, choose_victims
from services.storage_agent.core.residency import CheckpointKey, DramCopy, Residency
from services.storage_agent.fetch import Fetch, OnProgress
from services.storage_agent.leases import LeaseFiles, retire, take_over
from services.storage_agent.probing import Probe, probe_ssd
from services.storage_agent.repository import Repository
from services.storage_agent.ssd import SsdDirectory
from services.storage_agent.threads import Threads

log = structlog.get_logger()

# File work that runs at once: the ranges of a fetch, and one for everything else.
FILE_THREADS = 4

# A worker that was told to unload lets go within milliseconds; one that does not in this time is not going to.
ROOM_S_MAX = 30.0
# How often a load that waits for chunks looks whether a worker let go. One look is one flock per instance.
ROOM_POLL_S = 0.01


class Tiers:
    """SSD and DRAM of one server. `on_change` is called whenever what the heartbeat says has changed."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.repository = Repository(config.repository_url)
        self.residency = Residency(chunk_count=config.chunk_count, ssd_size_bytes=config.ssd_bytes)
        self.threads = Threads(FILE_THREADS, "agent-files")
        self.probe = Probe(bandwidth_bytes_per_s=0.0, is_direct=True)
        self._config = config
        self._on_change = on_change
        self._clock = clock
        self._ssd = SsdDirectory(config.ssd_dir)
        self._open = OpenCheckpoints()
        self._leases = LeaseFiles(config.pool_path)
        self._attaching: set[str] = set()
        self._pool: ckptio.ChunkPool | None = None

    # --- life ---

    async def open(self) -> None:
        """Rebuild the truth about this server: what is on its SSD, an empty pool, how fast the SSD reads."""
        config = self._config
        started_s = self._clock()
        await self.threads.run(take_over, config.pool_path, config.chunk_size_bytes)
        for found in await self.threads.run(self._ssd.scan):
            self.residency.add_ssd(found.key, size_bytes=found.size_bytes, now=started_s - found.idle_s)
        scanned_s = self._clock()
        self._pool = await self.threads.run(
            ckptio.ChunkPool.create, config.pool_path, config.pool_bytes, config.chunk_size_bytes
        )
        pooled_s = self._clock()
        self.probe = await self.threads.run(
            probe_ssd, config.ssd_dir, self._pool, config.chunk_size_bytes, config.reader_threads, config.probe_bytes
        )
        self._changed()
        log.info(
            "storage_opened",
            scan_s=round(scanned_s - started_s, 4),
            pool_s=round(pooled_s - scanned_s, 4),
            probe_s=round(self._clock() - pooled_s, 4),
            pool_bytes=config.chunk_count * config.chunk_size_bytes,
            ssd_checkpoints=len(self.residency.ssd_copies()),
            ssd_bandwidth_bytes_per_s=round(self.probe.bandwidth_bytes_per_s),
            is_direct=self.probe.is_direct,
        )

    async def close(self) -> None:
        """Release everything; workers keep what they map."""
        self._leases.close()
        if self._pool is not None:
            await self.threads.run(self._close_pool)
        self.threads.close()

    def _close_pool(self) -> None:
        pool, self._pool = self.pool, None
        descriptor = os.open(pool.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            pool.close()
            retire(descriptor, self._config.pool_path, self._config.chunk_size_bytes)
        finally:
            os.close(descriptor)

    @property
    def pool(self) -> ckptio.ChunkPool:
        assert self._pool is not None, "open() comes first"
        return self._pool

    def attached(self) -> tuple[str, ...]:
        """The instances whose chunks a worker maps."""
        return tuple(lease for lease in self.residency.leases() if lease not in self._attaching)

    def pool_free_bytes(self) -> int:
        free_chunks = self.residency.chunk_count - self.residency.used_chunks()
        return free_chunks * self._config.chunk_size_bytes

    # --- SSD ---

    def path_of(self, key: CheckpointKey) -> Path:
        return self._ssd.path_of(key.model_id)

    def confirm_ssd(self, key: CheckpointKey) -> None:
        """Believe the account only if the directory is still there: somebody may have cleaned the disk."""
        if self.residency.ssd(key) is not None and not (self.path_of(key) / MANIFEST_FILE).exists():
            log.warning("ssd_copy_vanished", model_id=key.model_id, path=str(self.path_of(key)))
            self._forget(key)

    async def fetch(self, key: CheckpointKey, on_progress: OnProgress) -> None:
        """REMOTE → SSD. Copies of the model with other content leave first; raises what `Fetch.run` raises."""
        for stale in self.residency.ssd_copies(key.model_id):
            await self._remove(stale.key)
        try:
            partial = await self.threads.run(self._ssd.begin, key.model_id)
            fetch = Fetch(self.repository, key, partial, threads=self.threads, on_progress=on_progress)
            size_bytes = await fetch.run(lambda need_bytes: self._make_room_on_ssd(key, need_bytes))
            await self.threads.run(self._ssd.publish, key.model_id)
        except BaseException:
            await self.threads.run(self._ssd.abandon, key.model_id)
            raise
        self.residency.add_ssd(key, size_bytes=size_bytes, now=self._clock())
        self._changed()

    async def checkpoint(self, key: CheckpointKey) -> Checkpoint:
        """The parsed small files of the SSD copy; raises ckptio's errors and OSError when they are no good."""
        checkpoint = self._open.get(key)
        if checkpoint is None:
            path = self.path_of(key)
            checkpoint = await self.threads.run(open_checkpoint, key, path)
            self._open.put(checkpoint)
        return checkpoint

    async def reject(self, key: CheckpointKey) -> None:
        """The SSD copy is bad: remove it, but leave the chunks of the load that found out."""
        metrics.COPIES_REJECTED.inc()
        self.residency.remove_ssd(key)
        self._open.forget(key)
        await self.threads.run(self._ssd.remove, key.model_id)
        self._changed()

    def use(self, key: CheckpointKey) -> None:
        """The checkpoint was wanted now; also noted on the disk, for the order of eviction after a restart."""
        self.residency.use_ssd(key, now=self._clock())
        if self.residency.ssd(key) is not None:
            # Nobody waits for this: a busy journal can hold it up for tens of milliseconds.
            self.threads.submit(self._ssd.touch, key.model_id)

    # --- DRAM ---

    def check_capacity(self, key: CheckpointKey, size_bytes: int) -> None:
        """Raises ModelTooLarge when so many bytes can never fit, before anything is moved for them."""
        if self.pool.chunks_for(size_bytes) > self.pool.chunk_count:
            raise ModelTooLarge(model_id=key.model_id, need_bytes=size_bytes, capacity_bytes=self.pool.size_bytes)

    async def reserve(self, checkpoint: Checkpoint) -> DramCopy:
        """Chunks for a checkpoint that is about to be read, held until `end_load`.

        Raises ModelTooLarge when the whole pool is too small, Unavailable when what is in the way stays mapped.
        """
        counts = [self.pool.chunks_for(part.padded_bytes) for part in checkpoint.index.partitions]
        await self._make_room_in_dram(checkpoint.key, sum(counts))
        partitions = tuple(self.pool.allocate(count) for count in counts)
        copy = self.residency.reserve(
            checkpoint.key,
            size_bytes=checkpoint.manifest.total_bytes,
            partition_bytes=tuple(part.padded_bytes for part in checkpoint.index.partitions),
            partitions=partitions,
            now=self._clock(),
        )
        self._changed()
        return copy

    def begin_load(self, copy: DramCopy) -> None:
        self.residency.begin_load(copy.copy_id, now=self._clock())

    def complete(self, copy: DramCopy) -> None:
        self.residency.complete(copy.copy_id)
        self._changed()

    def end_load(self, copy: DramCopy) -> None:
        self._free(self.residency.end_load(copy.copy_id, now=self._clock()))

    # --- leases ---

    def lease(self, copy: DramCopy, instance_id: str) -> Path:
        """A lease file for an instance that is about to map the copy. It counts as mapped until `settle`."""
        path = self._leases.create(instance_id, copy.chunks)
        self.residency.add_lease(copy.copy_id, instance_id)
        self._attaching.add(instance_id)
        return path

    def is_mapped(self, instance_id: str) -> bool:
        """Whether the worker took the lease."""
        return self._leases.is_held(instance_id)

    def settle(self, instance_id: str) -> None:
        """The worker has answered: from now on the lock of the lease file alone says whether it maps the chunks."""
        self._attaching.discard(instance_id)
        self._changed()

    def sweep(self) -> None:
        """End every lease that no worker holds any more."""
        for instance_id in list(self.residency.leases()):
            if instance_id not in self._attaching and self._leases.end_if_free(instance_id):
                self._free(self.residency.end_lease(instance_id, now=self._clock()))
                log.info("lease_ended", instance_id=instance_id)
                self._changed()

    # --- removal ---

    async def remove_model(self, model_id: str, *, from_repository: bool) -> None:
        """Remove every copy of a model; chunks that an instance maps follow when it lets go. Raises OSError."""
        for ssd_copy in self.residency.ssd_copies(model_id):
            await self._remove(ssd_copy.key)
        for dram_copy in self.residency.dram_copies(model_id):
            self._free(self.residency.drop(dram_copy.copy_id))
        await self.threads.run(self._ssd.remove, model_id)
        if from_repository:
            await self.threads.run(self.repository.remove_published, model_id)
        self._changed()

    def holds(self, model_id: str) -> bool:
        return bool(self.residency.ssd_copies(model_id) or self.residency.dram_copies(model_id))

    async def _make_room_in_dram(self, key: CheckpointKey, need_chunks: int) -> None:
        chunk_size_bytes = self._config.chunk_size_bytes
        deadline_s = self._clock() + ROOM_S_MAX
        while True:
            decision = choose_victims(
                self.residency.dram_candidates(), need=need_chunks, capacity=self.residency.chunk_count
            )
            match decision:
                case Evict(keys=copy_ids):
                    for copy_id in copy_ids:
                        self._free(self.residency.drop(copy_id))
                        metrics.EVICTIONS.labels(Tier.DRAM).inc()
                    return
                case NeverFits(need=need, capacity=capacity):
                    raise ModelTooLarge(
                        model_id=key.model_id,
                        need_bytes=need * chunk_size_bytes,
                        capacity_bytes=capacity * chunk_size_bytes,
                    )
                case Wait(held=held):
                    if self._clock() >= deadline_s:
                        raise Unavailable(
                            what=f"memory for {key.model_id} ({held * chunk_size_bytes} bytes are mapped)"
                        )
                    await asyncio.sleep(ROOM_POLL_S)
                    self.sweep()

    async def _make_room_on_ssd(self, key: CheckpointKey, need_bytes: int) -> None:
        capacity_bytes = self.residency.ssd_size_bytes
        match choose_victims(self.residency.ssd_candidates(), need=need_bytes, capacity=capacity_bytes):
            case Evict(keys=keys):
                for victim in keys:
                    await self._remove(victim)
                    metrics.EVICTIONS.labels(Tier.SSD).inc()
            case NeverFits():
                raise ModelTooLarge(model_id=key.model_id, need_bytes=need_bytes, capacity_bytes=capacity_bytes)
            case Wait(held=held):
                raise Unavailable(what=f"SSD space for {key.model_id} ({held} bytes belong to running instances)")

    async def _remove(self, key: CheckpointKey) -> None:
        self._forget(key)
        await self.threads.run(self._ssd.remove, key.model_id)

    def _forget(self, key: CheckpointKey) -> None:
        self._open.forget(key)
        self._free(self.residency.evict(key))
        self._changed()

    def _free(self, chunks: tuple[int, ...]) -> None:
        if chunks:
            self.pool.free(chunks)
            self._changed()

    def _changed(self) -> None:
        metrics.POOL_USED_BYTES.set(self.residency.used_chunks() * self._config.chunk_size_bytes)
        metrics.SSD_USED_BYTES.set(self.residency.ssd_used_bytes())
        self._on_change()
