"""Pure: the pieces that a load reads, in their order, and what a load reports."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ckptio.index import Index
from ckptio.plan import PADDING_BYTES, ChunkRead, plan_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What makes loading fast, each of which can be switched off to see what it is worth (L7).

    `bulk`: chunks are read, not tensors. `direct`: past the page cache. `threads`: several readers. `pinned`:
    through the pool, whose pages are there and locked, not through fresh memory. `pipeline`: chunks go on to
    the device while others are read.
    """

    bulk: bool = True
    direct: bool = True
    threads: bool = True
    pinned: bool = True
    pipeline: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Bytes to be read at once: a chunk, or without bulk reads what a tensor has of it."""

    partition: int
    chunk_index: int
    chunk: ChunkRead
    digest: int

    def offset_in_chunk(self, chunk_size_bytes: int) -> int:
        """Where the piece begins in its chunk."""
        return self.chunk.offset_bytes - self.chunk_index * chunk_size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """What arrived in a tier (SSD means: was read from there): bytes, and wall time from first to last.

    Of a GPU only while a copy was under way: waiting for a slower tier is not its own slowness.

    `ceiling_bytes_per_s` is what the device was measured to give at best, if anybody has measured it.
    """

    tier: str
    size_bytes: int
    seconds: float
    ceiling_bytes_per_s: float | None = None

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes over wall time; 0 when nothing moved."""
        return self.size_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def share_of_ceiling(self) -> float | None:
        """Bandwidth over the measured ceiling, None when that is not known."""
        return self.bandwidth_bytes_per_s / self.ceiling_bytes_per_s if self.ceiling_bytes_per_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load did (L10). `resident_bytes` of `size_bytes` were in the pool before; `verify_s` is summed
    over threads."""

    size_bytes: int
    resident_bytes: int
    direct_bytes: int
    reread_chunks: int
    seconds: float
    verify_s: float
    tiers: tuple[TierReport, ...]


def plan_pieces(index: Index, chunk_size_bytes: int, *, is_bulk: bool) -> list[Piece]:
    """Everything to read for a checkpoint; partitions take turns, so that every GPU gets its first chunks."""
    by_partition = []
    for number, part in enumerate(index.partitions):
        chunks = plan_chunks(part.padded_bytes, chunk_size_bytes)
        digests = part.digests or (0,) * len(chunks)
        columns = enumerate(zip(chunks, digests, strict=True))
        pieces = [
            Piece(partition=number, chunk_index=chunk_index, chunk=chunk, digest=digest)
            for chunk_index, (chunk, digest) in columns
        ]
        if not is_bulk:
            pieces = list(_cut(pieces, _tensor_starts(index, number)))
        by_partition.append(pieces)
    return [piece for turn in zip_longest(*by_partition) for piece in turn if piece is not None]


def _tensor_starts(index: Index, partition: int) -> list[int]:
    """Offsets of the tensors of a partition, down to whole pages, since reads may be direct."""
    columns = zip(index.partition, index.offset_bytes, strict=True)
    return sorted({offset - offset % PADDING_BYTES for number, offset in columns if number == partition})


def _cut(pieces: Sequence[Piece], starts: Sequence[int]) -> Iterator[Piece]:
    for piece in pieces:
        begin, end = piece.chunk.offset_bytes, piece.chunk.offset_bytes + piece.chunk.size_bytes
        inside = starts[bisect_left(starts, begin + 1) : bisect_left(starts, end)]
        for start, stop in zip((begin, *inside), (*inside, end), strict=True):
            yield Piece(
                partition=piece.partition,
                chunk_index=piece.chunk_index,
                chunk=ChunkRead(offset_bytes=start, size_bytes=stop - start),
                digest=0,
            )
