"""The file of a chunk pool: who owns it, and when an old one may be replaced.

Beside a pool "x" lies ".x.ckptio-pool". Whoever holds its lock owns the pool; it names the file that the
owner made, so that nothing else at that path is ever taken for an old pool. The kernel drops the lock of an
owner that died.
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from ckptio.huge_pages import open_on_huge_tmpfs

# Where a file is memory.
_MEMORY_FILE_SYSTEMS = ("tmpfs", "hugetlbfs", "ramfs")
_NOTE_BYTES_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFile:
    """An open pool file; without `lock` it has no name in any directory."""

    path: Path
    descriptor: int
    lock: int | None = None

    def discard(self, is_owner: bool) -> None:
        """Closes the file; its owner unlinks it, unless something else is at its path by now."""
        if self.lock is not None:
            if is_owner and _identity_at(self.path) == _identity(self.descriptor):
                self.path.unlink(missing_ok=True)
            if is_owner:
                _lock_path(self.path).unlink(missing_ok=True)
            os.close(self.lock)
        os.close(self.descriptor)


def unnamed_pool_file() -> PoolFile:
    """A file that others open by its path in /proc, on huge pages where this process may ask for them."""
    descriptor = open_on_huge_tmpfs("ckptio-pool")
    if descriptor is None:
        descriptor = os.memfd_create("ckptio-pool", os.MFD_CLOEXEC)
    return PoolFile(path=Path(f"/proc/{os.getpid()}/fd/{descriptor}"), descriptor=descriptor)


def open_pool_file(path: Path) -> PoolFile:
    """A new file at `path`, owned until `discard` or the end of this process.

    Raises FileExistsError for the pool of a living process, and for a file that is no pool; ValueError where
    files are not memory.
    """
    path = Path(os.path.abspath(path))
    _check_file_system(path)
    lock = _own(path)
    try:
        found = _identity_at(path)
        if found and found != os.pread(lock, _NOTE_BYTES_MAX, 0):
            reason = "Exists and is not a pool of ckptio; remove it or choose another path"
            raise FileExistsError(errno.EEXIST, reason, os.fspath(path))
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Others may ask by this lock whether the owner lives.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, _identity(descriptor), 0)
    except BaseException:
        os.close(lock)
        raise
    return PoolFile(path=path, descriptor=descriptor, lock=lock)


def _own(path: Path) -> int:
    while True:
        lock = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise FileExistsError(errno.EEXIST, "A living process owns this pool", os.fspath(path)) from None
        # Its last owner may have removed it between our opening and our locking.
        if _identity_at(_lock_path(path)) == _identity(lock):
            return lock
        os.close(lock)


def _lock_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.ckptio-pool")


def _identity(file: Path | int) -> bytes:
    status = os.stat(file)
    return f"{status.st_dev}:{status.st_ino}".encode()


def _identity_at(path: Path) -> bytes:
    try:
        return _identity(path)
    except FileNotFoundError:
        return b""


def _check_file_system(path: Path) -> None:
    """Raises ValueError unless `path` is to be on a file system that lives in memory."""
    kind = _file_system_of(path.parent)
    if kind and kind not in _MEMORY_FILE_SYSTEMS:
        raise ValueError(f"{path} is on {kind}: a pool is memory; give a path on tmpfs, such as /dev/shm")


def _file_system_of(directory: Path) -> str:
    """The type of the file system of a directory; empty when the kernel does not tell."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted and "-" in fields:
            return fields[fields.index("-") + 1]
    return ""
