"""Export of a checkpoint to safetensors, equal tensor by tensor (F7)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from ckptio.checkpoint import check_sizes, read_checkpoint
from ckptio.errors import PathLike, UnsupportedFormat
from ckptio.files import opened, page_buffer, read_exactly, write_exactly
from ckptio.index import Index, TensorEntry
from ckptio.manifest import INDEX_FILE, Manifest, partition_file
from ckptio.plan import size_of
from ckptio.publish import check_space, publishing
from ckptio.stock import encode_header
from ckptio.writer import Meter, Progress, copy_file

_COPY_BYTES = 16 * 1024 * 1024


def export(
    path: PathLike,
    destination: PathLike,
    *,
    overwrite: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Path:
    """Writes the checkpoint `path` as a safetensors directory and returns its weight file.

    Safetensors has neither ties nor strides: each tied tensor is written out, each view made contiguous
    (torch is needed for that, and only for that). Digests are not checked here; `verify` does. Raises
    `UnsupportedFormat` for a dtype that safetensors does not have.
    """
    source = Path(path)
    manifest, index = read_checkpoint(source)
    check_sizes(source, index)
    entries = [index.entry(row) for row in range(len(index))]
    try:
        header = encode_header(
            ((entry.name, entry.dtype, entry.shape) for entry in entries),
            {"format": "pt"} | dict(index.metadata),
        )
    except ValueError as error:
        raise UnsupportedFormat(source / INDEX_FILE, f"cannot be written as safetensors: {error}") from error
    sizes = [size_of(entry.dtype, entry.shape) for entry in entries]
    is_adapter = any(file.name == "adapter_config.json" for file in manifest.files)
    name = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    with publishing(Path(destination), marker=name, overwrite=overwrite) as directory:
        check_space(directory, len(header) + sum(sizes))
        meter = Meter(source, "export", sum(sizes), progress)
        _write_tensors(source, directory / name, header, entries, index, meter)
        _copy_others(source, directory, manifest)
    return Path(destination) / name


def _write_tensors(
    source: Path, target: Path, header: bytes, entries: list[TensorEntry], index: Index, meter: Meter
) -> None:
    with ExitStack() as stack:
        files = [source / partition_file(number) for number in range(len(index.partitions))]
        descriptors = [stack.enter_context(opened(file)) for file in files]
        output = stack.enter_context(opened(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        buffer = page_buffer(_COPY_BYTES)
        write_exactly(output, memoryview(header))
        for entry in entries:
            for piece in _pieces(entry, descriptors[entry.partition], files[entry.partition], buffer):
                write_exactly(output, piece)
                meter.add(len(piece))
        os.fsync(output)


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
