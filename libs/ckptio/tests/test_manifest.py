"""The manifest: all a scheduler needs, and refused when damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptio
from ckptio.manifest import FileInfo, Manifest, PartitionInfo, Source, digest_of

A_MANIFEST = Manifest(
    partitions=(
        PartitionInfo(file="partition_0.bin", size_bytes=100, padded_bytes=4096),
        PartitionInfo(file="partition_1.bin", size_bytes=5000, padded_bytes=8192),
    ),
    tensor_count=3,
    parameter_count=2500,
    dtypes=("bfloat16", "float32"),
    architecture="LlamaForCausalLM",
    source=Source(name="acme/model", kind="safetensors", revision="abc"),
    index_size_bytes=700,
    index_digest="xxh3:0123456789abcdef",
    files=(FileInfo(name="sub/config.json", size_bytes=10, digest="xxh3:0000000000000000"),),
)


def test_a_manifest_survives_its_text() -> None:
    """F4: size and partition plan without touching the weights."""
    again = Manifest.from_json(A_MANIFEST.to_json())
    assert again == A_MANIFEST
    assert again.total_bytes == 5100
    assert again.padded_bytes == 12288
    assert str(again.source) == "acme/model@abc"


@given(st.integers(0, len(A_MANIFEST.to_json().encode()) - 1), st.integers(0, 7))
def test_any_flipped_bit_of_a_manifest_is_found(position: int, bit: int) -> None:
    raw = bytearray(A_MANIFEST.to_json().encode())
    raw[position] ^= 1 << bit
    try:
        again = Manifest.from_json(bytes(raw), "m/manifest.json")
    except (ckptio.CorruptCheckpoint, ckptio.UnsupportedFormat) as error:
        assert error.path == Path("m/manifest.json")  # noqa: PT017
    else:
        assert again == A_MANIFEST  # only white space between fields can differ


def with_changed(**changes: object) -> str:
    """A manifest with other values and a digest that fits them."""
    fields = json.loads(A_MANIFEST.to_json())
    del fields["digest"]
    fields |= changes
    fields["digest"] = digest_of(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
    return json.dumps(fields)


@pytest.mark.parametrize(
    "changes",
    [
        {"partitions": []},
        {"partitions": [{"file": "../partition_0.bin", "size_bytes": 5100, "padded_bytes": 8192}]},
        {"partitions": [{"file": "partition_0.bin", "size_bytes": 5100, "padded_bytes": 5100}]},
        {"partitions": "partition_0.bin"},
        {"total_bytes": 5101},
        {"tensor_count": -1},
        {"tensor_count": True},
        {"dtypes": ["float33"]},
        {"architecture": 7},
        {"source": None},
        {"index_size_bytes": 2**62},
        {"files": [{"name": "../../etc/passwd", "size_bytes": 1, "digest": "x"}]},
        {"files": [{"name": "/etc/passwd", "size_bytes": 1, "digest": "x"}]},
        {"files": [{"name": "a", "size_bytes": 1, "digest": "x"}] * 2},
    ],
    ids=str,
)
def test_a_manifest_that_breaks_a_rule_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ckptio.CorruptCheckpoint, match="manifest is not valid"):
        Manifest.from_json(with_changed(**changes))


@pytest.mark.parametrize("text", ["{}", '{"format": "other"}', with_changed(format_version=2)])
def test_another_format_is_unsupported(text: str) -> None:
    with pytest.raises(ckptio.UnsupportedFormat):
        Manifest.from_json(text)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 100_000, b"\xff\xfe"], ids=range(5))
def test_text_that_is_not_json_is_corrupt(text: str | bytes) -> None:
    with pytest.raises((ckptio.CorruptCheckpoint, ckptio.UnsupportedFormat)):
        Manifest.from_json(text)


def test_a_directory_without_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ckptio.UnsupportedFormat, match="convert it"):
        ckptio.read_manifest(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ckptio.read_manifest(tmp_path / "nowhere")


def test_an_index_of_another_checkpoint_is_refused(a_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    first = a_checkpoint((100,), directory=tmp_path / "a")
    second = a_checkpoint((200,), directory=tmp_path / "b")
    raw = (second / "index.msgpack").read_bytes()
    (first / "index.msgpack").write_bytes(raw)
    with pytest.raises(ckptio.CorruptCheckpoint, match=r"index\.msgpack"):
        ckptio.read_index(first)
