"""Owns the storage of a server at run time: the residency account and, always together with it, pool, files and leases.

Everything here belongs to the thread of the event loop; file work runs in threads and its result is entered afterwards.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress

import ckptio
import structlog
from whimbrel.wire.errors import Conflict, InvalidRequest, ModelTooLarge, Unavailable
from whimbrel.wire.messages import Tier

from services.storage_agent import metrics
from services.storage_agent.checkpoints import Checkpoint, layout_of
from services.storage_agent.config import AgentConfig
from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.core.eviction import Evict, NeverFits, Wait, choose_victims
from services.storage_agent.core.residency import PINNABLE, DramCopy, Residency
from services.storage_agent.leases import retire, take_over
from services.storage_agent.lending import Lending
from services.storage_agent.probing import Probe, probe_ssd
from services.storage_agent.repository import Repository
from services.storage_agent.ssd_tier import SsdTier
from services.storage_agent.threads import Threads

log = structlog.get_logger()

# File work that runs at once: verifying and storing the ranges of a fetch, and some for everything else.
FILE_THREADS = 8

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
        repository: Repository | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.repository = repository or Repository(config.repository_url)
        self.residency = Residency(chunk_count=config.chunk_count, ssd_size_bytes=config.ssd_bytes)
        self.threads = Threads(FILE_THREADS, "agent-files")
        self.ssd = SsdTier(
            config.ssd_dir,
            self.residency,
            self.threads,
            free=self._free,
            on_change=self._changed,
            clock=clock,
        )
        self.probe = Probe()
        self.lending = Lending(config.pool_path, hold=self.hold, let_go=self.let_go, on_change=self._changed)
        self._config = config
        self._on_change = on_change
        self._clock = clock
        self._pool: ckptio.ChunkPool | None = None
        # While the SSD is measured, chunks of the pool are in use that the account does not know.
        self._room = asyncio.Lock()

    # --- life ---

    async def open(self) -> None:
        """Rebuild the truth about this server: what is on its SSD, an empty pool, how fast the SSD reads.

        Raises FileExistsError when another agent that lives has the SSD directory or the pool.
        """
        config = self._config
        started_s = self._clock()
        await self.ssd.open()
        await self.threads.run(take_over, config.pool_path, config.chunk_size_bytes)
        scanned_s = self._clock()
        self._pool = await self.threads.run(
            ckptio.ChunkPool.create, config.pool_path, config.pool_bytes, config.chunk_size_bytes
        )
        pooled_s = self._clock()
        with suppress(Unavailable):  # a disk that is full, say: loads make room
            await self.measure()
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

    async def measure(self) -> Probe:
        """Learn how fast the SSD reads now; no load should be reading it. It takes a few chunks of the pool meanwhile,
        from idle copies if it must; raises Unavailable when every chunk is in use."""
        config = self._config
        async with self._room:
            self._shed_idle(max(1, config.probe_bytes // config.chunk_size_bytes))
            try:
                self.probe = await self.threads.run(
                    probe_ssd,
                    config.ssd_dir,
                    self.pool,
                    config.chunk_size_bytes,
                    config.reader_threads,
                    config.probe_bytes,
                )
            except (OSError, ckptio.CkptioError) as error:
                log.warning("storage_not_measured", reason=str(error))
                raise Unavailable(what=f"a measurement of {config.ssd_dir} ({error})") from error
        self._changed()
        return self.probe

    async def close(self) -> None:
        """Release everything; workers keep what they map."""
        self.lending.close()
        if self._pool is not None:
            await self.threads.run(self._close_pool)
        self.ssd.close()
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

    def pool_free_bytes(self) -> int:
        free_chunks = self.residency.chunk_count - self.residency.used_chunks()
        return free_chunks * self._config.chunk_size_bytes

    # --- DRAM ---

    def check_capacity(self, key: CheckpointKey, size_bytes: int) -> None:
        """Raises ModelTooLarge when so many bytes can never fit, before anything is moved for them."""
        if self.pool.chunks_for(size_bytes) > self.pool.chunk_count:
            raise ModelTooLarge(model_id=key.model_id, need_bytes=size_bytes, capacity_bytes=self.pool.size_bytes)

    def hold(self, copy: DramCopy, holder: str) -> None:
        self.residency.hold(copy.copy_id, holder, now=self._clock())

    def let_go(self, copy_id: int, holder: str) -> None:
        self._free(self.residency.let_go(copy_id, holder, now=self._clock()))

    async def reserve(self, checkpoint: Checkpoint, holder: str) -> DramCopy:
        """The DRAM copy, held by `holder`, with a place for every chunk; what was resident of it stays.

        Who waits for room holds nothing meanwhile, so that what fits goes ahead and two never wait for each other.
        Raises ModelTooLarge when the whole pool is too small, Unavailable when what is in the way is pinned or stays.
        """
        deadline_s = self._clock() + ROOM_S_MAX
        layout = layout_of(checkpoint.index)
        self._check_fits(checkpoint.key, layout.chunk_count)
        while True:
            async with self._room:
                copy = self.residency.open_copy(
                    checkpoint.key,
                    layout=layout,
                    size_bytes=checkpoint.manifest.total_bytes,
                    holder=holder,
                    now=self._clock(),
                )
                need = len(copy.unplaced())
                held = self._make_room(need)
                if held is None:
                    self.residency.place(copy.copy_id, self.pool.allocate(need))
                    self._changed()
                    return copy
                self.let_go(copy.copy_id, holder)
            if self._clock() >= deadline_s:
                in_use_bytes = held * self._config.chunk_size_bytes
                raise Unavailable(what=f"memory for {checkpoint.key.model_id} ({in_use_bytes} bytes are in use)")
            await asyncio.sleep(ROOM_POLL_S)
            self.lending.sweep()

    # --- pins and removal ---

    async def pin(self, model_id: str, tier: Tier) -> None:
        """Raises InvalidRequest for a tier that nothing is pinned in."""
        self.residency.pin(model_id, _pinnable(tier))
        if tier is Tier.SSD:
            await self.ssd.save_pins()
        self._changed()

    async def unpin(self, model_id: str, tier: Tier) -> None:
        self.residency.unpin(model_id, _pinnable(tier))
        if tier is Tier.SSD:
            await self.ssd.save_pins()
        self._changed()

    async def evict(self, model_id: str, tier: Tier) -> None:
        """Give back what nobody uses of a model. Raises Conflict while somebody does, or while it is pinned there."""
        pinned = self.residency.pinned(model_id)
        if _pinnable(tier) in pinned or (tier is Tier.SSD and pinned):
            raise Conflict(reason=f"{model_id} is pinned in {', '.join(sorted(pinned))}; unpin it first")
        copies = self.residency.dram_copies(model_id)
        fetched = [copy for copy in self.residency.ssd_copies(model_id) if copy.users]
        if any(copy.is_held for copy in copies) or (tier is Tier.SSD and fetched):
            raise Conflict(reason=f"{model_id} is in use; it can go when its loads and instances have ended")
        if tier is Tier.SSD:
            for ssd_copy in self.residency.ssd_copies(model_id):
                await self.ssd.remove(ssd_copy.key)
        for copy in copies:
            self._free(self.residency.drop(copy.copy_id))
        self._changed()

    async def remove_model(self, model_id: str, *, from_repository: bool) -> None:
        """Remove every copy of a model; chunks that an instance maps follow when it lets go. Raises OSError.

        All of the account goes at once: a load that comes from now on begins anew, and what it makes stays.
        """
        was_pinned = bool(self.residency.pinned(model_id))
        self.residency.unpin(model_id)
        for copy in self.residency.dram_copies(model_id):
            self._free(self.residency.drop(copy.copy_id))
        await self.ssd.remove_model(model_id)
        if was_pinned:
            await self.ssd.save_pins()
        if from_repository:
            await self.repository.remove_published(model_id)
        self._changed()

    def holds(self, model_id: str) -> bool:
        return bool(self.residency.ssd_copies(model_id) or self.residency.dram_copies(model_id))

    # --- room ---

    def _shed_idle(self, need_chunks: int) -> None:
        """Make so many chunks free, or as many as nobody holds."""
        match choose_victims(
            self.residency.dram_candidates(),
            need=min(need_chunks, self.residency.chunk_count),
            capacity=self.residency.chunk_count,
        ):
            case Evict(victims=victims):
                for victim in victims:
                    self._free(self.residency.shed(victim.key, victim.size))
            case Wait(obtainable=obtainable):
                self._shed_idle(obtainable)
            case NeverFits():
                raise AssertionError("no more was asked for than there is")

    def _check_fits(self, key: CheckpointKey, need_chunks: int) -> None:
        """Raises ModelTooLarge for more than the pool has, and Unavailable for more than is not pinned: nobody waits
        for a pin to go away."""
        chunk_size_bytes, count = self._config.chunk_size_bytes, self.residency.chunk_count
        if need_chunks > count:
            raise ModelTooLarge(
                model_id=key.model_id, need_bytes=need_chunks * chunk_size_bytes, capacity_bytes=self.pool.size_bytes
            )
        pinned = [
            copy
            for copy in self.residency.dram_copies()
            if copy.key != key and Tier.DRAM in self.residency.pinned(copy.key.model_id)
        ]
        if need_chunks > count - sum(len(copy.places) for copy in pinned):
            names = ", ".join(sorted({copy.key.model_id for copy in pinned}))
            raise Unavailable(what=f"memory for {key.model_id} (it is pinned by {names}; unpin one of them)")

    def _make_room(self, need_chunks: int) -> int | None:
        """Evict what has to go; else how many chunks are held by others."""
        match choose_victims(self.residency.dram_candidates(), need=need_chunks, capacity=self.residency.chunk_count):
            case Evict(victims=victims):
                for victim in victims:
                    self._free(self.residency.shed(victim.key, victim.size))
                    metrics.EVICTIONS.labels(Tier.DRAM).inc()
                return None
            case Wait(held=held):
                return held
            case NeverFits():
                raise AssertionError("that was checked before")

    def _free(self, chunks: tuple[int, ...]) -> None:
        if chunks:
            self.pool.free(chunks)
            self._changed()

    def _changed(self) -> None:
        metrics.POOL_USED_BYTES.set(self.residency.used_chunks() * self._config.chunk_size_bytes)
        metrics.SSD_USED_BYTES.set(self.residency.ssd_used_bytes())
        self._on_change()


def _pinnable(tier: Tier) -> Tier:
    if tier not in PINNABLE:
        raise InvalidRequest(field="tier", reason=f"{tier} is no cache; use ssd or dram")
    return tier
