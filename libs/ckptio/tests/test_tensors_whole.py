"""Checkpoints that were converted with a tensor-parallel plan, read as whole tensors again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptio
from ckptio.dtypes import DTYPES
from ckptio.partitioning import by_tensor_parallel

# Those that safetensors has, so that a plan can be applied, and whose shapes have no packing.
STOCK_DTYPES = sorted(
    name for name, one in DTYPES.items() if one.stock and one.stock_packing == 1 and hasattr(torch, name)
)
PLAN = {"rows": "colwise", "columns": "rowwise"}


def a_state(dtype: str) -> dict[str, torch.Tensor]:
    """One tensor split by rows, one by columns, one copied; sizes that leave uneven parts."""

    def build(*shape: int) -> torch.Tensor:
        numbers = torch.randint(0, 2, (torch.Size(shape).numel() * DTYPES[dtype].item_size_bytes,))
        return numbers.to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)

    return {"rows.weight": build(7, 5), "columns.weight": build(3, 11, 10), "norm.weight": build(13)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert bits(got[name]).equal(bits(tensor)), name


def split(state: dict[str, torch.Tensor], directory: Path, gpus: int) -> Path:
    save_file(state, directory / "m.safetensors")
    styles = {module: style for module, style in PLAN.items() if f"{module}.weight" in state}
    plan = by_tensor_parallel(styles, gpus)
    ckptio.convert(directory / "m.safetensors", directory / "c", partitioning=plan, chunk_size_bytes=4096)
    return directory / "c"


@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize("dtype", STOCK_DTYPES)
def test_a_split_model_is_read_whole_under_its_own_names(dtype: str, gpus: int, tmp_path: Path) -> None:
    """F2, F7: loaded at once and tensor by tensor, bit for bit, for every dtype."""
    state = a_state(dtype)
    path = split(state, tmp_path, gpus)
    assert_same(ckptio.load(path), state)
    assert_same(ckptio.load(path, [None] * gpus, verify=False), state)
    with ckptio.open(path) as checkpoint:
        assert set(checkpoint.keys()) == set(checkpoint) == state.keys()
        assert len(checkpoint) == len(checkpoint.keys()) == 3
        assert_same({name: checkpoint[name] for name in checkpoint}, state)


def test_slices_are_read_under_their_names_where_that_is_asked_for(tmp_path: Path) -> None:
    """F2: with `whole` off, on several devices, and one by one."""
    state = a_state("float32")
    path = split(state, tmp_path, 2)
    parts = {f"rows.weight#{gpu}": part for gpu, part in enumerate(state["rows.weight"].chunk(2))}
    parts |= {f"columns.weight#{gpu}": part for gpu, part in enumerate(state["columns.weight"].chunk(2, 2))}
    parts |= {f"norm.weight#{gpu}": state["norm.weight"] for gpu in range(2)}
    assert_same(ckptio.load(path, whole=False), parts)
    apart = ckptio.load(path, ["cpu", "meta"])
    assert apart.keys() == parts.keys()
    assert {apart[name].device.type for name in apart if name.endswith("#1")} == {"meta"}
    assert apart["norm.weight#0"].equal(state["norm.weight"])
    with ckptio.open(path) as checkpoint:
        assert_same({name: checkpoint[name] for name in parts}, parts)
        assert "rows.weight#1" in checkpoint
        assert "rows.weight#2" not in checkpoint
        with pytest.raises(KeyError, match="rows"):
            checkpoint["rows"]


def test_whole_tensors_do_not_keep_the_partitions_in_memory(tmp_path: Path) -> None:
    """Also the small ones that are copies, of which one would hold all of partition 0."""
    state = {"rows.weight": torch.randn(4096, 64), "norm.weight": torch.randn(64)}
    loaded = ckptio.load(split(state, tmp_path, 2))
    assert_same(loaded, state)
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in loaded.values()
    }
    assert sum(sizes.values()) == (4096 * 64 + 64) * 4


def test_ties_and_overlaps_of_a_split_model_are_kept(tmp_path: Path) -> None:
    """F7: tied slices give one whole; copies that overlap still overlap."""
    weight = torch.randn(12, 6)
    base = torch.arange(16.0)
    state = {
        "rows.weight": weight,
        "head.weight": weight,
        "long": base[1:],
        "short": base[4:12],
    }
    torch.save(state, tmp_path / "m.pt")
    plan = by_tensor_parallel({"rows": "colwise", "head": "colwise"}, 2)
    ckptio.convert(tmp_path / "m.pt", tmp_path / "c", partitioning=plan)
    loaded = ckptio.load(tmp_path / "c")
    assert_same(loaded, state)
    loaded["head.weight"][0, 0] = 5
    assert loaded["rows.weight"][0, 0] == 5
    loaded["long"][3] = 5
    assert loaded["short"][0] == 5


def test_damage_of_any_slice_is_damage_of_the_whole(tmp_path: Path) -> None:
    path = split(a_state("float32"), tmp_path, 2)
    place = ckptio.read_index(path)["rows.weight#1"]
    raw = bytearray((path / "partition_1.bin").read_bytes())
    raw[place.offset_bytes] ^= 1
    (path / "partition_1.bin").write_bytes(raw)
    with pytest.raises(ckptio.CorruptCheckpoint, match=r"partition_1\.bin"):
        ckptio.load(path)
    with ckptio.open(path) as checkpoint, pytest.raises(ckptio.CorruptCheckpoint, match=r"partition_1\.bin"):
        checkpoint["rows.weight"]


def test_a_checkpoint_without_slices_is_not_copied(a_checkpoint: Callable) -> None:
    """L8: all tensors of the partition are views of one storage."""
    loaded = ckptio.load(a_checkpoint())
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.values()}) == 1
