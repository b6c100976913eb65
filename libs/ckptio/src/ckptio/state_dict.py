"""State dicts of torch: what can be stored, which tensors share bytes, and saving them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ckptio.dtypes import DTYPES, ITEM_SIZE_BYTES_MAX
from ckptio.errors import PathLike, UnsupportedFormat
from ckptio.index_rules import check_name
from ckptio.manifest import MANIFEST_FILE, Manifest, Source
from ckptio.plan import CHUNK_SIZE_BYTES, Extent, Member, group_overlaps, size_of
from ckptio.publish import publishing
from ckptio.writer import Content, write_checkpoint


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

    Tensors keep the order of `state_dict`. Raises TypeError for anything but a map of names to tensors,
    `UnsupportedFormat`, naming the tensor, for what is no plain strided tensor (sparse, quantized, meta), and
    the errors of `convert` for the destination.
    """
    check_state_dict(state_dict, path, call="save(state_dict, path)")
    tensors = {name: plain_tensor(name, tensor, path) for name, tensor in state_dict.items()}
    extents, payloads = make_extents(tensors)
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


def check_state_dict(state_dict: object, path: object, *, call: str) -> None:
    """Raises TypeError, saying what to pass, unless `state_dict` maps names and `path` is a place."""
    if not isinstance(path, str | os.PathLike):
        swapped = "; the arguments are swapped" if isinstance(state_dict, str | os.PathLike) else ""
        raise TypeError(f"{call}: the place is a path, not {_kind_of(path)}{swapped}")
    if isinstance(state_dict, torch.nn.Module):
        raise TypeError(
            f"{call}: a map of names to tensors, not a module ({type(state_dict).__name__}); "
            "pass its state_dict()"
        )
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"{call}: a map of names to tensors, such as module.state_dict(), not {_kind_of(state_dict)}"
        )
    for name in state_dict:
        if not isinstance(name, str):
            raise TypeError(f"{call}: the name of a tensor is a string, not {name!r} ({type(name).__name__})")


def _kind_of(value: object) -> str:
    return f"a value of type {type(value).__name__}"


def plain_tensor(name: str, tensor: object, path: PathLike) -> torch.Tensor:
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


def make_extents(tensors: Mapping[str, torch.Tensor]) -> tuple[list[Extent], list[_StorageBytes]]:
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
