"""The safetensors format, strictly: reading a header that may be anything, and writing one.

Parsed here rather than by the safetensors package, because the converter needs offsets, not tensors, and
because a damaged file must be told apart by place: which file, which offset, how many bytes are missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckptio.dtypes import DTYPES, DTYPES_BY_STOCK
from ckptio.errors import CorruptCheckpoint, PathLike, TruncatedCheckpoint, UnsupportedFormat
from ckptio.files import FileState, opened, read_exactly
from ckptio.index_rules import check_name
from ckptio.plan import size_of

LENGTH_BYTES = 8

# The limit of the format's own implementation.
HEADER_BYTES_MAX = 100_000_000

# Enough to recognise what a wrong file is.
_SNIFF_BYTES = 512

_TENSOR_KEYS = {"dtype", "shape", "data_offsets"}

# Dtype and shape as a header has them -> both in our terms, and the bytes they need.
_Sizes = dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StockTensor:
    """A tensor of a safetensors file; `offset_bytes` from the start of the file, the rest in our terms."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StockHeader:
    """What a safetensors file says about itself; `state` is that of the file it was read from."""

    tensors: tuple[StockTensor, ...]
    metadata: Mapping[str, str]
    size_bytes: int
    state: FileState | None = None


def read_header(path: Path) -> StockHeader:
    """Reads and checks the header of a safetensors file, and that the file has all the bytes it promises.

    Raises `UnsupportedFormat`, `CorruptCheckpoint` or `TruncatedCheckpoint`.
    """
    with opened(path) as descriptor:
        state = FileState.of(descriptor)
        size_bytes = state.size_bytes
        start = bytearray(min(size_bytes, _SNIFF_BYTES))
        read_exactly(descriptor, memoryview(start), 0, path)
        _refuse_other_kinds(bytes(start), path)
        if size_bytes < LENGTH_BYTES:
            raise TruncatedCheckpoint(path, expected_bytes=LENGTH_BYTES, actual_bytes=size_bytes)
        header_bytes = int.from_bytes(start[:LENGTH_BYTES], "little")
        if header_bytes > HEADER_BYTES_MAX:
            raise CorruptCheckpoint(path, f"header length {header_bytes} is not possible")
        if LENGTH_BYTES + header_bytes > size_bytes:
            raise TruncatedCheckpoint(
                path, expected_bytes=LENGTH_BYTES + header_bytes, actual_bytes=size_bytes
            )
        raw = bytearray(header_bytes)
        read_exactly(descriptor, memoryview(raw), LENGTH_BYTES, path)
    return replace(parse_header(bytes(raw), size_bytes, path), state=state)


def parse_header(raw: bytes, file_bytes: int, path: PathLike) -> StockHeader:
    """Checks the JSON header `raw` of a file of `file_bytes`: names, dtypes, shapes, no gap, no overlap."""
    table = _parse_json(raw, path)
    metadata = _parse_metadata(table.pop("__metadata__", {}), path)
    data_start = LENGTH_BYTES + len(raw)
    # Layers repeat their shapes, so sizes are computed once for each.
    sizes: _Sizes = {}
    tensors = sorted(
        (_parse_tensor(name, item, data_start, sizes, path) for name, item in table.items()),
        key=lambda tensor: (tensor.offset_bytes, tensor.size_bytes),
    )
    end = data_start
    for tensor in tensors:
        if tensor.offset_bytes != end:
            reason = (
                f"tensor {tensor.name!r} starts at {tensor.offset_bytes}, the one before it ends at {end}"
            )
            raise CorruptCheckpoint(path, reason, offset_bytes=end)
        end += tensor.size_bytes
    if end > file_bytes:
        raise TruncatedCheckpoint(path, expected_bytes=end, actual_bytes=file_bytes)
    if end < file_bytes:
        raise CorruptCheckpoint(path, f"{file_bytes - end} bytes after the last tensor", offset_bytes=end)
    return StockHeader(tensors=tuple(tensors), metadata=metadata, size_bytes=file_bytes)


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a file with `tensors` (name, dtype, shape in our terms) one after the other.

    Raises ValueError for a dtype or a name that the format does not have.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype_name, shape in tensors:
        dtype = DTYPES[dtype_name]
        if dtype.stock is None:
            raise ValueError(f"{name}: safetensors has no {dtype_name}")
        if name == "__metadata__":
            raise ValueError("a tensor named __metadata__ cannot be in a safetensors file")
        if dtype.stock_packing > 1 and not shape:
            raise ValueError(
                f"{name}: a packed {dtype_name} without dimensions cannot be in a safetensors file"
            )
        size_bytes = size_of(dtype_name, shape)
        stock_shape = (*shape[:-1], shape[-1] * dtype.stock_packing) if shape else ()
        table[name] = {
            "dtype": dtype.stock,
            "shape": list(stock_shape),
            "data_offsets": [offset, offset + size_bytes],
        }
        offset += size_bytes
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)  # the format wants the data aligned to 8 bytes
    return len(raw).to_bytes(LENGTH_BYTES, "little") + raw


