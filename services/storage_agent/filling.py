"""Owns a filling: one checkpoint on its way up to a tier, once for all who wait for it.

    REMOTE ──ranges──▶ chunk of the pool ──▶ listeners: copiers to GPUs
    SSD ───direct────▶        │
                              └──▶ SSD, in the same pass (what DRAM has can be used before the SSD has it)

What each tier has is worked out anew before each move, so a copy that was cut off goes on where it was, and a chunk
that turns out to be bad on the SSD is fetched again alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import ckptio
import structlog
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.messages import Tier, WaitStage

from services.storage_agent.core.chunks import CheckpointKey, ChunkId
from services.storage_agent.core.path import Begin, Fetch, Move, Read, next_move, source_tier
from services.storage_agent.core.residency import DramCopy, SsdCopy
from services.storage_agent.crossings import Crossings
from services.storage_agent.failures import explain, forget_frames
from services.storage_agent.fetch import Source
from services.storage_agent.fetching import Fetching
from services.storage_agent.paths import Paths
from services.storage_agent.ssd_reads import SsdReads
from services.storage_agent.steps import Step, Steps
from services.storage_agent.storing import Storing
from services.storage_agent.tiers import Tiers

log = structlog.get_logger()

# An instance that was told to unload lets go in less than this.
ROOM_SOON_S = 1.0

# What says that an SSD copy, or a chunk of it, is no good; any other error is this server's trouble, and the copy is
# as good as before.
DAMAGE = (
    ckptio.CorruptCheckpoint,
    ckptio.TruncatedCheckpoint,
    ckptio.MissingFile,
    ckptio.UnsupportedFormat,
    ckptio.ReadFailed,
    FileNotFoundError,
)


class Filling:
    """One checkpoint's way. `run` is the whole of it; everybody else waits for its steps."""

    def __init__(
        self,
        key: CheckpointKey,
        wanted: Tier,
        *,
        tiers: Tiers,
        paths: Paths,
        source: Source,
        reads: SsdReads,
        server_id: str,
        stall_s_max: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = key
        self.wanted = wanted
        self.copy: DramCopy | None = None
        self.crossings = Crossings(clock)
        self.steps = Steps()
        self.stage = WaitStage.QUEUED
        self.waited_s = 0.0  # for turns after the first
        self._tiers = tiers
        self._paths = paths
        self._source = source
        self._reads = reads
        self._server_id = server_id
        self._stall_s_max = stall_s_max
        self._fetching = Fetching(tiers, source, on_bytes=self._on_bytes, arrived=self._arrived, stored=self._stored)
        self._clock = clock
        self._holder = f"filling of {key.model_id} at {id(self):x}"
        self._waiters: set[str] = set()
        self._listeners: list[Callable[[ChunkId], None]] = []
        self._started_s: float | None = None
        self._moved_s: float | None = None  # when a byte moved last; None while it waits for a turn
        self._under_way_bytes = 0
        self._there_before_bytes: int | None = None
        self._has_rejected = False
        self._needs_room = False
        self.source_tier = source_tier(tiers.residency.find(key), tiers.residency.ssd(key))

    # --- for those who wait ---

    def join(self, holder: str, wanted: Tier) -> None:
        """Wait for it as well. On the way to DRAM the copy is held for `holder` from PLACED on until it leaves."""
        self._waiters.add(holder)
        if wanted is Tier.DRAM:
            self.wanted = Tier.DRAM
        if self.copy is not None:
            self._tiers.hold(self.copy, holder)

    def leave(self, holder: str) -> bool:
        """Wait no more; True when nobody does."""
        self._waiters.discard(holder)
        if self.copy is not None:
            self._tiers.let_go(self.copy.copy_id, holder)
        return not self._waiters

    def listen(self, listener: Callable[[ChunkId], None]) -> None:
        """Be told of each chunk as it becomes ready in DRAM; what is ready by now is in the copy."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[ChunkId], None]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    @property
    def done_bytes(self) -> int:
        """What has moved since it started."""
        return min(self.total_bytes, self._there_bytes() - (self._there_before_bytes or 0) + self._under_way_bytes)

    @property
    def total_bytes(self) -> int:
        """What had to move when it started; 0 while that is not known."""
        known = self.copy or self._tiers.residency.ssd(self.key)
        return 0 if known is None else known.layout.size_bytes - (self._there_before_bytes or 0)

    def _there_bytes(self) -> int:
        ssd = self._tiers.residency.ssd(self.key)
        if self.copy is not None:
            return self.copy.ready_bytes
        return 0 if ssd is None or self.wanted is Tier.DRAM else ssd.stored_bytes

    @property
    def is_waiting(self) -> bool:
        """Whether bytes are still to come and it is the turn of others."""
        return self._moved_s is None and not self.steps.has(Step.READY)

    def running_s(self, now: float) -> float:
        return 0.0 if self._started_s is None else max(0.0, now - self._started_s - self.waited_s)

    def give_up(self) -> None:
        """It was cancelled: whoever still waits hears so."""
        self.steps.fail(Unavailable(what=f"the load of {self.key.model_id} (it was cancelled)"))

    # --- the whole of it ---

    async def run(self) -> None:
        """Until the wanted tier is whole and what the SSD gets of it is stored. Waiters hear of failures; only a
        cancellation is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                await self._fill()
                watch.cancel()
        except ExceptionGroup as failures:
            forget_frames(failures)
            self.steps.fail(explain(failures, model_id=self.key.model_id, server_id=self._server_id))
        finally:
            if self.copy is not None:
                self._tiers.let_go(self.copy.copy_id, self._holder)
            self._tiers.ssd.use(self.key)

    async def _fill(self) -> None:
        while (move := self._next_move()) is not None:
            tier = Tier.SSD if isinstance(move, Read) else Tier.REMOTE
            waiting_since_s = self._clock()
            async with self._paths.turn(tier):
                if self._started_s is not None:
                    self.waited_s += self._clock() - waiting_since_s
                self._start()
                # What there is may have changed while others had their turn.
                while (move := self._next_move()) is not None and tier is (
                    Tier.SSD if isinstance(move, Read) else Tier.REMOTE
                ):
                    await self._perform(move)
                    if self._needs_room:
                        break
            if self._needs_room:
                await self._wait_for_room()
        self._start()
        if self.wanted is Tier.DRAM:
            await self._place()  # also when all was there: those who wait hold it from then on
        self.steps.reach(Step.READY, Step.STORED)

    def _next_move(self) -> Move | None:
        residency = self._tiers.residency
        return next_move(self.copy or residency.find(self.key), residency.ssd(self.key), wanted=self.wanted)

    async def _perform(self, move: Move) -> None:
        self._moved_s = self._clock()
        if self._there_before_bytes is None and self.wanted is Tier.SSD:
            self._there_before_bytes = self._there_bytes()
        ssd = self._tiers.residency.ssd(self.key)
        if ssd is not None:
            ssd.users.add(self._holder)  # nobody makes room by its removal meanwhile
        try:
            match move:
                case Begin():
                    self.stage = WaitStage.FETCHING
                    self.source_tier = Tier.REMOTE
                    published = await self._source.open(self.key, self._on_moved)
                    files = await self._source.small_files(published, self._on_moved)
                    await self._tiers.ssd.begin(published, files)
                case Read(chunks=chunks):
                    await self._read(chunks)
                case Fetch():
                    self.source_tier = Tier.REMOTE
                    assert ssd is not None, "a fetch follows the small files"
                    await self._fetch(ssd)
        finally:
            if ssd is not None:
                ssd.users.discard(self._holder)
            self.crossings.end()
            self._moved_s = None
            self._under_way_bytes = 0

    # --- SSD → DRAM ---

    async def _read(self, chunks: Sequence[ChunkId]) -> None:
        """Read into the pool; what is damaged on the SSD counts as missing there from now on."""
        self.stage = WaitStage.LOADING
        try:
            checkpoint = await self._tiers.ssd.checkpoint(self.key)
            copy = await self._place_soon()
            if copy is None:
                self._needs_room = True
                return
            chunks = [chunk for chunk in chunks if chunk not in copy.ready]
            self.crossings.begin(Tier.SSD)
            await self._reads.read(checkpoint, copy, chunks, self._arrived)
        except DAMAGE as damage:
            await self._answer_damage(damage)

    async def _answer_damage(self, damage: Exception) -> None:
        chunk = self._reads.damaged_chunk(damage)
        log.warning("ssd_copy_damaged", model_id=self.key.model_id, chunk=chunk, reason=str(damage))
        if chunk is not None:
            await self._tiers.ssd.damaged(self.key, chunk)
            return
        if self._has_rejected:
            # The fetch verified every chunk, so it is this server's disk that damages them.
            raise damage
        self._has_rejected = True
        await self._tiers.ssd.reject(self.key)

    # --- REMOTE → DRAM and SSD ---

    async def _fetch(self, ssd: SsdCopy) -> None:
        self.stage = WaitStage.FETCHING
        checkpoint = await self._tiers.ssd.checkpoint(self.key)
        copy = await self._place_soon() if self.wanted is Tier.DRAM else None
        storing = Storing(self._tiers, ssd, await self._tiers.ssd.writer(ssd), self._on_moved)
        try:
            with self._resident(copy) as resident:
                # Until it was held, an idle copy may have given up chunks to others.
                move = self._next_move()
                if isinstance(move, Fetch):
                    places = {} if resident is None else resident.places
                    self.crossings.begin(Tier.REMOTE)
                    await self._fetching.run(checkpoint.index, ssd, copy, places, move, storing)
        finally:
            await storing.close()
        if ssd.is_whole:
            await self._tiers.ssd.finish(ssd)

    @contextmanager
    def _resident(self, copy: DramCopy | None) -> Iterator[DramCopy | None]:
        """What DRAM has already, held meanwhile: on the way to the SSD nobody else does."""
        resident = self._tiers.residency.find(self.key) if copy is None else copy
        if resident is None or resident is self.copy:
            yield resident
            return
        self._tiers.hold(resident, self._holder)
        try:
            yield resident
        finally:
            self._tiers.let_go(resident.copy_id, self._holder)

    # --- steps ---

    async def _place_soon(self) -> DramCopy | None:
        """Room where there is some soon: those who wait for this path need not wait for an instance that stays."""
        try:
            # Not only room is waited for: the SSD may be being measured.
            async with asyncio.timeout(ROOM_SOON_S):
                return await self._place()
        except TimeoutError:
            log.info("room_awaited", model_id=self.key.model_id)
            return None

    async def _wait_for_room(self) -> None:
        """Without a turn; the next one comes when there is room. A damaged copy is answered, and planned anew."""
        self._needs_room = False
        waiting_since_s = self._clock()
        try:
            await self._place()
            self.waited_s += self._clock() - waiting_since_s
        except DAMAGE as damage:
            await self._answer_damage(damage)

    async def _place(self) -> DramCopy:
        """Room for every chunk, once."""
        if self.copy is None:
            checkpoint = await self._tiers.ssd.checkpoint(self.key)
            self._reads.check_chunk_size(checkpoint)
            self.copy = await self._tiers.reserve(checkpoint, self._holder)
            self._there_before_bytes = self.copy.ready_bytes
            for holder in self._waiters:
                self._tiers.hold(self.copy, holder)
            self.steps.reach(Step.PLACED)
        return self.copy

    def _on_moved(self) -> None:
        self._moved_s = self._clock()

    def _on_bytes(self, size_bytes: int) -> None:
        self._on_moved()
        self._under_way_bytes += size_bytes

    def _stored(self, size_bytes: int) -> None:
        """A chunk went to the SSD alone. On the way to DRAM it stays under way: it has to be read from there yet."""
        self.crossings.add(size_bytes)
        if self.wanted is Tier.SSD:
            self._under_way_bytes = max(0, self._under_way_bytes - size_bytes)

    def _arrived(self, chunks: Sequence[ChunkId]) -> None:
        copy = self.copy
        assert copy is not None
        self._moved_s = self._clock()
        size_bytes = sum(copy.layout.bytes_of(chunk) for chunk in chunks)
        self._under_way_bytes = max(0, self._under_way_bytes - size_bytes)
        self.crossings.add(size_bytes)
        for chunk in chunks:
            self._tiers.residency.arrive(copy.copy_id, chunk)
            for listener in self._listeners:
                listener(chunk)
        if copy.is_whole:
            # What is left is the SSD's part, for which nobody needs to wait.
            self.crossings.end()
            self.steps.reach(Step.READY)

    def _start(self) -> None:
        if self._started_s is None:
            self._started_s = self._clock()
        self.steps.reach(Step.STARTED)

    async def _watch(self) -> None:
        """A load has a progress limit, never a wall-clock one."""
        while True:
            moved_s = self._moved_s
            await asyncio.sleep(self._stall_s_max if moved_s is None else moved_s + self._stall_s_max - self._clock())
            if self._moved_s is not None and self._clock() - self._moved_s >= self._stall_s_max:
                what = f"{self.source_tier} tier of {self.key.model_id} (no byte came for {self._stall_s_max:g} s)"
                raise Unavailable(what=what)
