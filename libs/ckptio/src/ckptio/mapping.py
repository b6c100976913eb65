"""Chunks of a pool in the address range of another process: back to back, zero copy, private."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptio.errors import PathLike, TruncatedCheckpoint
from ckptio.files import opened
from ckptio.huge_pages import HUGE_PAGE_BYTES, is_hugetlb
from ckptio.native import require_native
from ckptio.plan import PADDING_BYTES, chunk_count

if TYPE_CHECKING:
    from ckptio._native import Mapping


def map_chunks(
    pool_path: PathLike, chunk_size_bytes: int, chunk_indices: Sequence[int], size_bytes: int
) -> Mapping:
    """Maps chunks of the pool file as one contiguous range of `size_bytes`, rounded up to a page.

    No byte is copied or touched; the range is private and writable, so a write to it never reaches the pool
    (on hugetlbfs a write needs a free huge page, and without one ends the process). Raises ValueError when
    indices and size do not fit, `TruncatedCheckpoint` when the pool has no such chunk.
    """
    with opened(pool_path) as descriptor:
        return map_chunks_of(descriptor, pool_path, chunk_size_bytes, chunk_indices, size_bytes)


def map_chunks_of(
    descriptor: int, path: PathLike, chunk_size_bytes: int, chunk_indices: Sequence[int], size_bytes: int
) -> Mapping:
    """`map_chunks` of a pool that is open already; `path` is for errors."""
    native = require_native()
    check_chunk_size(descriptor, chunk_size_bytes)
    if len(chunk_indices) != chunk_count(size_bytes, chunk_size_bytes):
        raise ValueError(f"{len(chunk_indices)} chunks of {chunk_size_bytes} for {size_bytes} bytes")
    if any(index < 0 for index in chunk_indices):
        raise ValueError(f"chunk indices {list(chunk_indices)}")
    # Beyond the end of the file there is no error on mapping, only a bus error on touching.
    pool_bytes = os.fstat(descriptor).st_size
    needed_bytes = (max(chunk_indices, default=-1) + 1) * chunk_size_bytes
    if needed_bytes > pool_bytes:
        raise TruncatedCheckpoint(path, expected_bytes=needed_bytes, actual_bytes=pool_bytes)
    mapping: Mapping = native.Mapping.stitched(descriptor, chunk_size_bytes, list(chunk_indices), size_bytes)
    return mapping


def check_chunk_size(descriptor: int, chunk_size_bytes: int) -> None:
    """Raises ValueError unless chunks are whole pages of the file, which are huge on hugetlbfs."""
    page_bytes = PADDING_BYTES
    if is_hugetlb(descriptor):
        page_bytes = os.fstatvfs(descriptor).f_bsize
        if page_bytes > HUGE_PAGE_BYTES:
            raise ValueError(
                f"pages of {page_bytes} bytes are too large; use hugetlbfs with {HUGE_PAGE_BYTES}"
            )
    if chunk_size_bytes <= 0 or chunk_size_bytes % page_bytes:
        raise ValueError(f"chunk size {chunk_size_bytes} is not a multiple of {page_bytes}")
