"""Writes the matrix with its results as docs/chaos.md."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from statistics import median

from whimbrel.client.admin import MIGRATION_ENDS

from tests.chaos.harms import PAUSE_S
from tests.chaos.matrix import HARMS, Cell, Result, State, Victim, Way

HEAD = f"""# Chaos

Written by `make chaos`, which takes some twelve minutes; never by hand. `make chaos ONLY="worker,redis"` runs some
victims, `STATES="handover"` some states, `SEED=7` lets harms come somewhat later in each state; those write nothing.

On a cluster of real processes (two servers of one slot, two schedulers, one router, the echo engine) an answer is
streamed that is its own prompt, its instance is moved, and when the migration says that it is in a state, one victim
is killed (SIGKILL; what runs it starts it again) or paused (SIGSTOP, and SIGCONT {PAUSE_S:g} seconds later), or the
router's connection to NATS is cut and refused for that long.

A cell names the end of the migration and the longest time between two pieces of the answer that the client saw. It has
passed when the client got the whole text, every token once and in order (*cut*: its router died, and the connection
ended with it), another one that waited for its turn on the same instance did so, too, the migration came to an end
(*finished*, where an agent, the leader, NATS or Redis was killed, or NATS paused), a new request was served, and
nothing was left: no request, no instance, no lease, everybody alive.

A handover lasts milliseconds, so for those cells the router is stopped from the state before until the harm has begun:
some tenths of a second of the pause are that. *In …* says in which state the harm really came, by the times of the
events, where that is not the state of the column.
"""


def machine() -> str:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} processors, {memory_gib:.0f} GiB of memory"


def render(results: Sequence[Result], planned: Sequence[Cell], machine: str) -> str:
    """The whole page. Cells that were planned and have no result were not run."""
    by_cell = {result.cell: result for result in results}
    rows = [
        f"| {victim} {way} | " + " | ".join(_cell(by_cell.get(Cell(victim, way, state))) for state in State) + " |"
        for victim, way in HARMS
    ]
    titles = " | ".join(state.value for state in State)
    return "\n".join(
        [
            HEAD,
            f"Machine: {machine}.\n",
            f"| victim | {titles} |",
            "|---|" + "---|" * len(State),
            *rows,
            "",
            *_totals(results, len(planned)),
            "",
            "## Cells that failed",
            "",
            *(_faults(results) or ["None."]),
            "",
        ]
    )


def line(result: Result) -> str:
    """One result, for whoever watches the run."""
    verdict = "ok  " if result.is_passed else "FAIL"
    faults = "".join(f"\n       {fault}" for fault in result.faults)
    return f"{verdict} {result.seconds:5.1f} s  {result.cell.name}: {_what(result)}{faults}"


def _cell(result: Result | None) -> str:
    if result is None:
        return "not run"
    return _what(result) if result.is_passed else f"**failed**: {_what(result)}"


def _what(result: Result) -> str:
    end = f"{result.end} ({result.cause})" if result.cause else result.end or "no end"
    words = [end, f"{result.longest_pause_s:.2f} s"]
    if result.is_cut_short:
        words.append("cut")
    if not _is_as_wished(result):
        words.append(f"in {result.struck or 'no state'}")
    return ", ".join(words)


def _is_as_wished(result: Result) -> bool:
    if result.cell.state is State.ENDED:
        return result.struck in MIGRATION_ENDS
    return result.struck == result.cell.state


def _totals(results: Sequence[Result], planned: int) -> list[str]:
    passed = sum(result.is_passed for result in results)
    ends = ", ".join(f"{count} {end or 'unknown'}" for end, count in Counter(r.end for r in results).most_common())
    lines = [
        f"{planned} cells, {len(results)} run, {passed} passed, in {sum(r.seconds for r in results) / 60:.0f} minutes.",
        f"Migrations: {ends}; the last one ended {max((r.end_s for r in results), default=0.0):.1f} s after the harm.",
    ]
    for way in Way:
        pauses = sorted(r.longest_pause_s for r in results if r.cell.way is way and not _is_held(r))
        if pauses:
            lines.append(f"Pauses where somebody was {way}: median {median(pauses):.2f} s, most {pauses[-1]:.2f} s.")
    return lines


def _is_held(result: Result) -> bool:
    """Whether its client had to wait for the harness, or has lost its router."""
    return result.cell.state is State.HANDOVER or result.cell.victim is Victim.ROUTER


def _faults(results: Sequence[Result]) -> list[str]:
    return [f"* {r.cell.name}: {'; '.join(r.faults)}" for r in results if not r.is_passed]
