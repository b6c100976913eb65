"""The chunk reader: fills chunks of a pool from a partition file, with persistent native threads (L2, L4)."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptio.errors import Cancelled, CorruptCheckpoint, PathLike, ReadFailed, TruncatedCheckpoint
from ckptio.files import FileState, check_unchanged
from ckptio.native import require_native
from ckptio.plan import PADDING_BYTES, ChunkRead, choose_direct, chunk_count, plan_chunks
from ckptio.pool import ChunkPool

if TYPE_CHECKING:
    from ckptio._native import CancelToken, CopyPipeline, Mapping
    from ckptio.index import IndexPartition

# Two threads of 16 MiB reads keep a disk of a few GB/s busy, two more while the others copy and verify what
# they have read. Beyond that more bring nothing.
READER_THREADS = 4
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOrder:
    """One chunk of one file, and where it goes in the target.

    `chunk_index` is the chunk's number in its file. `target_offset_bytes` None leaves the place to the sink;
    a resident chunk is there already, and is only passed on.
    """

    chunk: ChunkRead
    chunk_index: int
    target_offset_bytes: int | None
    file: int = 0
    digest: int = 0
    is_resident: bool = False


def order_chunks(
    chunks: Sequence[ChunkRead], targets: Sequence[int], digests: Sequence[int] | None
) -> list[ReadOrder]:
    """Orders for all chunks of one file, each to its target offset."""
    columns = zip(chunks, targets, digests or [0] * len(chunks), strict=True)
    return [
        ReadOrder(chunk=chunk, chunk_index=number, target_offset_bytes=target, digest=digest)
        for number, (chunk, target, digest) in enumerate(columns)
    ]


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
        if digests is not None and len(digests) != count:
            raise ValueError(f"{len(digests)} digests for {count} chunks; chunk sizes must agree")
        targets = [index * pool.chunk_size_bytes for index in chunk_indices]
        return self.run(
            pool.mapping,
            [Path(partition_path)],
            order_chunks(plan_chunks(size_bytes, pool.chunk_size_bytes), targets, digests),
            is_verified=digests is not None,
            is_bounced=not pool.report.has_huge_pages,
            direct=direct,
            progress=progress,
            cancel=cancel,
        )

    def run(
        self,
        target: Mapping,
        paths: Sequence[Path],
        orders: Sequence[ReadOrder],
        *,
        is_verified: bool,
        is_bounced: bool = False,
        direct: bool | None = None,
        sink: CopyPipeline | None = None,
        progress: Callable[[int], None] | None = None,
        arrived: Callable[[Sequence[int]], None] | None = None,
        cancel: CancelToken | None = None,
        states: Sequence[FileState] = (),
    ) -> ReadReport:
        """Carries out orders, in their order, from `paths` into `target`, and hands each chunk to `sink`.

        `is_bounced` says that `target` has small pages only. The caller finishes `sink`. `arrived` is called
        in this thread with the numbers of the orders that are done since its last call; what it heard of is
        good, also when the rest fails. Files that are not in the `states` they had are `CorruptCheckpoint`.
        The rest is as for `read`.
        """
        if self._is_closed or os.getpid() != self._owner_pid:
            raise ValueError("the reader is closed, or belongs to the parent process")
        start = time.monotonic()
        with ExitStack() as stack:
            files = [
                (stack.enter_context(_descriptor(path)), stack.enter_context(_opened_direct(path)))
                for path in paths
            ]
            ends = _check_sizes(paths, [buffered for buffered, _ in files], orders)
            _check_states(paths, files, states)
            choices = _choose_all(files, orders) if direct is None else [direct] * len(orders)
            outcome, code, order_index, offset_bytes, done_bytes, *numbers = self._threads.read(
                target,
                [
                    (
                        order.target_offset_bytes,
                        order.file,
                        order.chunk.offset_bytes,
                        order.chunk.size_bytes,
                        order.digest,
                        is_direct,
                        order.is_resident,
                    )
                    for order, is_direct in zip(orders, choices, strict=True)
                ],
                files,
                is_verified,
                is_bounced,
                cancel,
                sink,
                progress,
                arrived,
            )
            _check_states(paths, files, states)
        _raise_for(outcome, code, order_index, offset_bytes, done_bytes, paths, orders, ends)
        direct_bytes, reread_chunks, read_s, verify_s = numbers
        return ReadReport(
            size_bytes=sum(order.chunk.size_bytes for order in orders if not order.is_resident),
            seconds=time.monotonic() - start,
            direct_bytes=direct_bytes,
            reread_chunks=reread_chunks,
            read_s=read_s,
            verify_s=verify_s,
        )

    def close(self) -> None:
        """Cancels what runs and ends the threads. Closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        self._threads.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and os.getpid() == self._owner_pid:
            warnings.warn("unclosed ckptio reader", ResourceWarning, source=self, stacklevel=2)
            self.close()


