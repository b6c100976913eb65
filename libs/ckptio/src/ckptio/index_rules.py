"""The rules of the index, checked when it is written and when it is read, before anybody acts on it."""

from __future__ import annotations

from ckptio.dtypes import DTYPES, ITEM_SIZE_BYTES_MAX
from ckptio.index import Index, IndexPartition, Slice
from ckptio.plan import ALIGNMENT_BYTES, PADDING_BYTES, SIZE_BYTES_MAX, chunk_count, round_up, size_of

# Bounds on what is read; each is far above what a real checkpoint has, and small enough to parse in memory.
TENSORS_MAX = 4_000_000
PARTITIONS_MAX = 4096
NAME_BYTES_MAX = 4096
RANK_MAX = 64  # torch's own limit
CHUNK_SIZE_BYTES_MAX = 1024 * 1024 * 1024


def check(index: Index) -> None:
    """Raises ValueError, naming the tensor, when `index` breaks a rule of the format."""
    chunk_size_bytes = index.chunk_size_bytes
    require(0 < chunk_size_bytes <= CHUNK_SIZE_BYTES_MAX, f"chunk size {chunk_size_bytes} is out of range")
    require(chunk_size_bytes % PADDING_BYTES == 0, f"chunk size {chunk_size_bytes} is not whole pages")
    require(1 <= len(index.partitions) <= PARTITIONS_MAX, f"{len(index.partitions)} partitions")
    for number, part in enumerate(index.partitions):
        _check_partition(number, part, chunk_size_bytes)
    require(len(index.names) <= TENSORS_MAX, f"{len(index.names)} tensors are too many")
    require(len(set(index.names)) == len(index.names), "a name occurs twice")
    for name in index.names:
        check_name(name)
    _check_shapes(index)
    _check_places(index)
    if index.slices:
        _check_slices(index)


def _check_partition(number: int, part: IndexPartition, chunk_size_bytes: int) -> None:
    require(
        0 <= part.size_bytes <= SIZE_BYTES_MAX - PADDING_BYTES, f"partition {number}: size {part.size_bytes}"
    )
    padded_bytes = round_up(part.size_bytes, PADDING_BYTES)
    require(part.padded_bytes == padded_bytes, f"partition {number}: padded size {part.padded_bytes}")
    chunks = chunk_count(padded_bytes, chunk_size_bytes)
    require(len(part.digests) == chunks, f"partition {number}: {len(part.digests)} digests, {chunks} chunks")


def check_name(name: str) -> None:
    """Raises ValueError when a tensor cannot have this name."""
    if not name or "\0" in name:
        raise ValueError(f"name {name!r} is empty or has a zero character")
    if len(name.encode()) > NAME_BYTES_MAX:
        raise ValueError(f"name {name[:40]!r}… is longer than {NAME_BYTES_MAX} bytes")


def _check_shapes(index: Index) -> None:
    sizes: dict[tuple[str, tuple[int, ...], tuple[int, ...] | None], int] = {}
    for row, (dtype, shape, size_bytes) in enumerate(
        zip(index.dtype, index.shape, index.size_bytes, strict=True)
    ):
        key = (dtype, shape, index.stride.get(row))
        expected = sizes.get(key)
        if expected is None:
            name = index.names[row]
            require(dtype in DTYPES, f"{name}: unknown dtype {dtype!r}")
            require(len(shape) <= RANK_MAX, f"{name}: rank {len(shape)}")
            try:
                expected = sizes[key] = size_of(*key)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        if size_bytes != expected:
            raise ValueError(f"{index.names[row]}: {size_bytes} bytes, but its shape needs {expected}")


