"""Torch tensors: loading, and views of mapped chunks."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckptio.checkpoint import check_chunk, check_sizes, read_checkpoint
from ckptio.dtypes import DTYPES
from ckptio.errors import PathLike
from ckptio.files import opened, read_exactly
from ckptio.index import Index, TensorEntry
from ckptio.manifest import partition_file
from ckptio.native import native_status
from ckptio.plan import plan_chunks, size_of

if TYPE_CHECKING:
    from ckptio._native import Mapping as ChunkMapping

# Torch cannot copy strided tensors of every dtype; elements of the same size always can stand in for them.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def load(path: PathLike, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """Reads a whole checkpoint into private memory, every chunk verified, and gives its tensors, ties kept.

    All tensors of a partition share one storage. On another device than the CPU each partition is copied
    once.
    """
    directory = Path(path)
    _, index = read_checkpoint(directory)
    check_sizes(directory, index)
    read = _read_native if native_status().is_loaded else _read_python
    bases = [read(directory, index, number) for number in range(len(index.partitions))]
    target = torch.device(device)
    return _views(index, [base.to(target) for base in bases])


def tensors(index: Index, mappings: Sequence[ChunkMapping]) -> dict[str, torch.Tensor]:
    """Zero-copy tensors over the mapping of each partition, in order; tied tensors share memory.

    No byte is touched, so this may run while a reader still fills the chunks. The mappings live as long as
    any of the tensors. Raises ValueError when a mapping is too small for its partition.
    """
    if len(mappings) != len(index.partitions):
        raise ValueError(f"{len(mappings)} mappings for {len(index.partitions)} partitions")
    for number, (mapping, part) in enumerate(zip(mappings, index.partitions, strict=True)):
        if mapping.size_bytes < part.size_bytes:
            raise ValueError(
                f"mapping {number} has {mapping.size_bytes} bytes, the partition {part.size_bytes}"
            )
    return _views(index, [_base(mapping.pin(), mapping.size_bytes) for mapping in mappings])


def contiguous_bytes(raw: bytearray, entry: TensorEntry) -> bytes:
    """The elements of a strided tensor whose span is `raw`, in row-major order."""
    assert entry.stride is not None
    carrier = _CARRIERS[DTYPES[entry.dtype].item_size_bytes]
    view = _typed(_base(raw, len(raw)), carrier).as_strided(entry.shape, entry.stride, 0)
    dense = view.contiguous()
    return ctypes.string_at(dense.data_ptr(), size_of(entry.dtype, entry.shape))


def _views(index: Index, bases: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One `as_strided` per tensor on a base of its dtype: a third of the time of slicing and viewing."""
    typed: dict[tuple[int, str], torch.Tensor] = {}
    steps: dict[tuple[int, ...], tuple[int, ...]] = {}
    views = {}
    columns = zip(index.names, index.partition, index.offset_bytes, index.dtype, index.shape, strict=True)
    for row, (name, partition, offset_bytes, dtype, shape) in enumerate(columns):
        base = typed.get((partition, dtype))
        if base is None:
            base = typed[partition, dtype] = _typed(bases[partition], dtype)
        stride = index.stride.get(row)
        if stride is None:
            stride = steps.get(shape)
            if stride is None:
                stride = steps[shape] = _contiguous_stride(shape)
        offset = offset_bytes // DTYPES[dtype].item_size_bytes
        views[name] = base.as_strided(shape, stride, offset)
    return views


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _base(owner: Any, size_bytes: int) -> torch.Tensor:
    """All bytes of `owner` as one tensor, which keeps it alive."""
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(owner, dtype=torch.uint8, count=size_bytes)


def _typed(base: torch.Tensor, dtype: str) -> torch.Tensor:
    item_size_bytes = DTYPES[dtype].item_size_bytes
    return base[: len(base) // item_size_bytes * item_size_bytes].view(getattr(torch, dtype))


def _read_native(directory: Path, index: Index, number: int) -> torch.Tensor:
    from ckptio.reader import Reader, read_private

    part = index.partitions[number]
    with Reader() as reader:
        owner = read_private(reader, directory / partition_file(number), part, index.chunk_size_bytes)
    return _base(owner, part.padded_bytes)


def _read_python(directory: Path, index: Index, number: int) -> torch.Tensor:
    """The same without the extension: one thread, through the page cache."""
    part = index.partitions[number]
    path = directory / partition_file(number)
    if part.padded_bytes == 0:
        return _base(b"", 0)
    owner = mmap.mmap(-1, part.padded_bytes)
    with opened(path) as descriptor, memoryview(owner) as view:
        for chunk_index, chunk in enumerate(plan_chunks(part.padded_bytes, index.chunk_size_bytes)):
            target = view[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes]
            read_exactly(descriptor, target, chunk.offset_bytes, path)
            check_chunk(target, part.digests[chunk_index], path, chunk.offset_bytes, chunk_index)
            target.release()
    return _base(owner, part.padded_bytes)
