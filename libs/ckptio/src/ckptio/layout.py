"""Where the bytes of a checkpoint lie, converted or not: one index over the files that hold them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptio.checkpoint import check_sizes, read_checkpoint
from ckptio.errors import CorruptCheckpoint, PathLike, UnsupportedFormat
from ckptio.index import Index, IndexPartition, TensorEntry
from ckptio.index_rules import check_name
from ckptio.manifest import INDEX_FILE, MANIFEST_FILE, Manifest, partition_file
from ckptio.plan import CHUNK_SIZE_BYTES
from ckptio.source import ShardTensor, StockSource, open_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The index of a checkpoint, and the file of each of its partitions.

    `is_verified` says whether the index has digests to verify the bytes with. `manifest` is None for a stock
    checkpoint.
    """

    index: Index
    files: tuple[Path, ...]
    is_verified: bool
    manifest: Manifest | None


def read_layout(path: PathLike) -> Layout:
    """The layout of a checkpoint of ckptio, or of safetensors as they were published, unconverted.

    Stock is a directory (one file, shards with or without an index, an adapter) or one file. There each file
    is a partition, header included, so that offsets count from its start; they may be unaligned for their
    dtype, and there are no digests. The sizes of all files are checked, no weight is read. Raises
    FileNotFoundError, `MissingFile`, `TruncatedCheckpoint`, `CorruptCheckpoint` or `UnsupportedFormat`.
    """
    path = Path(path)
    if (path / MANIFEST_FILE).exists() or (path / INDEX_FILE).exists():
        manifest, index = read_checkpoint(path)
        check_sizes(path, index)
        files = tuple(path / partition_file(number) for number in range(len(index.partitions)))
        return Layout(index=index, files=files, is_verified=True, manifest=manifest)
    stock = open_source(path)
    _refuse_other_formats(stock, path)
    files = tuple(sorted({shard.file for shard in stock.tensors}))
    index = _stock_index(stock, files, path)
    return Layout(index=index, files=files, is_verified=False, manifest=None)


def _refuse_other_formats(stock: StockSource, path: Path) -> None:
    """The converter reads more formats than have their tensors as plain bytes at known offsets."""
    if not all(isinstance(shard, ShardTensor) for shard in stock.tensors):
        raise UnsupportedFormat(path, "not safetensors: only a conversion reads it; convert it first")


def _stock_index(stock: StockSource, files: Sequence[Path], path: Path) -> Index:
    number_of = {file: number for number, file in enumerate(files)}
    ties = _recorded_ties(stock, path)
    shards = sorted(stock.tensors, key=lambda shard: (number_of[shard.file], shard.tensor.offset_bytes))
    rows: list[TensorEntry] = []
    aliases: list[tuple[int, ...]] = []
    for shard in shards:
        names = (shard.tensor.name, *ties.get(shard.tensor.name, ()))
        if len(names) > 1:
            aliases.append(tuple(range(len(rows), len(rows) + len(names))))
        rows.extend(_entry(name, shard, number_of[shard.file]) for name in names)
    return Index(
        chunk_size_bytes=CHUNK_SIZE_BYTES,
        partitions=tuple(_partition(file) for file in files),
        names=tuple(row.name for row in rows),
        partition=tuple(row.partition for row in rows),
        offset_bytes=tuple(row.offset_bytes for row in rows),
        size_bytes=tuple(row.size_bytes for row in rows),
        dtype=tuple(row.dtype for row in rows),
        shape=tuple(row.shape for row in rows),
        aliases=tuple(aliases),
        metadata=dict(stock.metadata),
    )


def _recorded_ties(stock: StockSource, path: Path) -> dict[str, list[str]]:
    """Kept tensor -> names tied to it: safetensors stores one of them and notes the others as metadata."""
    sizes = {shard.tensor.name: shard.tensor.size_bytes for shard in stock.tensors}
    ties: dict[str, list[str]] = {}
    for name, kept in stock.metadata.items():
        if name == "format" or name in sizes or sizes.get(kept, 0) == 0:
            continue
        try:
            check_name(name)
        except ValueError as error:
            raise CorruptCheckpoint(path, f"__metadata__ ties {kept!r} to a bad name: {error}") from error
        ties.setdefault(kept, []).append(name)
    return ties


def _entry(name: str, shard: ShardTensor, partition: int) -> TensorEntry:
    tensor = shard.tensor
    return TensorEntry(
        name=name,
        partition=partition,
        offset_bytes=tensor.offset_bytes,
        size_bytes=tensor.size_bytes,
        dtype=tensor.dtype,
        shape=tensor.shape,
        stride=None,
    )


def _partition(file: Path) -> IndexPartition:
    size_bytes = os.stat(file).st_size
    return IndexPartition(size_bytes=size_bytes, padded_bytes=size_bytes)
