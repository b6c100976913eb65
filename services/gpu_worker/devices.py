"""Owns what the worker knows of its device: that it is there, and its memory, which is asked for and not configured."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ckptio
from ckptio.memory import available_bytes
from whimbrel.chassis.config import ConfigError

# A burst of heartbeats need not ask the driver, or read the files of the kernel, each time.
MEMORY_AGE_S_MAX = 0.5

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Of a GPU, or of this machine within the limits of our control groups. Zeros where nobody can tell."""

    size_bytes: int
    free_bytes: int


class Device:
    """The slot's device, "cpu" or "cuda:N"."""

    def __init__(self, name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock
        self._memory = DeviceMemory(size_bytes=0, free_bytes=0)
        self._asked_at: float | None = None

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def number(self) -> int:
        """Of a GPU."""
        assert self.is_gpu
        return int(self.name.removeprefix("cuda:"))

    def check(self) -> None:
        """Raises ConfigError when there is no such device."""
        if not self.is_gpu:
            return
        status = ckptio.cuda_status()
        if self.number >= status.device_count:
            there = status.reason or f"this machine has cuda:0 to cuda:{status.device_count - 1}"
            raise ConfigError("WB_DEVICE", f"there is no {self.name} ({there}); name one that is there, or use cpu")

    def memory(self) -> DeviceMemory:
        """As it is now, or was half a second ago."""
        now = self._clock()
        if self._asked_at is None or now - self._asked_at >= MEMORY_AGE_S_MAX:
            self._asked_at = now
            self._memory = self._ask_gpu() if self.is_gpu else _host_memory()
        return self._memory

    def _ask_gpu(self) -> DeviceMemory:
        # An engine that computes on a GPU has imported torch; for any other it would be seconds of start-up.
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return DeviceMemory(size_bytes=0, free_bytes=0)
        free_bytes, size_bytes = torch.cuda.mem_get_info(self.number)
        return DeviceMemory(size_bytes=size_bytes, free_bytes=free_bytes)


def _host_memory() -> DeviceMemory:
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    size_bytes = min([machine_bytes, *_group_limits()])
    return DeviceMemory(size_bytes=size_bytes, free_bytes=min(available_bytes(), size_bytes))


def _group_limits() -> Iterator[int]:
    """Bytes that our control group (version 2), and those that it is in, may use; none without a limit."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    group = _GROUPS / own.lstrip("/")
    for directory in (group, *group.parents):
        if not directory.is_relative_to(_GROUPS):
            return
        try:
            limit = (directory / "memory.max").read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():
            yield int(limit)
