"""Owns reading a checkpoint of the repository, verified: its small files, then chunks in whatever order (L1, L4).

Small files come first: they say how much room is needed, and a wrong checkpoint is refused before its weights move.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ckptio
from ckptio.checkpoint import check_chunk
from ckptio.index_codec import decode
from ckptio.manifest import INDEX_FILE, MANIFEST_FILE, check_agreement, digest_of, partition_file

from services.storage_agent.checkpoints import file_sizes
from services.storage_agent.core.chunks import CheckpointKey, ChunkId
from services.storage_agent.repository import Repository
from services.storage_agent.threads import Threads

# A repository that answers wrong bytes may do better the next time; one that does not is corrupt.
TRIES_MAX = 3

OnBytes = Callable[[int], None]
OnMoved = Callable[[], None]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A checkpoint in the repository whose manifest and index agree with each other and with its files' sizes."""

    key: CheckpointKey
    manifest: ckptio.Manifest
    index: ckptio.Index
    raw_manifest: bytes
    raw_index: bytes


class Source:
    """Checkpoints of one repository. Raises LoadFailed, Unavailable, and ckptio's errors with file and offset."""

    def __init__(self, repository: Repository, threads: Threads) -> None:
        self._repository = repository
        self._threads = threads

    async def open(self, key: CheckpointKey, on_moved: OnMoved = _nothing) -> Published:
        """Read manifest and index, and compare every file's size: one that is missing or short is named. `on_moved` is
        called with each answer of the repository."""
        raw_manifest, manifest, raw_index = await self._repository.open(key)
        index_path = self._repository.location(key.model_id, INDEX_FILE)
        if digest_of(raw_index) != manifest.index_digest:
            raise ckptio.CorruptCheckpoint(index_path, "the file does not match the digest in the manifest")
        index = decode(raw_index, index_path)
        check_agreement(manifest, index, index_path)
        await self._check_sizes(key.model_id, file_sizes(manifest), on_moved)
        return Published(key=key, manifest=manifest, index=index, raw_manifest=raw_manifest, raw_index=raw_index)

    async def small_files(self, published: Published, on_moved: OnMoved = _nothing) -> dict[str, bytes]:
        """Every file that is no partition, verified, by its name."""
        files = {MANIFEST_FILE: published.raw_manifest, INDEX_FILE: published.raw_index}
        for file in published.manifest.files:
            files[file.name] = await self._file(published.key.model_id, file.name, file.digest)
            on_moved()
        return files

    async def read_chunk(
        self, index: ckptio.Index, model_id: str, chunk: ChunkId, view: memoryview, on_bytes: OnBytes
    ) -> None:
        """Fill `view`, which has the chunk's size, and verify it; a bad chunk is read again."""
        name = partition_file(chunk.partition)
        path = self._repository.location(model_id, name)
        offset_bytes = chunk.number * index.chunk_size_bytes
        digest = index.partitions[chunk.partition].digests[chunk.number]
        for tries in range(1, TRIES_MAX + 1):
            try:
                await self._repository.read_into(model_id, name, offset_bytes, view, on_bytes)
            except FileNotFoundError as error:
                raise self._missing(model_id, name) from error
            try:
                await self._threads.run(check_chunk, view, digest, path, offset_bytes, chunk.number)
                return
            except ckptio.CorruptCheckpoint:
                if tries == TRIES_MAX:
                    raise

    async def _check_sizes(self, model_id: str, sizes: dict[str, int], on_moved: OnMoved) -> None:
        for name, expected_bytes in sizes.items():
            path = self._repository.location(model_id, name)
            actual_bytes = await self._size_bytes(model_id, name, expected_bytes)
            on_moved()
            if actual_bytes < expected_bytes:
                raise ckptio.TruncatedCheckpoint(path, expected_bytes=expected_bytes, actual_bytes=actual_bytes)
            if actual_bytes > expected_bytes:
                reason = f"{actual_bytes - expected_bytes} bytes more than were written"
                raise ckptio.CorruptCheckpoint(path, reason, offset_bytes=expected_bytes)

    async def _size_bytes(self, model_id: str, name: str, expected_bytes: int) -> int:
        """What the repository says; a size that is not the expected one is asked for again."""
        actual_bytes = -1
        for _ in range(TRIES_MAX):
            try:
                actual_bytes = await self._repository.size_bytes(model_id, name)
            except FileNotFoundError as error:
                raise self._missing(model_id, name) from error
            if actual_bytes == expected_bytes:
                break
        return actual_bytes

    def _missing(self, model_id: str, name: str) -> ckptio.MissingFile:
        manifest_path = self._repository.location(model_id, MANIFEST_FILE)
        return ckptio.MissingFile(self._repository.location(model_id, name), named_by=manifest_path)

    async def _file(self, model_id: str, name: str, digest: str) -> bytes:
        for _ in range(TRIES_MAX):
            try:
                data = await self._repository.read(model_id, name)
            except FileNotFoundError as error:
                raise self._missing(model_id, name) from error
            if digest_of(data) == digest:
                return data
        path = self._repository.location(model_id, name)
        raise ckptio.CorruptCheckpoint(path, "the file does not match the digest in the manifest")
