"""The fresh process of one measurement: a request as its argument, an answer on its standard output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any


def main() -> int:
    """Does the one task in the first argument; libraries that print do so on standard error."""
    descriptor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(content: dict[str, Any]) -> None:
        os.write(descriptor, json.dumps(content).encode() + b"\n")

    request = json.loads(sys.argv[1])
    task = request.pop("task")
    _TASKS[task](request, answer)
    return 0


def _load(request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    from ckptio.bench.timing import LoadRequest, time_load

    answer(asdict(time_load(LoadRequest(**request))))


def _read_raw(request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    from ckptio.bench.ceiling import read_raw

    answer(asdict(read_raw([Path(file) for file in request["files"]], request["threads"])))


def _copy_memory(request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    from ckptio.bench.ceiling import copy_memory

    answer(asdict(copy_memory(request["size_bytes"], request["threads"])))


def _hold(request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    from ckptio.bench.attach import hold

    hold(request["checkpoint"], answer)


def _attach(request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    from ckptio.bench.attach import PoolPlace, attach

    answer(asdict(attach(PoolPlace(**request))))


def _ablation(request: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    from ckptio.bench.ablation import run_step

    answer(asdict(run_step(Path(request["place"]), tuple(request["factors"]), request["device"])))


_TASKS: dict[str, Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], None]] = {
    "load": _load,
    "read_raw": _read_raw,
    "copy_memory": _copy_memory,
    "hold": _hold,
    "attach": _attach,
    "ablation": _ablation,
}

if __name__ == "__main__":
    sys.exit(main())
