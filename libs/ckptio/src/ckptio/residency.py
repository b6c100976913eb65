"""Pure: which chunks of which checkpoints lie in a pool, who leases them, and which go first (L2).

A model may be partly resident: eviction takes chunks, not models, and a load reads what is missing. A chunk
that is leased never goes; of the others the one whose last lease ended longest ago goes first, and of one
checkpoint its last chunk goes before its first, since a load begins with the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Chunk number `chunk_index` of a partition of the checkpoint with identity `checkpoint`."""

    checkpoint: str
    partition: int
    chunk_index: int


@dataclass(slots=True)
class _Resident:
    """A chunk in the pool; idle when nobody leases it."""

    pool_index: int
    leases: int


class ResidentChunks:
    """The table of one pool. Chunks are admitted leased, by whoever read them."""

    def __init__(self) -> None:
        self._residents: dict[ChunkKey, _Resident] = {}
        # Those without a lease, in order of eviction: a dict keeps its order of insertion.
        self._idle: dict[ChunkKey, None] = {}

    @property
    def idle_chunks(self) -> int:
        """How many chunks could be evicted now."""
        return len(self._idle)

    @property
    def leases(self) -> int:
        """How many leases there are, over all chunks."""
        return sum(resident.leases for resident in self._residents.values())

    def __len__(self) -> int:
        return len(self._residents)

    def lease(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, int]:
        """Leases those of `keys` that are resident, and gives their place in the pool."""
        leased = {}
        for key in keys:
            resident = self._residents.get(key)
            if resident is None:
                continue
            resident.leases += 1
            self._idle.pop(key, None)
            leased[key] = resident.pool_index
        return leased

    def admit(self, places: Iterable[tuple[ChunkKey, int]]) -> None:
        """Takes in chunks that were just read, leased once. Raises ValueError for one that is there."""
        for key, pool_index in places:
            if key in self._residents:
                raise ValueError(f"{key} is resident already")
            self._residents[key] = _Resident(pool_index, leases=1)

    def release(self, keys: Sequence[ChunkKey]) -> None:
        """Ends a lease of each chunk; it stays resident. Raises ValueError for one without a lease."""
        for key in reversed(keys):
            resident = self._residents.get(key)
            if resident is None or resident.leases == 0:
                raise ValueError(f"{key} has no lease")
            resident.leases -= 1
            if resident.leases == 0:
                self._idle[key] = None

    def evict(self, count: int) -> list[int]:
        """Forgets `count` idle chunks, or as many as there are, and gives their places back."""
        keys = [key for key, _ in zip(self._idle, range(count), strict=False)]
        return [self._forget(key) for key in keys]

    def drop(self, checkpoint: str) -> list[int]:
        """Forgets every idle chunk of one checkpoint, and gives their places back."""
        return [self._forget(key) for key in list(self._idle) if key.checkpoint == checkpoint]

    def _forget(self, key: ChunkKey) -> int:
        del self._idle[key]
        return self._residents.pop(key).pool_index
