"""Names that a file system or JSON can hold and a checkpoint cannot, and some that it can."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptio
from ckptio.manifest import Manifest

Writer = Callable[..., Path]
Tensors = Callable[..., dict[str, tuple[str, tuple[int, ...], bytes]]]


@pytest.mark.parametrize("name", ["", "a\0b", "n" * 5000])
def test_a_tie_to_a_name_that_no_tensor_can_have_is_corrupt(
    tmp_path: Path, write_stock: Writer, some_tensors: Tensors, name: str
) -> None:
    source = write_stock(tmp_path / "model.safetensors", some_tensors((5,)), {"format": "pt", name: "t.0"})
    for use in (lambda: ckptio.convert(source, tmp_path / "out"), lambda: ckptio.read_layout(source)):
        with pytest.raises(ckptio.CorruptCheckpoint, match="bad name"):
            use()


def test_a_source_path_of_any_bytes_can_be_converted(
    tmp_path: Path, write_model: Writer, some_tensors: Tensors
) -> None:
    source = write_model(tmp_path / os.fsdecode(b"mod\xffel"), some_tensors((5,)))
    manifest = ckptio.convert(source, tmp_path / "out")
    assert "mod\N{REPLACEMENT CHARACTER}el" in manifest.source.name
    ckptio.verify(tmp_path / "out")


def test_a_copied_file_whose_name_is_no_text_is_refused_before_anything_is_written(
    tmp_path: Path, write_model: Writer, some_tensors: Tensors
) -> None:
    source = write_model(tmp_path / "model", some_tensors((5,)))
    (source / os.fsdecode(b"voc\xffab.json")).write_text("{}")
    with pytest.raises(ckptio.UnsupportedFormat, match="rename it"):
        ckptio.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_half_a_character_in_a_manifest_is_corrupt(
    a_checkpoint: Callable[..., Path],
) -> None:
    fields = json.loads((a_checkpoint() / "manifest.json").read_text())
    fields["source"]["name"] = "\ud800"
    with pytest.raises(ckptio.CorruptCheckpoint):
        Manifest.from_json(json.dumps(fields))


@pytest.mark.parametrize("use", [ckptio.read_layout, lambda path: ckptio.convert(path, path.parent / "out")])
def test_a_shard_with_a_name_that_no_file_can_have_is_corrupt(
    tmp_path: Path, use: Callable[[Path], object]
) -> None:
    (tmp_path / "model").mkdir()
    index = {"weight_map": {"a": "x" * 5000 + ".safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ckptio.CorruptCheckpoint, match="longer than 255"):
        use(tmp_path / "model")


def test_shards_may_lie_in_folders(
    tmp_path: Path, write_stock: Writer, some_tensors: Tensors, checkpoint_bytes: Callable[[Path], object]
) -> None:
    tensors = some_tensors((5,), (6,))
    weight_map = {}
    for name, tensor in tensors.items():
        write_stock(tmp_path / "model" / "parts" / f"{name}.safetensors", {name: tensor})
        weight_map[name] = f"parts/{name}.safetensors"
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    ckptio.convert(tmp_path / "model", tmp_path / "out")
    assert checkpoint_bytes(tmp_path / "out") == tensors
    assert set(ckptio.load(tmp_path / "model")) == set(tensors)
