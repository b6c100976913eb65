"""Where the bytes of a checkpoint lie, converted or not: one index over the files that hold them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptio.checkpoint import check_sizes, read_checkpoint
from ckptio.collector import collector_paused
from ckptio.dtypes import DTYPES
from ckptio.errors import PathLike
from ckptio.files import FileState
from ckptio.index import Index, IndexPartition
from ckptio.manifest import INDEX_FILE, MANIFEST_FILE, Manifest, partition_file
from ckptio.plan import CHUNK_SIZE_BYTES
from ckptio.source import StockSource, open_source, recorded_ties
from ckptio.stock import StockTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The index of a checkpoint, and the file of each of its partitions.

    `is_verified` says whether the index has digests to verify the bytes with. `manifest` is None for a stock
    checkpoint. `states` are those of the files of a stock checkpoint when their headers were read: nothing
    else tells whether the bytes are still those that the headers describe.
    """

    index: Index
    files: tuple[Path, ...]
    is_verified: bool
    manifest: Manifest | None
    states: tuple[FileState, ...] = ()

    @property
    def is_aligned(self) -> bool:
        """Whether every tensor is aligned to its elements, so that views of the files' bytes are enough."""
        columns = zip(self.index.dtype, self.index.offset_bytes, strict=True)
        return self.is_verified or not any(
            offset_bytes % DTYPES[dtype].item_size_bytes for dtype, offset_bytes in columns
        )


def read_layout(path: PathLike) -> Layout:
    """The layout of a checkpoint of ckptio, or of safetensors as they were published, unconverted.

    Stock is a directory (one file, shards with or without an index, an adapter) or one file. There each file
    is a partition, header included, so that offsets count from its start; they may be unaligned for their
    dtype, and there are no digests. The sizes of all files are checked, no weight is read. Raises
    FileNotFoundError, `MissingFile`, `TruncatedCheckpoint`, `CorruptCheckpoint` or `UnsupportedFormat`.
    """
    with collector_paused():
        return _read_layout(Path(path))


def _read_layout(path: Path) -> Layout:
    if (path / MANIFEST_FILE).exists() or (path / INDEX_FILE).exists():
        manifest, index = read_checkpoint(path)
        check_sizes(path, index)
        files = tuple(path / partition_file(number) for number in range(len(index.partitions)))
        return Layout(index=index, files=files, is_verified=True, manifest=manifest)
    stock = open_source(path)
    files = tuple(sorted({shard.file for shard in stock.tensors}))
    index = _stock_index(stock, files, path)
    states = tuple(stock.states[file] for file in files)
    return Layout(index=index, files=files, is_verified=False, manifest=None, states=states)


def _stock_index(stock: StockSource, files: Sequence[Path], path: Path) -> Index:
    """The columns of an index, in order of file and offset; tied names follow the tensor that is stored."""
    number_of = {file: number for number, file in enumerate(files)}
    ties = recorded_ties(stock, path)
    shards = sorted(
        ((number_of[shard.file], shard.tensor.offset_bytes, shard.tensor) for shard in stock.tensors),
        key=lambda place: place[:2],
    )
    rows: list[tuple[str, int, StockTensor]] = []
    aliases: list[tuple[int, ...]] = []
    for number, _, tensor in shards:
        rows.append((tensor.name, number, tensor))
        tied = ties.get(tensor.name)
        if tied is not None:
            aliases.append(tuple(range(len(rows) - 1, len(rows) + len(tied))))
            rows.extend((name, number, tensor) for name in tied)
    return Index(
        chunk_size_bytes=CHUNK_SIZE_BYTES,
        partitions=tuple(_partition(file) for file in files),
        names=tuple([name for name, _, _ in rows]),
        partition=tuple([number for _, number, _ in rows]),
        offset_bytes=tuple([tensor.offset_bytes for _, _, tensor in rows]),
        size_bytes=tuple([tensor.size_bytes for _, _, tensor in rows]),
        dtype=tuple([tensor.dtype for _, _, tensor in rows]),
        shape=tuple([tensor.shape for _, _, tensor in rows]),
        aliases=tuple(aliases),
        metadata=dict(stock.metadata),
    )


def _partition(file: Path) -> IndexPartition:
    size_bytes = os.stat(file).st_size
    return IndexPartition(size_bytes=size_bytes, padded_bytes=size_bytes)
