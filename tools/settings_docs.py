#!/usr/bin/env python3
"""Writes the settings table of docs/operations.md from the services' configuration classes, so that it can't lie."""

from __future__ import annotations

import argparse
import sys
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

from services.gpu_worker.config import WorkerConfig
from services.router.config import RouterConfig
from services.scheduler.config import SchedulerConfig
from services.storage_agent.config import AgentConfig

CONFIGS = {"router": RouterConfig, "scheduler": SchedulerConfig, "agent": AgentConfig, "worker": WorkerConfig}
DOCUMENT = Path(__file__).parents[1] / "docs" / "operations.md"
MARK = "<!-- settings -->"


def shown(default: Any) -> str:
    if default is MISSING:
        return "required"
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int) and default >= 1024 * 1024 and default % (1024 * 1024) == 0:
        return f"{default // (1024 * 1024)}MiB"
    return f"`{default}`"


def table() -> str:
    """One row per variable: which services read it, and what it is when unset."""
    rows: dict[str, dict[str, str]] = {}
    for service, config in CONFIGS.items():
        for field in fields(config):
            rows.setdefault(f"WB_{field.name.upper()}", {})[service] = shown(field.default)
    lines = ["| variable | read by | default |", "|---|---|---|"]
    for name, readers in sorted(rows.items()):
        who = "all" if len(readers) == len(CONFIGS) else ", ".join(readers)
        defaults = sorted(set(readers.values()))
        lines.append(f"| `{name}` | {who} | {' or '.join(defaults)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the document is out of date")
    arguments = parser.parse_args()
    text = DOCUMENT.read_text()
    wanted = text[: text.index(MARK) + len(MARK)] + "\n\n" + table()
    if arguments.check:
        if text != wanted:
            print(f"{DOCUMENT.name} is out of date; run: python tools/settings_docs.py", file=sys.stderr)
        return int(text != wanted)
    DOCUMENT.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
