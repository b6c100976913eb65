"""Pure decisions: where tensors go in partitions, and how partitions are cut into chunks and read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptio.dtypes import DTYPES

# 16 MiB per read saturates an NVMe disk with two threads, and a digest of it fits the time of the next read.
CHUNK_SIZE_BYTES = 16 * 1024 * 1024

# Every group of overlapping tensors starts here: aligned for any vector load and for copies to a GPU.
ALIGNMENT_BYTES = 256

# Partition files end on a page, so that each read and write of them can be direct.
PADDING_BYTES = 4096

# File offsets and sizes are signed 64-bit numbers in every system call that takes them.
SIZE_BYTES_MAX = 2**63 - 1

# The share of a chunk that must be in the page cache for a copy from there to be quicker than a direct read
# of all of it: memory is four to five times as fast as a good disk, but buffered reads of the rest are
# slower.
RESIDENT_SHARE_MIN = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A tensor inside an extent; `stride` in elements, None when contiguous; `size_bytes` is its span."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    offset_bytes: int = 0
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes that are stored together: one tensor, or several that overlap (tied, or views of one storage)."""

    size_bytes: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Extent number `extent` of the input goes to `offset_bytes` of its partition."""

    extent: int
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLayout:
    """What one partition holds, in order of offset."""

    placements: tuple[Placement, ...]
    size_bytes: int

    @property
    def padded_bytes(self) -> int:
        """The size of the file."""
        return round_up(self.size_bytes, PADDING_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """One chunk of a partition: `size_bytes` at `offset_bytes` of the file."""

    offset_bytes: int
    size_bytes: int


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def size_of(dtype: str, shape: Sequence[int], stride: Sequence[int] | None = None) -> int:
    """Bytes from the first to the last element of a tensor, both included.

    Raises ValueError when a dimension is negative or a size does not fit in 63 bits, even where another is
    zero.
    """
    item_size_bytes = DTYPES[dtype].item_size_bytes
    # A plain loop: an index has thousands of shapes, and this is most of what checking it costs.
    count = nonzero_count = 1
    for size in shape:
        if size < 0:
            raise ValueError(f"shape {list(shape)} has a negative dimension")
        count *= size
        if size:
            nonzero_count *= size
    if nonzero_count * item_size_bytes > SIZE_BYTES_MAX:
        raise ValueError(f"shape {list(shape)} of {dtype} overflows")
    if stride is not None and (len(stride) != len(shape) or any(step < 0 for step in stride)):
        raise ValueError(f"stride {list(stride)} does not fit shape {list(shape)}")
    if count and stride is not None:
        count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if count * item_size_bytes > SIZE_BYTES_MAX:
            raise ValueError(f"stride {list(stride)} of shape {list(shape)} overflows")
    return count * item_size_bytes


def load_order(name: str) -> tuple[object, ...]:
    """Sort key that puts layer 2 before layer 10, so that tensors lie about as a forward pass needs them."""
    pieces = re.split(r"(\d+)", name)
    return (tuple((int(p), "") if p.isdecimal() and p.isascii() else (-1, p) for p in pieces), name)


def group_overlaps(spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Groups of span numbers (start, end) that overlap, each in order of start; empty spans are alone."""
    groups: list[list[int]] = [[number] for number, (start, end) in enumerate(spans) if start == end]
    ordered = sorted(
        (number for number, (start, end) in enumerate(spans) if start < end), key=spans.__getitem__
    )
    group_end = None
    for number in ordered:
        start, end = spans[number]
        if group_end is not None and start < group_end:
            groups[-1].append(number)
            group_end = max(group_end, end)
        else:
            groups.append([number])
            group_end = end
    return groups


def plan_layout(
    extents: Sequence[Extent], partition_of: Callable[[str], int] | None = None
) -> tuple[PartitionLayout, ...]:
    """Lays extents out in the given order, each in the partition of its first member.

    `partition_of` gives the partition, that is the GPU, of a tensor's name; without it there is one
    partition.
    """
    numbers = [0 if partition_of is None else partition_of(extent.members[0].name) for extent in extents]
    layouts = []
    for partition in range(max(numbers, default=0) + 1):
        placements = []
        cursor = 0
        for number, extent in enumerate(extents):
            if numbers[number] != partition:
                continue
            offset_bytes = round_up(cursor, ALIGNMENT_BYTES)
            placements.append(Placement(extent=number, offset_bytes=offset_bytes))
            cursor = offset_bytes + extent.size_bytes
        layouts.append(PartitionLayout(placements=tuple(placements), size_bytes=cursor))
    return tuple(layouts)


def plan_chunks(size_bytes: int, chunk_size_bytes: int) -> tuple[ChunkRead, ...]:
    """Cuts a partition of `size_bytes` into chunks; the last one may be shorter."""
    return tuple(
        ChunkRead(offset_bytes=offset, size_bytes=min(chunk_size_bytes, size_bytes - offset))
        for offset in range(0, size_bytes, chunk_size_bytes)
    )


def chunk_count(size_bytes: int, chunk_size_bytes: int) -> int:
    """How many chunks `size_bytes` need."""
    return -(-size_bytes // chunk_size_bytes)


def choose_direct(resident_bytes: Sequence[int], chunks: Sequence[ChunkRead]) -> tuple[bool, ...]:
    """For each chunk, whether to read it past the page cache (L3), which is unless it is there already."""
    return tuple(
        resident < RESIDENT_SHARE_MIN * chunk.size_bytes
        for resident, chunk in zip(resident_bytes, chunks, strict=True)
    )
