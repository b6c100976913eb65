"""Torch `.bin`, `.pt` and `.pth` files as input: weights and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import ckptio

Tensors = Mapping[str, torch.Tensor]


def some_weights(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.10.w": torch.randn(70, 30, generator=generator),
        "layers.2.w": torch.randn(41, 5, generator=generator).to(torch.bfloat16),
        "layers.2.scale": torch.randn((), generator=generator),
        "layers.2.empty": torch.empty(0, 7),
        "layers.2.fp8": torch.randn(33, generator=generator).to(torch.float8_e4m3fn),
    }


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(
            found[name].contiguous().reshape(-1).view(torch.uint8),
            tensor.contiguous().reshape(-1).view(torch.uint8),
        )
        for name, tensor in expected.items()
    )


def sharded(directory: Path, weights: Tensors, shards: int) -> Path:
    directory.mkdir()
    weight_map = {}
    for number in range(shards):
        name = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = dict(list(weights.items())[number::shards])
        torch.save(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before-1.6"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_one_torch_file_gives_every_tensor(name: str, is_zip: bool, tmp_path: Path) -> None:
    """F1, F7: in both formats of torch, alone or in a directory."""
    weights = some_weights()
    if not is_zip:
        del weights["layers.2.fp8"]  # younger than that format: torch writes it, but does not read it
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"architectures": ["A"]}')
    torch.save(OrderedDict(weights), tmp_path / "m" / name, _use_new_zipfile_serialization=is_zip)
    manifest = ckptio.convert(tmp_path / "m", tmp_path / "c", chunk_size_bytes=4096)
    assert same(ckptio.load(tmp_path / "c"), weights)
    assert (manifest.source.kind, manifest.architecture) == ("torch", "A")
    assert [file.name for file in manifest.files] == ["config.json"]
    ckptio.convert(tmp_path / "m" / name, tmp_path / "c2", chunk_size_bytes=4096)
    assert same(ckptio.load(tmp_path / "c2"), weights)


def test_torch_and_safetensors_of_one_model_give_the_same_bytes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    weights = some_weights()
    torch.save(weights, tmp_path / "m.bin")
    save_file(weights, tmp_path / "m.safetensors", {"format": "pt"})
    for kind in ("bin", "safetensors"):
        ckptio.convert(tmp_path / f"m.{kind}", tmp_path / kind)
    for file in ("partition_0.bin", "index.msgpack"):
        assert (tmp_path / "bin" / file).read_bytes() == (tmp_path / "safetensors" / file).read_bytes()


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    weights = some_weights()
    source = sharded(tmp_path / "m", weights, 3)
    torch.save({"stray": torch.ones(3)}, source / "pytorch_model.bin")
    ckptio.convert(source, tmp_path / "c")
    assert same(ckptio.load(tmp_path / "c"), weights)
    (source / "pytorch_model.bin").unlink()
    (source / "pytorch_model.bin.index.json").unlink()  # then their names alone tell
    ckptio.convert(source, tmp_path / "c2")
    assert same(ckptio.load(tmp_path / "c2"), weights)


def test_missing_shards_are_all_named_before_anything_is_written(tmp_path: Path) -> None:
    source = sharded(tmp_path / "m", some_weights(), 4)
    for number in (2, 4):
        (source / f"pytorch_model-0000{number}-of-00004.bin").unlink()
    with pytest.raises(ckptio.MissingFile, match=r"00002-of-00004\.bin.*00004-of-00004\.bin") as caught:
        ckptio.convert(source, tmp_path / "c")
    assert caught.value.path == source / "pytorch_model-00002-of-00004.bin"
    assert caught.value.also == (source / "pytorch_model-00004-of-00004.bin",)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_safetensors_win_over_torch_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = sharded(tmp_path / "m", {"w": torch.zeros(4), "v": torch.zeros(4)}, 2)
    save_file({"w": torch.ones(4)}, source / "model.safetensors")
    manifest = ckptio.convert(source, tmp_path / "c")
    assert manifest.source.kind == "safetensors"
    assert same(ckptio.load(tmp_path / "c"), {"w": torch.ones(4)})


def test_ties_and_views_of_a_shard_are_kept(tmp_path: Path) -> None:
    """F7: tied once and again, overlapping views with offset and stride."""
    base = torch.arange(200, dtype=torch.float32)
    weights = {
        "embed": base[:60].view(6, 10),
        "head": base[:60].view(6, 10),
        "tail": base[30:90],
        "turned": base[100:160].view(6, 10).T,
        "every_second": base[161:199:2],
    }
    torch.save(weights, tmp_path / "m.pt")
    manifest = ckptio.convert(tmp_path / "m.pt", tmp_path / "c")
    loaded = ckptio.load(tmp_path / "c")
    assert same(loaded, weights)
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr()
    assert loaded["tail"].data_ptr() == loaded["head"].data_ptr() + 30 * 4
    assert loaded["turned"].stride() == (1, 10)
    assert manifest.total_bytes < 200 * 4 + 3 * 256
    stock = ckptio.export(tmp_path / "c", tmp_path / "stock")
    from safetensors.torch import load_file

    assert same(load_file(stock), weights)


def test_an_adapter_in_torch_format_goes_the_same_way(tmp_path: Path) -> None:
    """F6: LoRA adapters."""
    weights = {"base_model.model.q.lora_A.weight": torch.randn(8, 64)}
    weights["base_model.model.q.lora_B.weight"] = torch.randn(64, 8)
    (tmp_path / "lora").mkdir()
    torch.save(weights, tmp_path / "lora" / "adapter_model.bin")
    torch.save({"lr": 1}, tmp_path / "lora" / "training_args.bin")
    (tmp_path / "lora" / "adapter_config.json").write_text('{"r": 8}')
    manifest = ckptio.convert(tmp_path / "lora", tmp_path / "c")
    assert [file.name for file in manifest.files] == ["adapter_config.json"]
    assert same(ckptio.load(tmp_path / "c"), weights)
    exported = ckptio.export(tmp_path / "c", tmp_path / "again")
    assert exported.name == "adapter_model.safetensors"
    assert (tmp_path / "again" / "adapter_config.json").read_text() == '{"r": 8}'
    ckptio.convert(tmp_path / "again", tmp_path / "c2")
    assert same(ckptio.load(tmp_path / "c2"), weights)


def test_a_state_dict_inside_a_training_checkpoint_is_found(tmp_path: Path) -> None:
    weights = some_weights()
    torch.save({"state_dict": weights, "epoch": 3, "optimizer": {"m": torch.ones(2)}}, tmp_path / "m.pt")
    ckptio.convert(tmp_path / "m.pt", tmp_path / "c")
    assert same(ckptio.load(tmp_path / "c"), weights)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"w": torch.ones(2), "step": 17}, "step: int is not a tensor"),
        ({"w": torch.ones(2), "state_dict": {"v": torch.ones(2)}}, "state_dict: dict is not a tensor"),
        ({"state_dict": {"w": torch.ones(2), "x": [1]}}, "x: list is not a tensor"),
        ({"w": torch.eye(3).to_sparse()}, "w: a .*sparse.* tensor has no plain bytes"),
        ({1: torch.ones(2)}, "entry 1 has no name"),
        ([torch.ones(2)], "holds a list, not a state dict"),
        (torch.ones(2), "holds a Tensor, not a state dict"),
    ],
)
def test_what_is_no_state_dict_is_refused_by_name(table: object, reason: str, tmp_path: Path) -> None:
    torch.save(table, tmp_path / "m.bin")
    with pytest.raises(ckptio.UnsupportedFormat, match=reason) as caught:
        ckptio.convert(tmp_path / "m.bin", tmp_path / "c")
    assert caught.value.path == tmp_path / "m.bin"
    assert not (tmp_path / "c").exists()


class WantsToRun:
    """A pickle of it calls a function when loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path(self.path),)  # type: ignore[return-value]


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before-1.6"])
def test_code_in_a_pickle_is_refused_and_never_runs(is_zip: bool, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"w": WantsToRun(mark)}, tmp_path / "m.bin", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ckptio.UnsupportedFormat, match=r"would run .*save the state dict as safetensors"):
        ckptio.convert(tmp_path / "m.bin", tmp_path / "c")
    assert not mark.exists()
    torch.save(torch.nn.Linear(2, 2), tmp_path / "m.bin", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ckptio.UnsupportedFormat, match=r"would run torch\.nn\.modules\.linear\.Linear"):
        ckptio.convert(tmp_path / "m.bin", tmp_path / "c")


