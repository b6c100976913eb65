"""The loader: checkpoints into a chunk pool, and through it onto GPUs, chunk by chunk (L1, L2, L4, L5)."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckptio.devices import DeviceBuffer, device_error
from ckptio.errors import Cancelled, PathLike
from ckptio.layout import Layout, read_layout
from ckptio.leasing import Places, PoolLeases, identity_of
from ckptio.load_plan import Factors, LoadReport, Piece, TierReport, plan_pieces
from ckptio.loaded import Loaded
from ckptio.native import require_native
from ckptio.pool import ChunkPool
from ckptio.reader import READER_THREADS, Reader, ReadOrder, ReadReport
from ckptio.residency import ChunkKey

if TYPE_CHECKING:
    from ckptio import _native

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A load, before anything is moved, and what its caller wants to hear of it."""

    layout: Layout
    pieces: tuple[Piece, ...]
    keys: tuple[ChunkKey, ...]
    is_verified: bool
    progress: Progress | None
    cancel: _native.CancelToken | None

    def key(self, piece: Piece) -> ChunkKey:
        """The chunk that a piece belongs to."""
        return ChunkKey(self.keys[0].checkpoint, piece.partition, piece.chunk_index)


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
        raise; after an error, pool and leases are as they were.
        """
        with self._in_turn() as start:
            load = self._plan(path, verify, progress, cancel)
            places = self._leases.take(load.keys, may_be_ring=False)
            with self._given_up_on_error(places):
                read = self._read(load, places, self._pool.mapping, None)
            self._leases.settle(places)
            report = self._report(load, places, start, read)
        return Loaded(
            layout=load.layout,
            chunks=_by_partition(load, places),
            report=report,
            pool=self._pool,
            release=lambda: self._release(load.keys),
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

        Returns when every byte has arrived. What fits the pool stays resident there; a checkpoint larger than
        the pool goes through it as through a ring. Raises as `load` does, ValueError when the buffers do not
        fit, `DeviceError` when a copy fails; the buffers then hold anything.
        """
        with self._in_turn() as start:
            load = self._plan(path, verify, progress, cancel)
            _check_buffers(load.layout, buffers)
            if not self._factors.pinned:
                return self._load_through_fresh_memory(load, buffers, start)
            may_be_ring = self._factors.bulk and self._factors.pipeline
            places = self._leases.take(load.keys, may_be_ring=may_be_ring)
            with self._given_up_on_error(places):
                read, copied = self._copy(load, places, self._pool.mapping, buffers)
            self._leases.settle(places)
            self._release(tuple(places.indices))
            return self._report(load, places, start, read, copied)

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
    def _in_turn(self) -> Iterator[float]:
        with self._turn:
            if self._is_closed:
                raise ValueError("the loader is closed")
            yield time.monotonic()

    @contextmanager
    def _given_up_on_error(self, places: Places) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._leases.give_up(places)
            raise

    def _release(self, keys: Sequence[ChunkKey]) -> None:
        self._leases.release(keys)
        if self._is_closed:
            self.drop()

    def _plan(
        self, path: PathLike, verify: bool, progress: Progress | None, cancel: _native.CancelToken | None
    ) -> _Load:
        layout = read_layout(path)
        chunk_size_bytes = self._pool.chunk_size_bytes
        if layout.is_verified and layout.index.chunk_size_bytes != chunk_size_bytes:
            sizes = f"{layout.index.chunk_size_bytes} bytes, those of the pool {chunk_size_bytes}"
            raise ValueError(f"{path}: its chunks have {sizes}; make a pool with the same")
        if verify and layout.is_verified and not self._factors.bulk:
            raise ValueError("digests are those of whole chunks; without bulk reads pass verify=False")
        pieces = plan_pieces(layout.index, chunk_size_bytes, is_bulk=self._factors.bulk)
        identity = identity_of(layout)
        keys = {ChunkKey(identity, piece.partition, piece.chunk_index): None for piece in pieces}
        return _Load(
            layout=layout,
            pieces=tuple(pieces),
            keys=tuple(keys),
            is_verified=verify and layout.is_verified,
            progress=progress,
            cancel=cancel,
        )

    def _load_through_fresh_memory(
        self, load: _Load, buffers: Sequence[DeviceBuffer], start: float
    ) -> LoadReport:
        """Without pinned memory: what a loader without a pool does, page faults included."""
        places = Places(resident={}, fresh={key: number for number, key in enumerate(load.keys)})
        size_bytes = max(len(load.keys), 1) * self._pool.chunk_size_bytes
        with require_native().Mapping.anonymous(size_bytes) as memory:
            read, copied = self._copy(load, places, memory, buffers)
        return self._report(load, places, start, read, copied)

    def _copy(
        self, load: _Load, places: Places, memory: _native.Mapping, buffers: Sequence[DeviceBuffer]
    ) -> tuple[ReadReport, TierReport]:
        partitions = load.layout.index.partitions
        copies = []
        for piece in load.pieces:
            # A buffer may end where the true bytes of its partition do; the padding of the file stays behind.
            left_bytes = partitions[piece.partition].size_bytes - piece.chunk.offset_bytes
            copies.append(
                (piece.partition, piece.chunk.offset_bytes, min(piece.chunk.size_bytes, left_bytes))
            )
        chunk_size_bytes = self._pool.chunk_size_bytes
        ring = [index * chunk_size_bytes for index in places.ring]
        memories = [buffer.memory for buffer in buffers]
        sink = require_native().CopyPipeline(
            memories, copies, memory, ring, chunk_size_bytes, self._factors.pipeline
        )
        try:
            read = self._read(load, places, memory, sink)
        except BaseException as error:
            code, operation, _, _ = sink.finish(True)
            if code and isinstance(error, Cancelled):
                raise device_error(code, operation) from None
            raise
        code, operation, copied_bytes, seconds = sink.finish(False)
        if code:
            raise device_error(code, operation)
        return read, TierReport(
            tier="GPU",
            size_bytes=copied_bytes,
            seconds=seconds,
            ceiling_bytes_per_s=self._ceilings_bytes_per_s.get("GPU"),
        )

    def _read(
        self, load: _Load, places: Places, memory: _native.Mapping, sink: _native.CopyPipeline | None
    ) -> ReadReport:
        """Reads what is not resident to its place in `memory`, or by way of the ring of `sink`."""
        chunk_size_bytes = self._pool.chunk_size_bytes
        indices = places.indices
        orders = []
        for piece in load.pieces:
            key = load.key(piece)
            start_bytes = None if key not in indices else indices[key] * chunk_size_bytes
            if start_bytes is not None:
                start_bytes += piece.offset_in_chunk(chunk_size_bytes)
            orders.append(
                ReadOrder(
                    chunk=piece.chunk,
                    chunk_index=piece.chunk_index,
                    target_offset_bytes=start_bytes,
                    file=piece.partition,
                    digest=piece.digest,
                    is_resident=key in places.resident,
                )
            )
        return self._reader.run(
            memory,
            load.layout.files,
            orders,
            is_verified=load.is_verified,
            is_bounced=memory is self._pool.mapping and not self._pool.report.has_huge_pages,
            direct=None if self._factors.direct else False,
            sink=sink,
            progress=load.progress,
            cancel=load.cancel,
        )

    def _report(
        self, load: _Load, places: Places, start: float, read: ReadReport, copied: TierReport | None = None
    ) -> LoadReport:
        size_bytes = sum(piece.chunk.size_bytes for piece in load.pieces)
        ssd = TierReport(
            tier="SSD",
            size_bytes=read.size_bytes,
            seconds=read.seconds,
            ceiling_bytes_per_s=self._ceilings_bytes_per_s.get("SSD"),
        )
        return LoadReport(
            size_bytes=size_bytes,
            resident_bytes=size_bytes - read.size_bytes,
            direct_bytes=read.direct_bytes,
            reread_chunks=read.reread_chunks,
            seconds=time.monotonic() - start,
            verify_s=read.verify_s,
            tiers=(ssd,) if copied is None else (ssd, copied),
        )


def _by_partition(load: _Load, places: Places) -> tuple[tuple[int, ...], ...]:
    indices = places.indices
    chunks: list[list[int]] = [[] for _ in load.layout.files]
    for key in load.keys:
        chunks[key.partition].append(indices[key])
    return tuple(map(tuple, chunks))


def _check_buffers(layout: Layout, buffers: Sequence[DeviceBuffer]) -> None:
    partitions = layout.index.partitions
    if len(buffers) != len(partitions):
        raise ValueError(f"{len(buffers)} buffers for {len(partitions)} partitions")
    for number, (buffer, part) in enumerate(zip(buffers, partitions, strict=True)):
        if buffer.size_bytes < part.size_bytes:
            raise ValueError(
                f"buffer {number} has {buffer.size_bytes} bytes, its partition {part.size_bytes}"
            )
