"""Torch tensors over the bytes of partitions: views of them, and whole tensors out of slices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckptio.collector import collector_paused
from ckptio.dtypes import DTYPES, ITEM_SIZE_BYTES_MAX
from ckptio.errors import UnsupportedFormat
from ckptio.index import Index, TensorEntry
from ckptio.manifest import INDEX_FILE
from ckptio.plan import size_of

# Torch cannot copy or join tensors of every dtype; elements of the same size always can stand in for them.
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}

# Of the tensors of one dtype in one partition: what makes their views, size of an element, shape -> stride.
_Kind = tuple[Callable[..., torch.Tensor], int, dict[tuple[int, ...], tuple[int, ...]]]


def make_views(index: Index, bases: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
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
                    stride = steps[shape] = contiguous_stride(shape)
            offset, rest_bytes = divmod(offset_bytes, item_size_bytes)
            if rest_bytes:
                views[name] = _copy(index.entry(row), bases[key[0]], copies)
            else:
                views[name] = make_view(shape, stride, offset)
    return views


def make_wholes(index: Index, bases: Sequence[torch.Tensor], target: torch.device) -> dict[str, torch.Tensor]:
    """Every whole tensor on `target`, those that were split over GPUs put together; ties are kept.

    Each is in memory of its own, so that the partitions in `bases` can go.
    """
    group_of = {row: rows for rows in index.aliases for row in rows}
    joined: dict[tuple[tuple[int, int, torch.Size], ...], torch.Tensor] = {}
    copied: dict[tuple[int, int, int], torch.Tensor] = {}
    wholes = {}
    for name, rows in index.rows_of_wholes().items():
        first = index.slices.get(rows[0])
        if first is None or first.dimension is None:
            # Tensors that overlap stay so: what they share is copied once.
            members = [index.entry(row) for row in group_of.get(rows[0], rows[:1])]
            wholes[name] = _moved(index.entry(rows[0]), members, bases, target, copied)
            continue
        entries = [index.entry(row) for row in rows]
        key = tuple((one.partition, one.offset_bytes, torch.Size(one.shape)) for one in entries)
        if key not in joined:
            raws = [_bytes_of(entry, bases[entry.partition]) for entry in entries]
            joined[key] = join_slices(entries, raws, first.dimension).to(target)
        wholes[name] = joined[key]
    return wholes


def join_slices(entries: Sequence[TensorEntry], raws: Sequence[torch.Tensor], dimension: int) -> torch.Tensor:
    """The whole tensor of contiguous slices, whose bytes are `raws`, joined along `dimension`."""
    carrier = _CARRIERS[DTYPES[entries[0].dtype].item_size_bytes]
    parts = [typed(raw, carrier).view(entry.shape) for entry, raw in zip(entries, raws, strict=True)]
    return torch.cat(parts, dim=dimension).view(torch_dtype(entries[0].dtype))


def contiguous_bytes(raw: bytearray, entry: TensorEntry) -> bytes:
    """The elements of a strided tensor whose span is `raw`, in row-major order."""
    assert entry.stride is not None
    carrier = _CARRIERS[DTYPES[entry.dtype].item_size_bytes]
    view = typed(base_of(raw, len(raw)), carrier).as_strided(entry.shape, entry.stride, 0)
    dense = view.contiguous()
    return ctypes.string_at(dense.data_ptr(), size_of(entry.dtype, entry.shape))


def tensor_of(entry: TensorEntry, raw: torch.Tensor) -> torch.Tensor:
    """The tensor whose span is the bytes `raw`, as a view of them."""
    stride = contiguous_stride(entry.shape) if entry.stride is None else entry.stride
    view = typed(raw, entry.dtype)
    return view.as_strided(entry.shape, stride, view.storage_offset())


def base_of(owner: Any, size_bytes: int) -> torch.Tensor:
    """All bytes of `owner` as one tensor, which keeps it alive."""
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(owner, dtype=torch.uint8, count=size_bytes)


def typed(base: torch.Tensor, dtype: str) -> torch.Tensor:
    """The elements of `dtype` that fit the bytes `base`, as a view of them."""
    item_size_bytes = DTYPES[dtype].item_size_bytes
    return base[: len(base) // item_size_bytes * item_size_bytes].view(torch_dtype(dtype))


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of torch by its name; raises `UnsupportedFormat` where this torch has none."""
    dtype: torch.dtype | None = getattr(torch, name, None)
    if dtype is None:
        raise UnsupportedFormat(INDEX_FILE, f"torch {torch.__version__} has no dtype {name}; use a newer one")
    return dtype


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The steps, in elements, of a tensor whose elements follow one another."""
    # Nearly all weights are matrices and vectors, and a checkpoint can have thousands of shapes.
    if len(shape) == 2:
        return (shape[1] or 1, 1)
    if len(shape) == 1:
        return (1,)
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _kind(base: torch.Tensor, dtype: str) -> _Kind:
    return typed(base, dtype).as_strided, DTYPES[dtype].item_size_bytes, {}


def _bytes_of(entry: TensorEntry, base: torch.Tensor) -> torch.Tensor:
    return base[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]


def _moved(
    entry: TensorEntry,
    members: Sequence[TensorEntry],
    bases: Sequence[torch.Tensor],
    target: torch.device,
    copied: dict[tuple[int, int, int], torch.Tensor],
) -> torch.Tensor:
    start = min(member.offset_bytes for member in members)
    start -= start % ITEM_SIZE_BYTES_MAX  # each stays aligned to its elements
    end = max(member.offset_bytes + member.size_bytes for member in members)
    key = (entry.partition, start, end)
    if key not in copied:
        copied[key] = bases[entry.partition][start:end].to(target, copy=True)
    offset_bytes = entry.offset_bytes - start
    return tensor_of(entry, copied[key][offset_bytes : offset_bytes + entry.size_bytes])


def _copy(
    entry: TensorEntry, base: torch.Tensor, copies: dict[tuple[int, int, int], torch.Tensor]
) -> torch.Tensor:
    """A tensor that is not aligned to its elements, from aligned memory of its own; tied ones share it."""
    key = (entry.partition, entry.offset_bytes, entry.size_bytes)
    if key not in copies:
        copies[key] = _bytes_of(entry, base).clone()
    return tensor_of(entry, copies[key])
