"""Torch tensors: loading, and views of mapped chunks."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ckptio.checkpoint import check_chunk
from ckptio.collector import collector_paused
from ckptio.devices import DeviceBuffer, cuda_status
from ckptio.dtypes import DTYPES
from ckptio.errors import PathLike, UnsupportedFormat
from ckptio.files import opened, read_exactly
from ckptio.index import Index, TensorEntry
from ckptio.layout import Layout, read_layout
from ckptio.manifest import INDEX_FILE
from ckptio.native import native_status
from ckptio.plan import plan_chunks, size_of

if TYPE_CHECKING:
    from ckptio._native import Mapping as ChunkMapping

# Torch cannot copy strided tensors of every dtype; elements of the same size always can stand in for them.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}

# A layout, the number of a partition and whether to verify it -> the bytes of the partition.
_ReadPartition = Callable[[Layout, int, bool], torch.Tensor]

# Of the tensors of one dtype in one partition: what makes their views, size of an element, shape -> stride.
_Kind = tuple[Callable[..., torch.Tensor], int, dict[tuple[int, ...], tuple[int, ...]]]


def load(
    path: PathLike,
    device: str | torch.device | Sequence[str | torch.device] = "cpu",
    *,
    verify: bool = True,
) -> dict[str, torch.Tensor]:
    """Reads a whole checkpoint into private memory and gives its tensors, ties kept.

    `path` is a checkpoint of ckptio, whose every chunk is verified unless `verify` is off, or safetensors as
    they were published (see `read_layout`), which have nothing to verify. All tensors of a partition share
    one storage; only those that their file holds unaligned are copies. `device` may be one for each
    partition; chunks go to a GPU while others are read. Raises the errors of `read_layout`,
    `CorruptCheckpoint` for a chunk that is not what was written, and `DeviceError`.
    """
    return load_layout(read_layout(path), device, verify=verify)


def load_layout(
    layout: Layout,
    device: str | torch.device | Sequence[str | torch.device] = "cpu",
    *,
    verify: bool = True,
) -> dict[str, torch.Tensor]:
    """`load` of a checkpoint whose layout was read before."""
    devices = _devices(device, len(layout.files))
    is_verified = verify and layout.is_verified
    if any(target.type == "cuda" for target in devices) and not cuda_status().reason:
        return _views(layout.index, _read_onto_gpus(layout, devices, is_verified))
    with ExitStack() as stack:
        read: _ReadPartition = _read_python
        if native_status().is_loaded:
            read = _native_read(stack)
        bases = [read(layout, number, is_verified).to(target) for number, target in enumerate(devices)]
    return _views(layout.index, bases)


def tensors(index: Index, mappings: Sequence[ChunkMapping]) -> dict[str, torch.Tensor]:
    """Zero-copy tensors over the mapping of each partition, in order; tied tensors share memory.

    No byte is touched, so this may run while a reader still fills the chunks; but where `Layout.is_aligned`
    is false, tensors that are not aligned to their elements are copied, so there the chunks must be filled.
    The mappings live as long as any of the tensors. Raises ValueError when a mapping is too small for its
    partition.
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


def tensor_of(entry: TensorEntry, raw: torch.Tensor) -> torch.Tensor:
    """The tensor whose span is the bytes `raw`, as a view of them."""
    stride = _contiguous_stride(entry.shape) if entry.stride is None else entry.stride
    return _typed(raw, entry.dtype).as_strided(entry.shape, stride, 0)