def _check_places(index: Index) -> None:
    """Rows in order, inside their partition, aligned, and overlapping only where the alias table says so."""
    group_of = _groups(index)
    previous = (0, 0)
    group = None
    end = 0
    for row, place in enumerate(zip(index.partition, index.offset_bytes, strict=True)):
        partition, offset_bytes = place
        name = index.names[row]
        if place < previous:
            raise ValueError(f"{name}: row out of order")
        if partition >= len(index.partitions):
            raise ValueError(f"{name}: partition {partition} does not exist")
        if partition != previous[0]:
            group, end = None, 0
        previous = place
        row_group = group_of.get(row)
        row_end = offset_bytes + index.size_bytes[row]
        if offset_bytes % DTYPES[index.dtype[row]].item_size_bytes:
            raise ValueError(f"{name}: offset {offset_bytes} is not aligned to its elements")
        if row_end > index.partitions[partition].size_bytes:
            raise ValueError(f"{name}: ends at {row_end}, after the end of its partition")
        if row_group is None or row_group != group:
            if offset_bytes < end:
                raise ValueError(f"{name}: overlaps a tensor that it is not an alias of")
            # Overlapping tensors start in the first 16 bytes: their storage may put a small element before a
            # large.
            is_near = row_group is not None and offset_bytes % ALIGNMENT_BYTES < ITEM_SIZE_BYTES_MAX
            if offset_bytes % ALIGNMENT_BYTES and not is_near:
                raise ValueError(f"{name}: offset {offset_bytes} is not aligned")
            group, end = row_group, row_end
        else:
            if offset_bytes >= end:
                raise ValueError(f"{name}: shares no byte with its aliases")
            end = max(end, row_end)


def _groups(index: Index) -> dict[int, int]:
    group_of: dict[int, int] = {}
    for group, rows in enumerate(index.aliases):
        require(len(rows) >= 2, f"alias group {group} has {len(rows)} tensors")
        for row in rows:
            require(
                0 <= row < len(index.names) and row not in group_of, f"alias group {group}: bad row {row}"
            )
            require(index.size_bytes[row] > 0, f"{index.names[row]}: an empty tensor has no alias")
            group_of[row] = group
        require(
            list(rows) == list(range(rows[0], rows[0] + len(rows))), f"alias group {group} is not consecutive"
        )
        is_one_place = index.partition[rows[0]] == index.partition[rows[-1]]
        require(is_one_place, f"alias group {group} is in two partitions")
    return group_of


def slice_name(whole: str, partition: int) -> str:
    """The name of the row for the part or copy of `whole` in `partition`: one per partition, so unique."""
    return f"{whole}#{partition}"


def _check_slices(index: Index) -> None:
    """The rows of one whole tensor are copies of it, or tile it along one dimension, no gap, no overlap."""
    names = set(index.names)
    for part in index.slices.values():
        check_name(part.whole)
    for whole, rows in index.rows_of_wholes().items():
        if rows[0] not in index.slices:
            require(len(rows) == 1, f"{whole}: is a tensor, and also split over GPUs")
            continue
        require(whole not in names, f"{whole}: is a tensor, and also split over GPUs")
        first = index.slices[rows[0]]
        require(len(first.shape) <= RANK_MAX, f"{whole}: rank {len(first.shape)}")
        end = 0
        for row in rows:
            part, name = index.slices[row], index.names[row]
            require(
                name == slice_name(whole, index.partition[row]),
                f"{name}: a part of {whole!r} in partition {index.partition[row]} has another name",
            )
            require(
                part.dimension == first.dimension
                and part.shape == first.shape
                and index.dtype[row] == index.dtype[rows[0]],
                f"{name}: differs from the other parts of {whole!r} in dimension, dtype or whole shape",
            )
            require(part.start == end, f"{name}: starts at {part.start}, the part before it ends at {end}")
            end += _slice_length(name, part, index.shape[row], row in index.stride)
        if first.dimension is not None:
            require(
                end == first.shape[first.dimension],
                f"{whole}: its parts have {end} of {first.shape[first.dimension]} elements",
            )


def _slice_length(name: str, part: Slice, shape: tuple[int, ...], is_strided: bool) -> int:
    """Elements along the dimension of the slice; 0 for a copy, which moves nothing forward."""
    if part.dimension is None:
        require(shape == part.shape, f"{name}: a copy has shape {list(shape)}, not {list(part.shape)}")
        return 0
    require(part.dimension < len(part.shape), f"{name}: dimension {part.dimension} of {list(part.shape)}")
    require(len(shape) == len(part.shape) and not is_strided, f"{name}: is no part of {list(part.shape)}")
    length = shape[part.dimension]
    expected = (*part.shape[: part.dimension], length, *part.shape[part.dimension + 1 :])
    require(shape == expected and length > 0, f"{name}: is no part of {list(part.shape)}")
    return length


def require(condition: bool, reason: str) -> None:
    """Raises ValueError with `reason` unless `condition`."""
    if not condition:
        raise ValueError(reason)