def read_private(
    reader: Reader,
    path: Path,
    part: IndexPartition,
    chunk_size_bytes: int,
    state: FileState | None = None,
) -> Mapping:
    """Reads a partition, verified, into new private memory."""
    mapping: Mapping = require_native().Mapping.anonymous(max(part.padded_bytes, PADDING_BYTES))
    mapping.advise_huge_pages()
    chunks = plan_chunks(part.padded_bytes, chunk_size_bytes)
    orders = order_chunks(chunks, [chunk.offset_bytes for chunk in chunks], part.digests or None)
    states = () if state is None else (state,)
    reader.run(mapping, [path], orders, is_verified=bool(part.digests), states=states)
    return mapping


@contextmanager
def _descriptor(path: Path, flags: int = 0) -> Iterator[int]:
    """An open file. What its user raises is the user's own, and gets no path."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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
    if not chunks:
        return []
    start = min(chunk.offset_bytes for chunk in chunks)
    size_bytes = max(chunk.offset_bytes + chunk.size_bytes for chunk in chunks) - start
    total = resident_bytes(descriptor, start, size_bytes)
    if total == 0 or total == size_bytes:
        return [total == 0] * len(chunks)
    return choose_direct([resident_bytes(descriptor, c.offset_bytes, c.size_bytes) for c in chunks], chunks)


def _choose_all(files: Sequence[tuple[int, int]], orders: Sequence[ReadOrder]) -> list[bool]:
    chosen = [False] * len(orders)
    for number, (descriptor, _) in enumerate(files):
        rows = [row for row, order in enumerate(orders) if order.file == number and not order.is_resident]
        for row, choice in zip(rows, _choose(descriptor, [orders[row].chunk for row in rows]), strict=True):
            chosen[row] = choice
    return chosen


def _check_states(
    paths: Sequence[Path], files: Sequence[tuple[int, int]], states: Sequence[FileState]
) -> None:
    for path, (descriptor, _), state in zip(paths, files, states, strict=False):
        check_unchanged(path, descriptor, state)


def _check_sizes(paths: Sequence[Path], descriptors: Sequence[int], orders: Sequence[ReadOrder]) -> list[int]:
    """Where the orders of each file end; raises when a file ends before."""
    ends = [0] * len(paths)
    for order in orders:
        ends[order.file] = max(ends[order.file], order.chunk.offset_bytes + order.chunk.size_bytes)
    for path, descriptor, end in zip(paths, descriptors, ends, strict=True):
        actual_bytes = os.fstat(descriptor).st_size
        if actual_bytes < end:
            raise TruncatedCheckpoint(path, expected_bytes=end, actual_bytes=actual_bytes)
    return ends


def _raise_for(
    outcome: str,
    code: int,
    order_index: int,
    offset_bytes: int,
    done_bytes: int,
    paths: Sequence[Path],
    orders: Sequence[ReadOrder],
    ends: Sequence[int],
) -> None:
    """The typed error of an outcome of the native reader."""
    if outcome == "done":
        return
    order = orders[order_index]
    path = paths[order.file]
    match outcome:
        case "cancelled":
            raise Cancelled(path, done_bytes=done_bytes)
        case "corrupt":
            raise CorruptCheckpoint(
                path,
                "the bytes do not match their digest",
                offset_bytes=offset_bytes,
                chunk_index=order.chunk_index,
            )
        case "truncated":
            raise TruncatedCheckpoint(path, expected_bytes=ends[order.file], actual_bytes=offset_bytes)
        case _:
            if code == errno.EIO:
                raise ReadFailed(path, code, offset_bytes=offset_bytes, chunk_index=order.chunk_index)
            raise OSError(code, f"{os.strerror(code)} (at offset {offset_bytes})", os.fspath(path))
