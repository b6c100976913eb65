"""Owns REMOTE → SSD: one checkpoint from the repository into a directory, verified while it streams (L1, L4).

Small files come first: they say how much room is needed, and a wrong checkpoint is refused before its weights move.
Then each partition in ranges of one chunk, some at a time; a chunk whose digest is wrong is read again, then refused.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import ckptio
from ckptio.checkpoint import check_chunk
from ckptio.index import IndexPartition
from ckptio.index_codec import decode
from ckptio.manifest import INDEX_FILE, MANIFEST_FILE, check_agreement, digest_of, partition_file
from ckptio.plan import ChunkRead, plan_chunks

from services.storage_agent.checkpoints import file_sizes, footprint_bytes
from services.storage_agent.core.residency import CheckpointKey
from services.storage_agent.repository import Repository
from services.storage_agent.threads import Threads

# Ranges in flight: one is being read while another is verified and written, and one waits. More brings nothing on one
# disk and costs a chunk of memory each.
RANGES_IN_FLIGHT = 3

# A repository that answers one bad chunk may do better the second time; one that does not is corrupt.
CHUNK_TRIES_MAX = 2

MakeRoom = Callable[[int], Awaitable[None]]
OnProgress = Callable[[int, int], None]


class Fetch:
    """One transfer. Bytes land in `partial`, an empty directory that the caller publishes or abandons."""

    def __init__(
        self,
        repository: Repository,
        key: CheckpointKey,
        partial: Path,
        *,
        threads: Threads,
        on_progress: OnProgress,
    ) -> None:
        self._repository = repository
        self._model_id = key.model_id
        self._key = key
        self._partial = partial
        self._threads = threads
        self._on_progress = on_progress
        self._done_bytes = 0
        self._total_bytes = 0

    async def run(self, make_room: MakeRoom) -> int:
        """Fill `partial`; returns the footprint in bytes, of which `make_room` is told before any of it moves.

        Raises LoadFailed, Unavailable, OSError (disk full), and ckptio's errors with the file in the repository and the
        offset in it. Can be cancelled between ranges.
        """
        raw_manifest, manifest, raw_index = await self._repository.open(self._key)
        index_path = self._repository.location(self._model_id, INDEX_FILE)
        if digest_of(raw_index) != manifest.index_digest:
            raise ckptio.CorruptCheckpoint(index_path, "the file does not match the digest in the manifest")
        index = decode(raw_index, index_path)
        check_agreement(manifest, index, index_path)
        size_bytes = footprint_bytes(manifest)
        await make_room(size_bytes)
        self._total_bytes = manifest.padded_bytes
        await self._check_sizes(file_sizes(manifest))
        for file in manifest.files:
            await self._copy_file(file.name, file.digest)
        for number, partition in enumerate(index.partitions):
            await self._copy_partition(partition_file(number), partition, index.chunk_size_bytes)
        # The manifest is last: without it a directory is no checkpoint.
        await self._write(INDEX_FILE, raw_index)
        await self._write(MANIFEST_FILE, raw_manifest)
        return size_bytes

    async def _check_sizes(self, sizes: dict[str, int]) -> None:
        """Refuse a checkpoint with a file that is missing or has another size than it should, naming it."""
        for name, expected_bytes in sizes.items():
            path = self._repository.location(self._model_id, name)
            try:
                actual_bytes = await self._repository.size_bytes(self._model_id, name)
            except FileNotFoundError as error:
                manifest_path = self._repository.location(self._model_id, MANIFEST_FILE)
                raise ckptio.MissingFile(path, named_by=manifest_path) from error
            if actual_bytes < expected_bytes:
                raise ckptio.TruncatedCheckpoint(path, expected_bytes=expected_bytes, actual_bytes=actual_bytes)
            if actual_bytes > expected_bytes:
                reason = f"{actual_bytes - expected_bytes} bytes more than were written"
                raise ckptio.CorruptCheckpoint(path, reason, offset_bytes=expected_bytes)

    async def _copy_file(self, name: str, digest: str) -> None:
        for tries in range(1, CHUNK_TRIES_MAX + 1):
            data = await self._repository.read(self._model_id, name)
            if digest_of(data) == digest:
                await self._write(name, data)
                return
            if tries == CHUNK_TRIES_MAX:
                path = self._repository.location(self._model_id, name)
                raise ckptio.CorruptCheckpoint(path, "the file does not match the digest in the manifest")

    async def _write(self, name: str, data: bytes) -> None:
        await self._threads.run(_write_file, self._partial / name, data)

    async def _copy_partition(self, name: str, partition: IndexPartition, chunk_size_bytes: int) -> None:
        descriptor = await self._threads.run(_allocate, self._partial / name, partition.padded_bytes)
        room = asyncio.Semaphore(RANGES_IN_FLIGHT)
        chunks = plan_chunks(partition.padded_bytes, chunk_size_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                for number, chunk in enumerate(chunks):
                    await room.acquire()
                    copying = group.create_task(
                        self._copy_chunk(name, descriptor, chunk, partition.digests[number], number)
                    )
                    copying.add_done_callback(lambda _: room.release())
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            os.close(descriptor)

    async def _copy_chunk(self, name: str, descriptor: int, chunk: ChunkRead, digest: int, number: int) -> None:
        path = self._repository.location(self._model_id, name)
        for tries in range(1, CHUNK_TRIES_MAX + 1):
            data = memoryview(
                await self._repository.read_range(self._model_id, name, chunk.offset_bytes, chunk.size_bytes)
            )
            try:
                await self._threads.run(_check_and_write, descriptor, data, digest, path, chunk.offset_bytes, number)
                break
            except ckptio.CorruptCheckpoint:
                if tries == CHUNK_TRIES_MAX:
                    raise
        self._done_bytes += chunk.size_bytes
        self._on_progress(self._done_bytes, self._total_bytes)


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _allocate(path: Path, size_bytes: int) -> int:
    """A new file that has all its blocks already, so that a full disk shows now and writes go on in parallel."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if size_bytes:
            os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    return descriptor


def _check_and_write(
    descriptor: int, data: memoryview, digest: int, source: Path, offset_bytes: int, number: int
) -> None:
    check_chunk(data, digest, source, offset_bytes, number)
    done_bytes = 0
    while done_bytes < len(data):
        done_bytes += os.pwrite(descriptor, data[done_bytes:], offset_bytes + done_bytes)
