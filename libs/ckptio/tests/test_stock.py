"""The safetensors format, against its own implementation and against everything a wrong file may be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptio
from ckptio.dtypes import DTYPES_BY_STOCK
from ckptio.stock import encode_header, parse_header, read_header


@pytest.mark.parametrize("stock_name", sorted(DTYPES_BY_STOCK))
def test_headers_agree_with_the_safetensors_package(stock_name: str, tmp_path: Path) -> None:
    """F5: whatever the common format holds."""
    dtype = DTYPES_BY_STOCK[stock_name]
    if not hasattr(torch, dtype.name):
        pytest.skip(f"this torch has no {dtype.name}")
    raw = torch.arange(2 * 6 * dtype.item_size_bytes, dtype=torch.uint8)
    tensor = raw.view(getattr(torch, dtype.name)).view(2, 6)
    path = tmp_path / "theirs.safetensors"
    safetensors.torch.save_file({"x": tensor}, path)
    (ours,) = read_header(path).tensors
    assert (ours.name, ours.dtype, ours.shape, ours.size_bytes) == ("x", dtype.name, (2, 6), len(raw))
    assert path.read_bytes()[ours.offset_bytes :] == bytes(raw.tolist())

    written = tmp_path / "ours.safetensors"
    written.write_bytes(encode_header([("x", dtype.name, (2, 6))], {"a": "b"}) + bytes(raw.tolist()))
    (again,) = safetensors.torch.load_file(written).values()
    assert again.dtype == tensor.dtype
    assert torch.equal(again.view(torch.uint8), tensor.view(torch.uint8))


def a_file(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(start: int, end: int, shape: list[object], dtype: str = "U8", **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]} | more


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"a": entry(0, 4, [4])}, b"12345", "1 bytes after"),
        ({"a": entry(1, 5, [4])}, b"12345", "starts at"),
        ({"a": entry(0, 3, [3]), "b": entry(2, 5, [3])}, b"12345", "starts at"),
        ({"a": entry(0, 3, [4])}, b"123", "needs 4"),
        ({"a": entry(4, 0, [4])}, b"1234", "needs 4"),
        ({"a": entry(0, 4, [2**32, 2**32])}, b"1234", "overflows"),
        ({"a": entry(0, 0, [2**62, 2**62, 0])}, b"", "overflows"),
        ({"a": entry(0, 4, [-4])}, b"1234", "negative"),
        ({"a": entry(0, 4, [4.0])}, b"1234", "whole numbers"),
        ({"a": entry(0, 1, [True])}, b"1", "whole numbers"),
        ({"a": entry(0, 4, [4], dtype="U9")}, b"1234", "unknown"),
        ({"a": entry(0, 4, [4], extra=1)}, b"1234", "nothing else"),
        ({"a": [0, 4]}, b"1234", "nothing else"),
        ({"a": {"dtype": "U8", "shape": [4]}}, b"1234", "nothing else"),
        ({"a": entry(0, 1, [1], dtype="F4")}, b"1", "multiple of 2"),
        ({"": entry(0, 4, [4])}, b"1234", "empty"),
        ({"a\0b": entry(0, 4, [4])}, b"1234", "zero character"),
        ({"\ud800": entry(0, 4, [4])}, b"1234", "surrogates"),
        ({"__metadata__": {"a": 1}}, b"", "map of strings"),
        ({"__metadata__": {"a": "\ud800"}}, b"", "not text"),
        ({"__metadata__": {"\udc00": "a"}}, b"", "not text"),
        (b'{"a": 1, "a": 2}', b"", "twice"),
        (b'{"a": ', b"", "not valid JSON"),
        (b"{\xff}", b"", "not valid JSON"),
        (b'{"a":' + b"[" * 100_000, b"", "not valid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", b"", "not valid JSON"),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused(
    header: object, data: bytes, reason: str, tmp_path: Path
) -> None:
    """F7: sizes, offsets, products of shapes and names are checked before a byte is read."""
    path = a_file(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(ckptio.CorruptCheckpoint, match=reason) as caught:
        read_header(path)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git lfs pull"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\n<html>", "web page"),
        (
            b"PK\x03\x04rest of a zip file",
            "torch weights; convert them .named .bin. first: ckptio convert",
        ),
        (b"GGUF\x03\0\0\0\0\0\0\0", "GGUF"),
        (b"\x10\0\0\0\0\0\0\0nothing like json", "not a safetensors file"),
    ],
)
def test_a_wrong_file_says_what_it_is(raw: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ckptio.UnsupportedFormat, match=reason) as caught:
        read_header(path)
    assert caught.value.path == path


@pytest.mark.parametrize(("raw", "expected"), [(b"", 8), (b"\x10\0\0", 8), (b"\x10\0\0\0\0\0\0\0{", 24)])
def test_a_file_that_ends_in_its_header_is_truncated(raw: bytes, expected: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(ckptio.TruncatedCheckpoint) as caught:
        read_header(path)
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (expected, len(raw))


@pytest.mark.parametrize("header_bytes", [640, 2688, 0x4B50])
def test_a_header_length_that_looks_like_another_format_is_a_length(
    header_bytes: int, tmp_path: Path
) -> None:
    """F7: 640 is how a pickle begins; found by a property test."""
    path = tmp_path / "model.safetensors"
    table = json.dumps({"a": entry(0, 4, [4])}).encode()
    path.write_bytes(header_bytes.to_bytes(8, "little") + table.ljust(header_bytes) + b"1234")
    assert [tensor.name for tensor in read_header(path).tensors] == ["a"]
    assert safetensors.torch.load_file(path).keys() == {"a"}


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001])
def test_an_impossible_header_length_is_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(100))
    with pytest.raises(ckptio.CorruptCheckpoint, match=str(length)):
        read_header(path)


@pytest.mark.parametrize("missing_bytes", [1, 100, 4096])
def test_a_truncated_shard_says_how_many_bytes_are_missing(
    missing_bytes: int, tmp_path: Path, some_tensors: Callable, write_stock: Callable
) -> None:
    path = write_stock(tmp_path / "model.safetensors", some_tensors((5000,), (5000,)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-missing_bytes])
    with pytest.raises(ckptio.TruncatedCheckpoint, match=f"{missing_bytes} missing") as caught:
        read_header(path)
    assert caught.value.path == path
    assert caught.value.expected_bytes == len(whole)
    assert caught.value.actual_bytes == len(whole) - missing_bytes


@given(st.binary(max_size=300))
def test_no_header_escapes_as_another_error(raw: bytes) -> None:
    try:
        parse_header(b"{" + raw, 1000, "file")
    except (ckptio.CorruptCheckpoint, ckptio.TruncatedCheckpoint) as error:
        assert error.path == Path("file")  # noqa: PT017


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(DTYPES_BY_STOCK)) | json_values,
        "shape": st.lists(st.integers(0, 5), max_size=3) | json_values,
        "data_offsets": st.tuples(st.integers(0, 60), st.integers(0, 60)) | json_values,
    }
)


@given(st.dictionaries(st.text(max_size=5), entries | json_values, max_size=3), st.integers(0, 400))
def test_no_table_escapes_as_another_error(table: dict[str, object], file_bytes: int) -> None:
    try:
        header = parse_header(json.dumps(table).encode(), file_bytes, "file")
    except (ckptio.CorruptCheckpoint, ckptio.TruncatedCheckpoint):
        return
    assert {tensor.name for tensor in header.tensors} == table.keys() - {"__metadata__"}


def test_what_safetensors_cannot_hold_is_refused() -> None:
    for name, dtype, shape in [
        ("x", "complex128", (1,)),
        ("x", "float4_e2m1fn_x2", ()),
        ("__metadata__", "uint8", ()),
    ]:
        with pytest.raises(ValueError, match=r"safetensors"):
            encode_header([(name, dtype, shape)], {})


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_torch_weights_are_not_read_but_said_to_be_convertible(
    suffix: str, is_zip: bool, tmp_path: Path
) -> None:
    """By everything that reads what was published; what the text says to do works."""
    path = tmp_path / f"m{suffix}"
    state = {"w": torch.arange(3)}
    torch.save(state, path, _use_new_zipfile_serialization=is_zip)
    for read in (ckptio.load, ckptio.open, ckptio.load_file, ckptio.read_layout):
        with pytest.raises(
            ckptio.UnsupportedFormat,
            match=rf"torch weights; convert them first: ckptio convert {path} DESTINATION$",
        ):
            read(path)
    ckptio.convert(path, tmp_path / "c")
    assert torch.equal(ckptio.load(tmp_path / "c")["w"], state["w"])