def _views(index: Index, bases: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """One `as_strided` per tensor on a base of its dtype: a third of the time of slicing and viewing."""
    kinds: dict[tuple[int, str], _Kind] = {}
    copies: dict[tuple[int, int, int], torch.Tensor] = {}
    strides = index.stride
    views = {}
    columns = zip(
        index.names,
        zip(index.partition, index.dtype, strict=True),
        index.offset_bytes,
        index.shape,
        strict=True,
    )
    with collector_paused():
        for row, (name, key, offset_bytes, shape) in enumerate(columns):
            kind = kinds.get(key)
            if kind is None:
                kind = kinds[key] = _kind(bases[key[0]], key[1])
            make_view, item_size_bytes, steps = kind
            stride = strides.get(row) if strides else None
            if stride is None:
                stride = steps.get(shape)
                if stride is None:
                    stride = steps[shape] = _contiguous_stride(shape)
            offset, rest_bytes = divmod(offset_bytes, item_size_bytes)
            if rest_bytes:
                views[name] = _copy(index.entry(row), bases[key[0]], copies)
            else:
                views[name] = make_view(shape, stride, offset)
    return views


def _kind(base: torch.Tensor, dtype: str) -> _Kind:
    return _typed(base, dtype).as_strided, DTYPES[dtype].item_size_bytes, {}


def _copy(
    entry: TensorEntry, base: torch.Tensor, copies: dict[tuple[int, int, int], torch.Tensor]
) -> torch.Tensor:
    """A tensor that is not aligned to its elements, from aligned memory of its own; tied ones share it."""
    key = (entry.partition, entry.offset_bytes, entry.size_bytes)
    if key not in copies:
        copies[key] = base[entry.offset_bytes : entry.offset_bytes + entry.size_bytes].clone()
    return tensor_of(entry, copies[key])


def _devices(device: str | torch.device | Sequence[str | torch.device], count: int) -> list[torch.device]:
    if isinstance(device, str | torch.device):
        return [torch.device(device)] * count
    if len(device) != count:
        raise ValueError(f"{len(device)} devices for {count} partitions")
    return [torch.device(one) for one in device]


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
    torch_dtype = getattr(torch, dtype, None)
    if torch_dtype is None:
        raise UnsupportedFormat(
            INDEX_FILE, f"torch {torch.__version__} has no dtype {dtype}; use a newer one"
        )
    return base[: len(base) // item_size_bytes * item_size_bytes].view(torch_dtype)


def _read_onto_gpus(layout: Layout, devices: Sequence[torch.device], is_verified: bool) -> list[torch.Tensor]:
    """The bytes of each partition on its device, through a small pool that lives as long as this call."""
    from ckptio.loader import load_layout_onto

    parts = layout.index.partitions
    bases = [
        torch.empty(max(part.padded_bytes, 1), dtype=torch.uint8, device=target)
        for part, target in zip(parts, devices, strict=True)
    ]
    with ExitStack() as stack:
        for target in {base.device for base in bases if base.is_cuda}:
            # Memory that torch used before may have kernels on their way to it.
            torch.cuda.synchronize(target)
        buffers = [
            stack.enter_context(
                DeviceBuffer.borrow(
                    f"cuda:{base.device.index}" if base.is_cuda else "host", base.data_ptr(), len(base), base
                )
            )
            for base in bases
        ]
        load_layout_onto(layout, buffers, verify=is_verified)
    return bases


def _native_read(stack: ExitStack) -> _ReadPartition:
    """Reading with the threads of a reader that lives until `stack` ends."""
    from ckptio.reader import Reader, read_private

    reader = stack.enter_context(Reader())

    def read(layout: Layout, number: int, is_verified: bool) -> torch.Tensor:
        part = layout.index.partitions[number]
        part = part if is_verified else replace(part, digests=())
        owner = read_private(reader, layout.files[number], part, layout.index.chunk_size_bytes)
        return _base(owner, part.padded_bytes)

    return read


def _read_python(layout: Layout, number: int, is_verified: bool) -> torch.Tensor:
    """The same without the extension: one thread, through the page cache."""
    part = layout.index.partitions[number]
    path = layout.files[number]
    if part.padded_bytes == 0:
        return _base(b"", 0)
    owner = mmap.mmap(-1, part.padded_bytes)
    chunks = plan_chunks(part.padded_bytes, layout.index.chunk_size_bytes)
    with opened(path) as descriptor, memoryview(owner) as view:
        for chunk_index, chunk in enumerate(chunks):
            with view[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes] as target:
                read_exactly(descriptor, target, chunk.offset_bytes, path)
                if is_verified:
                    check_chunk(target, part.digests[chunk_index], path, chunk.offset_bytes, chunk_index)
    return _base(owner, part.padded_bytes)