def _refuse_other_kinds(start: bytes, path: PathLike) -> None:
    if not start:
        raise TruncatedCheckpoint(path, expected_bytes=LENGTH_BYTES, actual_bytes=0)
    # Looked at first: the length of a good header may look like the mark of another kind (640 like a pickle).
    is_possible = int.from_bytes(start[:LENGTH_BYTES], "little") <= HEADER_BYTES_MAX
    if is_possible and start[LENGTH_BYTES:].startswith(b"{"):
        return
    text = start.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        raise UnsupportedFormat(path, "a git-lfs pointer, not the file itself; fetch it with `git lfs pull`")
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise UnsupportedFormat(
            path, "a web page, not a safetensors file; the download went wrong, repeat it"
        )
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):
        rename = "" if Path(path).suffix in (".bin", ".pt", ".pth") else " (named .bin)"
        raise UnsupportedFormat(
            path, f"torch weights; convert them{rename} first: ckptio convert {path} DESTINATION"
        )
    if start.startswith(b"GGUF"):
        raise UnsupportedFormat(path, "a GGUF file, not a safetensors file; save it as safetensors first")
    if len(start) > LENGTH_BYTES and start[LENGTH_BYTES] != ord("{"):
        raise UnsupportedFormat(
            path, "not a safetensors file: no header where one must start", offset_bytes=8
        )


def _parse_json(raw: bytes, path: PathLike) -> dict[str, object]:
    try:
        table = json.loads(raw.decode(), object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        place = LENGTH_BYTES + (getattr(error, "pos", None) or getattr(error, "start", None) or 0)
        raise CorruptCheckpoint(path, f"header is not valid JSON ({error})", offset_bytes=place) from error
    if not isinstance(table, dict):
        raise CorruptCheckpoint(path, "header is not a JSON object", offset_bytes=LENGTH_BYTES)
    return table


def _refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table: dict[str, object] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name[:200]!r} occurs twice")
        table[name] = value
    return table


def _parse_metadata(table: object, path: PathLike) -> dict[str, str]:
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise CorruptCheckpoint(path, "__metadata__ is not a map of strings", offset_bytes=LENGTH_BYTES)
    try:
        # JSON can spell half of a surrogate pair, which no other encoding holds.
        "".join((*table, *table.values())).encode()
    except UnicodeEncodeError as error:
        raise CorruptCheckpoint(
            path, f"__metadata__ is not text ({error})", offset_bytes=LENGTH_BYTES
        ) from error
    return table


def _parse_tensor(name: str, item: object, data_start: int, sizes: _Sizes, path: PathLike) -> StockTensor:
    try:
        return _tensor(name, item, data_start, sizes)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"header entry {name[:200]!r} is not valid ({error})"
        raise CorruptCheckpoint(path, reason, offset_bytes=LENGTH_BYTES) from error


def _tensor(name: str, item: object, data_start: int, sizes: _Sizes) -> StockTensor:
    if not isinstance(item, dict) or item.keys() != _TENSOR_KEYS:
        raise ValueError("it needs dtype, shape and data_offsets, and nothing else")
    check_name(name)
    start, end = item["data_offsets"]
    numbers = (*item["shape"], start, end)
    for number in numbers:
        if type(number) is not int or number < 0:
            raise ValueError("shape and offsets must be whole numbers, not negative")
    key = (item["dtype"], numbers[:-2])
    known = sizes.get(key)
    if known is None:
        known = sizes[key] = _size(*key)
    dtype, shape, size_bytes = known
    if end - start != size_bytes:
        raise ValueError(f"{end - start} bytes at offset {start}, but shape {list(shape)} needs {size_bytes}")
    return StockTensor(
        name=name, dtype=dtype, shape=shape, offset_bytes=data_start + start, size_bytes=size_bytes
    )


def _size(stock_dtype: str, stock_shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int]:
    """The dtype and shape in our terms, and the bytes they need."""
    dtype = DTYPES_BY_STOCK.get(stock_dtype)
    if dtype is None:
        raise ValueError(f"dtype {stock_dtype!r} is unknown")
    shape = stock_shape
    if dtype.stock_packing > 1:
        if not shape or shape[-1] % dtype.stock_packing:
            raise ValueError(
                f"the last dimension of {dtype.stock} must be a multiple of {dtype.stock_packing}"
            )
        shape = (*shape[:-1], shape[-1] // dtype.stock_packing)
    return dtype.name, shape, size_of(dtype.name, shape)
