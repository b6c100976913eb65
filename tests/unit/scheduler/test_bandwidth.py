"""What is learned of a tier: robustly, per server and tier, with overhead."""

from __future__ import annotations

import random

import pytest
from whimbrel.wire.messages import Tier
from whimbrel.wire.records import BandwidthRecord

from services.scheduler.core.bandwidth import (
    OBSERVATIONS_KEPT,
    PRIOR_BANDWIDTH_BYTES_PER_S,
    PRIOR_OVERHEAD_S,
    observe_overhead,
    observe_transfer,
    prior,
)

MB = 10**6


def learned(*bandwidths: float, size_bytes: int = 100 * MB) -> BandwidthRecord:
    record = prior("s0", Tier.SSD)
    for bandwidth in bandwidths:
        record = observe_transfer(record, size_bytes=size_bytes, seconds=size_bytes / bandwidth)
    return record


def bandwidth(record: BandwidthRecord) -> float:
    return 1.0 / record.seconds_per_byte


@pytest.mark.parametrize("tier", list(PRIOR_BANDWIDTH_BYTES_PER_S), ids=str)
def test_without_observations_there_is_a_prior_that_is_marked_as_one(tier: Tier) -> None:
    """E6"""
    record = prior("s0", tier)
    assert bandwidth(record) == pytest.approx(PRIOR_BANDWIDTH_BYTES_PER_S[tier])
    assert record.overhead_s == PRIOR_OVERHEAD_S
    assert record.observations == 0


def test_a_probe_of_the_storage_is_the_better_prior_for_its_tier_only() -> None:
    """E6"""
    assert bandwidth(prior("s0", Tier.SSD, 3e9)) == pytest.approx(3e9)
    assert bandwidth(prior("s0", Tier.REMOTE, 3e9)) == pytest.approx(PRIOR_BANDWIDTH_BYTES_PER_S[Tier.REMOTE])
    assert bandwidth(prior("s0", Tier.SSD, 0.0)) == pytest.approx(PRIOR_BANDWIDTH_BYTES_PER_S[Tier.SSD])


def test_the_first_load_replaces_the_prior() -> None:
    """E6"""
    record = learned(2e9)
    assert bandwidth(record) == pytest.approx(2e9)
    assert record.observations == 1
    assert record.variance == pytest.approx(0.0)


def test_the_estimate_follows_noisy_loads_and_knows_their_spread() -> None:
    """E6, E7"""
    chance = random.Random(7)
    record = learned(*(2e9 * chance.uniform(0.95, 1.05) for _ in range(30)))
    assert bandwidth(record) == pytest.approx(2e9, rel=0.05)
    assert 0.0 < record.variance**0.5 / record.seconds_per_byte < 0.06
    assert len(record.recent_seconds_per_byte) == OBSERVATIONS_KEPT
    assert record.observations == 30


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.4, 3.0, 10.0], ids=str)
def test_one_outlier_in_twenty_moves_the_estimate_by_less_than_a_fifth(factor: float) -> None:
    """E7: outliers survive, such as one load in 119 that took far longer."""
    chance = random.Random(11)
    record = learned()
    for number in range(1, 101):
        is_outlier = number % 20 == 0
        observed = 2e9 * chance.uniform(0.95, 1.05) * (factor if is_outlier else 1.0)
        record = observe_transfer(record, size_bytes=100 * MB, seconds=100 * MB / observed)
        assert abs(bandwidth(record) / 2e9 - 1.0) < 0.2, f"after load {number}"


@pytest.mark.parametrize("factor", [0.1, 10.0], ids=["slower", "faster"])
def test_a_tier_that_changes_tenfold_is_relearned_within_five_loads(factor: float) -> None:
    """E6"""
    record = learned(*[2e9] * 50, *[2e9 * factor] * 5)
    assert bandwidth(record) == pytest.approx(2e9 * factor, rel=0.01)


def test_a_tier_that_costs_nothing_can_be_learned_too() -> None:
    """E3: mapping chunks that lie in DRAM into a CPU slot moves no bytes."""
    record = observe_transfer(prior("s0", Tier.DRAM), size_bytes=MB, seconds=0.0)
    assert record.seconds_per_byte == 0.0


def test_nothing_is_learned_from_no_bytes() -> None:
    record = learned(2e9)
    assert observe_transfer(record, size_bytes=0, seconds=1.0) == record


def test_overhead_is_learned_beside_bandwidth_and_is_never_negative() -> None:
    """E6"""
    record = learned(2e9)
    record = observe_overhead(record, -0.3)
    assert record.overhead_s == 0.0
    for _ in range(5):
        record = observe_overhead(record, 0.2)
    assert record.overhead_s == pytest.approx(0.2)
    assert bandwidth(record) == pytest.approx(2e9)
