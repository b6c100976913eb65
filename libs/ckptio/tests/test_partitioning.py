"""Partition plans: device maps, balance, tensor parallelism; and that nothing is lost by dividing a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ckptio
from ckptio.cli import main
from ckptio.partitioning import (
    Partitioning,
    Place,
    balanced,
    by_device_map,
    by_tensor_parallel,
    split_sizes,
)

PLAN = {
    "layers.*.attn.q_proj": "colwise",
    "layers.*.attn.o_proj": "rowwise",
    "embed": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
    "norm": "sequence_parallel",
}


def a_model(width: int = 48, layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    model = {"embed.weight": torch.randn(100, width, generator=generator)}
    for number in range(layers):
        name = f"model.layers.{number}"
        model[f"{name}.attn.q_proj.weight"] = torch.randn(width * 2, width, generator=generator)
        model[f"{name}.attn.q_proj.bias"] = torch.randn(width * 2, generator=generator)
        model[f"{name}.attn.o_proj.weight"] = torch.randn(width, width * 2, generator=generator)
        model[f"{name}.attn.o_proj.bias"] = torch.randn(width, generator=generator)
        model[f"{name}.scale"] = torch.tensor(float(number))
    model["norm.weight"] = torch.randn(width, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in model.items()}


def place(plan: Partitioning, name: str, *shape: int) -> Place:
    return plan.place_of(name, shape)


def test_the_longest_module_of_a_device_map_wins() -> None:
    """F2: tensors grouped by GPU as the framework's device map says."""
    plan = by_device_map({"model.layers.0": 0, "model.layers.1.mlp": "cuda:2", "": 1, "head": "0"})
    gpus = {
        "model.layers.0.w": 0,
        "model.layers.1.w": 1,
        "model.layers.1.mlp.up.w": 2,
        "model.layers.10.mlp.w": 1,
        "head": 0,
    }
    assert {name: place(plan, name, 4).gpu for name in gpus} == gpus
    assert plan.gpus == 3


@pytest.mark.parametrize("device", ["cpu", "disk", "meta", -1, True, "cuda", "cuda:-1", 1.5, 10**6])
def test_a_device_that_is_no_gpu_is_refused(device: object) -> None:
    with pytest.raises(ValueError, match=r"'?layer.*is not a GPU"):
        by_device_map({"layer": device})  # type: ignore[dict-item]


def test_a_tensor_outside_the_device_map_is_refused(tmp_path: Path) -> None:
    save_file({"a.w": torch.ones(2), "b.w": torch.ones(2)}, tmp_path / "m.safetensors")
    with pytest.raises(ckptio.UnsupportedFormat, match=r"b\.w: no module of the device map"):
        ckptio.convert(tmp_path / "m.safetensors", tmp_path / "c", partitioning=by_device_map({"a": 0}))
    with pytest.raises(ValueError, match="empty"):
        by_device_map({})
    assert not (tmp_path / "c").exists()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_balanced_partitions_are_contiguous_and_none_could_be_smaller(sizes: list[int], gpus: int) -> None:
    named = [(str(number), size) for number, size in enumerate(sizes)]
    if len(sizes) < gpus:
        with pytest.raises(ValueError, match="cannot be divided"):
            balanced(named, gpus)
        return
    plan = balanced(named, gpus)
    numbers = [plan.place_of(name, ()).gpu for name, _ in named]
    assert numbers == sorted(numbers, key=lambda gpu: gpu or 0)
    assert set(numbers) == set(range(gpus))
    largest = max(
        sum(size for size, n in zip(sizes, numbers, strict=True) if n == gpu) for gpu in range(gpus)
    )
    assert largest == smallest_possible(sizes, gpus)


def smallest_possible(sizes: list[int], gpus: int) -> int:
    """By dynamic programming over all cuts."""
    best = [float("inf")] * (len(sizes) + 1)
    best[0] = 0
    for _ in range(gpus):
        best = [
            min((max(best[start], sum(sizes[start:end])) for start in range(end + 1)), default=0)
            for end in range(len(sizes) + 1)
        ]
    return int(best[-1])


