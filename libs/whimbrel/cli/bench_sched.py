"""Owns the scheduler benchmark: load tasks per second, latency, the time of a decision, and its growth with servers.

A load task is all of it: a request for a cold model, the decision, its commands, the agent's and worker's reports, the
request's start and end, and later the unloading for another model. All slots are in use, so nearly every decision
evicts. `pure` is the controller alone on one core; `durable` is a scheduler process with a real NATS and a Redis that
syncs its file with every append, and everybody else played by this process. `placement` is the choice of a server with
displacement: most slots run what can be moved, one in twenty is free.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from services.scheduler.core.policies import migration
from whimbrel.cli import sched_durable
from whimbrel.cli.measure import result
from whimbrel.cli.sched_world import World, random_tasks, snapshot_of_movable

SERVERS, SLOTS, MODELS = 100, 8, 1_000
GROWTH_SERVERS = (10, 30, 100, 300, 1_000)
PURE_TASKS = 4_000
PLACEMENTS = 400
TARGETS = {
    "sched.pure.tasks_per_s": 5_000.0,
    "sched.durable.tasks_per_s": 3_000.0,
    "sched.durable.p99_s": 0.05,
    "sched.growth.exponent": 1.0,
    "sched.placement_s.p99": 0.001,
}


async def measure(directory: Path, models: Path, rounds: int, console: Console) -> list[dict[str, Any]]:
    """The results of `rounds` rounds, at least one of each."""
    params = {"servers": SERVERS, "slots": SLOTS, "models": MODELS}
    rates = [_pure_rate(SERVERS, PURE_TASKS, seed) for seed in range(rounds)]
    rows = [result("sched.pure.tasks_per_s", "1/s", rates, **params)]
    console.print(f"pure: {rates[-1]:,.0f} tasks/s", style="dim")
    durable = [await sched_durable.run(directory / f"durable-{k}", SERVERS, SLOTS, MODELS) for k in range(rounds)]
    rows.append(result("sched.durable.tasks_per_s", "1/s", [one.tasks_per_s for one in durable], **params))
    rows.append(result("sched.durable.p50_s", "s", [one.p50_s for one in durable], **params))
    rows.append(result("sched.durable.p99_s", "s", [one.p99_s for one in durable], **params))
    rows.append(result("sched.durable.fsync_s", "s", [one.fsync_s for one in durable], **params))
    console.print(f"durable: {durable[-1].tasks_per_s:,.0f} tasks/s", style="dim")
    placed = [_placement_times(SERVERS, seed) for seed in range(rounds)]
    rows.append(result("sched.placement_s.p50", "s", [_quantile(times, 0.5) for times in placed], **params))
    rows.append(result("sched.placement_s.p99", "s", [_quantile(times, 0.99) for times in placed], **params))
    return rows + await asyncio.to_thread(_growth, rounds)


def _growth(rounds: int) -> list[dict[str, Any]]:
    """Time per task over servers, and the slope of both logarithms by least squares."""
    rows: list[dict[str, Any]] = []
    slopes: list[float] = []
    times: dict[int, list[float]] = {servers: [] for servers in GROWTH_SERVERS}
    for seed in range(rounds):
        # Interleaved, so that what else the machine does falls on all sizes alike.
        for servers in GROWTH_SERVERS:
            times[servers].append(1.0 / _pure_rate(servers, PURE_TASKS // 4, seed))
        slopes.append(_slope([(servers, times[servers][-1]) for servers in GROWTH_SERVERS]))
    for servers in GROWTH_SERVERS:
        rows.append(result(f"sched.growth.task_s.{servers}", "s", times[servers], servers=servers, slots=SLOTS))
    rows.append(result("sched.growth.exponent", "1", slopes, servers=list(GROWTH_SERVERS)))
    return rows


def _pure_rate(servers: int, tasks: int, seed: int) -> float:
    """Load tasks per second of processor time, once every slot has been used."""
    world = World(servers=servers, slots=SLOTS, models=max(MODELS, servers * SLOTS * 5 // 4), seed=seed)
    world.fill()
    gc.collect()
    gc.freeze()
    world.controller_s = 0.0
    world.run(tasks)
    gc.unfreeze()
    return tasks / world.controller_s


def _placement_times(servers: int, seed: int) -> list[float]:
    chance = random.Random(seed)
    snapshot = snapshot_of_movable(chance, servers=servers, slots=SLOTS, models=MODELS)
    times: list[float] = []
    for task in random_tasks(chance, PLACEMENTS, models=MODELS):
        started_s = time.perf_counter()
        migration(snapshot, task, 100.0)
        times.append(time.perf_counter() - started_s)
    return times


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line through the points on log-log paper."""
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - mean_x) ** 2 for x in xs)
