"""Export of a checkpoint to safetensors, equal tensor by tensor (F7)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ckptio.checkpoint import check_sizes, read_checkpoint
from ckptio.errors import PathLike, UnsupportedFormat
from ckptio.files import opened, page_buffer, read_exactly, write_exactly
from ckptio.index import Index, TensorEntry
from ckptio.manifest import INDEX_FILE, Manifest, partition_file
from ckptio.plan import size_of
from ckptio.publish import check_space, publishing
from ckptio.slicing import join
from ckptio.stock import encode_header
from ckptio.writer import Meter, Progress, copy_file, noticing_full_device

_COPY_BYTES = 16 * 1024 * 1024


def export(
    path: PathLike,
    destination: PathLike,
    *,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Writes the checkpoint `path` as a safetensors directory and returns its weight file.

    A tensor that was split over GPUs is joined again, of copies there is one. Safetensors has neither ties
    nor strides: each tied tensor is written out, each view made contiguous
    (torch is needed for that, and only for that). Digests are not checked here; `verify` does. Raises
    `UnsupportedFormat` for a dtype that safetensors does not have, `InsufficientSpace`.
    """
    source = Path(path)
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
    with publishing(Path(destination), marker=name, overwrite=overwrite) as directory:
        check_space(directory, len(header) + size_bytes)
        meter = Meter(source, "export", size_bytes, progress)
        with noticing_full_device(directory, meter, len(header) + size_bytes):
            _write_tensors(source, directory / name, header, wholes, index, meter)
            _copy_others(source, directory, manifest)
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


@dataclass(frozen=True, slots=True)
class _PartBytes:
    """The bytes of a contiguous tensor of an open partition."""

    descriptor: int
    path: Path
    start_bytes: int

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        read_exactly(self.descriptor, target, self.start_bytes + offset_bytes, self.path)


def _write_tensors(
    source: Path, target: Path, header: bytes, wholes: list[_Whole], index: Index, meter: Meter
) -> None:
    with ExitStack() as stack:
        files = [source / partition_file(number) for number in range(len(index.partitions))]
        descriptors = [stack.enter_context(opened(file)) for file in files]
        output = stack.enter_context(opened(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        buffer = page_buffer(_COPY_BYTES)
        write_exactly(output, memoryview(header))
        for whole in wholes:
            entry = whole.parts[0]
            if whole.dimension is None:
                pieces = _pieces(entry, descriptors[entry.partition], files[entry.partition], buffer)
            else:
                pieces = _joined(whole, descriptors, files)
            for piece in pieces:
                write_exactly(output, piece)
                meter.add(len(piece))
        os.fsync(output)


def _joined(whole: _Whole, descriptors: list[int], files: list[Path]) -> Iterator[memoryview]:
    assert whole.dimension is not None
    rows = math.prod(whole.shape[: whole.dimension])
    parts = [
        _PartBytes(descriptors[part.partition], files[part.partition], part.offset_bytes)
        for part in whole.parts
    ]
    return join(parts, [part.size_bytes // max(rows, 1) for part in whole.parts], rows, _COPY_BYTES)


def _pieces(entry: TensorEntry, descriptor: int, path: Path, buffer: memoryview) -> Iterator[memoryview]:
    if entry.stride is not None:
        raw = bytearray(entry.size_bytes)
        read_exactly(descriptor, memoryview(raw), entry.offset_bytes, path)
        from ckptio.torch import contiguous_bytes  # here, because all else works without torch

        yield memoryview(contiguous_bytes(raw, entry))
        return
    for offset in range(0, entry.size_bytes, len(buffer)):
        piece = buffer[: min(len(buffer), entry.size_bytes - offset)]
        read_exactly(descriptor, piece, entry.offset_bytes + offset, path)
        yield piece


def _copy_others(source: Path, directory: Path, manifest: Manifest) -> None:
    buffer = page_buffer(_COPY_BYTES)
    for file in manifest.files:
        copy_file(directory, file.name, source / file.name, buffer)