@given(st.integers(1, 200), st.integers(1, 16))
def test_a_dimension_is_split_as_torch_does(size: int, gpus: int) -> None:
    expected = tuple(part.numel() for part in torch.empty(size).chunk(gpus))
    if len(expected) == gpus:
        assert split_sizes(size, gpus) == expected
    else:
        with pytest.raises(ValueError, match=f"{len(expected)} GPUs, not {gpus}"):
            split_sizes(size, gpus)


def test_styles_of_a_tensor_parallel_plan_split_the_dimension_they_mean() -> None:
    plan = by_tensor_parallel(PLAN | {"layers.*.attn": "replicate"}, 2)
    assert place(plan, "model.layers.11.attn.q_proj.weight", 8, 4) == Place(dimension=0)
    assert place(plan, "layers.0.attn.q_proj.bias", 8) == Place(dimension=0)
    assert place(plan, "layers.0.attn.o_proj.weight", 4, 8) == Place(dimension=1)
    assert place(plan, "layers.0.attn.o_proj.bias", 4) == Place()
    assert place(plan, "layers.x.attn.q_proj.weight", 8, 4) == Place()
    assert place(plan, "norm.weight", 8) == Place()
    assert place(plan, "layers.0.attn.q_proj.step") == Place()
    assert place(plan, "prelm_head.weight", 8, 8) == Place()
    with pytest.raises(ValueError, match="packed_colwise"):
        by_tensor_parallel({"mlp.gate_up": "packed_colwise"}, 2)
    with pytest.raises(ValueError, match="0 GPUs"):
        by_tensor_parallel(PLAN, 0)


@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8], ids=str)
def test_each_gpu_gets_its_part_and_the_export_is_the_source(
    gpus: int, dtype: torch.dtype, any_path: Path
) -> None:
    """F2, F7: tensor by tensor equal, for parts of rows and of columns, copies and all."""
    model = a_model(width=50, dtype=dtype)  # 50 and 100 over 3 and 4: uneven parts
    save_file(model, any_path / "m.safetensors")
    plan = by_tensor_parallel(PLAN, gpus)
    manifest = ckptio.convert(
        any_path / "m.safetensors", any_path / "c", partitioning=plan, chunk_size_bytes=8192
    )
    ckptio.verify(any_path / "c")
    index = ckptio.read_index(any_path / "c")
    assert manifest.tensor_count == len(model)
    assert manifest.parameter_count == sum(tensor.numel() for tensor in model.values())
    assert len(manifest.partitions) == gpus
    stored = ckptio.load(any_path / "c", whole=False)
    for gpu in range(gpus):
        entries = index.of_gpu(gpu)
        assert entries.keys() == model.keys()
        for name, entry in entries.items():
            dimension = plan.place_of(name, tuple(model[name].shape)).dimension
            whole = model[name]
            expected = whole if dimension is None or gpus == 1 else whole.chunk(gpus, dimension)[gpu]
            assert torch.equal(stored[entry.name], expected), name
            assert entry.partition == gpu
    exported = load_file(ckptio.export(any_path / "c", any_path / "stock"))
    assert exported.keys() == model.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in model.items())


