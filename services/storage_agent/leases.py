"""Owns the lease files: how the agent knows, without asking, that a worker has let go of chunks.

A worker holds a shared flock on the lease file while it maps the chunks of an instance. The kernel drops the lock with
the process, so an exclusive lock that succeeds here means that nobody maps them, whatever happened to the worker.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whimbrel.wire.codec import pack_tokens, unpack_tokens
from whimbrel.wire.errors import ProtocolError, Unavailable
from whimbrel.wire.ids import check_service_id

# `<pool file>.lease.<instance>`: one directory holds them all, as /dev/shm does.
_SUFFIX = ".lease."

_FALLOC_FL_KEEP_SIZE = 0x01
_FALLOC_FL_PUNCH_HOLE = 0x02


class LeaseFiles:
    """One file per attached instance, beside the pool file."""

    def __init__(self, pool_path: Path) -> None:
        self._pool_path = pool_path
        # Kept open, so that the test works on the very file the worker locked even if somebody deletes the name.
        self._descriptors: dict[str, int] = {}

    def create(self, instance_id: str, chunks: tuple[int, ...]) -> Path:
        """A new lease over `chunks`; raises InvalidRequest for an id that is no file name."""
        assert instance_id not in self._descriptors
        path = self._path_of(check_service_id(instance_id))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._descriptors[instance_id] = descriptor
        # The next life of the agent reads from here which chunks of the old pool a worker still needs.
        os.write(descriptor, pack_tokens(chunks))
        return path

    def is_held(self, instance_id: str) -> bool:
        """Whether a worker holds the lease now."""
        try:
            fcntl.flock(self._descriptors[instance_id], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptors[instance_id], fcntl.LOCK_UN)
        return False

    def end_if_free(self, instance_id: str) -> bool:
        """Whether no worker holds the lease; then its file is gone, and a worker that comes late finds none.

        A worker that opened the file just before must look whether it still has a name after locking it.
        """
        descriptor = self._descriptors[instance_id]
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._path_of(instance_id).unlink(missing_ok=True)
        os.close(self._descriptors.pop(instance_id))
        return True

    @contextmanager
    def shared(self, instance_id: str) -> Iterator[None]:
        """We use memory that the worker allocated: it frees none of it while we hold the lease as well.

        Raises Unavailable when the worker is freeing it already.
        """
        descriptor = os.open(self._path_of(instance_id), os.O_RDONLY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Unavailable(what=f"instance {instance_id}, whose worker is giving it up,") from error
            yield
        finally:
            os.close(descriptor)

    def forget_chunks(self, instance_id: str) -> None:
        """The instance needs no chunks any more; its lease tells of its life only."""
        os.ftruncate(self._descriptors[instance_id], 0)

    def close(self) -> None:
        """Let go of every file; workers keep their locks, and the names stay until the pool is retired."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _path_of(self, instance_id: str) -> Path:
        return self._pool_path.with_name(f"{self._pool_path.name}{_SUFFIX}{instance_id}")


def take_over(pool_path: Path, chunk_size_bytes: int) -> None:
    """Remove the pool and the leases of a former life of this agent that was killed.

    Raises FileExistsError when that life has not ended: its owner holds a lock on the pool.
    """
    try:
        descriptor = os.open(pool_path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        _remove_leases(pool_path)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        retire(descriptor, pool_path, chunk_size_bytes)
    except BlockingIOError:
        raise FileExistsError(errno.EEXIST, "another storage agent owns this pool", os.fspath(pool_path)) from None
    finally:
        os.close(descriptor)
    pool_path.unlink()


def retire(descriptor: int, pool_path: Path, chunk_size_bytes: int) -> None:
    """Give back the memory of a pool that nobody fills any more, and remove its leases; what workers map stays valid.

    An unlinked file keeps all its memory as long as one worker maps one chunk of it, so everything that no worker maps
    is given back: otherwise an agent that starts again would need its memory twice.
    """
    _punch_all_but(_leased_chunks(pool_path), descriptor, chunk_size_bytes)
    _remove_leases(pool_path)


def _lease_paths(pool_path: Path) -> list[Path]:
    return sorted(path for path in pool_path.parent.iterdir() if path.name.startswith(pool_path.name + _SUFFIX))


def _remove_leases(pool_path: Path) -> None:
    for path in _lease_paths(pool_path):
        path.unlink(missing_ok=True)


def _leased_chunks(pool_path: Path) -> set[int]:
    """The chunks that a worker which is alive maps."""
    chunks: set[int] = set()
    for path in _lease_paths(pool_path):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                chunks.update(_chunks_in(file.read()))
    return chunks


def _chunks_in(data: bytes) -> list[int]:
    try:
        return unpack_tokens(data)
    except ProtocolError:  # cut short by a crash: it was never given to a worker
        return []


def _punch_all_but(kept: set[int], descriptor: int, chunk_size_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    size_bytes = os.fstat(descriptor).st_size
    for chunk in range(-(-size_bytes // chunk_size_bytes)):
        if chunk not in kept:
            # A file system that can't (then it is not tmpfs) only costs memory until the workers let go.
            libc.fallocate(
                descriptor,
                _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE,
                chunk * chunk_size_bytes,
                chunk_size_bytes,
            )
