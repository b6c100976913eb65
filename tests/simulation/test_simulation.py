"""Random lives of whole clusters: real cores under a virtual clock, a bad network, and deaths of everything. After
every step the invariants hold; in the end nobody is forgotten and everything is back to zero. A failure names its seed:
run it again with SEED=<seed> SEEDS=1. STEPS and SEEDS make longer runs (`make nightly-simulation`)."""

from __future__ import annotations

import os

import pytest

from tests.simulation.chaos import Life

SEEDS = int(os.environ.get("SEEDS", "20"))
#: Of the controllers, in all lives together; about half of them are trouble, the other half order.
STEPS = int(os.environ.get("STEPS", "100000"))
FIRST_SEED = int(os.environ.get("SEED", "0"))


@pytest.mark.timeout(max(120, STEPS // 500))
@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + SEEDS))
def test_invariants_hold_and_nobody_is_forgotten_whatever_happens(seed: int) -> None:
    """P1, P2, C4, R6: one owner per slot, tokens once and in order, records replay, waits are bounded, all ends."""
    life = Life(seed)
    life.live(max(1, STEPS // SEEDS // 2))
    print(f"seed {seed}: {life.sim.steps} steps, {len(life.sim.streams)} requests, {life.sim.network.carried} messages")
    assert any(stream.is_done for stream in life.sim.streams)


def test_the_same_seed_leads_to_the_same_life() -> None:
    """The cores decide from their inputs alone."""
    journals = []
    for _ in range(2):
        life = Life(5)
        life.live(600)
        journals.append(list(life.sim.records.data.journal))
    assert journals[0] == journals[1]
