"""The scheduler benchmark measures the real controller and a real scheduler process; here at a size that is quick."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from whimbrel.cli import bench_sched, sched_durable
from whimbrel.cli.sched_world import IN_FLIGHT, World, random_tasks, snapshot_of_movable

from services.scheduler.core.decisions import Placement
from services.scheduler.core.policies import migration


def test_every_task_of_the_world_is_served_with_all_slots_in_use() -> None:
    world = World(servers=3, slots=2, models=IN_FLIGHT + 20, seed=1)
    world.fill()
    world.run(200)
    assert world.controller_s > 0.0


def test_the_snapshot_of_movable_instances_asks_for_moves_now_and_then() -> None:
    """Otherwise the time of a placement would say nothing about displacement."""
    chance = random.Random(1)
    snapshot = snapshot_of_movable(chance, servers=20, slots=8, models=200)
    decisions = [migration(snapshot, task, 100.0) for task in random_tasks(chance, 100, models=200)]
    assert all(isinstance(decision, Placement) for decision in decisions)
    assert sum(isinstance(decision, Placement) and bool(decision.moves) for decision in decisions) > 5


def test_the_slope_is_that_of_the_line_on_log_log_paper() -> None:
    assert bench_sched._slope([(10, 1.0), (100, 10.0), (1000, 100.0)]) == pytest.approx(1.0)
    assert bench_sched._slope([(10, 5.0), (100, 5.0), (1000, 5.0)]) == pytest.approx(0.0)


async def test_a_scheduler_process_serves_the_tasks_of_the_durable_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, P3: with a real NATS and a Redis that syncs every append."""
    monkeypatch.setattr(sched_durable, "WARM_UP_TASKS", 20)
    monkeypatch.setattr(sched_durable, "TASKS", 100)
    monkeypatch.setattr(sched_durable, "IN_FLIGHT", 8)
    measured = await sched_durable.run(tmp_path / "durable", servers=3, slots=2, models=40)
    assert measured.tasks_per_s > 0.0
    assert 0.0 < measured.p50_s <= measured.p99_s
    assert measured.fsync_s > 0.0
