"""The ceilings of the machine: the fastest read of the very file past the page cache, and copying memory.

The read goes where a loader's bytes go at best: into anonymous memory on huge pages that was touched before.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckptio.bench.page_cache import set_temperature
from ckptio.errors import TruncatedCheckpoint
from ckptio.files import opened
from ckptio.plan import PADDING_BYTES, ChunkRead, plan_chunks, round_up

REQUEST_BYTES = 16 * 1024 * 1024

# Above this the figure does not change any more, and the buffer pair stays small.
COPY_BYTES_MAX = 1024**3

_LIBC = ctypes.CDLL(None)
_LIBC.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRead:
    """A read of whole files, or a copy; `is_direct` is False where the file system refuses direct I/O."""

    size_bytes: int
    seconds: float
    threads: int
    is_direct: bool = False
    resident_bytes: int = 0


def read_raw(files: Sequence[Path], threads: int) -> RawRead:
    """Reads `files`, evicted first, in requests of 16 MiB by `threads` threads."""
    sizes = [file.stat().st_size for file in files]
    buffer = touched_buffer(sum(round_up(size, REQUEST_BYTES) for size in sizes))
    resident = set_temperature(files, "cold")
    is_direct = True
    start_bytes = 0
    with memoryview(buffer) as whole, ThreadPoolExecutor(threads) as pool:
        # Threads start with the first work they get: not inside the measured time.
        list(pool.map(time.sleep, [0.01] * threads))
        start = time.monotonic()
        for file, size_bytes in zip(files, sizes, strict=True):
            target = whole[start_bytes : start_bytes + round_up(size_bytes, REQUEST_BYTES)]
            is_direct = _read_file(file, size_bytes, target, pool) and is_direct
            target.release()
            start_bytes += round_up(size_bytes, REQUEST_BYTES)
        seconds = time.monotonic() - start
    return RawRead(
        size_bytes=sum(sizes),
        seconds=seconds,
        threads=threads,
        is_direct=is_direct,
        resident_bytes=resident,
    )


def copy_memory(size_bytes: int, threads: int) -> RawRead:
    """Copies memory that was touched before, a share per thread."""
    size_bytes = min(size_bytes, COPY_BYTES_MAX) // (threads * PADDING_BYTES) * threads * PADDING_BYTES
    source, target = touched_buffer(size_bytes), touched_buffer(size_bytes)
    share = size_bytes // threads
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(time.sleep, [0.01] * threads))
        start = time.monotonic()
        moves = [
            pool.submit(_LIBC.memcpy, _address(target) + offset, _address(source) + offset, share)
            for offset in range(0, size_bytes, share)
        ]
        for move in moves:
            move.result()
        seconds = time.monotonic() - start
    return RawRead(size_bytes=size_bytes, seconds=seconds, threads=threads)


def touched_buffer(size_bytes: int) -> mmap.mmap:
    """Private memory, on huge pages where there are any, every page of it backed already."""
    # Private: shared memory, which is the default here, has huge pages on few machines.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    buffer = mmap.mmap(-1, max(size_bytes, PADDING_BYTES), flags=flags)
    try:
        buffer.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        # A kernel without huge pages: small ones then, as for every loader.
        if error.errno != errno.EINVAL:
            raise
    ctypes.memset(_address(buffer), 1, len(buffer))
    return buffer


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _read_file(file: Path, size_bytes: int, target: memoryview, pool: ThreadPoolExecutor) -> bool:
    try:
        descriptor_flags = os.O_RDONLY | os.O_DIRECT
        with opened(file, descriptor_flags) as descriptor:
            _read_all(descriptor, size_bytes, target, pool, file)
        return True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    with opened(file) as descriptor:
        _read_all(descriptor, size_bytes, target, pool, file)
    return False


def _read_all(
    descriptor: int, size_bytes: int, target: memoryview, pool: ThreadPoolExecutor, file: Path
) -> None:
    reads: Callable[[ChunkRead], None] = lambda chunk: _read_chunk(descriptor, chunk, target, file)  # noqa: E731
    for _ in pool.map(reads, plan_chunks(size_bytes, REQUEST_BYTES)):
        pass


def _read_chunk(descriptor: int, chunk: ChunkRead, target: memoryview, file: Path) -> None:
    """Direct reads need whole sectors: the last one is rounded up and comes back short."""
    end = chunk.offset_bytes + chunk.size_bytes
    done = chunk.offset_bytes
    while done < end:
        count = os.preadv(descriptor, [target[done : round_up(end, PADDING_BYTES)]], done)
        if count == 0:
            raise TruncatedCheckpoint(file, expected_bytes=end, actual_bytes=done)
        done += count
