"""One load on its way: from files to a pool, and chunk by chunk on to devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptio.devices import DeviceBuffer, device_error
from ckptio.errors import Cancelled
from ckptio.layout import Layout
from ckptio.leasing import Places, identity_of
from ckptio.load_plan import Factors, LoadReport, Piece, TierReport, plan_pieces
from ckptio.native import require_native
from ckptio.pool import ChunkPool
from ckptio.reader import Reader, ReadOrder, ReadReport
from ckptio.residency import ChunkKey

if TYPE_CHECKING:
    from ckptio import _native


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A load: what is read in which order, through which pool, and what its caller wants to hear of it."""

    layout: Layout
    pool: ChunkPool
    reader: Reader
    factors: Factors
    pieces: tuple[Piece, ...]
    keys: tuple[ChunkKey, ...]
    is_verified: bool
    progress: Callable[[int], None] | None
    cancel: _native.CancelToken | None
    ceilings_bytes_per_s: Mapping[str, float]

    def key(self, piece: Piece) -> ChunkKey:
        """The chunk that a piece belongs to."""
        return ChunkKey(self.keys[0].checkpoint, piece.partition, piece.chunk_index)

    def by_partition(self, places: Places) -> tuple[tuple[int, ...], ...]:
        """The pool's chunks of each partition, in order."""
        indices = places.indices
        chunks: list[list[int]] = [[] for _ in self.layout.files]
        for key in self.keys:
            chunks[key.partition].append(indices[key])
        return tuple(map(tuple, chunks))

    def copy(
        self, places: Places, memory: _native.Mapping, buffers: Sequence[DeviceBuffer]
    ) -> tuple[ReadReport, TierReport]:
        """Reads like `read`, and copies partition k to `buffers[k]` as its chunks arrive."""
        partitions = self.layout.index.partitions
        copies = []
        for piece in self.pieces:
            # A buffer may end where the true bytes of its partition do; the padding of the file stays behind.
            left_bytes = partitions[piece.partition].size_bytes - piece.chunk.offset_bytes
            copies.append(
                (piece.partition, piece.chunk.offset_bytes, min(piece.chunk.size_bytes, left_bytes))
            )
        chunk_size_bytes = self.pool.chunk_size_bytes
        ring = [index * chunk_size_bytes for index in places.ring]
        memories = [buffer.memory for buffer in buffers]
        sink = require_native().CopyPipeline(
            memories, copies, memory, ring, chunk_size_bytes, self.factors.pipeline
        )
        try:
            read = self.read(places, memory, sink)
        except BaseException as error:
            code, operation, *_ = sink.finish(True, None, None)
            if code and isinstance(error, Cancelled):
                raise device_error(code, operation) from None
            raise
        code, operation, copied_bytes, seconds, was_cancelled = sink.finish(False, self.cancel, self.progress)
        if code:
            raise device_error(code, operation)
        if was_cancelled:
            raise Cancelled(self.layout.files[0], done_bytes=copied_bytes)
        return read, TierReport(
            tier="GPU",
            size_bytes=copied_bytes,
            seconds=seconds,
            ceiling_bytes_per_s=self.ceilings_bytes_per_s.get("GPU"),
        )

    def read(
        self, places: Places, memory: _native.Mapping, sink: _native.CopyPipeline | None = None
    ) -> ReadReport:
        """Reads what is not resident to its place in `memory`, or by way of the ring of `sink`."""
        chunk_size_bytes = self.pool.chunk_size_bytes
        indices = places.indices
        orders = []
        for piece in self.pieces:
            key = self.key(piece)
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
        return self.reader.run(
            memory,
            self.layout.files,
            orders,
            is_verified=self.is_verified,
            is_bounced=memory is self.pool.mapping and not self.pool.report.has_huge_pages,
            direct=None if self.factors.direct else False,
            sink=sink,
            progress=self.progress,
            cancel=self.cancel,
            states=self.layout.states,
        )

    def report(self, start: float, read: ReadReport, copied: TierReport | None = None) -> LoadReport:
        """What was done since `start`, a reading of the monotonic clock."""
        size_bytes = sum(piece.chunk.size_bytes for piece in self.pieces)
        ssd = TierReport(
            tier="SSD",
            size_bytes=read.size_bytes,
            seconds=read.seconds,
            ceiling_bytes_per_s=self.ceilings_bytes_per_s.get("SSD"),
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

    def copy_through_fresh_memory(self, buffers: Sequence[DeviceBuffer]) -> tuple[ReadReport, TierReport]:
        """Without pinned memory: what a loader without a pool does, page faults included."""
        places = Places(resident={}, fresh={key: number for number, key in enumerate(self.keys)})
        size_bytes = max(len(self.keys), 1) * self.pool.chunk_size_bytes
        with require_native().Mapping.anonymous(size_bytes) as memory:
            return self.copy(places, memory, buffers)


def plan_transfer(
    layout: Layout,
    pool: ChunkPool,
    reader: Reader,
    factors: Factors,
    *,
    verify: bool,
    progress: Callable[[int], None] | None,
    cancel: _native.CancelToken | None,
    ceilings_bytes_per_s: Mapping[str, float],
) -> Transfer:
    """The transfer of a whole checkpoint; raises ValueError when pool or factors do not go with it."""
    chunk_size_bytes = pool.chunk_size_bytes
    if layout.is_verified and layout.index.chunk_size_bytes != chunk_size_bytes:
        sizes = f"{layout.index.chunk_size_bytes} bytes, those of the pool {chunk_size_bytes}"
        raise ValueError(f"{layout.files[0].parent}: its chunks have {sizes}; make a pool with the same")
    is_verified = verify and layout.is_verified
    if is_verified and not factors.bulk:
        raise ValueError("digests are those of whole chunks; without bulk reads pass verify=False")
    pieces = plan_pieces(layout.index, chunk_size_bytes, is_bulk=factors.bulk)
    # What nobody has verified must not pass for what somebody has.
    identity = identity_of(layout) + ("" if is_verified else " as it was read")
    keys = {ChunkKey(identity, piece.partition, piece.chunk_index): None for piece in pieces}
    return Transfer(
        layout=layout,
        pool=pool,
        reader=reader,
        factors=factors,
        pieces=tuple(pieces),
        keys=tuple(keys),
        is_verified=is_verified,
        progress=progress,
        cancel=cancel,
        ceilings_bytes_per_s=ceilings_bytes_per_s,
    )
