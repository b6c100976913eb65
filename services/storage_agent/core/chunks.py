"""Owns the names of a checkpoint's parts: which content of a model it is, and its chunks in the order of loading."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointKey:
    """One deployed content of a model; deploying other content under the same id makes another key."""

    model_id: str
    checkpoint_digest: str


class ChunkId(NamedTuple):
    """Chunk `number` of a partition's file."""

    partition: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a checkpoint is cut up: `partition_bytes` are the sizes of its files, each cut into chunks of one size."""

    partition_bytes: tuple[int, ...]
    chunk_size_bytes: int

    @property
    def size_bytes(self) -> int:
        return sum(self.partition_bytes)

    @property
    def chunk_count(self) -> int:
        return sum(self.counts())

    def counts(self) -> tuple[int, ...]:
        """How many chunks each partition has."""
        return tuple(-(-size_bytes // self.chunk_size_bytes) for size_bytes in self.partition_bytes)

    def chunks(self) -> Iterator[ChunkId]:
        """Every chunk in the order of loading: partitions take turns, so that every GPU gets its first chunks (L5)."""
        counts = self.counts()
        for number in range(max(counts, default=0)):
            for partition, count in enumerate(counts):
                if number < count:
                    yield ChunkId(partition, number)

    def bytes_of(self, chunk: ChunkId) -> int:
        """The size of one chunk; the last of a partition may be short."""
        return min(self.chunk_size_bytes, self.partition_bytes[chunk.partition] - self.offset_bytes(chunk))

    def bytes_in(self, chunks: Set[ChunkId]) -> int:
        """The size of some of the chunks, in the time that the partitions take, not the chunks: asked for often."""
        size_bytes = len(chunks) * self.chunk_size_bytes
        for partition, count in enumerate(self.counts()):
            last = ChunkId(partition, count - 1)
            if last in chunks:
                size_bytes -= self.chunk_size_bytes - self.bytes_of(last)
        return size_bytes

    def offset_bytes(self, chunk: ChunkId) -> int:
        """Where a chunk starts in its partition's file."""
        return chunk.number * self.chunk_size_bytes

    def has(self, chunk: ChunkId) -> bool:
        counts = self.counts()
        return 0 <= chunk.partition < len(counts) and 0 <= chunk.number < counts[chunk.partition]
