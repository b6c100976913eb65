"""The index of a checkpoint: which bytes of which partition each tensor is, and the digest of every chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckptio.dtypes import DTYPES
from ckptio.plan import Extent, PartitionLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor is; `stride` in elements, None when contiguous; `size_bytes` is the whole span."""

    name: str
    partition: int
    offset_bytes: int
    size_bytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPartition:
    """True size of a partition, size of its file, and the XXH3-64 digest of each chunk of the file."""

    size_bytes: int
    padded_bytes: int
    digests: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """What a row stores of the tensor `whole`, which has `shape`: along `dimension`, from element `start`.

    Without a dimension the row is a copy of all of it, one of several on different GPUs.
    """

    whole: str
    dimension: int | None
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Index(Mapping[str, TensorEntry]):
    """All tensors of a checkpoint, as columns; also a mapping from name to `TensorEntry`.

    `aliases` are groups of rows that share bytes (tied tensors and overlapping views). `stride` has only the
    rows that are not contiguous. `slices` has only the rows that are a part or a copy of a tensor that
    several GPUs share; such a row is named after the tensor and its partition ("q_proj.weight#1"). `metadata`
    is the string map of the safetensors files that the checkpoint came from.
    """

    chunk_size_bytes: int
    partitions: tuple[IndexPartition, ...]
    names: tuple[str, ...]
    partition: tuple[int, ...]
    offset_bytes: tuple[int, ...]
    size_bytes: tuple[int, ...]
    dtype: tuple[str, ...]
    shape: tuple[tuple[int, ...], ...]
    stride: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    aliases: tuple[tuple[int, ...], ...] = ()
    slices: Mapping[int, Slice] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> TensorEntry:
        return self.entry(self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def entry(self, row: int) -> TensorEntry:
        """The tensor in row `row`."""
        return TensorEntry(
            name=self.names[row],
            partition=self.partition[row],
            offset_bytes=self.offset_bytes[row],
            size_bytes=self.size_bytes[row],
            dtype=self.dtype[row],
            shape=self.shape[row],
            stride=self.stride.get(row),
        )

    def whole_name(self, row: int) -> str:
        """The name of the tensor that row `row` is, or is a part or a copy of."""
        part = self.slices.get(row)
        return self.names[row] if part is None else part.whole

    def of_gpu(self, gpu: int) -> dict[str, TensorEntry]:
        """What GPU `gpu` holds, under the names of the whole tensors: what its share of a model asks for.

        Raises ValueError when the checkpoint has no such partition.
        """
        if not 0 <= gpu < len(self.partitions):
            raise ValueError(f"GPU {gpu}: the checkpoint is for {len(self.partitions)}")
        rows = [row for row, partition in enumerate(self.partition) if partition == gpu]
        return {self.whole_name(row): self.entry(row) for row in rows}

    def rows_of_wholes(self) -> dict[str, tuple[int, ...]]:
        """Name of every whole tensor -> its rows, in order of their start."""
        rows: dict[str, list[int]] = {}
        for row in range(len(self.names)):
            rows.setdefault(self.whole_name(row), []).append(row)
        if self.slices:
            for group in rows.values():
                group.sort(key=lambda row: (self.slices[row].start if row in self.slices else 0, row))
        return {name: tuple(group) for name, group in rows.items()}

    @property
    def tensor_count(self) -> int:
        """Tensors of the model; one that several GPUs share counts once."""
        return len(self.names) - len(self.slices) + len({part.whole for part in self.slices.values()})

    @property
    def total_bytes(self) -> int:
        """True bytes of all partitions, without the padding of their files."""
        return sum(partition.size_bytes for partition in self.partitions)

    @property
    def parameter_count(self) -> int:
        """Elements of distinct tensors: of overlapping ones only the largest counts, packed ones unpacked.

        Of the copies of one tensor on several GPUs only the first counts.
        """
        counts = [
            math.prod(shape) * DTYPES[dtype].stock_packing
            for shape, dtype in zip(self.shape, self.dtype, strict=True)
        ]
        copied: set[str] = set()
        for row in sorted(row for row, part in self.slices.items() if part.dimension is None):
            if self.slices[row].whole in copied:
                counts[row] = 0
            copied.add(self.slices[row].whole)
        shared = sum(
            sum(counts[row] for row in rows) - max(counts[row] for row in rows) for rows in self.aliases
        )
        return sum(counts) - shared

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.names)}


def make_index(
    extents: Sequence[Extent],
    layouts: Sequence[PartitionLayout],
    digests: Sequence[Sequence[int]],
    *,
    chunk_size_bytes: int,
    metadata: Mapping[str, str],
    slices: Mapping[str, Slice] | None = None,
) -> Index:
    """The index of extents laid out as `layouts`, with the digests of each partition's chunks.

    `slices` says which names are parts or copies of whole tensors.
    """
    rows: list[TensorEntry] = []
    aliases: list[tuple[int, ...]] = []
    for partition, layout in enumerate(layouts):
        for placement in layout.placements:
            members = sorted(extents[placement.extent].members, key=lambda member: member.offset_bytes)
            if len(members) > 1:
                aliases.append(tuple(range(len(rows), len(rows) + len(members))))
            rows.extend(
                TensorEntry(
                    name=member.name,
                    partition=partition,
                    offset_bytes=placement.offset_bytes + member.offset_bytes,
                    size_bytes=member.size_bytes,
                    dtype=member.dtype,
                    shape=member.shape,
                    stride=member.stride,
                )
                for member in members
            )
    return Index(
        chunk_size_bytes=chunk_size_bytes,
        partitions=tuple(
            IndexPartition(
                size_bytes=layout.size_bytes,
                padded_bytes=layout.padded_bytes,
                digests=tuple(partition_digests),
            )
            for layout, partition_digests in zip(layouts, digests, strict=True)
        ),
        names=tuple(row.name for row in rows),
        partition=tuple(row.partition for row in rows),
        offset_bytes=tuple(row.offset_bytes for row in rows),
        size_bytes=tuple(row.size_bytes for row in rows),
        dtype=tuple(row.dtype for row in rows),
        shape=tuple(row.shape for row in rows),
        stride={number: row.stride for number, row in enumerate(rows) if row.stride is not None},
        aliases=tuple(aliases),
        slices={number: slices[row.name] for number, row in enumerate(rows) if row.name in slices}
        if slices
        else {},
        metadata=dict(metadata),
    )
