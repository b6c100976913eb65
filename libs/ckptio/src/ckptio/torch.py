"""Torch tensors: saving, loading, and views of mapped chunks. The only module that imports torch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ckptio.checkpoint import check_chunk, check_sizes, read_checkpoint
from ckptio.dtypes import DTYPES, ITEM_SIZE_BYTES_MAX
from ckptio.errors import PathLike, UnsupportedFormat
from ckptio.files import opened, read_exactly
from ckptio.index import Index, TensorEntry
from ckptio.index_rules import check_name
from ckptio.manifest import MANIFEST_FILE, Manifest, Source, partition_file
from ckptio.native import native_status
from ckptio.plan import CHUNK_SIZE_BYTES, Extent, Member, group_overlaps, plan_chunks, size_of
from ckptio.publish import publishing
from ckptio.writer import Content, write_checkpoint

if TYPE_CHECKING:
    from ckptio._native import Mapping as ChunkMapping

# Torch cannot copy strided tensors of every dtype; elements of the same size always can stand in for them.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


def save(
    state_dict: Mapping[str, torch.Tensor],
    path: PathLike,
    *,
    source_name: str = "state_dict",
    architecture: str | None = None,
    partition_of: Callable[[str], int] | None = None,
    chunk_size_bytes: int = CHUNK_SIZE_BYTES,
    overwrite: bool = False,
) -> Manifest:
    """Writes a state dict as a checkpoint: any dtype, any stride, tied and overlapping tensors once.

    Tensors keep the order of `state_dict`. Raises `UnsupportedFormat`, naming the tensor, for what is no
    plain strided tensor (sparse, quantized, meta), and the errors of `convert` for the destination.
    """
    tensors = {name: _plain(name, tensor, path) for name, tensor in state_dict.items()}
    extents, payloads = _extents(tensors)
    content = Content(
        extents=extents,
        payloads=payloads,
        source=Source(name=source_name, kind="state_dict"),
        architecture=architecture,
        metadata={"format": "pt"},
    )
    with publishing(Path(path), marker=MANIFEST_FILE, overwrite=overwrite) as directory:
        return write_checkpoint(
            directory, content, partition_of=partition_of, chunk_size_bytes=chunk_size_bytes
        )


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


def _plain(name: str, tensor: object, path: PathLike) -> torch.Tensor:
    """The tensor without autograd, conjugation and negation bits; refuses what has no plain bytes."""
    try:
        check_name(name)
    except ValueError as error:
        raise UnsupportedFormat(path, str(error)) from error
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedFormat(path, f"{name}: {type(tensor).__name__} is not a tensor")
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout)
        raise UnsupportedFormat(path, f"{name}: a {kind} tensor has no plain bytes; make it dense first")
    if _dtype_name(tensor) not in DTYPES:
        raise UnsupportedFormat(path, f"{name}: dtype {tensor.dtype} is not supported; dequantize it first")
    plain = tensor.detach().resolve_conj().resolve_neg()
    if type(plain) is not torch.Tensor:
        raise UnsupportedFormat(
            path, f"{name}: {type(plain).__name__} is a tensor of its own kind; unwrap it first"
        )
    return plain


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class _StorageBytes:
    """A range of a tensor's storage, on any device; holds the storage, so that the bytes stay."""

    def __init__(self, storage: torch.UntypedStorage, start_bytes: int, size_bytes: int) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._bytes = whole[start_bytes : start_bytes + size_bytes]

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        source = self._bytes[offset_bytes : offset_bytes + len(target)]
        torch.frombuffer(target, dtype=torch.uint8).copy_(source)


def _extents(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Extent], list[_StorageBytes]]:
    """Makes an extent of each group of tensors that share bytes, in order of the first tensor of each."""
    names = list(tensors)
    by_storage: dict[tuple[torch.device, int], list[int]] = {}
    for number, name in enumerate(names):
        storage = tensors[name].untyped_storage()
        by_storage.setdefault((storage.device, storage.data_ptr()), []).append(number)
    spans = [_span(tensors[name]) for name in names]
    groups = []
    for numbers in by_storage.values():
        groups += [[numbers[i] for i in group] for group in group_overlaps([spans[n] for n in numbers])]
    groups.sort(key=min)
    extents, payloads = [], []
    for group in groups:
        start = min(spans[number][0] for number in group)
        if len(group) > 1:
            # Overlapping tensors may differ in dtype; each must stay aligned to its elements.
            start -= start % ITEM_SIZE_BYTES_MAX
        size_bytes = max(spans[number][1] for number in group) - start
        members = tuple(_member(names[n], tensors[names[n]], spans[n][0] - start) for n in group)
        extents.append(Extent(size_bytes=size_bytes, members=members))
        payloads.append(_StorageBytes(tensors[names[group[0]]].untyped_storage(), start, size_bytes))
    return extents, payloads


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.element_size()
    stride = None if tensor.is_contiguous() else tuple(tensor.stride())
    return start, start + size_of(_dtype_name(tensor), tuple(tensor.shape), stride)


def _member(name: str, tensor: torch.Tensor, offset_bytes: int) -> Member:
    stride = None if tensor.is_contiguous() else tuple(tensor.stride())
    shape = tuple(tensor.shape)
    dtype = _dtype_name(tensor)
    return Member(
        name=name,
        dtype=dtype,
        shape=shape,
        stride=stride,
        offset_bytes=offset_bytes,
        size_bytes=size_of(dtype, shape, stride),
    )
