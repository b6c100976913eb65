"""Writes the files of a checkpoint: partitions with digests, copied files, index, and last the manifest."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import xxhash

from ckptio.errors import Cancelled, InsufficientSpace
from ckptio.files import (
    opened,
    page_buffer,
    read_exactly,
    start_writeback,
    sync_directory,
    write_durably,
    write_exactly,
)
from ckptio.index import Slice, make_index
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
from ckptio.plan import CHUNK_SIZE_BYTES, Extent, PartitionLayout, plan_chunks, plan_layout
from ckptio.publish import check_space
from ckptio.resume import Journal


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
    slices: Mapping[str, Slice] = field(default_factory=dict)


def write_checkpoint(
    directory: Path,
    content: Content,
    *,
    partition_of: Callable[[str], int] | None = None,
    chunk_size_bytes: int = CHUNK_SIZE_BYTES,
    progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    journal: Journal | None = None,
) -> Manifest:
    """Fills a directory; memory in use is one chunk, whatever the size of the tensors.

    The directory is empty, or with a `journal` has what an interrupted call wrote of the same content. Raises
    `InsufficientSpace`, also when the file system fills up underway, and `Cancelled`.
    """
    layouts = plan_layout(content.extents, partition_of)
    padded_bytes = sum(layout.padded_bytes for layout in layouts)
    other_bytes = sum(os.stat(path).st_size for _, path in content.other_files)
    kept_bytes = 0 if journal is None else journal.kept_bytes
    check_space(directory, max(0, padded_bytes - kept_bytes) + other_bytes)
    meter = Meter(directory, "convert", padded_bytes, progress, cancelled)
    chunk = page_buffer(chunk_size_bytes)
    with noticing_full_device(directory, meter, padded_bytes + other_bytes):
        return _write_all(directory, content, layouts, chunk, meter, journal)


@contextmanager
def noticing_full_device(directory: Path, meter: Meter, total_bytes: int) -> Iterator[None]:
    """Turns "no space left" into `InsufficientSpace`, which says how much more is needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        required_bytes = total_bytes - meter.done_bytes
        status = os.statvfs(directory)
        available_bytes = status.f_bavail * status.f_frsize
        # A quota can be used up on a file system that has room: then there is none for us.
        raise InsufficientSpace(
            error.filename or directory,
            required_bytes=required_bytes,
            available_bytes=available_bytes if available_bytes < required_bytes else 0,
        ) from error


def _write_all(
    directory: Path,
    content: Content,
    layouts: Sequence[PartitionLayout],
    chunk: memoryview,
    meter: Meter,
    journal: Journal | None,
) -> Manifest:
    if journal is not None:
        journal.start()
    digests = [
        _write_partition(directory / partition_file(number), layout, content, chunk, meter, journal)
        for number, layout in enumerate(layouts)
    ]
    files = tuple(copy_file(directory, name, path, chunk) for name, path in content.other_files)
    index = make_index(
        content.extents,
        layouts,
        digests,
        chunk_size_bytes=len(chunk),
        metadata=content.metadata,
        slices=content.slices,
    )
    raw_index = encode(index)
    write_durably(directory / INDEX_FILE, raw_index)
    manifest = make_manifest(
        index, raw_index, architecture=content.architecture, source=content.source, files=files
    )
    # The manifest is what makes a directory a checkpoint, so it appears after all else is on the device.
    if journal is not None:
        journal.remove()
    sync_directory(directory)
    write_durably(directory / MANIFEST_FILE, manifest.to_json().encode())
    return manifest


def _write_partition(
    path: Path,
    layout: PartitionLayout,
    content: Content,
    chunk: memoryview,
    meter: Meter,
    journal: Journal | None,
) -> list[int]:
    """Streams a partition through one chunk buffer and returns the digest of each chunk."""
    flags = os.O_WRONLY | os.O_EXCL if journal is None else os.O_RDWR
    with opened(path, flags | os.O_CREAT) as descriptor:
        kept = [] if journal is None else _keep_chunks(descriptor, path, layout, chunk, meter, journal)
        stream = _ChunkStream(descriptor, chunk, meter, kept, journal)
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


def _keep_chunks(
    descriptor: int, path: Path, layout: PartitionLayout, chunk: memoryview, meter: Meter, journal: Journal
) -> list[int]:
    """Digests of the leading chunks that are as an interrupted conversion noted; cuts off the rest."""
    kept: list[int] = []
    padded_bytes = layout.padded_bytes
    size_bytes = min(os.fstat(descriptor).st_size, padded_bytes)
    for read in plan_chunks(padded_bytes, len(chunk)):
        digest = journal.next_kept()
        if digest is None or read.offset_bytes + read.size_bytes > size_bytes:
            break
        piece = chunk[: read.size_bytes]
        read_exactly(descriptor, piece, read.offset_bytes, path)
        if xxhash.xxh3_64_intdigest(piece) != digest:
            break
        kept.append(digest)
        journal.confirm()
        meter.add(read.size_bytes)
    kept_bytes = min(len(kept) * len(chunk), padded_bytes)
    if kept_bytes < padded_bytes:
        journal.forget_rest()
    os.ftruncate(descriptor, kept_bytes)
    os.lseek(descriptor, kept_bytes, os.SEEK_SET)
    return kept


class _ChunkStream:
    """Collects bytes into chunks; each full chunk is digested and written, after those that were kept."""

    def __init__(
        self, descriptor: int, chunk: memoryview, meter: Meter, kept: list[int], journal: Journal | None
    ) -> None:
        self._descriptor = descriptor
        self._chunk = chunk
        self._meter = meter
        self._journal = journal
        self._filled = 0
        self._written_bytes = 0
        self._skip_bytes = len(kept) * len(chunk)
        self.digests = kept

    def append(self, size_bytes: int, payload: Bytes) -> None:
        done = min(size_bytes, self._skip_bytes)
        self._skip_bytes -= done
        self._written_bytes += done
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
        digest = xxhash.xxh3_64_intdigest(piece)
        self.digests.append(digest)
        write_exactly(self._descriptor, piece)
        start_writeback(self._descriptor, self._written_bytes, self._filled)
        if self._journal is not None:
            self._journal.append(digest)
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
