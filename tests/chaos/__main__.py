"""Runs the matrix: `make chaos`, or `python -m tests.chaos --only worker,redis --states handover`."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from whimbrel.chassis.logging import configure

from tests.chaos import report
from tests.chaos.cell import run_cell
from tests.chaos.matrix import Cell, Result, choose_cells
from tests.chaos.world import a_world
from tests.support.cluster import ROOT

PAGE = ROOT / "docs" / "chaos.md"
DIRECTORY = ROOT / "build" / "chaos"


# States last half a second or more.
LATE_S_MAX = 0.3


async def run_matrix(cells: Sequence[Cell], directory: Path, limit_s: float, seed: int | None = None) -> list[Result]:
    """All cells in a row on one cluster; a new one after a cell that failed. Ends early when the time is over.

    With a seed, each harm comes somewhat later than the news of the state.
    """
    chance = random.Random(seed)
    deadline_s = time.monotonic() + limit_s
    left, results = list(cells), list[Result]()
    while left and time.monotonic() < deadline_s:
        async with a_world(directory / "cluster") as world:
            print(f"a cluster is ready: {world.url}", flush=True)
            while left and time.monotonic() < deadline_s:
                late_s = 0.0 if seed is None else chance.uniform(0.0, LATE_S_MAX)
                result = await run_cell(world, left.pop(0), late_s=late_s)
                results.append(result)
                print(f"{len(results):2}/{len(cells)} {report.line(result)}", flush=True)
                if not result.is_passed:
                    place = directory / "failed" / result.cell.name.replace(" ", "-").replace(",", "")
                    world.keep_logs(place)
                    print(f"       logs: {place}", flush=True)
                    break
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="words of victims and ways, such as worker,redis or paused")
    parser.add_argument("--states", default="", help="words of states, such as handover")
    parser.add_argument("--limit-s", type=float, default=14 * 60.0, help="no cell begins later")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="of the cluster, and of logs of failed cells")
    parser.add_argument("--seed", type=int, help="harms come at random moments of a state, not at its beginning")
    chosen = parser.parse_args()
    cells = choose_cells(only=chosen.only, states=chosen.states)
    if not cells:
        parser.error("no cell has such a name")
    configure("warning", service="chaos")
    results = asyncio.run(run_matrix(cells, chosen.directory, chosen.limit_s, chosen.seed))
    if cells == choose_cells() and chosen.seed is None:
        PAGE.write_text(report.render(results, cells, report.machine()))
        print(f"written: {PAGE}")
    failed = [result for result in results if not result.is_passed]
    print(f"{len(results)} of {len(cells)} cells run, {len(failed)} failed")
    return 1 if failed or len(results) < len(cells) else 0


if __name__ == "__main__":
    sys.exit(main())
