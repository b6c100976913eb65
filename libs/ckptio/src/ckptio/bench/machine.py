"""The machine and the software that a result came from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_PACKAGES = (
    "ckptio",
    "torch",
    "safetensors",
    "transformers",
    "runai-model-streamer",
    "fastsafetensors",
    "tensorizer",
)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def machine_facts(directory: Path, device: str) -> dict[str, Any]:
    """What bears on the figures: processor, memory, kernel, huge pages, file system, versions."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device,
        "kernel": platform.release(),
        "huge_pages": _setting(_HUGE_PAGES / "enabled"),
        "shared_huge_pages": _setting(_HUGE_PAGES / "shmem_enabled"),
        "file_system": _file_system(directory),
        "python": platform.python_version(),
        "packages": _versions(),
    }


def commit() -> str:
    """The commit of the checkout that this package runs from, else the version of the package."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return importlib.metadata.version("ckptio")


def available_memory_bytes() -> int:
    """The kernel's estimate of what can be used without swapping; 0 where it has none."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _setting(path: Path) -> str:
    """The word in brackets."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"


def _file_system(directory: Path) -> str:
    """Type of the file system with the longest mount point above `directory`."""
    place = os.path.realpath(directory)
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        mount, kind = line.split()[1:3]
        if (place + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
