"""The slot's device: its memory is learned from the machine, and one that is not there is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import ckptio
import pytest
from whimbrel.chassis.config import ConfigError

from services.gpu_worker import devices
from services.gpu_worker.devices import MEMORY_AGE_S_MAX, Device
from tests.unit.gpu_worker.builders import Lender
from tests.unit.gpu_worker.harness import a_worker
from tests.unit.gpu_worker.tiny_models import TinyModel

MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
MIB = 1024 * 1024


def test_memory_of_the_cpu_is_that_of_the_machine_or_of_its_container() -> None:
    memory = Device("cpu").memory()
    assert 0 < memory.free_bytes <= memory.size_bytes <= MACHINE_BYTES


def test_the_tightest_control_group_is_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.write_text("0::/service/worker\n")
    groups = tmp_path / "groups"
    (groups / "service" / "worker").mkdir(parents=True)
    (groups / "service" / "worker" / "memory.max").write_text("max\n")
    (groups / "service" / "memory.max").write_text(f"{64 * MIB}\n")
    monkeypatch.setattr(devices, "_OWN_GROUPS", own)
    monkeypatch.setattr(devices, "_GROUPS", groups)
    memory = Device("cpu").memory()
    assert memory.size_bytes == 64 * MIB
    assert memory.free_bytes <= 64 * MIB


def test_a_machine_without_control_groups_has_its_own_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_OWN_GROUPS", tmp_path / "none")
    assert Device("cpu").memory().size_bytes == MACHINE_BYTES


def test_a_burst_of_heartbeats_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], [0]

    def available() -> int:
        asked[0] += 1
        return asked[0] * MIB

    monkeypatch.setattr(devices, "available_bytes", available)
    device = Device("cpu", clock=lambda: now[0])
    assert [device.memory().free_bytes for _ in range(3)] == [MIB] * 3
    now[0] = MEMORY_AGE_S_MAX
    assert device.memory().free_bytes == 2 * MIB


def test_a_gpu_that_is_not_there_is_refused_with_the_reason() -> None:
    if ckptio.cuda_status().device_count > 999:
        pytest.skip("a machine with a thousand GPUs")
    with pytest.raises(ConfigError, match=r"WB_DEVICE: there is no cuda:999 \(.+\); name one that is there"):
        Device("cuda:999").check()


def test_the_cpu_is_always_there() -> None:
    Device("cpu").check()


async def test_the_heartbeat_has_the_memory_of_the_slot(lender: Lender, tiny_models: dict[str, TinyModel]) -> None:
    async with a_worker(lender, tiny_models["llama"]) as outside:
        assert 0 < outside.beat.memory_free_bytes <= outside.beat.memory_size_bytes <= MACHINE_BYTES
        assert outside.beat.device == "cpu"
