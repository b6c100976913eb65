"""Owns which chunk of which checkpoint is in which tier of this server, who holds it there, and what is pinned.

Rules. A chunk of the pool belongs to at most one DRAM copy, so the used chunks are the sum of the copies' places
(`check` asserts it). A copy is *held* by the loads that fill or use it and by the instances that map it: nothing of a
held copy is evicted. An idle copy keeps what is ready, gives up its last chunks first, and what is left of it is used
by the next load (L2). Bytes can outlive their welcome: a copy that must go while it is held is *doomed*, is found by
nobody any more, and gives its chunks back when its last holder lets go. A DRAM copy stands on the small files of an SSD
copy, where a worker reads the index of an instance; hence an SSD copy goes together with the DRAM copies above it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from whimbrel.wire.messages import ResidentModel, Tier

from services.storage_agent.core.chunks import CheckpointKey, ChunkId, Layout
from services.storage_agent.core.eviction import Candidate

PINNABLE = (Tier.SSD, Tier.DRAM)


@dataclass(slots=True, kw_only=True, eq=False)
class SsdCopy:
    """A checkpoint directory, whole or with chunks `missing`. `size_bytes` is all that it takes when it is whole: that
    much is reserved from the start. `users` are the fetches that work on it; `used_s` is when it was last wanted."""

    key: CheckpointKey
    layout: Layout
    size_bytes: int
    used_s: float
    missing: set[ChunkId] = field(default_factory=set)
    users: set[str] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        return not self.missing

    @property
    def stored_bytes(self) -> int:
        return self.layout.size_bytes - self.layout.bytes_in(self.missing)


@dataclass(slots=True, kw_only=True, eq=False)
class DramCopy:
    """Chunks of the pool that hold, or are about to hold, a checkpoint.

    `places` are the pool's chunks by the checkpoint's; those in `ready` have their bytes, verified.
    """

    copy_id: int
    key: CheckpointKey
    layout: Layout
    size_bytes: int
    used_s: float
    places: dict[ChunkId, int] = field(default_factory=dict)
    ready: set[ChunkId] = field(default_factory=set)
    holders: set[str] = field(default_factory=set)
    is_doomed: bool = False

    @property
    def is_held(self) -> bool:
        return bool(self.holders)

    @property
    def is_whole(self) -> bool:
        return len(self.ready) == self.layout.chunk_count

    @property
    def ready_bytes(self) -> int:
        return self.layout.bytes_in(self.ready)

    def unplaced(self) -> list[ChunkId]:
        """The chunks that have no place in the pool."""
        return [chunk for chunk in self.layout.chunks() if chunk not in self.places]

    def partitions(self) -> tuple[tuple[int, ...], ...]:
        """The pool's chunks of each partition in file order; only when every chunk has its place."""
        return tuple(
            tuple(self.places[ChunkId(partition, number)] for number in range(count))
            for partition, count in enumerate(self.layout.counts())
        )


