"""t_load = q + n / b."""

from __future__ import annotations

import pytest
from whimbrel.wire.messages import Tier
from whimbrel.wire.records import BandwidthRecord

from services.scheduler.core.bandwidth import observe_overhead, observe_transfer, prior
from services.scheduler.core.estimates import PathSpeed, estimate_load, path_speeds

GB = 10**9


def known(tier: Tier, bandwidth: float, overhead_s: float = 0.0) -> BandwidthRecord:
    record = observe_transfer(prior("s0", tier), size_bytes=GB, seconds=GB / bandwidth)
    return observe_overhead(record, overhead_s)


@pytest.mark.parametrize(
    ("queue_s", "size_bytes", "bandwidth", "overhead_s", "total_s"),
    [(0.0, GB, 2e9, 0.0, 0.5), (3.0, GB, 2e9, 0.0, 3.5), (3.0, 0, 2e9, 0.1, 3.1), (0.0, 4 * GB, 1e9, 0.05, 4.05)],
)
def test_the_estimate_is_queue_plus_bytes_over_bandwidth_plus_overhead(
    queue_s: float, size_bytes: int, bandwidth: float, overhead_s: float, total_s: float
) -> None:
    """E1, E2, E3"""
    speed = PathSpeed(source_tier=Tier.SSD, seconds_per_byte=1 / bandwidth, overhead_s=overhead_s, is_prior=False)
    estimate = estimate_load(queue_s=queue_s, size_bytes=size_bytes, speed=speed)
    assert estimate.total_s == pytest.approx(total_s)
    assert estimate.load_s == pytest.approx(total_s - queue_s)


def test_the_slowest_tier_of_a_path_is_its_bandwidth() -> None:
    """E3"""
    tiers = {
        Tier.REMOTE: known(Tier.REMOTE, 1e8, 0.3),
        Tier.SSD: known(Tier.SSD, 2e9, 0.2),
        Tier.DRAM: known(Tier.DRAM, 1e10, 0.1),
    }
    speeds = path_speeds("s0", tiers, 0.0)
    assert {tier: 1 / speed.seconds_per_byte for tier, speed in speeds.items()} == pytest.approx(
        {Tier.REMOTE: 1e8, Tier.SSD: 2e9, Tier.DRAM: 1e10}
    )
    assert {tier: speed.overhead_s for tier, speed in speeds.items()} == pytest.approx(
        {Tier.REMOTE: 0.3, Tier.SSD: 0.2, Tier.DRAM: 0.1}
    )
    slow_disk = path_speeds("s0", {**tiers, Tier.SSD: known(Tier.SSD, 5e7)}, 0.0)
    assert 1 / slow_disk[Tier.REMOTE].seconds_per_byte == pytest.approx(5e7)


def test_an_estimate_says_whether_its_bandwidth_was_ever_observed() -> None:
    """E6"""
    speeds = path_speeds("s0", {Tier.SSD: known(Tier.SSD, 2e9)}, 0.0)
    assert {tier: speed.is_prior for tier, speed in speeds.items()} == {
        Tier.REMOTE: True, Tier.SSD: False, Tier.DRAM: True,
    }  # fmt: skip


def test_a_path_says_how_sure_its_bandwidth_is_once_there_are_loads_to_tell() -> None:
    """E6: priors and first loads have no spread; later ones do, and a slow one among them does not count."""
    tiers = {Tier.SSD: known(Tier.SSD, 2e9)}
    assert path_speeds("s0", {}, 0.0)[Tier.SSD].spread is None
    assert path_speeds("s0", tiers, 0.0)[Tier.SSD].spread is None
    for bandwidth in (1.8e9, 2.2e9, 2e9, 1e8, 1.9e9):
        tiers[Tier.SSD] = observe_transfer(tiers[Tier.SSD], size_bytes=GB, seconds=GB / bandwidth)
    spread = path_speeds("s0", tiers, 0.0)[Tier.SSD].spread
    assert spread is not None
    assert 0.03 < spread < 0.12
