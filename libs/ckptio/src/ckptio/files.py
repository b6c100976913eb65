"""File handling that every part needs: errors with paths, exact reads, durable writes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ckptio.errors import CorruptCheckpoint, PathLike, TruncatedCheckpoint
from ckptio.faults import writable_bytes

_LIBC = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = ctypes.c_uint(2)


class FileState(NamedTuple):
    """What changes when a file is replaced or written to."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, file: PathLike | int) -> FileState:
        """The state of a path, or of an open file."""
        status = os.stat(file)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def check_unchanged(path: PathLike, file: PathLike | int, expected: FileState) -> None:
    """Raises `CorruptCheckpoint` when a file is no longer what it was when its header was read."""
    if FileState.of(file) != expected:
        raise CorruptCheckpoint(path, "the file changed while it was read; start again")


@contextmanager
def naming(path: PathLike) -> Iterator[None]:
    """Adds `path` to an `OSError` raised inside that does not carry one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), os.fspath(path)) from error


@contextmanager
def opened(path: PathLike, flags: int = os.O_RDONLY, mode: int = 0o666) -> Iterator[int]:
    """A file descriptor of `path`, closed at the end; errors inside carry the path."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        with naming(path):
            yield descriptor
    finally:
        os.close(descriptor)


def page_buffer(size_bytes: int) -> memoryview:
    """Zeroed memory that starts on a page; freed with its last view."""
    return memoryview(mmap.mmap(-1, size_bytes))


def read_exactly(descriptor: int, target: memoryview, offset_bytes: int, path: PathLike) -> None:
    """Fills `target` from `offset_bytes`; raises `TruncatedCheckpoint` when the file ends first."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset_bytes + done)
        if count == 0:
            raise TruncatedCheckpoint(
                path, expected_bytes=offset_bytes + len(target), actual_bytes=offset_bytes + done
            )
        done += count


def write_exactly(descriptor: int, source: memoryview) -> None:
    """Writes all of `source` at the file position."""
    done = 0
    while done < len(source):
        done += os.write(descriptor, source[done : done + writable_bytes(len(source) - done)])


def start_writeback(descriptor: int, offset_bytes: int, size_bytes: int) -> None:
    """Lets the kernel begin to write a range, so that the device works while the next chunk is prepared.

    Without it everything waits for the fsync at the end, which halves the speed of a conversion. Only a hint:
    a file system that does not know it still has that fsync.
    """
    _LIBC.sync_file_range(
        descriptor, ctypes.c_int64(offset_bytes), ctypes.c_int64(size_bytes), _SYNC_FILE_RANGE_WRITE
    )


def read_bounded(path: Path, size_bytes_max: int) -> bytes:
    """The content of a small file; raises `CorruptCheckpoint` when it is larger than `size_bytes_max`."""
    with open(path, "rb") as file:
        raw = file.read(size_bytes_max + 1)
    if len(raw) > size_bytes_max:
        raise CorruptCheckpoint(path, f"larger than {size_bytes_max} bytes", offset_bytes=size_bytes_max)
    return raw


def write_durably(path: Path, raw: bytes) -> None:
    """Writes a new file and waits until it is on the device."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        write_exactly(descriptor, memoryview(raw))
        os.fsync(descriptor)


def sync_directory(path: PathLike) -> None:
    """Waits until the entries of a directory are on the device."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)
