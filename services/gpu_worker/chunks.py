"""Owns the hold on an instance's chunks: the lease that tells the agent, and the mappings that show the bytes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from pathlib import Path

import ckptio
from whimbrel.wire.codec import unpack_tokens
from whimbrel.wire.errors import Cancelled, LoadFailed, WhimbrelError
from whimbrel.wire.messages import AttachInstance

CONFIG_FILE = "config.json"

# Pages are put into this process's page tables in pieces, so that giving the chunks back never waits for long.
TOUCH_BYTES = 16 * 1024 * 1024
_MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None)


class LentChunks:
    """Chunks of the agent's pool, mapped under a lease that is held until `close`. Made by `take`."""

    def __init__(self, lease: int, index: ckptio.Index, mappings: list[ckptio.Mapping]) -> None:
        self._lease: int | None = lease
        self._lock = threading.Lock()
        self.index = index
        self.mappings = mappings

    @classmethod
    def take(cls, attach: AttachInstance) -> LentChunks:
        """Lock the lease, read the index, map the chunks; blocks for milliseconds.

        Raises Cancelled when the agent has taken the lease back, LoadFailed when index and chunks do not fit together.
        """
        lease = _lock(attach)
        try:
            index = ckptio.read_index(attach.checkpoint_path)
            return cls(lease, index, _map(attach, index))
        except (ckptio.CkptioError, OSError, ValueError, WhimbrelError) as cause:
            os.close(lease)
            raise LoadFailed(model_id=attach.model_id, reason=str(cause)) from cause
        except BaseException:
            os.close(lease)
            raise

    def touch(self) -> None:
        """Take the page faults of the mappings now, while the bytes may still be on their way; blocks for milliseconds.

        A quarter of a gigabyte has 65,000 pages, and their faults would cost the first prefill some 30 ms of processor
        time. No byte is looked at. Does nothing on a kernel that cannot (before 5.14), or when the chunks are closed.
        """
        for mapping in self.mappings:
            for start in range(0, len(mapping), TOUCH_BYTES):
                with self._lock:
                    if mapping.is_closed:
                        return
                    _populate(mapping, start, min(TOUCH_BYTES, len(mapping) - start))

    def close(self) -> None:
        """Unmap everything, then let go of the lease. Raises BufferError, keeping the lease, while a view is alive."""
        with self._lock:
            for mapping in self.mappings:
                mapping.close()
            if self._lease is not None:
                os.close(self._lease)
                self._lease = None


def read_config(attach: AttachInstance) -> bytes:
    """The model's configuration from the checkpoint itself, for an attach that comes before the scheduler's word."""
    path = Path(attach.checkpoint_path) / CONFIG_FILE
    try:
        return path.read_bytes()
    except OSError as cause:
        raise LoadFailed(model_id=attach.model_id, reason=f"{path}: {cause.strerror}") from cause


def _populate(mapping: ckptio.Mapping, start: int, size_bytes: int) -> None:
    view = (ctypes.c_char * 1).from_buffer(mapping, start)
    _libc.madvise(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size_bytes), _MADV_POPULATE_READ)


def _lock(attach: AttachInstance) -> int:
    """A descriptor that holds the lease's shared lock; the kernel drops it with the process, whatever happens."""
    gone = f"the load of instance {attach.instance_id!r}, whose lease {attach.lease_path} is gone,"
    try:
        lease = os.open(attach.lease_path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as cause:
        raise Cancelled(what=gone) from cause
    # The agent holds the exclusive lock for no longer than it takes to test and unlink.
    fcntl.flock(lease, fcntl.LOCK_SH)
    # It may have unlinked the file between the two lines above: then our lock protects nothing.
    if os.fstat(lease).st_nlink == 0:
        os.close(lease)
        raise Cancelled(what=gone)
    return lease


def _map(attach: AttachInstance, index: ckptio.Index) -> list[ckptio.Mapping]:
    lent = len(attach.partitions)
    if lent != len(index.partitions):
        raise ValueError(f"{lent} partitions were lent, the index has {len(index.partitions)}")
    mappings: list[ckptio.Mapping] = []
    try:
        for number, (partition, known) in enumerate(zip(attach.partitions, index.partitions, strict=True)):
            if partition.size_bytes < known.size_bytes:
                raise ValueError(f"partition {number}: {partition.size_bytes} bytes lent of {known.size_bytes}")
            chunks = unpack_tokens(partition.chunks)
            mappings.append(ckptio.map_chunks(attach.pool_path, attach.chunk_size_bytes, chunks, partition.size_bytes))
    except BaseException:
        for mapping in mappings:
            mapping.close()
        raise
    return mappings
