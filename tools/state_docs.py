#!/usr/bin/env python3
"""Draws the state machines from their tables, so that the pictures in docs/state can't lie."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from services.gpu_worker.core import instance as worker_instance
from services.router.core import request_states
from services.scheduler.core import instances, migration

DIRECTORY = Path(__file__).parents[1] / "docs" / "state"
Table = Mapping[Any, Mapping[Any, Any]]

MACHINES: dict[str, tuple[str, str, Table]] = {
    "migration": ("A migration", "services/scheduler/core/migration.py", migration.TRANSITIONS),
    "request": ("A request in the router", "services/router/core/request_states.py", request_states.TRANSITIONS),
    "instance": ("An instance in the scheduler", "services/scheduler/core/instances.py", instances.TRANSITIONS),
    "worker-instance": (
        "An instance in its worker",
        "services/gpu_worker/core/instance.py",
        worker_instance.TRANSITIONS,
    ),
}


def name(value: Any) -> str:
    """A state or an event, which may be a member of an enum or a class."""
    return str(value.value) if isinstance(value, Enum) else str(value.__name__)


def page(title: str, path: str, table: Table) -> str:
    """One arrow per pair of states, with all events that lead from the one to the other."""
    first = next(iter(table))
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, row in table.items():
        for event, target in row.items():
            arrows.setdefault((name(state), name(target)), []).append(name(event))
    lines = [
        f"# {title}",
        "",
        f"Drawn from the table in `{path}` by `tools/state_docs.py`. What is not drawn is illegal.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        f"    [*] --> {name(first)}",
        *(f"    {source} --> {target}: {', '.join(events)}" for (source, target), events in arrows.items()),
        *(f"    {name(state)} --> [*]" for state, row in table.items() if not row),
        "```",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when a picture is out of date")
    arguments = parser.parse_args()
    wanted = {DIRECTORY / f"{key}.md": page(*machine) for key, machine in MACHINES.items()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.name} is out of date; run: python tools/state_docs.py", file=sys.stderr)
        return int(bool(stale))
    DIRECTORY.mkdir(exist_ok=True)
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
