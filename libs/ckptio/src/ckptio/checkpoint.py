"""Reading a checkpoint directory: manifest, index, and the full check of every byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import xxhash

from ckptio.errors import CorruptCheckpoint, MissingFile, PathLike, TruncatedCheckpoint, UnsupportedFormat
from ckptio.files import opened, page_buffer, read_bounded, read_exactly
from ckptio.index import Index, IndexPartition
from ckptio.index_codec import decode
from ckptio.manifest import (
    INDEX_FILE,
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    FileInfo,
    Manifest,
    check_agreement,
    digest_of,
    partition_file,
    spell_digest,
)
from ckptio.plan import plan_chunks
from ckptio.writer import Meter, Progress

_COPY_BYTES = 1024 * 1024


def read_manifest(path: PathLike) -> Manifest:
    """The manifest of the checkpoint in directory `path`.

    Raises `UnsupportedFormat` when there is none or it is another version, `CorruptCheckpoint` when it is
    damaged.
    """
    file = Path(path) / MANIFEST_FILE
    try:
        raw = read_bounded(file, MANIFEST_BYTES_MAX)
    except FileNotFoundError as error:
        if not Path(path).is_dir():
            raise
        raise UnsupportedFormat(
            path, f"no {MANIFEST_FILE} here: not a checkpoint of ckptio; convert it"
        ) from error
    except NotADirectoryError as error:
        if not Path(path).is_file():
            raise
        raise UnsupportedFormat(
            path, f"is a file; give the checkpoint directory, such as {Path(path).parent}"
        ) from error
    return Manifest.from_json(raw, file)


def read_index(path: PathLike) -> Index:
    """The index of the checkpoint in directory `path`, checked against the digest in its manifest."""
    return read_checkpoint(path)[1]


def read_checkpoint(path: PathLike) -> tuple[Manifest, Index]:
    """Manifest and index, each valid and in agreement with the other; partition files are not touched."""
    manifest = read_manifest(path)
    file = Path(path) / INDEX_FILE
    raw = _read_whole(file, manifest.index_size_bytes, manifest.index_digest)
    index = decode(raw, file)
    check_agreement(manifest, index, file)
    return manifest, index


def check_sizes(path: PathLike, index: Index) -> None:
    """Raises unless every partition file is there and has exactly its size."""
    for number, part in enumerate(index.partitions):
        _check_size(Path(path) / partition_file(number), part.padded_bytes)


def verify(path: PathLike, *, progress: Callable[[Progress], None] | None = None) -> None:
    """Reads every byte of a checkpoint and compares it with the recorded digests.

    Raises `CorruptCheckpoint` (with `offset_bytes` of the bad chunk), `TruncatedCheckpoint` or `MissingFile`.
    """
    directory = Path(path)
    manifest, index = read_checkpoint(directory)
    check_sizes(directory, index)
    total_bytes = manifest.padded_bytes + sum(file.size_bytes for file in manifest.files)
    meter = Meter(directory, "verify", total_bytes, progress)
    buffer = page_buffer(index.chunk_size_bytes)
    for number, part in enumerate(index.partitions):
        _verify_partition(directory / partition_file(number), part, buffer, meter)
    for file in manifest.files:
        _verify_file(directory / file.name, file, meter)


def check_chunk(chunk: memoryview, digest: int, path: PathLike, offset_bytes: int, chunk_index: int) -> None:
    """Raises `CorruptCheckpoint` when the bytes of a chunk are not those of its digest."""
    if xxhash.xxh3_64_intdigest(chunk) != digest:
        raise CorruptCheckpoint(
            path, "the bytes do not match their digest", offset_bytes=offset_bytes, chunk_index=chunk_index
        )


def _verify_partition(path: Path, part: IndexPartition, buffer: memoryview, meter: Meter) -> None:
    with opened(path) as descriptor:
        for number, read in enumerate(plan_chunks(part.padded_bytes, len(buffer))):
            chunk = buffer[: read.size_bytes]
            read_exactly(descriptor, chunk, read.offset_bytes, path)
            check_chunk(chunk, part.digests[number], path, read.offset_bytes, number)
            meter.add(read.size_bytes)


def _verify_file(path: Path, info: FileInfo, meter: Meter) -> None:
    _check_size(path, info.size_bytes)
    digest = xxhash.xxh3_64()
    with open(path, "rb") as stream:
        while piece := stream.read(_COPY_BYTES):
            digest.update(piece)
            meter.add(len(piece))
    if spell_digest(digest.intdigest()) != info.digest:
        raise CorruptCheckpoint(path, "the file does not match the digest in the manifest")


def _read_whole(path: Path, size_bytes: int, digest: str) -> bytes:
    _check_size(path, size_bytes)
    raw = path.read_bytes()
    if digest_of(raw) != digest:
        raise CorruptCheckpoint(path, "the file does not match the digest in the manifest")
    return raw


def _check_size(path: Path, expected_bytes: int) -> None:
    try:
        actual_bytes = os.stat(path).st_size
    except FileNotFoundError as error:
        raise MissingFile(path, named_by=path.parent / MANIFEST_FILE) from error
    if actual_bytes < expected_bytes:
        raise TruncatedCheckpoint(path, expected_bytes=expected_bytes, actual_bytes=actual_bytes)
    if actual_bytes > expected_bytes:
        reason = f"{actual_bytes - expected_bytes} bytes more than were written"
        raise CorruptCheckpoint(path, reason, offset_bytes=expected_bytes)
