"""Displacement finds the optimum: held against brute force over all load-and-displace plans of random clusters (M5)."""

from __future__ import annotations

import random

import msgspec
import pytest

from services.scheduler.core.decisions import Decision, Deferred, NeverFits, Placement
from services.scheduler.core.policies import migration
from services.scheduler.core.views import Nearness, Snapshot, Task
from tests.unit.scheduler.random_clusters import NOW_S, optimum, random_snapshot

CLUSTERS = 10_000
PARTS = 10


def same(one: Decision, other: Decision) -> bool:
    """Whether they say the same; their reasons know different snapshots."""
    left, right = (
        msgspec.structs.replace(d, reasons=None) if isinstance(d, Placement | Deferred) else d for d in (one, other)
    )
    return left == right


def check(snapshot: Snapshot, task: Task, seed: int) -> Placement | None:
    """The decision costs what the optimum costs; returns it when it is a placement."""
    decision = migration(snapshot, task, NOW_S)
    near = msgspec.structs.replace(snapshot, nearness=Nearness.of(snapshot.servers))
    assert same(migration(near, task, NOW_S), decision), f"seed {seed}: looking near first changed the answer"
    assert not isinstance(decision, NeverFits), f"seed {seed}"
    best = optimum(snapshot, task)
    if isinstance(decision, Deferred):
        assert not best, f"seed {seed}: deferred, but {best[0]} was possible"
        return None
    assert best, f"seed {seed}: {decision} is no plan at all"
    evictions = len(decision.evict)
    is_avoided = decision.server_id in task.avoid
    rank = (is_avoided, decision.cost_s, len(decision.moves), evictions, decision.server_id)
    assert rank in {way.rank for way in best}, f"seed {seed}: {rank} instead of {best[0]}"
    return decision


@pytest.mark.parametrize("part", range(PARTS))
def test_the_placement_equals_brute_force_over_all_plans(part: int) -> None:
    """M5, C1, C2: 10,000 random small clusters."""
    moves = evictions = 0
    for seed in range(part * CLUSTERS // PARTS, (part + 1) * CLUSTERS // PARTS):
        decision = check(*random_snapshot(random.Random(seed)), seed)
        if decision is not None:
            moves += bool(decision.moves)
            evictions += bool(decision.evict)
    assert moves > 20, "the clusters would not tell displacement from its absence"
    assert evictions > 50
