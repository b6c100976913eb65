"""`load_file` and `save_file` beside those of the safetensors package."""

from __future__ import annotations

import inspect
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import ckptio
from ckptio.dtypes import DTYPES
from ckptio.errors import SharedTensors, UnsaveableTensor
from ckptio.safetensors_face import load_file, save_file

STOCK_DTYPES = sorted(name for name, dtype in DTYPES.items() if dtype.stock and hasattr(torch, name))


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert got[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


def one_of_each() -> dict[str, torch.Tensor]:
    """Every dtype of the format, with an odd count of elements, and with none."""
    tensors = {}
    for number, dtype in enumerate(STOCK_DTYPES):
        raw = torch.arange(24 * 8, dtype=torch.uint8).roll(number)
        tensors[dtype] = raw.view(getattr(torch, dtype))[:21].clone()
        tensors[f"{dtype}.empty"] = tensors[dtype][:0].reshape(0, 3).clone()
    tensors["scalar"] = torch.tensor(3.5)
    return tensors


def test_both_read_what_the_other_wrote(any_path: Path) -> None:
    """F7: equal tensor by tensor, every dtype of the format, on disk and on tmpfs."""
    expected = one_of_each()
    save_file(expected, any_path / "ours.safetensors", {"format": "pt", "note": "ä"})
    safetensors.torch.save_file(expected, any_path / "theirs.safetensors")
    assert_equal(safetensors.torch.load_file(any_path / "ours.safetensors"), expected)
    assert_equal(load_file(any_path / "ours.safetensors"), expected)
    assert_equal(load_file(str(any_path / "theirs.safetensors"), "cpu"), expected)
    with safetensors.safe_open(any_path / "ours.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "ä"}
    assert sorted(os.listdir(any_path)) == ["ours.safetensors", "theirs.safetensors"]


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x.safetensors")
    assert (
        load_file(tmp_path / "x.safetensors") == safetensors.torch.load_file(tmp_path / "x.safetensors") == {}
    )


def test_a_noted_tie_is_no_tensor_of_the_file(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors", {"head": "w"})
    assert load_file(tmp_path / "x.safetensors").keys() == {"w"}
    assert ckptio.load(tmp_path / "x.safetensors").keys() == {"w", "head"}


def shared() -> dict[str, torch.Tensor]:
    base = torch.zeros(10)
    return {"a": base[:6], "b": base[4:]}


@pytest.mark.parametrize(
    ("tensors", "theirs", "ours", "reason"),
    [
        (shared(), RuntimeError, SharedTensors, r"a, b share memory.*ckptio\.save"),
        ({"t": torch.zeros(3, 4).t()}, ValueError, UnsaveableTensor, r"t: not contiguous.*ckptio\.save"),
        ({"s": torch.eye(3).to_sparse()}, ValueError, UnsaveableTensor, "s: .*sparse"),
        ({"n": 3}, ValueError, UnsaveableTensor, "n: int is not a tensor"),
    ],
    ids=["shared", "strided", "sparse", "number"],
)
def test_what_safetensors_refuses_is_refused_with_its_error_and_a_way_out(
    tensors: dict, theirs: type, ours: type, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(theirs):
        safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors")
    with pytest.raises(theirs, match=reason) as caught:
        save_file(tensors, tmp_path / "ours.safetensors")
    assert type(caught.value) is ours
    assert isinstance(caught.value, ckptio.UnsupportedFormat)
    assert not (tmp_path / "ours.safetensors").exists()


def test_a_dtype_or_metadata_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsaveableTensor, match="z: safetensors has no complex128"):
        save_file({"z": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "x.safetensors")
    with pytest.raises(UnsaveableTensor, match="__metadata__"):
        save_file({"__metadata__": torch.zeros(2)}, tmp_path / "x.safetensors")
    with pytest.raises(TypeError, match="map of strings"):
        save_file({}, tmp_path / "x.safetensors", {"a": 1})  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_an_old_file_stays_whole_when_a_new_one_does_not_fit(tmp_path: Path) -> None:
    """F7: a failed write, here by the limit on file sizes, leaves what was there and nothing beside it."""
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(3)}, path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            save_file({"w": torch.ones(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename is not None
    assert_equal(load_file(path), {"w": torch.ones(3)})
    assert list(tmp_path.iterdir()) == [path]


def test_only_single_safetensors_files_are_read(a_checkpoint: Callable, tmp_path: Path) -> None:
    path = a_checkpoint()
    with pytest.raises(ckptio.UnsupportedFormat, match=r"a directory.*use ckptio\.load"):
        load_file(path)
    with pytest.raises(ckptio.UnsupportedFormat, match="not a safetensors file"):
        load_file(path / "partition_0.bin")
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "nothing.safetensors")


def test_saving_needs_one_chunk_of_memory_beside_the_tensors(tmp_path: Path) -> None:
    """The peak beyond 128 MiB of tensors stays below 64 MiB."""

    def status_bytes(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    tensors = {f"t{number}": torch.ones(32 << 20, dtype=torch.uint8) for number in range(4)}
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_bytes("VmRSS")
    save_file(tensors, tmp_path / "x.safetensors")
    assert status_bytes("VmHWM") - before < 64 << 20


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_the_backend_of_safetensors_may_be_named(backend: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    assert_equal(load_file(tmp_path / "x.safetensors", backend=backend), {"w": torch.ones(3)})
    with pytest.raises(ValueError, match="backend 'nope': safetensors has mmap and pread"):
        load_file(tmp_path / "x.safetensors", backend="nope")


def test_the_signatures_are_those_of_safetensors() -> None:
    """Every argument that its functions have, ours have too, in the same order and with the same default."""
    for ours, theirs in ((load_file, safetensors.torch.load_file), (save_file, safetensors.torch.save_file)):
        expected = inspect.signature(theirs).parameters
        got = inspect.signature(ours).parameters
        for name, parameter in expected.items():
            assert (got[name].kind, got[name].default) == (parameter.kind, parameter.default), name
        assert list(got)[: len(expected)] == list(expected)


def test_a_file_that_is_not_there_is_called_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No such file or directory") as caught:
        load_file(tmp_path / "nope")
    assert caught.value.filename == str(tmp_path / "nope")
    assert "model" not in str(caught.value).replace(str(tmp_path), "")


@pytest.mark.parametrize("save", [save_file, ckptio.save], ids=["save_file", "save"])
@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([torch.ones(3)], "not a value of type list"),
        ([("w", torch.ones(3))], "not a value of type list"),
        (torch.ones(3), "not a value of type Tensor"),
        (None, "not a value of type NoneType"),
        (torch.nn.Linear(2, 2), r"not a module \(Linear\); pass its state_dict\(\)"),
        ({1: torch.ones(3)}, r"the name of a tensor is a string, not 1 \(int\)"),
        ({b"w": torch.ones(3)}, r"the name of a tensor is a string, not b'w' \(bytes\)"),
    ],
    ids=["list", "pairs", "tensor", "none", "module", "number", "bytes"],
)
def test_what_is_no_map_of_tensors_is_refused_with_what_to_pass(
    save: Callable, tensors: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=reason):
        save(tensors, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("save", [save_file, ckptio.save], ids=["save_file", "save"])
def test_swapped_arguments_are_said_to_be_swapped(save: Callable, tmp_path: Path) -> None:
    for place in (tmp_path / "x", str(tmp_path / "x")):
        with pytest.raises(TypeError, match=r"save.*the arguments are swapped"):
            save(place, {"w": torch.ones(3)})
    with pytest.raises(TypeError, match="the place is a path, not a value of type int"):
        save({"w": torch.ones(3)}, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("metadata", [["a"], "text", 3, {"a": None}, {1: "a"}], ids=str)
def test_metadata_is_a_map_of_strings(metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="map of strings"):
        save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors", metadata)
    assert list(tmp_path.iterdir()) == []
