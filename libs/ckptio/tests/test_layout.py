"""The layout of converted and of stock checkpoints: where each tensor's bytes are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch

import ckptio
from ckptio.layout import Layout, read_layout
from ckptio.plan import CHUNK_SIZE_BYTES


def a_mix() -> dict[str, torch.Tensor]:
    """Tensors of several dtypes, odd sizes, no elements and no dimensions."""
    return {
        "model.layers.10.w": torch.randn(5, 3, dtype=torch.bfloat16),
        "model.layers.2.w": torch.arange(7, dtype=torch.uint8),
        "model.layers.1.w": torch.randn(4, 5, dtype=torch.float64),
        "scale": torch.tensor(2.5),
        "none": torch.empty(0, 3, dtype=torch.int16),
    }


def bytes_by_layout(layout: Layout) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor as the layout says, by nothing but offsets into its files."""
    raw = [file.read_bytes() for file in layout.files]
    return {
        entry.name: (
            entry.dtype,
            entry.shape,
            raw[entry.partition][entry.offset_bytes : entry.offset_bytes + entry.size_bytes],
        )
        for entry in layout.index.values()
    }


def plain_bytes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
            if math.prod(tensor.shape)
            else b"",
        )
        for name, tensor in tensors.items()
    }


def save_single(directory: Path) -> list[Path]:
    safetensors.torch.save_file(a_mix(), directory / "model.safetensors", {"format": "pt"})
    return [directory / "model.safetensors"]


def save_adapter(directory: Path) -> list[Path]:
    (directory / "adapter_config.json").write_text("{}")
    safetensors.torch.save_file(a_mix(), directory / "adapter_model.safetensors")
    return [directory / "adapter_model.safetensors"]


def save_sharded(directory: Path, with_index: bool = True) -> list[Path]:
    tensors = a_mix()
    files, weight_map = [], {}
    for number in range(2):
        file = directory / f"model-0000{number + 1}-of-00002.safetensors"
        part = dict(list(tensors.items())[number::2])
        safetensors.torch.save_file(part, file)
        weight_map |= dict.fromkeys(part, file.name)
        files.append(file)
    if with_index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(text)
    return files


def save_unindexed(directory: Path) -> list[Path]:
    return save_sharded(directory, with_index=False)


@pytest.mark.parametrize("save", [save_single, save_adapter, save_sharded, save_unindexed])
def test_every_stock_tensor_is_where_the_layout_says(save: Callable, tmp_path: Path) -> None:
    """F3: pointer arithmetic on the file gives what the safetensors package gives."""
    files = save(tmp_path)
    layout = read_layout(tmp_path)
    assert layout.files == tuple(files)
    assert (layout.is_verified, layout.manifest) == (False, None)
    assert layout.index.chunk_size_bytes == CHUNK_SIZE_BYTES
    for part, file in zip(layout.index.partitions, files, strict=True):
        assert part.size_bytes == part.padded_bytes == file.stat().st_size
        assert part.digests == ()
    expected = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
    assert bytes_by_layout(layout) == plain_bytes(expected)
    places = list(zip(layout.index.partition, layout.index.offset_bytes, strict=True))
    assert places == sorted(places)


def test_one_file_is_a_layout_too(tmp_path: Path) -> None:
    (file,) = save_single(tmp_path)
    assert read_layout(file) == read_layout(tmp_path)


def test_a_recorded_tie_is_a_tensor_of_its_own_name(tmp_path: Path) -> None:
    """F7: safetensors keeps one of two tied tensors and notes the other as metadata."""
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    index = read_layout(tmp_path).index
    assert set(index) == {"embed.weight", "head.weight"}
    assert index.aliases == ((0, 1),)
    assert index["head.weight"].offset_bytes == index["embed.weight"].offset_bytes
    assert index.parameter_count == 24


def test_a_converted_checkpoint_has_its_manifest_and_digests(a_checkpoint: Callable) -> None:
    path = a_checkpoint()
    layout = read_layout(path)
    assert layout.manifest == ckptio.read_manifest(path)
    assert layout.index == ckptio.read_index(path)
    assert layout.files == (path / "partition_0.bin",)
    assert layout.is_verified


def test_a_tie_to_an_impossible_name_is_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", {"a\0b": "w"})
    with pytest.raises(ckptio.CorruptCheckpoint, match="zero character"):
        read_layout(tmp_path)


def test_a_layout_checks_the_size_of_every_file(a_checkpoint: Callable, tmp_path: Path) -> None:
    path = a_checkpoint()
    whole = (path / "partition_0.bin").read_bytes()
    (path / "partition_0.bin").write_bytes(whole[:-1])
    with pytest.raises(ckptio.TruncatedCheckpoint, match=r"partition_0\.bin.*1 missing"):
        read_layout(path)
    stock = tmp_path / "source" / "model.safetensors"
    stock.write_bytes(stock.read_bytes()[:-1])
    with pytest.raises(ckptio.TruncatedCheckpoint, match=r"model\.safetensors.*1 missing"):
        read_layout(tmp_path / "source")


def test_what_is_not_there_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_layout(tmp_path / "nothing")
    with pytest.raises(ckptio.UnsupportedFormat, match="no safetensors file"):
        read_layout(tmp_path)
