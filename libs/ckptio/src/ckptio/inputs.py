"""What goes into a checkpoint, from whatever was published, divided over GPUs as a plan says."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ckptio.errors import UnsupportedFormat, needing_torch
from ckptio.files import naming, opened, page_buffer, read_exactly
from ckptio.manifest import Source
from ckptio.partitioning import Partitioning, Share, balanced, divide
from ckptio.plan import Extent, Member, PartitionLayout, load_order, plan_layout
from ckptio.resume import fingerprint_of
from ckptio.slicing import BLOCK_BYTES, CutBytes
from ckptio.source import (
    SAFETENSORS,
    TORCH,
    ShardTensor,
    StockSource,
    find_rest,
    find_weights,
    open_source,
    recorded_ties,
)
from ckptio.writer import Content


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """The content of a conversion; `places` tells in which file and where the bytes of each extent are.

    `gpu_of` has the GPU of the first tensor of every extent, when a partition plan was given. `ignored` are
    weights in other files, which are not part of the model. `is_one_file`: the source was no directory.
    """

    content: Content
    places: Sequence[tuple[str, int]]
    weights: tuple[Path, ...]
    ignored: tuple[str, ...] = ()
    gpu_of: Mapping[str, int] | None = None
    is_one_file: bool = False

    def layouts(self) -> tuple[PartitionLayout, ...]:
        """Where everything goes."""
        return plan_layout(self.content.extents, self.gpu_of.__getitem__ if self.gpu_of else None)

    def fingerprint(self, layouts: Sequence[PartitionLayout], chunk_size_bytes: int) -> str:
        """Changes with anything that decides the bytes: files, their sizes and times, headers, the plan."""
        files = [*self.weights, *(path for _, path in self.content.other_files)]
        states = [os.stat(file) for file in files]
        return fingerprint_of(
            {
                "journal": 1,
                "chunk_size_bytes": chunk_size_bytes,
                "files": [
                    [os.path.abspath(file), state.st_size, state.st_mtime_ns]
                    for file, state in zip(files, states, strict=True)
                ],
                "extents": [
                    [
                        *place,
                        extent.size_bytes,
                        [[m.name, m.dtype, m.shape, m.stride, m.offset_bytes] for m in extent.members],
                    ]
                    for extent, place in zip(self.content.extents, self.places, strict=True)
                ],
                "partitions": [
                    [[item.extent, item.offset_bytes] for item in layout.placements] for layout in layouts
                ],
            }
        )


@contextmanager
def opened_input(
    source: Path,
    *,
    source_name: str | None = None,
    revision: str | None = None,
    partitioning: Partitioning | int | None = None,
) -> Iterator[Input]:
    """Finds, checks and opens what `source` is: safetensors, which win, or torch files.

    `partitioning` as a number divides the tensors over that many GPUs in load order. Raises `MissingFile`,
    `UnsupportedFormat` (also for a plan that does not fit), `CorruptCheckpoint`, `TruncatedCheckpoint`.
    """
    # A path may have bytes that are no text; the manifest is text.
    name = source_name or os.fsencode(source).decode(errors="replace")
    with ExitStack() as stack:
        if _is_torch(source):
            whole = _torch_input(source, Source(name=name, kind="torch", revision=revision))
        else:
            origin = Source(name=name, kind="safetensors", revision=revision)
            whole = _stock_input(open_source(source), source, origin, stack)
        if partitioning is None:
            yield whole
            return
        try:
            plan = _as_plan(whole.content.extents, partitioning)
            shares = divide(whole.content.extents, plan)
            part = _divided(whole, shares)
        except ValueError as error:
            raise UnsupportedFormat(source, f"cannot be divided over GPUs as planned: {error}") from error
        yield part


@dataclass(frozen=True, slots=True)
class _FileBytes:
    """A range of an open file."""

    descriptor: int
    path: Path
    start_bytes: int

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        with naming(self.path):
            read_exactly(self.descriptor, target, self.start_bytes + offset_bytes, self.path)


def _is_torch(source: Path) -> bool:
    if source.is_file():
        return source.suffix in TORCH.suffixes
    if find_weights(source, SAFETENSORS) is not None:
        return False
    if find_weights(source, TORCH) is not None:
        return True
    raise UnsupportedFormat(source, "no safetensors file and no torch .bin, .pt or .pth file here")


def _torch_input(source: Path, origin: Source) -> Input:
    with needing_torch(f"{source}: reading torch weights"):
        from ckptio.torch_source import open_torch

    found = find_weights(source, TORCH)
    assert found is not None
    items = open_torch(found)
    rest = find_rest(source, found.files)
    content = Content(
        extents=[item.extent for item in items],
        payloads=[item.payload for item in items],
        source=origin,
        architecture=rest.architecture,
        metadata={"format": "pt"},
        other_files=rest.other_files,
    )
    places = [(os.fspath(item.file), item.number) for item in items]
    return Input(
        content=content,
        places=places,
        weights=found.files,
        ignored=rest.ignored,
        is_one_file=source.is_file(),
    )


def _stock_input(stock: StockSource, path: Path, origin: Source, stack: ExitStack) -> Input:
    paths = tuple(sorted({shard.file for shard in stock.tensors}))
    descriptors = {path: stack.enter_context(opened(path)) for path in paths}
    ties = recorded_ties(stock, path)
    tensors = sorted(stock.tensors, key=lambda shard: load_order(shard.tensor.name))
    tied_names = {name for group in ties.values() for name in group}
    content = Content(
        extents=[_extent(shard, ties.get(shard.tensor.name, ())) for shard in tensors],
        payloads=[
            _FileBytes(descriptors[shard.file], shard.file, shard.tensor.offset_bytes) for shard in tensors
        ],
        source=origin,
        architecture=stock.architecture,
        metadata={key: value for key, value in stock.metadata.items() if key not in tied_names},
        other_files=stock.other_files,
    )
    places = [(os.fspath(shard.file), shard.tensor.offset_bytes) for shard in tensors]
    return Input(
        content=content,
        places=places,
        weights=paths,
        ignored=stock.ignored,
        is_one_file=path.is_file(),
    )


def _extent(shard: ShardTensor, tied: list[str] | tuple[str, ...]) -> Extent:
    tensor = shard.tensor
    members = tuple(
        Member(name=name, dtype=tensor.dtype, shape=tensor.shape, size_bytes=tensor.size_bytes)
        for name in (tensor.name, *tied)
    )
    return Extent(size_bytes=tensor.size_bytes, members=members)


def _as_plan(extents: Sequence[Extent], partitioning: Partitioning | int) -> Partitioning:
    if not isinstance(partitioning, int):
        return partitioning
    return balanced([(extent.members[0].name, extent.size_bytes) for extent in extents], partitioning)


def _divided(whole: Input, shares: Sequence[Share]) -> Input:
    gpu_of = {}
    names: set[str] = set()
    for share in shares:
        gpu_of[share.extent.members[0].name] = share.gpu
        for member in share.extent.members:
            if member.name in names:
                raise ValueError(f"{member.name}: a tensor has the name that a part of another needs")
            names.add(member.name)
    slices = {name: part for share in shares for name, part in share.slices.items()}
    for part in slices.values():
        if part.whole in names:
            raise ValueError(f"{part.whole}: a tensor has the name that a part of another needs")
    block = page_buffer(BLOCK_BYTES)
    payloads = [
        whole.content.payloads[share.source]
        if share.cut is None
        else CutBytes(whole.content.payloads[share.source], share.cut, block)
        for share in shares
    ]
    content = replace(
        whole.content,
        extents=[share.extent for share in shares],
        payloads=payloads,
        slices=slices,
    )
    places = [whole.places[share.source] for share in shares]
    return replace(whole, content=content, places=places, gpu_of=gpu_of)
