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
    explained_s,
    observe_overhead,
    observe_transfer,
    prior,
    spread,
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


# --- models of all sizes ---


def seconds_of(size_bytes: int, bytes_per_s: float) -> float:
    """What a transfer takes that costs 10 ms whatever its size."""
    return 0.01 + size_bytes / bytes_per_s


@pytest.mark.parametrize("tier", [Tier.REMOTE, Tier.SSD], ids=str)
def test_small_models_loaded_again_and_again_do_not_make_a_tier_look_slow(tier: Tier) -> None:
    """E6: as measured, a model of 2 MB takes ten times as long per byte as one of 700 MB."""
    real = PRIOR_BANDWIDTH_BYTES_PER_S[tier] * 2
    record = prior("s0", tier)
    for size_bytes in [700 * MB] * 3 + [2 * MB] * 50:
        record = observe_transfer(record, size_bytes=size_bytes, seconds=seconds_of(size_bytes, real))
    assert 700 * MB * record.seconds_per_byte == pytest.approx(seconds_of(700 * MB, real), rel=0.05)


def test_small_models_alone_leave_the_prior_in_place_when_they_are_slower() -> None:
    """E6: they can't tell a slow tier from what every transfer costs."""
    record = observe_transfer(prior("s0", Tier.SSD), size_bytes=2 * MB, seconds=0.01)
    assert record == prior("s0", Tier.SSD)


def test_a_small_model_that_is_faster_than_was_thought_is_believed() -> None:
    """E6: no transfer is faster than its tier."""
    record = observe_transfer(prior("s0", Tier.SSD), size_bytes=20 * MB, seconds=0.005)
    assert bandwidth(record) == pytest.approx(4e9)
    assert record.observations == 1


def test_what_a_small_transfer_took_too_long_is_overhead_and_a_large_one_is_explained_by_its_bytes() -> None:
    """E6"""
    record = learned(2e9)
    assert explained_s(record, size_bytes=2 * MB, seconds=0.05) == pytest.approx(0.001)
    assert explained_s(record, size_bytes=2 * MB, seconds=0.0005) == 0.0005
    assert explained_s(record, size_bytes=700 * MB, seconds=9.0) == 9.0


# --- with the scatter of real loads ---


def scattered(chance: random.Random, mean_bytes_per_s: float) -> float:
    """A bandwidth as loads see it: a tenth up or down is normal, and now and then a neighbour takes some of it."""
    slowed = chance.uniform(0.6, 1.0) if chance.random() < 0.1 else 1.0
    return mean_bytes_per_s * max(0.3, chance.gauss(1.0, 0.1)) * slowed


def loads(record: BandwidthRecord, *bandwidths: float) -> BandwidthRecord:
    for observed in bandwidths:
        record = observe_transfer(record, size_bytes=100 * MB, seconds=100 * MB / observed)
    return record


@pytest.mark.parametrize("factor", [0.1, 10.0], ids=["slower", "faster"])
@pytest.mark.parametrize("seed", range(50))
def test_a_tenfold_change_is_relearned_within_five_scattered_loads(seed: int, factor: float) -> None:
    """E6"""
    chance = random.Random(seed)
    mean = 10 ** chance.uniform(8.0, 10.0)
    record = loads(learned(), *(scattered(chance, mean) for _ in range(chance.randint(9, 60))))
    record = loads(record, *(scattered(chance, mean * factor) for _ in range(5)))
    # The lowest of the new five on the side of the old ones: what is believed of a change at first may be cautious.
    assert bandwidth(record) == pytest.approx(mean * factor, rel=0.5), f"seed {seed}"
    record = loads(record, *(scattered(chance, mean * factor) for _ in range(5)))
    assert bandwidth(record) == pytest.approx(mean * factor, rel=0.25), f"seed {seed}"


@pytest.mark.parametrize("seed", range(50))
def test_an_outlier_among_twenty_scattered_loads_moves_the_estimate_by_less_than_a_fifth(seed: int) -> None:
    """E7"""
    chance = random.Random(seed)
    mean = 10 ** chance.uniform(8.0, 10.0)
    record = loads(learned(), *(scattered(chance, mean) for _ in range(9)))
    for block in range(10):
        odd = chance.randrange(20)
        for number in range(20):
            before = bandwidth(record)
            if number == odd:
                record = loads(record, mean * chance.choice([0.001, 0.01, 0.1, 0.3, 4.0, 50.0]))
                assert abs(bandwidth(record) / before - 1.0) < 0.2, f"seed {seed}, block {block}"
            else:
                record = loads(record, scattered(chance, mean))


@pytest.mark.parametrize("seed", range(20))
def test_the_spread_is_that_of_ordinary_loads(seed: int) -> None:
    """E7: it tells how far to trust an estimate, so a load in twenty that was far off does not count."""
    chance = random.Random(seed)
    record = learned()
    assert spread(record) is None
    record = loads(record, *(2e9 * chance.gauss(1.0, 0.1) for _ in range(8)), 2e7)
    known = spread(record)
    assert known is not None
    assert 0.02 < known < 0.25, f"seed {seed}"


def test_the_spread_of_a_tier_that_costs_nothing_is_none_at_all() -> None:
    record = prior("s0", Tier.DRAM)
    for _ in range(3):
        record = observe_transfer(record, size_bytes=MB, seconds=0.0)
    assert spread(record) == 0.0
