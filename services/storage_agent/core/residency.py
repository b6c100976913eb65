"""Owns which checkpoint is in which tier of this server: SSD copies, DRAM copies, their chunks and their leases.

Rules. A chunk belongs to at most one DRAM copy, so the used chunks are the sum of the copies' chunks (`check` asserts
it). A copy that is being loaded or that an instance maps is *held*: it can't be evicted. Bytes can outlive their
welcome: a copy that must go while an instance still maps it is *doomed*, is found by nobody any more, and gives its
chunks back when its last lease ends. The DRAM tier is included in the SSD tier, because a worker reads the index of an
instance from the SSD copy; hence an SSD copy goes together with the DRAM copies above it (L2, architecture section 5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from whimbrel.wire.messages import ResidentModel, Tier

from services.storage_agent.core.eviction import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointKey:
    """One deployed content of a model; deploying other content under the same id makes another key."""

    model_id: str
    checkpoint_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SsdCopy:
    """A whole checkpoint directory; `used_s` is when it was last wanted."""

    key: CheckpointKey
    size_bytes: int
    used_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DramCopy:
    """Chunks of the pool that hold, or are about to hold, a checkpoint.

    `partitions` has the chunk numbers of each partition in file order, `partition_bytes` the size of each file.
    """

    copy_id: int
    key: CheckpointKey
    size_bytes: int
    partition_bytes: tuple[int, ...]
    partitions: tuple[tuple[int, ...], ...]
    used_s: float
    is_loading: bool = True
    is_whole: bool = False
    is_doomed: bool = False
    leases: frozenset[str] = frozenset()

    @property
    def chunks(self) -> tuple[int, ...]:
        return tuple(chunk for partition in self.partitions for chunk in partition)

    @property
    def is_held(self) -> bool:
        return self.is_loading or bool(self.leases)


class Residency:
    """The tiers of one server. `chunk_count` and `ssd_size_bytes` are the budgets of DRAM and SSD."""

    def __init__(self, *, chunk_count: int, ssd_size_bytes: int) -> None:
        assert chunk_count > 0
        assert ssd_size_bytes > 0
        self.chunk_count = chunk_count
        self.ssd_size_bytes = ssd_size_bytes
        self._ssd: dict[CheckpointKey, SsdCopy] = {}
        self._dram: dict[int, DramCopy] = {}
        self._copies_made = 0

    # --- SSD ---

    def add_ssd(self, key: CheckpointKey, *, size_bytes: int, now: float) -> None:
        """A whole copy is on the SSD (found at start, or fetched)."""
        assert key not in self._ssd
        self._ssd[key] = SsdCopy(key=key, size_bytes=size_bytes, used_s=now)

    def ssd(self, key: CheckpointKey) -> SsdCopy | None:
        return self._ssd.get(key)

    def ssd_copies(self, model_id: str | None = None) -> tuple[SsdCopy, ...]:
        return tuple(c for c in self._ssd.values() if model_id is None or c.key.model_id == model_id)

    def use_ssd(self, key: CheckpointKey, *, now: float) -> None:
        """The copy is wanted now; nothing happens when it was removed meanwhile."""
        if key in self._ssd:
            self._ssd[key] = replace(self._ssd[key], used_s=now)

    def remove_ssd(self, key: CheckpointKey) -> None:
        """The directory is gone or no good; what DRAM holds of it stays for the load that is replacing it."""
        self._ssd.pop(key, None)

    def evict(self, key: CheckpointKey) -> tuple[int, ...]:
        """Forget the checkpoint in both tiers (DRAM is included in SSD). Returns the chunks that are free now."""
        self.remove_ssd(key)
        return tuple(chunk for copy in self._of(key) for chunk in self.drop(copy.copy_id))

    def ssd_used_bytes(self) -> int:
        return sum(copy.size_bytes for copy in self._ssd.values())

    def ssd_candidates(self) -> list[Candidate[CheckpointKey]]:
        """Every SSD copy, in bytes. One whose bytes an instance maps, or a load reads, is held."""
        return [
            Candidate(
                key=copy.key,
                size=copy.size_bytes,
                # A copy that only the SSD holds goes before one that DRAM holds too: it is the less wanted one.
                used=(bool(self._of(copy.key)), copy.used_s),
                is_held=any(above.is_held for above in self._of(copy.key)),
            )
            for copy in self._ssd.values()
        ]

    # --- DRAM ---

    def reserve(
        self,
        key: CheckpointKey,
        *,
        size_bytes: int,
        partition_bytes: tuple[int, ...],
        partitions: tuple[tuple[int, ...], ...],
        now: float,
    ) -> DramCopy:
        """Give free chunks to a checkpoint that is about to be read into them."""
        assert self.find(key) is None
        assert len(partition_bytes) == len(partitions)
        self._copies_made += 1
        copy = DramCopy(
            copy_id=self._copies_made,
            key=key,
            size_bytes=size_bytes,
            partition_bytes=partition_bytes,
            partitions=partitions,
            used_s=now,
        )
        self._dram[copy.copy_id] = copy
        return copy

    def find(self, key: CheckpointKey) -> DramCopy | None:
        """The whole copy of this checkpoint that a load can use as it is."""
        return next((copy for copy in self._of(key) if copy.is_whole and not copy.is_doomed), None)

    def copy(self, copy_id: int) -> DramCopy | None:
        return self._dram.get(copy_id)

    def dram_copies(self, model_id: str | None = None) -> tuple[DramCopy, ...]:
        return tuple(c for c in self._dram.values() if model_id is None or c.key.model_id == model_id)

    def begin_load(self, copy_id: int, *, now: float) -> None:
        """A load uses a copy that is there already (a DRAM hit); it is held until `end_load`."""
        copy = self._dram[copy_id]
        assert copy.is_whole
        self._dram[copy_id] = replace(copy, is_loading=True, used_s=now)

    def complete(self, copy_id: int) -> None:
        """Every byte is in its chunk and verified."""
        self._dram[copy_id] = replace(self._dram[copy_id], is_whole=True)

    def end_load(self, copy_id: int, *, now: float) -> tuple[int, ...]:
        """The load is over, well or not. Returns the chunks that are free now: those of a copy that is not whole."""
        copy = replace(self._dram[copy_id], is_loading=False, used_s=now)
        self._dram[copy_id] = replace(copy, is_doomed=copy.is_doomed or not copy.is_whole)
        return self._bury(copy_id)

    def add_lease(self, copy_id: int, instance_id: str) -> None:
        copy = self._dram[copy_id]
        assert self.leased(instance_id) is None
        self._dram[copy_id] = replace(copy, leases=copy.leases | {instance_id})

    def leased(self, instance_id: str) -> DramCopy | None:
        """The copy that an instance maps."""
        return next((copy for copy in self._dram.values() if instance_id in copy.leases), None)

    def leases(self) -> Iterator[str]:
        return (instance_id for copy in self._dram.values() for instance_id in sorted(copy.leases))

    def end_lease(self, instance_id: str, *, now: float) -> tuple[int, ...]:
        """The instance let go. Returns the chunks that are free now: those of a doomed copy nobody maps any more."""
        copy = self.leased(instance_id)
        if copy is None:
            return ()
        self._dram[copy.copy_id] = replace(copy, leases=copy.leases - {instance_id}, used_s=now)
        return self._bury(copy.copy_id)

    def drop(self, copy_id: int) -> tuple[int, ...]:
        """The copy must go: at once when nobody holds it, else when its last holder lets go. Returns freed chunks."""
        copy = self._dram.get(copy_id)
        if copy is None:
            return ()
        self._dram[copy_id] = replace(copy, is_doomed=True)
        return self._bury(copy_id)

    def used_chunks(self) -> int:
        return sum(len(copy.chunks) for copy in self._dram.values())

    def dram_candidates(self) -> list[Candidate[int]]:
        """Every DRAM copy by its id, in chunks."""
        return [
            Candidate(key=copy.copy_id, size=len(copy.chunks), used=(False, copy.used_s), is_held=copy.is_held)
            for copy in self._dram.values()
        ]

    def resident(self) -> tuple[ResidentModel, ...]:
        """Every whole checkpoint once, with the fastest tier that holds it."""
        ssd = [(copy.key, Tier.SSD, copy.size_bytes) for copy in self._ssd.values()]
        whole = [copy for copy in self._dram.values() if copy.is_whole and not copy.is_doomed]
        dram = [(copy.key, Tier.DRAM, copy.size_bytes) for copy in whole]
        fastest = {key: (tier, size_bytes) for key, tier, size_bytes in (*ssd, *dram)}
        return tuple(
            ResidentModel(
                model_id=key.model_id,
                checkpoint_digest=key.checkpoint_digest,
                tier=tier,
                size_bytes=size_bytes,
            )
            for key, (tier, size_bytes) in fastest.items()
        )

    def check(self) -> None:
        """Assert what must hold after every step."""
        chunks = [chunk for copy in self._dram.values() for chunk in copy.chunks]
        assert len(chunks) == len(set(chunks)), "a chunk has two owners"
        assert self.used_chunks() == len(chunks) <= self.chunk_count, "more chunks used than there are"
        assert all(0 <= chunk < self.chunk_count for chunk in chunks), "a chunk that the pool does not have"
        leases = list(self.leases())
        assert len(leases) == len(set(leases)), "an instance maps two copies"
        for copy in self._dram.values():
            assert copy.is_held or (copy.is_whole and not copy.is_doomed), "a dead copy kept its chunks"

    def _of(self, key: CheckpointKey) -> list[DramCopy]:
        return [copy for copy in self._dram.values() if copy.key == key]

    def _bury(self, copy_id: int) -> tuple[int, ...]:
        copy = self._dram[copy_id]
        if copy.is_held or not copy.is_doomed:
            return ()
        del self._dram[copy_id]
        return copy.chunks