@pytest.mark.parametrize(
    ("raw", "kind", "reason"),
    [
        (b"", ckptio.TruncatedCheckpoint, "truncated"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            ckptio.UnsupportedFormat,
            "git-lfs pull|git lfs pull",
        ),
        (b"<!DOCTYPE html><html>", ckptio.UnsupportedFormat, "web page"),
        (b"GGUF\x03\0\0\0", ckptio.UnsupportedFormat, "GGUF"),
        (b"weights, honestly", ckptio.UnsupportedFormat, "not a torch file"),
        (b"PK\x03\x04" + bytes(100), ckptio.CorruptCheckpoint, "cut off"),
        (b"\x80\x02", ckptio.CorruptCheckpoint, "fetch it again"),
        (b"\x80\x02" + b"\xff" * 50, ckptio.CorruptCheckpoint, "fetch it again"),
    ],
)
def test_a_file_of_another_kind_says_what_it_is(
    raw: bytes, kind: type[Exception], reason: str, tmp_path: Path
) -> None:
    """F7: a typed error that names the file."""
    (tmp_path / "m").mkdir()
    path = tmp_path / "m" / "pytorch_model.bin"
    path.write_bytes(raw)
    with pytest.raises(kind, match=reason) as caught:
        ckptio.convert(tmp_path / "m", tmp_path / "c")
    assert caught.value.path == path  # type: ignore[attr-defined]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before-1.6"])
