"""What the scheduler's metrics say of its estimates."""

from __future__ import annotations

import re

import pytest
from whimbrel.chassis import telemetry
from whimbrel.wire.messages import Tier

from services.scheduler import metrics
from services.scheduler.core import accuracy, bandwidth
from services.scheduler.core.ready import Ready

GB = 10**9


def shown(name: str, server_id: str) -> float | None:
    found = re.search(rf'^{name}{{server="{server_id}",tier="ssd"}} (\S+)$', telemetry.render().decode(), re.MULTILINE)
    return None if found is None else float(found[1])


def test_what_a_step_learned_of_a_tier_is_shown_with_its_scatter() -> None:
    """E6, E7"""
    record = bandwidth.prior("metered", Tier.SSD)
    metrics.observe(Ready(records=(record,)), step_s=0.0, events=1)
    metrics.show_learned()
    assert shown("whimbrel_scheduler_bandwidth_bytes_per_second", "metered") is None, "a prior was never seen"
    for seconds in (0.5, 0.4, 0.6):
        record = bandwidth.observe_transfer(record, size_bytes=GB, seconds=seconds)
    metrics.observe(Ready(records=(record,)), step_s=0.0, events=1)
    metrics.show_learned()
    bandwidth_bytes_per_s = shown("whimbrel_scheduler_bandwidth_bytes_per_second", "metered")
    assert bandwidth_bytes_per_s == pytest.approx(1 / record.seconds_per_byte) == pytest.approx(2e9, rel=0.05)
    assert shown("whimbrel_scheduler_bandwidth_spread_ratio", "metered") == pytest.approx(bandwidth.spread(record))


def test_a_tier_that_costs_nothing_has_no_bandwidth_to_show() -> None:
    record = bandwidth.observe_transfer(bandwidth.prior("free", Tier.SSD), size_bytes=GB, seconds=0.0)
    metrics.observe(Ready(records=(record,)), step_s=0.0, events=1)
    metrics.show_learned()
    assert shown("whimbrel_scheduler_bandwidth_bytes_per_second", "free") is None


def test_how_good_the_estimates_of_a_tier_were_is_shown_per_server() -> None:
    """E7"""
    record = accuracy.unknown("judged", Tier.SSD)
    for actual_s in (1.0, 1.25):
        record = accuracy.observe(record, estimate_s=1.0, actual_s=actual_s)
    metrics.observe(Ready(records=(record,)), step_s=0.0, events=1)
    metrics.show_learned()
    assert shown("whimbrel_scheduler_estimate_error_p90_seconds", "judged") == pytest.approx(0.25)
    assert shown("whimbrel_scheduler_estimate_error_p90_ratio", "judged") == pytest.approx(0.2)
