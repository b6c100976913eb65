"""Owns the shape of benchmark results: one JSON object, medians with their spread, the machine they came from."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table


def result(name: str, unit: str, values: Sequence[float], **params: Any) -> dict[str, Any]:
    """One row: median, min and max of `values`, which must not be empty."""
    assert values, f"{name} was not measured"
    return {
        "name": name, "unit": unit, "median": statistics.median(values), "min": min(values), "max": max(values),
        "n": len(values), "params": params,
    }  # fmt: skip


def report(part: str, results: list[dict[str, Any]], device: str = "cpu") -> dict[str, Any]:
    return {"part": part, "commit": _commit(), "machine": {**machine(), "device": device}, "results": results}


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "memory_bytes": memory}


def results_table(measured: dict[str, Any], targets: dict[str, float]) -> Table:
    table = Table("name", "median", "min", "max", "n", "target", title=f"{measured['part']} at {measured['commit']}")
    for row in measured["results"]:
        target = targets.get(row["name"])
        figures = (f"{row[key]:.4g}" for key in ("median", "min", "max"))
        table.add_row(
            f"{row['name']} ({row['unit']})", *figures, str(row["n"]), "-" if target is None else f"{target:g}"
        )
    return table


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    try:
        git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        return subprocess.run(git, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
