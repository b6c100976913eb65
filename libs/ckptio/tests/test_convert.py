"""Conversion of published safetensors directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptio
from ckptio.convert import plan_conversion

SHAPES = [(700, 3), (4096,), (1,), (0, 5), (), (511,), (20000,)]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_converted_model_has_every_tensor(
    shards: int,
    any_path: Path,
    write_model: Callable,
    some_tensors: Callable,
    checkpoint_bytes: Callable,
) -> None:
    """F1, F2: single and sharded, on disk and on tmpfs."""
    tensors = some_tensors(*SHAPES)
    source = write_model(any_path / "model", tensors, shards)
    manifest = ckptio.convert(source, any_path / "out", source_name="acme/model", chunk_size_bytes=8192)
    assert checkpoint_bytes(any_path / "out") == tensors
    assert manifest == ckptio.read_manifest(any_path / "out")
    assert manifest.architecture == "LlamaForCausalLM"
    assert manifest.source.name == "acme/model"
    assert manifest.tensor_count == len(SHAPES)
    assert manifest.parameter_count == 2100 + 4096 + 1 + 0 + 1 + 511 + 20000
    assert manifest.dtypes == ("uint8",)
    ckptio.verify(any_path / "out")


def test_the_same_model_gives_the_same_bytes_however_it_is_sharded(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    tensors = some_tensors(*SHAPES)
    for shards in (1, 2):
        ckptio.convert(write_model(tmp_path / f"m{shards}", tensors, shards), tmp_path / f"c{shards}")
    one, two = tmp_path / "c1", tmp_path / "c2"
    assert (one / "partition_0.bin").read_bytes() == (two / "partition_0.bin").read_bytes()
    assert (one / "index.msgpack").read_bytes() == (two / "index.msgpack").read_bytes()


@pytest.mark.parametrize("edge", [512, 4096, 8192, 16384])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_sizes_around_blocks_pages_and_chunks_lose_nothing(
    edge: int,
    off: int,
    any_path: Path,
    write_model: Callable,
    some_tensors: Callable,
    checkpoint_bytes: Callable,
) -> None:
    """F7: unaligned tails are where loaders lose data."""
    tensors = some_tensors((edge + off,), (3,))
    ckptio.convert(write_model(any_path / "model", tensors), any_path / "out", chunk_size_bytes=8192)
    ckptio.verify(any_path / "out")
    assert checkpoint_bytes(any_path / "out") == tensors
    assert (any_path / "out" / "partition_0.bin").stat().st_size % 4096 == 0


def test_partitions_hold_the_tensors_of_their_gpu(
    tmp_path: Path, write_model: Callable, some_tensors: Callable, checkpoint_bytes: Callable
) -> None:
    """F2: grouped by GPU."""
    tensors = some_tensors(*SHAPES)
    source = write_model(tmp_path / "model", tensors)
    ckptio.convert(source, tmp_path / "out", partition_of=lambda name: int(name[2:]) % 3)
    index = ckptio.read_index(tmp_path / "out")
    assert {name: entry.partition for name, entry in index.items()} == {n: int(n[2:]) % 3 for n in tensors}
    assert checkpoint_bytes(tmp_path / "out") == tensors
    ckptio.verify(tmp_path / "out")


def test_other_files_travel_and_other_weights_do_not(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors((10,)))
    (source / "modeling_own.py").write_text("x = 1\n")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    (tmp_path / "blob").write_text("template")
    (source / "chat_template.jinja").symlink_to(tmp_path / "blob")
    (source / "empty.txt").touch()
    for name in ("pytorch_model.bin", "model.gguf", ".gitattributes", "stray.safetensors"):
        (source / name).write_text("no")
    manifest = ckptio.convert(source, tmp_path / "out")
    expected = ["1_Pooling/config.json", "chat_template.jinja", "config.json", "empty.txt"]
    expected += ["modeling_own.py", "tokenizer.json"]
    assert sorted(file.name for file in manifest.files) == expected
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "template"
    assert not (tmp_path / "out" / "chat_template.jinja").is_symlink()
    on_disk = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert on_disk == {*expected, "manifest.json", "index.msgpack", "partition_0.bin"}


def test_an_adapter_goes_the_same_way(
    tmp_path: Path, write_stock: Callable, some_tensors: Callable, checkpoint_bytes: Callable
) -> None:
    """F6: LoRA adapters."""
    tensors = some_tensors((8, 64), (64, 8), prefix="base_model.model.lora_A")
    write_stock(tmp_path / "lora" / "adapter_model.safetensors", tensors)
    (tmp_path / "lora" / "adapter_config.json").write_text('{"r": 8}')
    manifest = ckptio.convert(tmp_path / "lora", tmp_path / "out")
    assert checkpoint_bytes(tmp_path / "out") == tensors
    assert manifest.architecture is None
    assert ckptio.export(tmp_path / "out", tmp_path / "again").name == "adapter_model.safetensors"


def test_ties_that_safetensors_noted_are_ties_again(
    tmp_path: Path, write_stock: Callable, some_tensors: Callable
) -> None:
    """F7: tied tensors are stored once and tied again."""
    metadata = {"format": "pt", "lm_head.weight": "embed.0"}
    path = write_stock(tmp_path / "tied.safetensors", some_tensors((9, 9), prefix="embed"), metadata)
    manifest = ckptio.convert(path, tmp_path / "out")
    index = ckptio.read_index(tmp_path / "out")
    assert index.aliases == ((0, 1),)
    assert index["lm_head.weight"].offset_bytes == index["embed.0"].offset_bytes
    assert dict(index.metadata) == {"format": "pt"}
    assert (manifest.tensor_count, manifest.parameter_count, manifest.total_bytes) == (2, 81, 81)


def test_a_missing_shard_is_named_before_anything_is_written(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors(*SHAPES), shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(ckptio.MissingFile, match="model-00002-of-00003") as caught:
            ckptio.convert(source, tmp_path / "out")
        assert caught.value.path == source / "model-00002-of-00003.safetensors"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
        (source / "model.safetensors.index.json").unlink(missing_ok=True)  # then the names alone tell


def test_all_missing_shards_are_named_at_once(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors(*SHAPES), shards=5)
    names = [f"model-0000{number}-of-00005.safetensors" for number in (1, 3, 5)]
    for name in names:
        (source / name).unlink()
    for _ in range(2):
        with pytest.raises(ckptio.MissingFile, match=r"00001-of.*00003-of.*00005-of.*fetch them") as caught:
            ckptio.convert(source, tmp_path / "out")
        assert [caught.value.path, *caught.value.also] == [source / name for name in names]
        (source / "model.safetensors.index.json").unlink(missing_ok=True)


def test_a_plan_says_what_the_conversion_then_does(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    """F1: a dry run reads headers, and writes nothing."""
    source = write_model(tmp_path / "model", some_tensors(*SHAPES), shards=3)
    for name in ("stray.safetensors", "pytorch_model.bin"):
        (source / name).write_text("no")
    before = sorted(tmp_path.rglob("*"))
    plan = plan_conversion(source, tmp_path / "deep" / "out", partitioning=2)
    assert sorted(tmp_path.rglob("*")) == before
    manifest = ckptio.convert(source, tmp_path / "deep" / "out", partitioning=2)
    index = ckptio.read_index(tmp_path / "deep" / "out")
    assert {(t.name, t.partition, t.dtype, t.shape, t.size_bytes) for t in plan.tensors} == {
        (e.name, e.partition, e.dtype, e.shape, e.size_bytes) for e in index.values()
    }
    assert plan.partition_bytes == tuple(part.size_bytes for part in manifest.partitions)
    assert plan.files == tuple(file.name for file in manifest.files)
    assert plan.architecture == manifest.architecture == "LlamaForCausalLM"
    assert plan.source_kind == "safetensors"
    assert list(plan.weights) == sorted(source.glob("model-*.safetensors"))
    written_bytes = sum(p.stat().st_size for p in (tmp_path / "deep" / "out").rglob("*") if p.is_file())
    assert written_bytes < plan.required_bytes < (plan.available_bytes or 0)
    assert [warning.partition(":")[0] for warning in plan.warnings] == [
        "pytorch_model.bin",
        "stray.safetensors",
    ]


def test_a_plan_warns_of_what_would_stop_the_conversion(
    tmp_path: Path, write_stock: Callable, some_tensors: Callable, a_checkpoint: Callable
) -> None:
    tied = {"format": "pt", "lm_head.weight": "embed.0"}
    path = write_stock(tmp_path / "tied.safetensors", some_tensors((9, 9), prefix="embed"), tied)
    plan = plan_conversion(path, a_checkpoint())
    assert plan.ties == (("embed.0", "lm_head.weight"),)
    assert ["exists" in warning for warning in plan.warnings] == [True]
    assert plan_conversion(path).available_bytes is None


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"t.0": "../model.safetensors"}, "plain relative name"),
        ({"t.0": "/etc/passwd"}, "plain relative name"),
        ({"t.0": "a\\b.safetensors"}, "plain relative name"),
        ({"t.0": 1}, "not a map"),
        ([], "not a map"),
        ({"t.0": "model.safetensors", "t.9": "model.safetensors"}, "'t.9' is missing"),
        ({}, "no tensors"),
    ],
)
def test_a_shard_index_that_lies_is_refused(
    weight_map: object, reason: str, tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors((10,)))
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ckptio.CorruptCheckpoint, match=reason):
        ckptio.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_no_index_names_is_not_lost_in_silence(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors((10,), (20,)))
    weight_map = {"t.0": "model.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ckptio.CorruptCheckpoint, match=r"'t\.1' is not in the index"):
        ckptio.convert(source, tmp_path / "out")


def test_a_directory_without_safetensors_says_so(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ckptio.UnsupportedFormat, match="no safetensors file"):
        ckptio.convert(tmp_path / "model", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ckptio.convert(tmp_path / "nowhere", tmp_path / "out")


def test_several_files_without_an_index_are_refused(
    tmp_path: Path, write_stock: Callable, some_tensors: Callable
) -> None:
    for name in ("a", "b"):
        write_stock(tmp_path / "model" / f"{name}.safetensors", some_tensors((1,)))
    with pytest.raises(ckptio.UnsupportedFormat, match=r"several.*a\.safetensors, b\.safetensors"):
        ckptio.convert(tmp_path / "model", tmp_path / "out")


def test_a_checkpoint_is_not_converted_again(a_checkpoint: Callable, tmp_path: Path) -> None:
    with pytest.raises(ckptio.UnsupportedFormat, match="already"):
        ckptio.convert(a_checkpoint(), tmp_path / "out")


def test_a_file_that_needs_a_reserved_name_is_refused(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors((10,)))
    (source / "partition_7.bin").touch()
    with pytest.raises(ckptio.UnsupportedFormat, match="rename it"):
        ckptio.convert(source, tmp_path / "out")


def test_progress_ends_at_the_size_of_the_partitions(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    seen: list[ckptio.Progress] = []
    source = write_model(tmp_path / "model", some_tensors((50_000,)))
    manifest = ckptio.convert(source, tmp_path / "out", chunk_size_bytes=8192, progress=seen.append)
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert len(seen) == 7
    assert seen[-1].done_bytes == seen[-1].total_bytes == manifest.padded_bytes


def test_export_gives_back_every_tensor(
    tmp_path: Path, write_model: Callable, some_tensors: Callable, checkpoint_bytes: Callable
) -> None:
    """F7: lossless, proven by converting what was exported."""
    tensors = some_tensors(*SHAPES, dtype="bfloat16")
    ckptio.convert(write_model(tmp_path / "model", tensors, shards=2), tmp_path / "one")
    weights = ckptio.export(tmp_path / "one", tmp_path / "stock")
    assert weights == tmp_path / "stock" / "model.safetensors"
    ckptio.convert(tmp_path / "stock", tmp_path / "two")
    assert checkpoint_bytes(tmp_path / "two") == tensors
    assert (tmp_path / "stock" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    with pytest.raises(ckptio.CheckpointExists):
        ckptio.export(tmp_path / "one", tmp_path / "stock")
    ckptio.export(tmp_path / "one", tmp_path / "stock", overwrite=True)
