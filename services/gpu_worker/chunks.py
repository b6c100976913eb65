"""Owns what the agent lent for an instance: the lease that tells it, and the memory in which the bytes are to be seen.

A partition for the CPU is mapped from the agent's pool. One for a GPU gets memory of that GPU, which this process
allocates and the agent fills through its IPC handle; the pool is then only a station on the way.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
import time
from pathlib import Path

import ckptio
from ckptio.checkpoint import read_checkpoint
from whimbrel.wire.codec import unpack_tokens
from whimbrel.wire.errors import Cancelled, Conflict, LoadFailed, WhimbrelError
from whimbrel.wire.messages import AttachInstance, PartitionChunks

from services.gpu_worker.engines.engine import PartitionMemory

CONFIG_FILE = "config.json"
HOST = "cpu"

# Pages are put into this process's page tables in pieces, so that giving the chunks back never waits for long.
TOUCH_BYTES = 16 * 1024 * 1024
_MADV_POPULATE_READ = 22

# A copy of a chunk takes milliseconds, and a load that is cancelled ends with the one that is under way.
ALONE_S_MAX = 10.0
ALONE_POLL_S = 0.005

_libc = ctypes.CDLL(None)


class LentChunks:
    """The memory of each partition, in order, under a lease. Made by `take`, given back by `close`."""

    def __init__(self, lease: int, index: ckptio.Index, memories: list[PartitionMemory]) -> None:
        self._lease: int | None = lease
        self._lock = threading.Lock()
        self._owned = memories.copy()
        self.index = index
        self.memories = memories
        # What the agent needs to fill the partitions that are on GPUs, in their order.
        self.handles: tuple[bytes, ...] = ()

    @classmethod
    def take(cls, attach: AttachInstance, former: LentChunks | None = None) -> LentChunks:
        """Lock the lease, read the index, map chunks and allocate memory of GPUs; blocks for milliseconds.

        Memory of a GPU that `former` has for the same partition is used again, because a GPU has no room for a model
        twice; it stays that of `former` until `adopt`. Raises Cancelled when the agent has taken the lease back,
        LoadFailed when index and chunks do not fit together, or a GPU is not there or full.
        """
        lease = _lock(attach)
        memories: list[PartitionMemory] = []
        reused = _device_memories(former)
        try:
            index = _read_index(attach)
            _check(attach, index)
            for number, partition in enumerate(attach.partitions):
                memories.append(
                    reused.get((number, partition.device, partition.size_bytes)) or _memory(attach, partition)
                )
            chunks = cls(lease, index, memories)
            chunks._owned = [memory for memory in memories if memory not in reused.values()]
            chunks.handles = tuple(m.ipc_handle() for m in memories if isinstance(m, ckptio.DeviceBuffer))
            return chunks
        except BaseException as cause:
            for memory in memories:
                if memory not in reused.values():
                    memory.close()
            os.close(lease)
            if isinstance(cause, Conflict):
                raise
            if isinstance(cause, ckptio.CkptioError | OSError | ValueError | WhimbrelError):
                raise LoadFailed(model_id=attach.model_id, reason=str(cause)) from cause
            raise

    def adopt(self, former: LentChunks) -> None:
        """Take over what was used again of `former`, which gives back only the rest."""
        with self._lock, former._lock:
            taken = [memory for memory in former._owned if memory in self.memories]
            former._owned = [memory for memory in former._owned if memory not in taken]
            self._owned += taken

    def touch(self) -> None:
        """Take the page faults of the mappings now, while the bytes may still be on their way; blocks for milliseconds.

        A quarter of a gigabyte has 65,000 pages, and their faults would cost the first prefill some 30 ms of processor
        time. No byte is looked at. Does nothing on a kernel that cannot (before 5.14), or when the chunks are closed.
        """
        for mapping in self.memories:
            if isinstance(mapping, ckptio.DeviceBuffer):
                continue
            for start in range(0, len(mapping), TOUCH_BYTES):
                with self._lock:
                    if mapping.is_closed:
                        return
                    _populate(mapping, start, min(TOUCH_BYTES, len(mapping) - start))

    def close(self) -> None:
        """Unmap and free everything, then let go of the lease. Raises BufferError, keeping the lease, while a view of a
        mapping is alive."""
        with self._lock:
            if self._lease is not None and any(isinstance(memory, ckptio.DeviceBuffer) for memory in self._owned):
                _wait_until_alone(self._lease)
            for memory in self._owned:
                memory.close()
            self._release_lease()

    def _release_lease(self) -> None:
        if self._lease is not None:
            os.close(self._lease)
            self._lease = None


def _wait_until_alone(lease: int) -> None:
    """The agent holds the lease too while it copies to our memory, which must not be freed under it. It is told to stop
    by whoever ends the instance; if it were stuck, waiting for ever would help nobody."""
    deadline_s = time.monotonic() + ALONE_S_MAX
    while time.monotonic() < deadline_s:
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(ALONE_POLL_S)


def _read_index(attach: AttachInstance) -> ckptio.Index:
    """The index of the content that was lent. Raises Conflict when another one lies there by now: the load may be tried
    again."""
    manifest, index = read_checkpoint(attach.checkpoint_path)
    if manifest.index_digest != attach.index_digest:
        raise Conflict(reason=f"{attach.checkpoint_path} holds another content of {attach.model_id} by now")
    return index


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


def _check(attach: AttachInstance, index: ckptio.Index) -> None:
    lent = len(attach.partitions)
    if lent != len(index.partitions):
        raise ValueError(f"{lent} partitions were lent, the index has {len(index.partitions)}")
    for number, (partition, known) in enumerate(zip(attach.partitions, index.partitions, strict=True)):
        if partition.size_bytes < known.size_bytes:
            raise ValueError(f"partition {number}: {partition.size_bytes} bytes lent of {known.size_bytes}")


def _memory(attach: AttachInstance, partition: PartitionChunks) -> PartitionMemory:
    if partition.device == HOST:
        chunks = unpack_tokens(partition.chunks)
        return ckptio.map_chunks(attach.pool_path, attach.chunk_size_bytes, chunks, partition.size_bytes)
    return ckptio.DeviceBuffer.allocate(partition.device, partition.size_bytes)


def _device_memories(former: LentChunks | None) -> dict[tuple[int, str, int], PartitionMemory]:
    """By number of the partition, device, and size in bytes."""
    memories = [] if former is None else former.memories
    return {
        (number, memory.device, memory.size_bytes): memory
        for number, memory in enumerate(memories)
        if isinstance(memory, ckptio.DeviceBuffer)
    }
