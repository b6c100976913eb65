"""The chunk reader: fills chunks of a pool from a partition file, with persistent native threads (L2, L4)."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptio.errors import Cancelled, CorruptCheckpoint, PathLike, TruncatedCheckpoint
from ckptio.files import opened
from ckptio.native import require_native
from ckptio.plan import PADDING_BYTES, ChunkRead, choose_direct, chunk_count, plan_chunks
from ckptio.pool import ChunkPool

if TYPE_CHECKING:
    from ckptio._native import CancelToken, Mapping
    from ckptio.index import IndexPartition

# Two threads of 16 MiB reads keep a disk of a few GB/s busy; more bring nothing on few cores.
READER_THREADS = 2
READER_THREADS_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """What a read did (L10): `read_s` and `verify_s` are summed over threads, `seconds` is wall time."""

    size_bytes: int
    seconds: float
    direct_bytes: int
    reread_chunks: int
    read_s: float
    verify_s: float

    @property
    def direct(self) -> bool:
        """Whether any byte came past the page cache."""
        return self.direct_bytes > 0

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes over wall time; 0 for an empty read."""
        return self.size_bytes / self.seconds if self.seconds > 0 else 0.0


class Reader:
    """Reader threads that live until `close`; reads from several Python threads are done in turn."""

    def __init__(self, threads: int = READER_THREADS) -> None:
        if not 1 <= threads <= READER_THREADS_MAX:
            raise ValueError(f"{threads} threads, 1 to {READER_THREADS_MAX} are possible")
        self._threads = require_native().ReaderThreads(threads)
        self._owner_pid = os.getpid()
        self._is_closed = False

    def read(
        self,
        pool: ChunkPool,
        partition_path: PathLike,
        chunk_indices: Sequence[int],
        size_bytes: int,
        *,
        digests: Sequence[int] | None = None,
        direct: bool | None = None,
        progress: Callable[[int], None] | None = None,
        cancel: CancelToken | None = None,
    ) -> ReadReport:
        """Fills chunks of `pool`, in this order, with the first `size_bytes` of a partition file.

        `digests`, one per chunk, are verified by the thread that read the chunk; a bad chunk is read once
        more. `direct` None reads each chunk past the page cache unless it is there already. `progress` is
        called in this thread with the bytes done so far. Raises `CorruptCheckpoint`, `TruncatedCheckpoint`,
        `Cancelled`, OSError.
        """
        count = chunk_count(size_bytes, pool.chunk_size_bytes)
        if len(chunk_indices) != count:
            raise ValueError(f"{len(chunk_indices)} chunks of {pool.chunk_size_bytes} for {size_bytes} bytes")
        if not all(0 <= index < pool.chunk_count for index in chunk_indices):
            raise ValueError(f"chunk indices {list(chunk_indices)} of a pool of {pool.chunk_count}")
        targets = [index * pool.chunk_size_bytes for index in chunk_indices]
        chunks = plan_chunks(size_bytes, pool.chunk_size_bytes)
        return self._read(
            pool.mapping, targets, chunks, Path(partition_path), digests, direct, progress, cancel
        )

    def close(self) -> None:
        """Cancels what runs and ends the threads. Closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        # Threads do not survive a fork: a child has nothing to join.
        if os.getpid() == self._owner_pid:
            self._threads.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and os.getpid() == self._owner_pid:
            warnings.warn("unclosed ckptio reader", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def _read(
        self,
        target: Mapping,
        targets: Sequence[int],
        chunks: Sequence[ChunkRead],
        path: Path,
        digests: Sequence[int] | None,
        direct: bool | None,
        progress: Callable[[int], None] | None,
        cancel: CancelToken | None,
    ) -> ReadReport:
        if self._is_closed or os.getpid() != self._owner_pid:
            raise ValueError("the reader is closed, or belongs to the parent process")
        if digests is not None and len(digests) != len(chunks):
            raise ValueError(f"{len(digests)} digests for {len(chunks)} chunks; chunk sizes must agree")
        size_bytes = sum(chunk.size_bytes for chunk in chunks)
        start = time.monotonic()
        with opened(path) as descriptor, _opened_direct(path) as direct_descriptor:
            _check_size(path, descriptor, size_bytes)
            choices = _choose(descriptor, chunks) if direct is None else [direct] * len(chunks)
            columns = zip(targets, chunks, digests or [0] * len(chunks), choices, strict=True)
            outcome, code, chunk_index, offset_bytes, done_bytes, *numbers = self._threads.read(
                target,
                [
                    (to, chunk.offset_bytes, chunk.size_bytes, digest, is_direct)
                    for to, chunk, digest, is_direct in columns
                ],
                descriptor,
                direct_descriptor,
                digests is not None,
                cancel,
                progress,
            )
            _raise_for(outcome, code, chunk_index, offset_bytes, done_bytes, path, chunks)
        direct_bytes, reread_chunks, read_s, verify_s = numbers
        return ReadReport(
            size_bytes=size_bytes,
            seconds=time.monotonic() - start,
            direct_bytes=direct_bytes,
            reread_chunks=reread_chunks,
            read_s=read_s,
            verify_s=verify_s,
        )


def read_private(reader: Reader, path: Path, part: IndexPartition, chunk_size_bytes: int) -> Mapping:
    """Reads a partition, verified, into new private memory."""
    mapping: Mapping = require_native().Mapping.anonymous(max(part.padded_bytes, PADDING_BYTES))
    mapping.advise_huge_pages()
    chunks = plan_chunks(part.padded_bytes, chunk_size_bytes)
    reader._read(
        mapping, [chunk.offset_bytes for chunk in chunks], chunks, path, part.digests, None, None, None
    )
    return mapping


@contextmanager
def _opened_direct(path: Path) -> Iterator[int]:
    """A descriptor for direct I/O, or -1 where the file system refuses."""
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    try:
        yield descriptor
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _choose(descriptor: int, chunks: Sequence[ChunkRead]) -> Sequence[bool]:
    """One question for the whole file answers the two usual cases, all cached and nothing cached."""
    resident_bytes = require_native().resident_bytes
    size_bytes = sum(chunk.size_bytes for chunk in chunks)
    if size_bytes == 0:
        return []
    total = resident_bytes(descriptor, 0, size_bytes)
    if total == 0 or total == size_bytes:
        return [total == 0] * len(chunks)
    return choose_direct([resident_bytes(descriptor, c.offset_bytes, c.size_bytes) for c in chunks], chunks)


def _check_size(path: Path, descriptor: int, size_bytes: int) -> None:
    actual_bytes = os.fstat(descriptor).st_size
    if actual_bytes < size_bytes:
        raise TruncatedCheckpoint(path, expected_bytes=size_bytes, actual_bytes=actual_bytes)


def _raise_for(
    outcome: str,
    code: int,
    chunk_index: int,
    offset_bytes: int,
    done_bytes: int,
    path: Path,
    chunks: Sequence[ChunkRead],
) -> None:
    """The typed error of an outcome of the native reader."""
    match outcome:
        case "done":
            return
        case "cancelled":
            raise Cancelled(path, done_bytes=done_bytes)
        case "corrupt":
            raise CorruptCheckpoint(
                path,
                "the bytes do not match their digest",
                offset_bytes=offset_bytes,
                chunk_index=chunk_index,
            )
        case "truncated":
            end = chunks[chunk_index].offset_bytes + chunks[chunk_index].size_bytes
            raise TruncatedCheckpoint(path, expected_bytes=end, actual_bytes=offset_bytes)
        case _:
            raise OSError(code, f"{os.strerror(code)} (at offset {offset_bytes})", os.fspath(path))
