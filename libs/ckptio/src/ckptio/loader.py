"""The loader: checkpoints into a chunk pool, and through it onto GPUs, chunk by chunk (L1, L2, L4, L5)."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckptio.copier import check_buffers
from ckptio.devices import DeviceBuffer
from ckptio.errors import Cancelled, PathLike
from ckptio.layout import Layout, read_layout
from ckptio.leasing import Places, PoolLeases, identity_of
from ckptio.load_plan import Factors, LoadReport
from ckptio.loaded import Loaded
from ckptio.pool import ChunkPool
from ckptio.reader import READER_THREADS, Reader
from ckptio.residency import ChunkKey
from ckptio.transfer import Transfer, plan_transfer

if TYPE_CHECKING:
    from ckptio import _native

Progress = Callable[[int], None]

# The pool of a single load: the readers' chunks and as many on their way to the GPU.
RING_BYTES = 128 * 1024 * 1024

# How often a load that waits for its turn looks whether it is still wanted.
_TURN_POLL_S = 0.05


class Loader:
    """Loads into one pool; what was loaded stays resident, chunk by chunk, until its place is needed.

    Loads take turns: one at a time goes at the speed of the device, predictably (L9, E4). Thread-safe.
    `ceilings_bytes_per_s` (tier -> bandwidth) are only for the reports.
    """

    def __init__(
        self,
        pool: ChunkPool,
        *,
        threads: int = READER_THREADS,
        factors: Factors | None = None,
        ceilings_bytes_per_s: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._factors = factors or Factors()
        self._pool = pool
        self._reader = Reader(threads if self._factors.threads else 1)
        self._ceilings_bytes_per_s = dict(ceilings_bytes_per_s)
        self._leases = PoolLeases(pool)
        self._turn = threading.Lock()
        self._is_closed = False

    @property
    def leases(self) -> int:
        """Leases of chunks that open loads have."""
        return self._leases.leases

    @property
    def resident_chunks(self) -> int:
        """Chunks of the pool that hold something, leased or not."""
        return self._leases.resident_chunks

    def load(
        self,
        path: PathLike,
        *,
        verify: bool = True,
        progress: Progress | None = None,
        cancel: _native.CancelToken | None = None,
    ) -> Loaded:
        """Brings a checkpoint (converted, or safetensors as they are) into the pool, and leases its chunks.

        Reads only what is not resident. `progress` gets the bytes done so far, resident ones included. Raises
        `PoolExhausted` when leased chunks leave too little room, and what `Reader.read` and `read_layout`
        raise; after an error nothing of it is leased, and only what was evicted for it is gone.
        """
        with self._in_turn(path, cancel) as start:
            transfer = self._plan(read_layout(path), verify, progress, cancel)
            places = self._leases.take(transfer.keys, may_be_ring=False)
            with self._given_up_on_error(places):
                read = transfer.read(places, self._pool.mapping)
            self._leases.settle(places)
            report = transfer.report(start, read)
        return Loaded(
            layout=transfer.layout,
            chunks=transfer.by_partition(places),
            report=report,
            pool=self._pool,
            release=lambda: self._release(transfer.keys),
        )

    def load_onto(
        self,
        path: PathLike,
        buffers: Sequence[DeviceBuffer],
        *,
        verify: bool = True,
        progress: Progress | None = None,
        cancel: _native.CancelToken | None = None,
    ) -> LoadReport:
        """Loads partition k into `buffers[k]`, on GPUs or the host, each with a copier of its own.

        Returns when every byte has arrived, which is what `progress` counts. A checkpoint that fits the pool
        stays resident there; a larger one goes through a part of it as through a ring. Raises as `load` does,
        ValueError when the buffers do not fit, `DeviceError` when a copy fails; the buffers then hold
        anything.
        """
        return self.load_layout_onto(
            read_layout(path), buffers, verify=verify, progress=progress, cancel=cancel
        )

    def load_layout_onto(
        self,
        layout: Layout,
        buffers: Sequence[DeviceBuffer],
        *,
        verify: bool = True,
        progress: Progress | None = None,
        cancel: _native.CancelToken | None = None,
    ) -> LoadReport:
        """`load_onto` of a checkpoint whose layout was read before."""
        with self._in_turn(layout.files[0].parent, cancel) as start:
            transfer = self._plan(layout, verify, progress, cancel)
            check_buffers(layout.index, buffers)
            if not self._factors.pinned:
                return transfer.report(start, *transfer.copy_through_fresh_memory(buffers))
            may_be_ring = self._factors.bulk and self._factors.pipeline
            places = self._leases.take(transfer.keys, may_be_ring=may_be_ring)
            with self._given_up_on_error(places):
                read, copied = transfer.copy(places, self._pool.mapping, buffers)
            self._leases.settle(places)
            self._release(tuple(places.indices))
            return transfer.report(start, read, copied)

    def drop(self, path: PathLike | None = None) -> int:
        """Gives idle chunks (of one checkpoint, or all) back to the pool, and says how many."""
        return self._leases.drop(None if path is None else identity_of(read_layout(path)))

    def close(self) -> None:
        """Ends the threads and gives idle chunks back; leased ones follow as loads close. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._reader.close()
        self.drop()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warnings.warn("unclosed ckptio loader", ResourceWarning, source=self, stacklevel=2)

    @contextmanager
    def _in_turn(self, path: PathLike, cancel: _native.CancelToken | None) -> Iterator[float]:
        is_ours = False
        try:
            while not is_ours:
                is_ours = self._turn.acquire(timeout=_TURN_POLL_S)
                if self._is_closed:
                    raise ValueError("the loader is closed")
                if cancel is not None and cancel.is_cancelled:
                    raise Cancelled(path)
            yield time.monotonic()
        finally:
            if is_ours:
                self._turn.release()

    @contextmanager
    def _given_up_on_error(self, places: Places) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._leases.give_up(places)
            if self._is_closed:
                self.drop()
            raise

    def _release(self, keys: Sequence[ChunkKey]) -> None:
        self._leases.release(keys)
        if self._is_closed:
            self.drop()

    def _plan(
        self, layout: Layout, verify: bool, progress: Progress | None, cancel: _native.CancelToken | None
    ) -> Transfer:
        return plan_transfer(
            layout,
            self._pool,
            self._reader,
            self._factors,
            verify=verify,
            progress=progress,
            cancel=cancel,
            ceilings_bytes_per_s=self._ceilings_bytes_per_s,
        )


def load_layout_onto(layout: Layout, buffers: Sequence[DeviceBuffer], *, verify: bool) -> LoadReport:
    """One load onto devices, through a pool that lives as long as this call."""
    chunk_size_bytes = layout.index.chunk_size_bytes
    pool_bytes = max(RING_BYTES, 2 * chunk_size_bytes)
    with ChunkPool.create(None, pool_bytes, chunk_size_bytes) as pool, Loader(pool) as loader:
        return loader.load_layout_onto(layout, buffers, verify=verify)
