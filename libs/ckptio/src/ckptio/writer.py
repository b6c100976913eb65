"""Writes the files of a checkpoint: partitions with digests, copied files, index, and last the manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from ckptio.errors import Cancelled
from ckptio.files import (
    opened,
    page_buffer,
    read_exactly,
    start_writeback,
    sync_directory,
    write_durably,
    write_exactly,
)
from ckptio.index import make_index
from ckptio.index_codec import encode
from ckptio.manifest import (
    INDEX_FILE,
    MANIFEST_FILE,
    FileInfo,
    Manifest,
    Source,
    make_manifest,
    partition_file,
    spell_digest,
)
from ckptio.plan import CHUNK_SIZE_BYTES, Extent, PartitionLayout, plan_layout
from ckptio.publish import check_space


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an operation is: `stage` is "convert", "verify" or "export"."""

    stage: str
    done_bytes: int
    total_bytes: int


class Bytes(Protocol):
    """The bytes of an extent, wherever they are."""

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        """Fills `target` from `offset_bytes` of the extent."""


class Meter:
    """Counts bytes, tells the caller, and asks whether to go on."""

    def __init__(
        self,
        path: Path,
        stage: str,
        total_bytes: int,
        progress: Callable[[Progress], None] | None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self._path = path
        self._stage = stage
        self._total_bytes = total_bytes
        self._progress = progress
        self._cancelled = cancelled
        self.done_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Raises `Cancelled` when the caller wants no more."""
        self.done_bytes += size_bytes
        if self._progress is not None:
            report = Progress(stage=self._stage, done_bytes=self.done_bytes, total_bytes=self._total_bytes)
            self._progress(report)
        if self._cancelled is not None and self._cancelled():
            raise Cancelled(self._path, done_bytes=self.done_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """All that goes into a checkpoint: extents, the bytes of each, and what describes them."""

    extents: Sequence[Extent]
    payloads: Sequence[Bytes]
    source: Source
    architecture: str | None = None
    metadata: Mapping[str, str]
    other_files: Sequence[tuple[str, Path]] = ()


def write_checkpoint(
    directory: Path,
    content: Content,
    *,
    partition_of: Callable[[str], int] | None = None,
    chunk_size_bytes: int = CHUNK_SIZE_BYTES,
    progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Manifest:
    """Fills an empty directory; memory in use is one chunk, whatever the size of the tensors."""
    layouts = plan_layout(content.extents, partition_of)
    padded_bytes = sum(layout.padded_bytes for layout in layouts)
    other_bytes = sum(os.stat(path).st_size for _, path in content.other_files)
    check_space(directory, padded_bytes + other_bytes)
    meter = Meter(directory, "convert", padded_bytes, progress, cancelled)
    chunk = page_buffer(chunk_size_bytes)
    digests = [
        _write_partition(directory / partition_file(number), layout, content, chunk, meter)
        for number, layout in enumerate(layouts)
    ]
    files = tuple(copy_file(directory, name, path, chunk) for name, path in content.other_files)
    index = make_index(
        content.extents, layouts, digests, chunk_size_bytes=chunk_size_bytes, metadata=content.metadata
    )
    raw_index = encode(index)
    write_durably(directory / INDEX_FILE, raw_index)
    manifest = make_manifest(
        index, raw_index, architecture=content.architecture, source=content.source, files=files
    )
    # The manifest is what makes a directory a checkpoint, so it appears after all else is on the device.
    sync_directory(directory)
    write_durably(directory / MANIFEST_FILE, manifest.to_json().encode())
    return manifest


def _write_partition(
    path: Path, layout: PartitionLayout, content: Content, chunk: memoryview, meter: Meter
) -> list[int]:
    """Streams a partition through one chunk buffer and returns the digest of each chunk."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        stream = _ChunkStream(descriptor, chunk, meter)
        position = 0
        for placement in layout.placements:
            size_bytes = content.extents[placement.extent].size_bytes
            stream.append(placement.offset_bytes - position, _ZEROS)
            stream.append(size_bytes, content.payloads[placement.extent])
            position = placement.offset_bytes + size_bytes
        stream.append(layout.padded_bytes - position, _ZEROS)
        stream.flush()
        os.fsync(descriptor)
    return stream.digests


class _ChunkStream:
    """Collects bytes into chunks; each full chunk is digested and written."""

    def __init__(self, descriptor: int, chunk: memoryview, meter: Meter) -> None:
        self._descriptor = descriptor
        self._chunk = chunk
        self._meter = meter
        self._filled = 0
        self._written_bytes = 0
        self.digests: list[int] = []

    def append(self, size_bytes: int, payload: Bytes) -> None:
        done = 0
        while done < size_bytes:
            count = min(size_bytes - done, len(self._chunk) - self._filled)
            payload.read_into(self._chunk[self._filled : self._filled + count], done)
            done += count
            self._filled += count
            if self._filled == len(self._chunk):
                self.flush()

    def flush(self) -> None:
        if self._filled == 0:
            return
        piece = self._chunk[: self._filled]
        self.digests.append(xxhash.xxh3_64_intdigest(piece))
        write_exactly(self._descriptor, piece)
        start_writeback(self._descriptor, self._written_bytes, self._filled)
        self._written_bytes += self._filled
        self._meter.add(self._filled)
        self._filled = 0


class _Zeros:
    """What lies between tensors and after the last one."""

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        target[:] = bytes(len(target))


_ZEROS = _Zeros()


def copy_file(directory: Path, name: str, path: Path, chunk: memoryview) -> FileInfo:
    """Copies `path` to `name` under `directory` through the buffer `chunk`, durably, and digests it."""
    target = directory / name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = xxhash.xxh3_64()
    with opened(path) as source:
        size_bytes = os.fstat(source).st_size
        with opened(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            for offset in range(0, size_bytes, len(chunk)):
                piece = chunk[: min(len(chunk), size_bytes - offset)]
                read_exactly(source, piece, offset, path)
                digest.update(piece)
                write_exactly(descriptor, piece)
            os.fsync(descriptor)
    return FileInfo(name=name, size_bytes=size_bytes, digest=spell_digest(digest.intdigest()))
