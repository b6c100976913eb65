"""Owns `whimbrel bench`: each part starts what it needs on free ports, measures, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from whimbrel.cli import bench_coldstart, bench_migrate, bench_sched, bench_tiers
from whimbrel.cli.measure import report, results_table

PARTS = {"coldstart": bench_coldstart, "tiers": bench_tiers, "sched": bench_sched, "migrate": bench_migrate}


def bench(
    part: Annotated[str, typer.Argument(help=f"One of: {', '.join(PARTS)}.")],
    models: Annotated[Path, typer.Option(help="The demo models, as tools/demo_models.py makes them.")] = Path(
        ".models"
    ),
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How often each figure is measured.")] = 10,
    quick: Annotated[bool, typer.Option(help="Three rounds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output, nothing else.")] = False,
) -> None:
    """Measure a part of Whimbrel on this machine."""
    console = Console(stderr=True)
    if part not in PARTS:
        console.print(f"[red]error:[/red] there is no part {part!r}; there are: {', '.join(PARTS)}")
        raise typer.Exit(2)
    module = PARTS[part]
    with tempfile.TemporaryDirectory(prefix="whimbrel-bench-") as directory:
        try:
            results = asyncio.run(module.measure(Path(directory), models, 3 if quick else rounds, console))
        except FileNotFoundError as error:
            console.print(f"[red]error:[/red] {error}", highlight=False)
            raise typer.Exit(1) from None
    measured = report(part, results)
    if as_json:
        json.dump(measured, sys.stdout)
        print()
    else:
        Console().print(results_table(measured, module.TARGETS))
