"""Export of a checkpoint to safetensors, equal tensor by tensor (F7)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptio.checkpoint import check_chunk, check_sizes, read_checkpoint
from ckptio.errors import CorruptCheckpoint, PathLike, UnsupportedFormat, needing_torch
from ckptio.files import opened, page_buffer, read_exactly, write_durably, write_exactly
from ckptio.index import Index, IndexPartition, TensorEntry
from ckptio.manifest import INDEX_FILE, Manifest, partition_file
from ckptio.plan import size_of
from ckptio.publish import check_outside, check_space, publishing
from ckptio.replaceable import EXPORT_FILE, export_note
from ckptio.slicing import join
from ckptio.stock import encode_header
from ckptio.writer import Meter, Progress, copy_file, noticing_full_device

_COPY_BYTES = 16 * 1024 * 1024


def export(
    path: PathLike,
    destination: PathLike,
    *,
    overwrite: bool = False,
    verify: bool = True,
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Writes the checkpoint `path` as a safetensors directory and returns its weight file.

    A tensor that was split over GPUs is joined again, of copies there is one. Safetensors has neither ties
    nor strides: each tied tensor is written out, each view made contiguous
    (torch is needed for that, and only for that). Every byte that is copied is compared with its digest,
    unless `verify` is false. Only an earlier export is replaced. Raises `UnsupportedFormat` for a dtype that
    safetensors does not have, `CorruptCheckpoint`, `InsufficientSpace`, `CheckpointExists`.
    """
    source = Path(path)
    check_outside(Path(destination), source)
    manifest, index = read_checkpoint(source)
    check_sizes(source, index)
    wholes = [_whole(index, name, rows) for name, rows in index.rows_of_wholes().items()]
    try:
        header = encode_header(
            ((whole.name, whole.dtype, whole.shape) for whole in wholes),
            {"format": "pt"} | dict(index.metadata),
        )
    except ValueError as error:
        raise UnsupportedFormat(source / INDEX_FILE, f"cannot be written as safetensors: {error}") from error
    size_bytes = sum(size_of(whole.dtype, whole.shape) for whole in wholes)
    is_adapter = any(file.name == "adapter_config.json" for file in manifest.files)
    name = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    with publishing(Path(destination), marker=EXPORT_FILE, overwrite=overwrite) as directory:
        check_space(directory, len(header) + size_bytes)
        meter = Meter(source, "export", size_bytes, progress)
        with noticing_full_device(directory, meter, len(header) + size_bytes):
            with _opened_partitions(source, index, verify) as partitions:
                _write_tensors(directory / name, header, wholes, partitions, meter)
            _copy_others(source, directory, manifest, verify)
            files = [name, *(file.name for file in manifest.files)]
            write_durably(directory / EXPORT_FILE, export_note(files))
    return Path(destination) / name


@dataclass(frozen=True, slots=True)
class _Whole:
    """A tensor to write: one row of the index, or the rows that it is joined from along `dimension`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TensorEntry, ...]
    dimension: int | None = None


def _whole(index: Index, name: str, rows: tuple[int, ...]) -> _Whole:
    entry = index.entry(rows[0])
    part = index.slices.get(rows[0])
    if part is None or part.dimension is None:
        return _Whole(name, entry.dtype, entry.shape, (entry,))
    parts = tuple(index.entry(row) for row in rows)
    return _Whole(name, entry.dtype, part.shape, parts, part.dimension)


class _Partition:
    """An open partition file; a chunk is compared with its digest before the first byte of it is used."""

    def __init__(self, descriptor: int, path: Path, part: IndexPartition, buffer: memoryview | None) -> None:
        self._descriptor = descriptor
        self._path = path
        self._part = part
        self._buffer = buffer
        self._checked: set[int] = set()

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        if self._buffer is not None and len(target) > 0:
            chunk_bytes = len(self._buffer)
            last = (offset_bytes + len(target) - 1) // chunk_bytes
            for number in range(offset_bytes // chunk_bytes, last + 1):
                if number not in self._checked:
                    self._check(number, self._buffer)
        read_exactly(self._descriptor, target, offset_bytes, self._path)

    def _check(self, number: int, buffer: memoryview) -> None:
        start = number * len(buffer)
        chunk = buffer[: min(len(buffer), self._part.padded_bytes - start)]
        read_exactly(self._descriptor, chunk, start, self._path)
        check_chunk(chunk, self._part.digests[number], self._path, start, number)
        self._checked.add(number)


@dataclass(frozen=True, slots=True)
class _PartBytes:
    """The bytes of a contiguous tensor of a partition."""

    partition: _Partition
    start_bytes: int

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        self.partition.read_into(target, self.start_bytes + offset_bytes)


@contextmanager
def _opened_partitions(source: Path, index: Index, verify: bool) -> Iterator[list[_Partition]]:
    buffer = page_buffer(index.chunk_size_bytes) if verify else None
    with ExitStack() as stack:
        partitions = []
        for number, part in enumerate(index.partitions):
            file = source / partition_file(number)
            partitions.append(_Partition(stack.enter_context(opened(file)), file, part, buffer))
        yield partitions


def _write_tensors(
    target: Path, header: bytes, wholes: list[_Whole], partitions: list[_Partition], meter: Meter
) -> None:
    buffer = page_buffer(_COPY_BYTES)
    with opened(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as output:
        write_exactly(output, memoryview(header))
        for whole in wholes:
            entry = whole.parts[0]
            if whole.dimension is None:
                pieces = _pieces(entry, partitions[entry.partition], buffer)
            else:
                pieces = _joined(whole, partitions)
            for piece in pieces:
                write_exactly(output, piece)
                meter.add(len(piece))
        os.fsync(output)


def _joined(whole: _Whole, partitions: list[_Partition]) -> Iterator[memoryview]:
    assert whole.dimension is not None
    rows = math.prod(whole.shape[: whole.dimension])
    parts = [_PartBytes(partitions[part.partition], part.offset_bytes) for part in whole.parts]
    return join(parts, [part.size_bytes // max(rows, 1) for part in whole.parts], rows, _COPY_BYTES)


def _pieces(entry: TensorEntry, partition: _Partition, buffer: memoryview) -> Iterator[memoryview]:
    if entry.stride is not None:
        raw = bytearray(entry.size_bytes)
        partition.read_into(memoryview(raw), entry.offset_bytes)
        with needing_torch(f"{entry.name}: making a view contiguous"):
            from ckptio.views import contiguous_bytes
        yield memoryview(contiguous_bytes(raw, entry))
        return
    for offset in range(0, entry.size_bytes, len(buffer)):
        piece = buffer[: min(len(buffer), entry.size_bytes - offset)]
        partition.read_into(piece, entry.offset_bytes + offset)
        yield piece


def _copy_others(source: Path, directory: Path, manifest: Manifest, verify: bool) -> None:
    buffer = page_buffer(_COPY_BYTES)
    for file in manifest.files:
        copied = copy_file(directory, file.name, source / file.name, buffer)
        if verify and copied != file:
            raise CorruptCheckpoint(source / file.name, "the file does not match the digest in the manifest")
