"""Torch tensors: loading, and views of mapped chunks."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ckptio.checkpoint import check_chunk
from ckptio.devices import DeviceBuffer, cuda_status
from ckptio.errors import PathLike
from ckptio.files import opened, read_exactly
from ckptio.index import Index
from ckptio.layout import Layout, read_layout
from ckptio.native import native_status
from ckptio.plan import plan_chunks
from ckptio.targets import Device, are_one, check_targets, targets_of
from ckptio.views import base_of, make_views, make_wholes

if TYPE_CHECKING:
    from ckptio._native import Mapping as ChunkMapping

# A layout, the number of a partition and whether to verify it -> the bytes of the partition.
_ReadPartition = Callable[[Layout, int, bool], torch.Tensor]


def load(
    path: PathLike,
    device: Device | Sequence[Device] = "cpu",
    *,
    verify: bool = True,
    whole: bool = True,
) -> dict[str, torch.Tensor]:
    """Reads a whole checkpoint into private memory and gives its tensors, ties kept.

    `path` is a checkpoint of ckptio, whose every chunk is verified unless `verify` is off, or safetensors as
    they were published (see `read_layout`), which have nothing to verify. All tensors of a partition share
    one storage; only those that their file holds unaligned are copies. `device` is a name, the number of a
    GPU, or one of these for each partition; chunks go to a GPU while others are read.

    A checkpoint that was converted with a tensor-parallel plan gives whole tensors too when all of it goes to
    one device: the slices are joined in host memory, which takes room for the checkpoint once more. With
    several devices, or with `whole` off, the slices stay where their partitions go, under their own names
    ("lm_head.weight#0" is what partition 0 has of lm_head.weight).

    Raises the errors of `read_layout`, `CorruptCheckpoint` for a chunk that is not what was written,
    `DeviceError`, also for a device that is not there, before anything is read, and ValueError for one that
    does not exist.
    """
    return load_layout(read_layout(path), device, verify=verify, whole=whole)


def load_layout(
    layout: Layout,
    device: Device | Sequence[Device] = "cpu",
    *,
    verify: bool = True,
    whole: bool = True,
) -> dict[str, torch.Tensor]:
    """`load` of a checkpoint whose layout was read before."""
    targets = targets_of(device, len(layout.files))
    check_targets(targets, layout.index.dtype)
    is_verified = verify and layout.is_verified
    if whole and layout.index.slices and are_one(targets):
        # The slices would take the room of the whole once more on the device, which may not have it.
        return make_wholes(layout.index, _read_onto_host(layout, is_verified), targets[0])
    if any(target.type == "cuda" for target in targets) and not cuda_status().reason:
        bases = _read_onto_gpus(layout, targets, is_verified)
    else:
        bases = _read_onto_host(layout, is_verified)
    # For what is no GPU of CUDA the bytes go through host memory.
    bases = [base.to(target) for base, target in zip(bases, targets, strict=True)]
    return make_views(layout.index, bases)


def tensors(index: Index, mappings: Sequence[ChunkMapping]) -> dict[str, torch.Tensor]:
    """Zero-copy tensors over the mapping of each partition, in order; tied tensors share memory.

    After a tensor-parallel conversion these are the slices, under their own names ("lm_head.weight#0"), as
    joining them would be a copy; `Index.of_gpu` has the names of the whole tensors for one partition.
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
    return make_views(index, [base_of(mapping.pin(), mapping.size_bytes) for mapping in mappings])


def _read_onto_gpus(layout: Layout, targets: Sequence[torch.device], is_verified: bool) -> list[torch.Tensor]:
    """The bytes of each partition, through a small pool that lives as long as this call.

    What goes to a GPU is there; all else is in host memory, wherever it goes.
    """
    from ckptio.loader import load_layout_onto

    places = [target if target.type == "cuda" else torch.device("cpu") for target in targets]
    bases = [
        torch.empty(max(part.padded_bytes, 1), dtype=torch.uint8, device=place)
        for part, place in zip(layout.index.partitions, places, strict=True)
    ]
    with ExitStack() as stack:
        for place in {base.device for base in bases if base.is_cuda}:
            # Memory that torch used before may have kernels on their way to it.
            torch.cuda.synchronize(place)
        buffers = []
        for base in bases:
            name = f"cuda:{base.device.index}" if base.is_cuda else "host"
            buffers.append(stack.enter_context(DeviceBuffer.borrow(name, base.data_ptr(), len(base), base)))
        load_layout_onto(layout, buffers, verify=is_verified)
    return bases


def _read_onto_host(layout: Layout, is_verified: bool) -> list[torch.Tensor]:
    """The bytes of each partition in private host memory."""
    with ExitStack() as stack:
        read: _ReadPartition = _read_python
        if native_status().is_loaded:
            read = _native_read(stack)
        return [read(layout, number, is_verified) for number in range(len(layout.files))]


def _native_read(stack: ExitStack) -> _ReadPartition:
    """Reading with the threads of a reader that lives until `stack` ends."""
    from ckptio.reader import Reader, read_private

    reader = stack.enter_context(Reader())

    def read(layout: Layout, number: int, is_verified: bool) -> torch.Tensor:
        part = layout.index.partitions[number]
        part = part if is_verified else replace(part, digests=())
        state = layout.states[number] if layout.states else None
        owner = read_private(reader, layout.files[number], part, layout.index.chunk_size_bytes, state)
        return base_of(owner, part.padded_bytes)

    return read


def _read_python(layout: Layout, number: int, is_verified: bool) -> torch.Tensor:
    """The same without the extension: one thread, through the page cache."""
    part = layout.index.partitions[number]
    path = layout.files[number]
    if part.padded_bytes == 0:
        return base_of(b"", 0)
    owner = mmap.mmap(-1, part.padded_bytes)
    chunks = plan_chunks(part.padded_bytes, layout.index.chunk_size_bytes)
    with opened(path) as descriptor, memoryview(owner) as view:
        for chunk_index, chunk in enumerate(chunks):
            with view[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes] as target:
                read_exactly(descriptor, target, chunk.offset_bytes, path)
                if is_verified:
                    check_chunk(target, part.digests[chunk_index], path, chunk.offset_bytes, chunk_index)
    return base_of(owner, part.padded_bytes)