def test_rows_longer_and_shorter_than_every_buffer_are_cut_and_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7: blocks of many short rows, and rows of several pieces."""
    monkeypatch.setattr(sys.modules["ckptio.export"], "_COPY_BYTES", 1000)
    monkeypatch.setattr(sys.modules["ckptio.inputs"], "BLOCK_BYTES", 4096)
    model = {"long.weight": torch.randn(5, 100_003), "short.weight": torch.randn(5003, 7)}
    model["deep.weight"] = torch.randn(3, 11, 600)
    save_file(model, tmp_path / "m.safetensors")
    plan = by_tensor_parallel({"long": "rowwise", "short": "rowwise", "deep": "colwise"}, 3)
    ckptio.convert(tmp_path / "m.safetensors", tmp_path / "c", partitioning=plan, chunk_size_bytes=4096)
    exported = load_file(ckptio.export(tmp_path / "c", tmp_path / "stock"))
    assert all(torch.equal(exported[name], tensor) for name, tensor in model.items())


def test_tied_tensors_stay_tied_where_they_are_split_alike(tmp_path: Path) -> None:
    """F7: and are stored apart where they are not."""
    weight = torch.randn(12, 6)
    state = {"embed.weight": weight, "head.weight": weight, "other.weight": torch.ones(3)}
    torch.save(state, tmp_path / "m.pt")
    alike = by_tensor_parallel({"embed": "embedding_rowwise", "head": "colwise"}, 2)
    ckptio.convert(tmp_path / "m.pt", tmp_path / "alike", partitioning=alike)
    index = ckptio.read_index(tmp_path / "alike")
    assert [[index.names[row] for row in group] for group in index.aliases] == [
        ["embed.weight#0", "head.weight#0"],
        ["embed.weight#1", "head.weight#1"],
    ]
    assert index.parameter_count == 72 + 3
    apart = by_tensor_parallel({"head": "colwise"}, 2)
    ckptio.convert(tmp_path / "m.pt", tmp_path / "apart", partitioning=apart)
    assert ckptio.read_index(tmp_path / "apart").aliases == ()
    for name in ("alike", "apart"):
        ckptio.verify(tmp_path / name)
        exported = load_file(ckptio.export(tmp_path / name, tmp_path / f"{name}-stock"))
        assert all(torch.equal(exported[key], tensor) for key, tensor in state.items())


def test_a_view_of_other_tensors_bytes_is_not_split(tmp_path: Path) -> None:
    base = torch.randn(8, 8)
    torch.save({"a.weight": base, "b.weight": base.T}, tmp_path / "m.pt")
    for plan in ({"b": "colwise"}, {"a": "colwise"}):
        with pytest.raises(ckptio.UnsupportedFormat, match=r"[ab]\.weight: is a view"):
            ckptio.convert(tmp_path / "m.pt", tmp_path / "c", partitioning=by_tensor_parallel(plan, 2))
    copies = by_tensor_parallel({"a": "replicate", "b": "replicate"}, 2)
    ckptio.convert(tmp_path / "m.pt", tmp_path / "c", partitioning=copies)
    exported = load_file(ckptio.export(tmp_path / "c", tmp_path / "stock"))
    assert torch.equal(exported["b.weight"], base.T)


def test_a_plan_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    save_file({"q.weight": torch.ones(3, 2), "q.weight#1": torch.tensor(1.0)}, tmp_path / "m.safetensors")
    for plan, reason in (
        (by_tensor_parallel({"q": "colwise"}, 4), r"q\.weight: a dimension of 3 gives parts for 3 GPUs"),
        (by_tensor_parallel({"q": "colwise"}, 2), r"q\.weight#1: a tensor has the name"),
        (3, "2 tensors cannot be divided over 3"),
    ):
        with pytest.raises(ckptio.UnsupportedFormat, match=reason):
            ckptio.convert(tmp_path / "m.safetensors", tmp_path / "c", partitioning=plan)
    with pytest.raises(ValueError, match="not both"):
        ckptio.convert(
            tmp_path / "m.safetensors", tmp_path / "c", partitioning=2, partition_of=lambda name: 0
        )


def test_the_command_takes_plans_from_files_and_shows_them(
    tmp_path: Path, write_model: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    model = a_model()
    save_file(model, tmp_path / "m.safetensors")
    (tmp_path / "map.json").write_text(json.dumps({"": 0, "model.layers.2": "cuda:1"}))
    (tmp_path / "tp.json").write_text(json.dumps(PLAN))
    source = str(tmp_path / "m.safetensors")
    for name, options in {
        "two": ["--gpus", "2"],
        "map": ["--device-map", str(tmp_path / "map.json")],
        "tp": ["--tp-plan", str(tmp_path / "tp.json"), "--gpus", "2"],
    }.items():
        assert main(["convert", source, str(tmp_path / name), *options]) == 0
        assert main(["inspect", str(tmp_path / name)]) == 0
        text = capsys.readouterr().out
        assert "GPU 1 " in text
        assert ("split         model.layers.0.attn.o_proj.weight [48, 96]: along dimension 1" in text) == (
            name == "tp"
        )
        exported = load_file(ckptio.export(tmp_path / name, tmp_path / f"{name}-stock"))
        assert all(torch.equal(exported[key], tensor) for key, tensor in model.items())
    assert main(["convert", source, str(tmp_path / "x"), "--tp-plan", str(tmp_path / "tp.json")]) == 1
    assert "also needs --gpus" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "plan", "says"),
    [
        ("--tp-plan", {"foo.*": "colwise", "embed": "colwise"}, "no tensor matches 'foo.*'"),
        ("--tp-plan", {"attn": "colwise"}, "no tensor matches 'attn'"),
        ("--tp-plan", {}, "is empty"),
        ("--device-map", {"nope": 0, "": 0}, "no tensor matches 'nope'"),
        ("--device-map", {"model.layer": 0, "model.layers.3": 1, "": 0}, "'model.layer', 'model.layers.3'"),
        ("--device-map", {}, "is empty"),
    ],
)
@pytest.mark.parametrize("is_dry", [False, True])
def test_a_plan_with_entries_that_match_nothing_is_refused(
    option: str,
    plan: dict[str, object],
    says: str,
    is_dry: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """F2: a misspelt plan would pass silently, and copy what it was to split."""
    save_file(a_model(), tmp_path / "m.safetensors")
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    command = ["convert", str(tmp_path / "m.safetensors"), str(tmp_path / "c"), option]
    command += [str(tmp_path / "plan.json"), *(["--gpus", "2"] if option == "--tp-plan" else [])]
    assert main([*command, *(["--dry-run"] if is_dry else [])]) == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_modules_without_tensors_that_every_model_names_may_be_in_a_plan(tmp_path: Path) -> None:
    """A tied head, rotary embeddings, and the rest where nothing is left."""
    save_file({"model.embed.weight": torch.ones(4, 2)}, tmp_path / "m.safetensors")
    device_map = by_device_map({"model.embed": 1, "model.rotary_emb": 0, "lm_head": 0, "": 0})
    parallel = by_tensor_parallel({"embed": "embedding_rowwise", "lm_head": "colwise"}, 2)
    cases = ((device_map, [(1, (4, 2))]), (parallel, [(0, (2, 2)), (1, (2, 2))]))
    for number, (plan, expected) in enumerate(cases):
        ckptio.convert(tmp_path / "m.safetensors", tmp_path / str(number), partitioning=plan)
        ckptio.verify(tmp_path / str(number))
        rows = ckptio.read_index(tmp_path / str(number))
        assert [(row.partition, row.shape) for row in rows.values()] == expected


def test_a_device_map_with_a_number_of_gpus_or_with_a_key_twice_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(a_model(), tmp_path / "m.safetensors")
    file = tmp_path / "map.json"
    command = ["convert", str(tmp_path / "m.safetensors"), str(tmp_path / "c"), "--device-map", str(file)]
    file.write_text('{"": 0}')
    assert main([*command, "--gpus", "4"]) == 1
    assert "leave out --gpus" in capsys.readouterr().err
    file.write_text('{"embed": 0, "": 0, "embed": 1}')
    assert main(command) == 1
    assert "'embed' occurs more than once" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_plans_of_transformers_are_understood() -> None:
    """F5: the plan of a model class, as it is."""
    transformers = pytest.importorskip("transformers")
    for config in (transformers.LlamaConfig(), transformers.Qwen2Config(), transformers.MistralConfig()):
        plan = by_tensor_parallel(config.base_model_tp_plan, 2)
        assert place(plan, "model.layers.3.self_attn.q_proj.weight", 64, 32) == Place(dimension=0)
        assert place(plan, "model.layers.3.self_attn.o_proj.weight", 32, 64) == Place(dimension=1)
        assert place(plan, "model.layers.3.mlp.down_proj.weight", 32, 64) == Place(dimension=1)
        assert place(plan, "model.layers.3.input_layernorm.weight", 32) == Place()