def test_a_torch_file_cut_anywhere_is_a_typed_error(is_zip: bool, tmp_path: Path) -> None:
    """F7: truncation by a byte, a page, a tensor, nearly all."""
    path = tmp_path / "m.pt"
    torch.save(some_weights(), path, _use_new_zipfile_serialization=is_zip)
    raw = path.read_bytes()
    for kept in (len(raw) - 1, len(raw) - 4096, len(raw) // 2, 600, 100, 5, 3):
        path.write_bytes(raw[:kept])
        with pytest.raises((ckptio.CorruptCheckpoint, ckptio.UnsupportedFormat)) as caught:
            ckptio.convert(path, tmp_path / "c")
        assert caught.value.path == path
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.pt"]


def test_archives_that_cannot_be_mapped_are_refused(tmp_path: Path) -> None:
    torch.save(some_weights(), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive, zipfile.ZipFile(tmp_path / "m.pt", "w") as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(ckptio.UnsupportedFormat, match="compressed"):
        ckptio.convert(tmp_path / "m.pt", tmp_path / "c")
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as other:
        other.writestr("holiday.jpg", b"")
    with pytest.raises(ckptio.UnsupportedFormat, match=r"no data\.pkl"):
        ckptio.convert(tmp_path / "m.pt", tmp_path / "c")


def test_a_torch_index_that_lies_is_refused(tmp_path: Path) -> None:
    source = sharded(tmp_path / "m", {"a": torch.ones(2), "b": torch.ones(2)}, 1)
    index = source / "pytorch_model.bin.index.json"
    shard = "pytorch_model-00001-of-00001.bin"
    for weight_map, reason in (
        ({"a": shard}, "'b' is not in the index"),
        ({"a": shard, "b": shard, "c": shard}, "'c' is missing"),
        ({"a": "../m.bin"}, "plain relative name"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ckptio.CorruptCheckpoint, match=reason):
            ckptio.convert(source, tmp_path / "c")


def test_one_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for number in (1, 2):
        torch.save({"a": torch.ones(2)}, tmp_path / "m" / f"pytorch_model-0000{number}-of-00002.bin")
    with pytest.raises(ckptio.CorruptCheckpoint, match="'a' is also in pytorch_model-00001-of-00002"):
        ckptio.convert(tmp_path / "m", tmp_path / "c")


def test_a_shard_that_is_cut_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    """F7: its mapping would end the process."""
    torch.save({"w": torch.ones(1 << 20)}, tmp_path / "m.pt")

    def cut(progress: ckptio.Progress) -> None:
        os.truncate(tmp_path / "m.pt", 1 << 20)

    with pytest.raises(ckptio.CorruptCheckpoint, match="changed while it was read"):
        ckptio.convert(tmp_path / "m.pt", tmp_path / "c", chunk_size_bytes=1 << 20, progress=cut)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.pt"]


CONVERT_IN_LITTLE_MEMORY = """
import sys
import ckptio
import torch
def private_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
before = private_bytes()
most = 0
def watch(progress):
    global most
    most = max(most, private_bytes() - before)
ckptio.convert(sys.argv[1], sys.argv[2], chunk_size_bytes=1 << 20, progress=watch)
print(most)
"""


def test_a_large_torch_model_is_never_in_private_memory(tmp_path: Path) -> None:
    """F1: conversion is bounded in memory, also from pickles."""
    weights = {f"layers.{number}.w": torch.ones(8 << 20, dtype=torch.uint8) for number in range(12)}
    source = sharded(tmp_path / "m", weights, 3)
    command = [sys.executable, "-c", CONVERT_IN_LITTLE_MEMORY, str(source), str(tmp_path / "c")]
    grown_bytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown_bytes < 24 << 20, f"{grown_bytes} bytes of private memory for a model of {96 << 20}"
    ckptio.verify(tmp_path / "c")


def test_a_directory_without_weights_says_what_it_needs(tmp_path: Path, some_tensors: Callable) -> None:
    (tmp_path / "m").mkdir()
    torch.save({}, tmp_path / "m" / "optimizer.pt")
    with pytest.raises(ckptio.UnsupportedFormat, match=r"no safetensors file and no torch \.bin"):
        ckptio.convert(tmp_path / "m", tmp_path / "c")
    for name in ("a.bin", "b.pt"):
        torch.save({}, tmp_path / "m" / name)
    with pytest.raises(ckptio.UnsupportedFormat, match=r"several .*a\.bin, b\.pt"):
        ckptio.convert(tmp_path / "m", tmp_path / "c")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # any import of it fails, as where it is not installed
from ckptio.cli import main
root = sys.argv[1]
statuses = [
    main(["convert", f"{root}/model", f"{root}/c"]),
    main(["convert", f"{root}/model/model.pt", f"{root}/c", "--dry-run"]),
    main(["export", f"{root}/views", f"{root}/e"]),
    main(["verify", f"{root}/views"]),
]
print(statuses)
"""


def test_without_torch_the_command_says_what_to_install(tmp_path: Path) -> None:
    """One line for each command, no traceback; what needs no torch works."""
    (tmp_path / "model").mkdir()
    torch.save({"w": torch.ones(3)}, tmp_path / "model" / "model.pt")
    ckptio.save({"view": torch.ones(3, 4).T}, tmp_path / "views")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[1, 1, 1, 0]"
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.endswith("needs torch; install it with: pip install 'ckptio[torch]'") for line in lines)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "views"]


def test_reading_torch_weights_as_they_are_is_answered_with_the_conversion(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(ckptio.UnsupportedFormat, match="convert them first: ckptio convert"):
        ckptio.load(tmp_path)