class Residency:
    """The tiers of one server. `chunk_count` and `ssd_size_bytes` are the budgets of DRAM and SSD."""

    def __init__(self, *, chunk_count: int, ssd_size_bytes: int) -> None:
        assert chunk_count > 0
        assert ssd_size_bytes > 0
        self.chunk_count = chunk_count
        self.ssd_size_bytes = ssd_size_bytes
        self._ssd: dict[CheckpointKey, SsdCopy] = {}
        self._dram: dict[int, DramCopy] = {}
        self._pins: dict[str, set[Tier]] = {}
        self._copies_made = 0

    # --- SSD ---

    def add_ssd(
        self,
        key: CheckpointKey,
        *,
        layout: Layout,
        size_bytes: int,
        now: float,
        missing: Iterable[ChunkId] = (),
    ) -> SsdCopy:
        """A copy is on the SSD, or being made there: then with the chunks that it has not got yet."""
        assert key not in self._ssd
        copy = SsdCopy(key=key, layout=layout, size_bytes=size_bytes, used_s=now, missing=set(missing))
        self._ssd[key] = copy
        return copy

    def ssd(self, key: CheckpointKey) -> SsdCopy | None:
        return self._ssd.get(key)

    def ssd_copies(self, model_id: str | None = None) -> tuple[SsdCopy, ...]:
        return tuple(c for c in self._ssd.values() if model_id is None or c.key.model_id == model_id)

    def use_ssd(self, key: CheckpointKey, *, now: float) -> None:
        """The copy is wanted now; nothing happens when it was removed meanwhile."""
        if key in self._ssd:
            self._ssd[key].used_s = now

    def remove_ssd(self, key: CheckpointKey) -> None:
        """The directory is gone or no good; what DRAM holds of it stays for the load that is replacing it."""
        self._ssd.pop(key, None)

    def evict(self, key: CheckpointKey) -> tuple[int, ...]:
        """Forget the checkpoint in both tiers. Returns the chunks that are free now."""
        self.remove_ssd(key)
        return tuple(chunk for copy in self._of(key) for chunk in self.drop(copy.copy_id))

    def ssd_used_bytes(self) -> int:
        return sum(copy.size_bytes for copy in self._ssd.values())

    def ssd_candidates(self) -> list[Candidate[CheckpointKey]]:
        """Every SSD copy, in bytes. One that a fetch works on, whose bytes somebody holds in DRAM, or that is pinned
        here or there is held."""
        return [
            Candidate(
                key=copy.key,
                size=copy.size_bytes,
                # A copy that only the SSD holds goes before one that DRAM holds too: it is the less wanted one.
                used=(bool(self._of(copy.key)), copy.used_s),
                is_held=bool(copy.users or self.pinned(copy.key.model_id))
                or any(above.is_held for above in self._of(copy.key)),
            )
            for copy in self._ssd.values()
        ]

    # --- DRAM ---

    def open_copy(self, key: CheckpointKey, *, layout: Layout, size_bytes: int, holder: str, now: float) -> DramCopy:
        """The DRAM copy of this checkpoint, an empty one where there is none, held by `holder` from now on."""
        copy = self.find(key)
        if copy is None:
            self._copies_made += 1
            copy = DramCopy(copy_id=self._copies_made, key=key, layout=layout, size_bytes=size_bytes, used_s=now)
            self._dram[copy.copy_id] = copy
        self.hold(copy.copy_id, holder, now=now)
        return copy

    def find(self, key: CheckpointKey) -> DramCopy | None:
        """The copy of this checkpoint that a load can use, whole or not."""
        return next((copy for copy in self._of(key) if not copy.is_doomed), None)

    def copy(self, copy_id: int) -> DramCopy | None:
        return self._dram.get(copy_id)

    def dram_copies(self, model_id: str | None = None) -> tuple[DramCopy, ...]:
        return tuple(c for c in self._dram.values() if model_id is None or c.key.model_id == model_id)

    def place(self, copy_id: int, chunks: Iterable[int]) -> None:
        """Give free chunks of the pool to what has no place yet, in the order of loading; `chunks` are as many."""
        copy = self._dram[copy_id]
        assert copy.is_held
        copy.places.update(zip(copy.unplaced(), chunks, strict=True))

    def arrive(self, copy_id: int, chunk: ChunkId) -> None:
        """The bytes of a chunk are in its place, verified."""
        copy = self._dram[copy_id]
        assert chunk in copy.places
        copy.ready.add(chunk)

    def hold(self, copy_id: int, holder: str, *, now: float) -> None:
        copy = self._dram[copy_id]
        assert holder not in copy.holders
        copy.holders.add(holder)
        copy.used_s = now

    def let_go(self, copy_id: int, holder: str, *, now: float) -> tuple[int, ...]:
        """`holder` needs the copy no more. Returns the chunks that are free now: with the last holder goes what is not
        ready, and of a doomed copy everything. Nothing happens when it does not hold it."""
        copy = self._dram.get(copy_id)
        if copy is None or holder not in copy.holders:
            return ()
        copy.holders.discard(holder)
        copy.used_s = now
        return self._settle(copy)

    def drop(self, copy_id: int) -> tuple[int, ...]:
        """The copy must go: at once when nobody holds it, else when its last holder lets go. Returns freed chunks."""
        copy = self._dram.get(copy_id)
        if copy is None:
            return ()
        copy.is_doomed = True
        return self._settle(copy)

    def shed(self, copy_id: int, count: int) -> tuple[int, ...]:
        """An idle copy gives up its last `count` chunks: a load begins with the first. Returns the freed chunks."""
        copy = self._dram[copy_id]
        assert not copy.is_held
        last = sorted(copy.places, key=lambda chunk: (chunk.number, chunk.partition))[-count:] if count else []
        copy.ready.difference_update(last)
        freed = tuple(copy.places.pop(chunk) for chunk in last)
        if not copy.places:
            del self._dram[copy_id]
        return freed

    def used_chunks(self) -> int:
        return sum(len(copy.places) for copy in self._dram.values())

    def dram_candidates(self) -> list[Candidate[int]]:
        """Every DRAM copy by its id, in chunks."""
        return [
            Candidate(
                key=copy.copy_id,
                size=len(copy.places),
                used=(False, copy.used_s),
                is_held=copy.is_held or Tier.DRAM in self.pinned(copy.key.model_id),
                is_divisible=True,
            )
            for copy in self._dram.values()
        ]

    # --- pins ---

    def pin(self, model_id: str, tier: Tier) -> None:
        """What is, or comes to be, of the model in the tier is not evicted."""
        assert tier in PINNABLE
        self._pins.setdefault(model_id, set()).add(tier)

    def unpin(self, model_id: str, tier: Tier | None = None) -> None:
        """It may be evicted again; without `tier` from everywhere."""
        left = set() if tier is None else self.pinned(model_id) - {tier}
        if left:
            self._pins[model_id] = left
        else:
            self._pins.pop(model_id, None)

    def pinned(self, model_id: str) -> set[Tier]:
        return set(self._pins.get(model_id, ()))

    def pinned_in(self, tier: Tier) -> frozenset[str]:
        """The models that are pinned in a tier."""
        return frozenset(model_id for model_id, tiers in self._pins.items() if tier in tiers)

    # --- the whole ---

    def resident(self) -> tuple[ResidentModel, ...]:
        """Every checkpoint of which something is here."""
        keys = dict.fromkeys((*self._ssd, *(copy.key for copy in self._dram.values() if not copy.is_doomed)))
        return tuple(found for key in keys if (found := self._resident(key)) is not None)

    def check(self) -> None:
        """Assert what must hold after every step."""
        chunks = [chunk for copy in self._dram.values() for chunk in copy.places.values()]
        assert len(chunks) == len(set(chunks)), "a chunk has two owners"
        assert self.used_chunks() == len(chunks) <= self.chunk_count, "more chunks used than there are"
        assert all(0 <= chunk < self.chunk_count for chunk in chunks), "a chunk that the pool does not have"
        for copy in self._dram.values():
            assert copy.ready <= copy.places.keys(), "bytes without a place"
            assert all(copy.layout.has(chunk) for chunk in copy.places), "a chunk that the checkpoint does not have"
            if not copy.is_held:
                assert not copy.is_doomed, "a dead copy kept its chunks"
                assert copy.places.keys() == copy.ready, "an idle copy keeps places without bytes"
                assert copy.places, "an empty copy stayed"

    def _resident(self, key: CheckpointKey) -> ResidentModel | None:
        ssd, dram = self._ssd.get(key), self.find(key)
        ssd_bytes = 0 if ssd is None else ssd.stored_bytes
        dram_bytes = 0 if dram is None else dram.ready_bytes
        if not ssd_bytes and not dram_bytes:
            return None
        layout = (ssd or dram).layout  # type: ignore[union-attr]
        tier = Tier.REMOTE
        if dram is not None and dram.is_whole:
            tier = Tier.DRAM
        elif ssd is not None and ssd.is_whole:
            tier = Tier.SSD
        return ResidentModel(
            model_id=key.model_id,
            checkpoint_digest=key.checkpoint_digest,
            tier=tier,
            size_bytes=layout.size_bytes,
            dram_bytes=dram_bytes,
            ssd_bytes=ssd_bytes,
            pinned=tuple(tier for tier in PINNABLE if tier in self.pinned(key.model_id)),
        )

    def _of(self, key: CheckpointKey) -> list[DramCopy]:
        return [copy for copy in self._dram.values() if copy.key == key]

    def _settle(self, copy: DramCopy) -> tuple[int, ...]:
        """What an idle copy has to give back."""
        if copy.is_held:
            return ()
        kept = set() if copy.is_doomed else copy.ready
        freed = tuple(place for chunk, place in copy.places.items() if chunk not in kept)
        copy.places = {chunk: place for chunk, place in copy.places.items() if chunk in kept}
        copy.ready = copy.ready & kept
        if not copy.places:
            del self._dram[copy.copy_id]
        return freed
