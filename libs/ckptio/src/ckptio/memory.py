"""How much memory this process may still use: of the machine, and of the control groups that it is in."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_MEMORY_STATUS = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """The kernel's estimate of what can be used without swapping, or less where a container has a limit."""
    return min([_machine_bytes(), *_group_bytes()])


def _machine_bytes() -> int:
    for line in _MEMORY_STATUS.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(errno.ENODATA, "No MemAvailable line", os.fspath(_MEMORY_STATUS))


def _group_bytes() -> list[int]:
    """What is left in each control group (version 2) up to the root; page cache counts as free."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    group = _GROUPS / own.lstrip("/")
    left = []
    for directory in (group, *group.parents):
        if not directory.is_relative_to(_GROUPS):
            break
        limit = _read_number(directory / "memory.max")
        used = _read_number(directory / "memory.current")
        if limit is not None and used is not None:
            left.append(max(limit - used + _inactive_file_bytes(directory), 0))
    return left


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _inactive_file_bytes(directory: Path) -> int:
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
