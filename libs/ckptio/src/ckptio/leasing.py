"""Chunks of a pool on loan to loads: the resident are leased, the missing get a place or share a ring."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptio.errors import PoolExhausted
from ckptio.layout import Layout
from ckptio.pool import ChunkPool
from ckptio.residency import ChunkKey, ResidentChunks

# Places of a ring for which others are evicted: one for each reader, and as many on their way to the device.
RING_CHUNKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Pool chunks for one load: those that hold theirs, those to be read into, and those that many share."""

    resident: dict[ChunkKey, int]
    fresh: dict[ChunkKey, int] = field(default_factory=dict)
    ring: tuple[int, ...] = ()

    @property
    def indices(self) -> dict[ChunkKey, int]:
        """Where each chunk is; one that goes through the ring has no place."""
        return self.resident | self.fresh


class PoolLeases:
    """All that is lent of one pool. Thread-safe; every place taken goes back by `settle` or `give_up`."""

    def __init__(self, pool: ChunkPool) -> None:
        self._pool = pool
        self._residents = ResidentChunks()
        self._lock = threading.Lock()

    @property
    def leases(self) -> int:
        """Leases of resident chunks."""
        with self._lock:
            return self._residents.leases

    @property
    def resident_chunks(self) -> int:
        """Chunks that hold something, leased or not."""
        with self._lock:
            return len(self._residents)

    def take(self, keys: Sequence[ChunkKey], *, may_be_ring: bool) -> Places:
        """Leases what is resident, and makes room for the rest by eviction.

        Where there is too little room for all, a few places become a ring if `may_be_ring`. Raises
        `PoolExhausted`, having evicted nothing.
        """
        with self._lock:
            resident = self._residents.lease(keys)
            missing = [key for key in keys if key not in resident]
            try:
                indices = self._make_room(len(missing), may_be_ring)
            except BaseException:
                self._residents.release(list(resident))
                raise
        if len(indices) < len(missing):
            return Places(resident=resident, ring=indices)
        return Places(resident=resident, fresh=dict(zip(missing, indices, strict=True)))

    def _make_room(self, count: int, may_be_ring: bool) -> tuple[int, ...]:
        """That many chunks or, as a ring, what is free but no fewer than a ring needs to keep up."""
        room = self._pool.free_chunks + self._residents.idle_chunks
        if count > room:
            if not may_be_ring or room == 0:
                raise PoolExhausted(self._pool.path, requested_chunks=count, free_chunks=room)
            count = min(room, max(self._pool.free_chunks, RING_CHUNKS))
        self._pool.free(self._residents.evict(max(count - self._pool.free_chunks, 0)))
        return self._pool.allocate(count)

    def settle(self, places: Places) -> None:
        """The fresh chunks hold their bytes now: they are resident, and leased once. The ring goes back."""
        with self._lock:
            self._residents.admit(places.fresh.items())
            self._pool.free(places.ring)

    def give_up(self, places: Places) -> None:
        """Everything goes back: nobody knows what is in the fresh chunks."""
        with self._lock:
            self._residents.release(list(places.resident))
            self._pool.free([*places.fresh.values(), *places.ring])

    def release(self, keys: Sequence[ChunkKey]) -> None:
        """Ends one lease of each chunk."""
        with self._lock:
            self._residents.release(keys)

    def drop(self, checkpoint: str | None = None) -> int:
        """Gives idle chunks, of one checkpoint or all, back to the pool; returns how many."""
        with self._lock:
            residents = self._residents
            indices = residents.evict(len(residents)) if checkpoint is None else residents.drop(checkpoint)
            self._pool.free(indices)
        return len(indices)


def identity_of(layout: Layout) -> str:
    """What tells a checkpoint from others: the digests of its bytes, or its files where there are none."""
    if layout.manifest is not None:
        return layout.manifest.index_digest
    return ";".join(str(state) for state in layout.states)
