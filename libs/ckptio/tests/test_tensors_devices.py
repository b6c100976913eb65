"""What may be given as a device, and that one that is not there is refused before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptio
from ckptio.layout import read_layout
from ckptio.targets import target_of
from ckptio.torch import _read_onto_gpus
from ckptio.views import make_views

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


@pytest.fixture
def unreadable(a_checkpoint: Callable) -> Path:
    """A checkpoint of which reading any byte that is verified fails."""
    path: Path = a_checkpoint()
    raw = (path / "partition_0.bin").read_bytes()
    (path / "partition_0.bin").write_bytes(bytes(byte ^ 1 for byte in raw))
    with pytest.raises(ckptio.CorruptCheckpoint):
        ckptio.load(path)
    return path


@needs_no_gpu
@pytest.mark.parametrize(
    "device", ["cuda", "cuda:0", "cuda:7", 0, 3, torch.device("cuda", 1), ["cuda:0"], [0]]
)
def test_a_gpu_that_is_not_there_is_refused_before_reading(device: Any, unreadable: Path) -> None:
    with pytest.raises(ckptio.DeviceError, match=r"use of cuda.*: .*(CUDA|GPU)") as caught:
        ckptio.load(unreadable, device)
    assert caught.value.description


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu:1"])
def test_a_device_of_another_kind_that_is_not_there_is_refused_before_reading(
    device: str, unreadable: Path
) -> None:
    kind = getattr(torch, device.partition(":")[0], None)
    if kind is not None and kind.is_available():
        pytest.skip("there is one here")
    with pytest.raises(ckptio.DeviceError, match=f"on {device}") as caught:
        ckptio.load(unreadable, device)
    assert "\n" not in str(caught.value)


@needs_no_gpu
def test_one_missing_gpu_among_several_devices_is_refused_before_reading(tmp_path: Path) -> None:
    state = {f"layer.{number}": torch.randn(3, 5) for number in range(2)}
    ckptio.save(state, tmp_path / "c", partition_of=lambda name: int(name[-1]))
    raw = (tmp_path / "c" / "partition_0.bin").read_bytes()
    (tmp_path / "c" / "partition_0.bin").write_bytes(bytes(byte ^ 1 for byte in raw))
    with pytest.raises(ckptio.DeviceError):
        ckptio.load(tmp_path / "c", ["cpu", 1])


@needs_no_gpu
def test_a_safetensors_file_for_a_missing_gpu_is_refused(tmp_path: Path) -> None:
    ckptio.save_file({"w": torch.ones(3)}, tmp_path / "x.safetensors")
    for device in ("cuda:0", 0, torch.device("cuda")):
        with pytest.raises(ckptio.DeviceError, match="use of cuda"):
            ckptio.load_file(tmp_path / "x.safetensors", device)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), [None], ("cpu",)], ids=str)
def test_the_host_has_several_names(device: Any, a_checkpoint: Callable) -> None:
    loaded = ckptio.load(a_checkpoint(), device)
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}


def test_a_number_is_a_gpu_as_in_safetensors() -> None:
    assert target_of(0) == torch.device("cuda:0")
    assert target_of(3) == torch.device("cuda:3")


@pytest.mark.parametrize(
    ("device", "kind", "reason"),
    [
        ("nope", ValueError, "device 'nope' is none of torch's"),
        ("cuda:x", ValueError, "device 'cuda:x' is none of torch's"),
        (-1, ValueError, "device -1 is none of torch's"),
        (True, TypeError, "device True: a name"),
        (1.5, TypeError, "device 1.5: one device, or a list"),
        ([b"cpu"], TypeError, "device b'cpu': a name"),
        ({"cpu"}, TypeError, "one device, or a list"),
        (["cpu", "cpu"], ValueError, "2 devices for 1 partitions"),
    ],
    ids=str,
)
def test_what_is_no_device_is_refused_before_reading(
    device: Any, kind: type[Exception], reason: str, unreadable: Path
) -> None:
    with pytest.raises(kind, match=reason):
        ckptio.load(unreadable, device)


def test_beside_gpus_all_else_goes_through_host_memory(tmp_path: Path) -> None:
    """Memory of no other device is ever lent to the reader as if it were the host's."""
    state = {f"layer.{number}": torch.randn(300, 5) for number in range(3)}
    ckptio.save(state, tmp_path / "c", partition_of=lambda name: int(name[-1]))
    layout = read_layout(tmp_path / "c")
    targets = [torch.device("meta"), torch.device("cpu"), torch.device("mps")]
    bases = _read_onto_gpus(layout, targets, True)
    assert {base.device.type for base in bases} == {"cpu"}
    views = make_views(layout.index, bases)
    assert all(views[name].equal(tensor) for name, tensor in state.items())
