"""Conversion of a published safetensors checkpoint, once, when a model is registered (F1)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptio.errors import PathLike
from ckptio.files import naming, opened, read_exactly
from ckptio.manifest import MANIFEST_FILE, Manifest, Source
from ckptio.plan import CHUNK_SIZE_BYTES, Extent, Member, load_order
from ckptio.publish import LOCK_WAIT_S, publishing
from ckptio.source import ShardTensor, StockSource, open_source
from ckptio.writer import Content, Progress, write_checkpoint


def convert(
    source: PathLike,
    destination: PathLike,
    *,
    source_name: str | None = None,
    revision: str | None = None,
    partition_of: Callable[[str], int] | None = None,
    chunk_size_bytes: int = CHUNK_SIZE_BYTES,
    overwrite: bool = False,
    wait_s: float = LOCK_WAIT_S,
    progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Manifest:
    """Converts a directory of safetensors (or one such file) into a checkpoint at `destination`.

    `source_name` and `revision` (default: the path) are recorded in the manifest. `partition_of` gives the
    GPU of a tensor. A second converter of the same destination waits up to `wait_s`. Nothing is visible at
    `destination` until all of it is on the device. Raises `CheckpointExists`, `ConversionInProgress`,
    `InsufficientSpace`, `Cancelled`, and for a bad source `MissingFile`, `UnsupportedFormat`,
    `CorruptCheckpoint`, `TruncatedCheckpoint`.
    """
    source = Path(source)
    origin = Source(name=source_name or os.fspath(source), kind="safetensors", revision=revision)
    stock = open_source(source)
    with (
        publishing(
            Path(destination), marker=MANIFEST_FILE, overwrite=overwrite, cancelled=cancelled, wait_s=wait_s
        ) as directory,
        _content(stock, origin) as content,
    ):
        return write_checkpoint(
            directory,
            content,
            partition_of=partition_of,
            chunk_size_bytes=chunk_size_bytes,
            progress=progress,
            cancelled=cancelled,
        )


@dataclass(frozen=True, slots=True)
class _FileBytes:
    """A range of an open file."""

    descriptor: int
    path: Path
    start_bytes: int

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        with naming(self.path):
            read_exactly(self.descriptor, target, self.start_bytes + offset_bytes, self.path)


@contextmanager
def _content(stock: StockSource, origin: Source) -> Iterator[Content]:
    with ExitStack() as stack:
        paths = {shard.file for shard in stock.tensors}
        descriptors = {path: stack.enter_context(opened(path)) for path in sorted(paths)}
        ties = _recorded_ties(stock)
        tensors = sorted(stock.tensors, key=lambda shard: load_order(shard.tensor.name))
        tied_names = {name for group in ties.values() for name in group}
        yield Content(
            extents=[_extent(shard, ties.get(shard.tensor.name, ())) for shard in tensors],
            payloads=[
                _FileBytes(descriptors[shard.file], shard.file, shard.tensor.offset_bytes)
                for shard in tensors
            ],
            source=origin,
            architecture=stock.architecture,
            metadata={key: value for key, value in stock.metadata.items() if key not in tied_names},
            other_files=stock.other_files,
        )


def _recorded_ties(stock: StockSource) -> dict[str, list[str]]:
    """Kept tensor -> names tied to it: safetensors stores one of them and notes the others as metadata."""
    sizes = {shard.tensor.name: shard.tensor.size_bytes for shard in stock.tensors}
    ties: dict[str, list[str]] = {}
    for name, kept in stock.metadata.items():
        if name != "format" and name not in sizes and sizes.get(kept, 0) > 0:
            ties.setdefault(kept, []).append(name)
    return ties


def _extent(shard: ShardTensor, tied: list[str] | tuple[str, ...]) -> Extent:
    tensor = shard.tensor
    members = tuple(
        Member(name=name, dtype=tensor.dtype, shape=tensor.shape, size_bytes=tensor.size_bytes)
        for name in (tensor.name, *tied)
    )
    return Extent(size_bytes=tensor.size_bytes, members=members)
