"""The chunk pool: one region of shared memory, backed by memory from the start, lent chunk by chunk (L2).

Page faults are the largest hidden cost of loading, so they are paid once, when the pool is made. A pool never
gives pages back: the next touch of a returned page may cost more than reading it from disk.
"""

from __future__ import annotations

import errno
import heapq
import os
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptio.devices import cuda_status
from ckptio.errors import DeviceError, InsufficientSpace, PathLike, PoolExhausted
from ckptio.files import naming
from ckptio.huge_pages import huge_pages_refusal, is_hugetlb
from ckptio.mapping import check_chunk_size, map_chunks_of
from ckptio.memory import available_bytes
from ckptio.native import require_native
from ckptio.plan import CHUNK_SIZE_BYTES, PADDING_BYTES, chunk_count
from ckptio.pool_file import PoolFile, open_pool_file, unnamed_pool_file

if TYPE_CHECKING:
    from ckptio._native import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """What making the pool gave; each error is empty when it worked.

    `is_registered` says that the CUDA runtime has the memory page-locked for every GPU.
    """

    prefault_s: float
    is_locked: bool
    lock_error: str
    has_huge_pages: bool
    huge_pages_error: str
    is_registered: bool
    register_error: str


class ChunkPool:
    """Owner of a chunk pool; others map its chunks by `path` with `map_chunks`. Make one with `create`.

    Allocation is thread-safe. `close` unlinks the file; processes that have chunks mapped keep them.
    """

    def __init__(self, file: PoolFile, mapping: Mapping, chunk_size_bytes: int, report: PoolReport) -> None:
        self.path = file.path
        self.chunk_size_bytes = chunk_size_bytes
        self.chunk_count = mapping.size_bytes // chunk_size_bytes
        self.report = report
        self._file = file
        self._mapping = mapping
        self._is_registered = report.is_registered
        self._is_closing = False
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        # A heap, so that chunks freed together are lent together and map as one range.
        self._free = list(range(self.chunk_count))
        self._leased: set[int] = set()

    @classmethod
    def create(
        cls,
        path: PathLike | None,
        size_bytes: int,
        chunk_size_bytes: int = CHUNK_SIZE_BYTES,
        prefault_threads: int = 2,
        is_registered: bool | None = None,
    ) -> ChunkPool:
        """Makes a pool of `size_bytes` (rounded down to chunks) in a new file, on tmpfs or hugetlbfs.

        Without `path` the pool has no name in any directory: others open it by its `path` in /proc as long
        as this process lives; it gets huge pages where this process may ask for them. The file of a pool
        whose owner died is replaced; that of a living one, or any other file, raises FileExistsError.
        `is_registered` None page-locks it for GPUs where there are any, which makes a CUDA context on the
        current GPU of this thread; a process that will fork should pass False. Raises `InsufficientSpace`
        when the file system or memory cannot hold it, `DeviceError` when registration was asked for and
        failed.
        """
        native = require_native()
        if chunk_size_bytes <= 0 or chunk_size_bytes % PADDING_BYTES:
            raise ValueError(f"chunk size {chunk_size_bytes} is not a multiple of {PADDING_BYTES}")
        size_bytes -= size_bytes % chunk_size_bytes
        if size_bytes <= 0 or prefault_threads <= 0:
            raise ValueError("a pool needs at least one chunk and one thread")
        file = unnamed_pool_file() if path is None else open_pool_file(Path(path))
        try:
            with naming(file.path):
                check_chunk_size(file.descriptor, chunk_size_bytes)
                _check_room(file, size_bytes)
                os.ftruncate(file.descriptor, size_bytes)
                mapping = native.Mapping.shared(file.descriptor, size_bytes)
                report = _prepare(mapping, prefault_threads, is_registered)
                return cls(file, mapping, chunk_size_bytes, report)
        except BaseException as error:
            file.discard(is_owner=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise InsufficientSpace(file.path, required_bytes=size_bytes, available_bytes=0) from error
            raise

    @property
    def size_bytes(self) -> int:
        """Size of all chunks."""
        return self.chunk_count * self.chunk_size_bytes

    @property
    def free_chunks(self) -> int:
        """How many chunks can be allocated now."""
        return len(self._free)

    @property
    def mapping(self) -> Mapping:
        """The memory of the pool. Raises ValueError when the pool is closed."""
        if self._mapping.is_closed or self._is_closing:
            raise ValueError(f"{self.path}: the pool is closed")
        return self._mapping

    def chunks_for(self, size_bytes: int) -> int:
        """How many chunks `size_bytes` need."""
        return chunk_count(size_bytes, self.chunk_size_bytes)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Lends `count` chunks, lowest numbers first, or raises `PoolExhausted` and lends none."""
        if count < 0:
            raise ValueError(f"{count} chunks")
        assert not self._mapping.is_closed, "the pool is closed"
        with self._lock:
            if count > len(self._free):
                raise PoolExhausted(self.path, requested_chunks=count, free_chunks=len(self._free))
            indices = tuple(heapq.heappop(self._free) for _ in range(count))
            self._leased.update(indices)
        return indices

    def free(self, indices: Sequence[int]) -> None:
        """Takes chunks back. Raises ValueError, taking none, when one of them is not lent."""
        with self._lock:
            if len(set(indices)) != len(indices) or not self._leased.issuperset(indices):
                raise ValueError(
                    f"{self.path}: chunks {list(indices)} are not all lent, or one is named twice"
                )
            self._leased.difference_update(indices)
            for index in indices:
                heapq.heappush(self._free, index)

    def chunk(self, index: int) -> memoryview:
        """The bytes of one chunk, writable; release the view before closing the pool."""
        if not 0 <= index < self.chunk_count:
            raise ValueError(f"{self.path}: chunk {index} of {self.chunk_count}")
        start = index * self.chunk_size_bytes
        with memoryview(self.mapping) as whole:
            return whole[start : start + self.chunk_size_bytes]

    def map_chunks(self, chunk_indices: Sequence[int], size_bytes: int) -> Mapping:
        """Chunks back to back as private memory, as `map_chunks` gives them to other processes."""
        assert self.mapping.size_bytes > 0, "a closed pool has raised"
        return map_chunks_of(
            self._file.descriptor, self.path, self.chunk_size_bytes, chunk_indices, size_bytes
        )

    def close(self) -> None:
        """Unmaps and unlinks; idempotent. Raises BufferError while a read or a view uses the pool.

        Chunks that were mapped stay valid. Raises `DeviceError`, after all is done, when the GPUs' runtime
        does not let go of the memory.
        """
        if self._mapping.is_closed:
            return
        self._is_closing = True
        if self._mapping.views:
            self._is_closing = False
            raise BufferError(f"{self.path}: {self._mapping.views} reads or views of the pool are alive")
        # A forked child has the object but not the pool: the file belongs to the process that made it.
        is_owner = os.getpid() == self._owner_pid
        try:
            if self._is_registered and is_owner:
                self._is_registered = False
                require_native().unregister_host_memory(self._mapping)
        finally:
            self._mapping.close()
            self._file.discard(is_owner)

    def __enter__(self) -> ChunkPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        mapping = getattr(self, "_mapping", None)
        if mapping is not None and not mapping.is_closed and os.getpid() == self._owner_pid:
            warnings.warn(f"unclosed chunk pool {self.path}", ResourceWarning, source=self, stacklevel=2)
            self.close()


def _check_room(file: PoolFile, size_bytes: int) -> None:
    """Before touching: a page that tmpfs cannot give is a bus error, one that memory cannot give kills."""
    status = os.fstatvfs(file.descriptor)
    # What hugetlbfs gives was set apart from other memory already.
    room_bytes = size_bytes if is_hugetlb(file.descriptor) else available_bytes()
    if status.f_blocks:  # a file system without a limit, such as the one of memfd, reports none
        room_bytes = min(room_bytes, status.f_bavail * status.f_frsize)
    if room_bytes < size_bytes:
        raise InsufficientSpace(file.path, required_bytes=size_bytes, available_bytes=room_bytes)


def _prepare(mapping: Mapping, threads: int, is_registered: bool | None) -> PoolReport:
    mapping.advise_huge_pages()
    start = time.monotonic()
    mapping.prefault(threads)
    prefault_s = time.monotonic() - start
    lock_error = mapping.lock_in_memory()
    huge_pages_error = huge_pages_refusal(mapping)
    register_error = _register(mapping, is_registered)
    return PoolReport(
        prefault_s=prefault_s,
        is_locked=lock_error == 0,
        lock_error=os.strerror(lock_error) if lock_error else "",
        has_huge_pages=not huge_pages_error,
        huge_pages_error=huge_pages_error,
        is_registered=not register_error,
        register_error=register_error,
    )


def _register(mapping: Mapping, is_wanted: bool | None) -> str:
    """Why the pool is not page-locked for GPUs; empty when it is."""
    if is_wanted is False:
        return "not asked for"
    status = cuda_status()
    if status.reason:
        if is_wanted:
            raise DeviceError("cudaHostRegister", code=0, description=status.reason)
        return status.reason
    try:
        require_native().register_host_memory(mapping)
    except DeviceError as error:
        if is_wanted:
            raise
        return str(error)
    return ""
