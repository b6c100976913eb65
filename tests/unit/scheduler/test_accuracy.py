"""How good our estimates were, as operators see it."""

from __future__ import annotations

import pytest
from whimbrel.wire.messages import Tier
from whimbrel.wire.records import AccuracyRecord

from services.scheduler.core.accuracy import KEPT, observe, quality, unknown


def seen(*pairs: tuple[float, float]) -> AccuracyRecord:
    record = unknown("s0", Tier.SSD)
    for estimate_s, actual_s in pairs:
        record = observe(record, estimate_s=estimate_s, actual_s=actual_s)
    return record


def test_nothing_is_said_of_no_loads() -> None:
    """E7"""
    assert unknown("s0", Tier.SSD).key() == "s0/ssd"
    assert quality(unknown("s0", Tier.SSD)).observations == 0
    assert quality(unknown("s0", Tier.SSD)).error_s_p90 == 0.0


def test_nine_of_ten_loads_are_within_the_error_that_is_said() -> None:
    """E7"""
    record = seen(*[(1.0, 1.1)] * 18, (1.0, 3.0), (3.0, 1.0))
    assert quality(record).observations == 20
    assert quality(record).error_s_p90 == pytest.approx(0.1)
    assert quality(record).error_share_p90 == pytest.approx(0.1 / 1.1)


def test_more_than_one_bad_load_in_ten_shows() -> None:
    """E7"""
    record = seen(*[(1.0, 1.0)] * 7, *[(1.0, 2.0)] * 3)
    assert quality(record).error_s_p90 == pytest.approx(1.0)
    assert quality(record).error_share_p90 == pytest.approx(0.5)


def test_an_estimate_that_is_too_high_is_as_wrong_as_one_that_is_too_low() -> None:
    assert quality(seen((1.2, 1.0))).error_s_p90 == pytest.approx(quality(seen((0.8, 1.0))).error_s_p90)


def test_only_the_last_loads_count() -> None:
    """E7: what was learned since has made it better."""
    record = seen(*[(9.0, 1.0)] * 50, *[(1.0, 1.0)] * KEPT)
    assert len(record.recent) == KEPT
    assert quality(record).error_s_p90 == 0.0


def test_a_load_that_took_no_time_at_all_is_no_reason_to_fail() -> None:
    assert quality(seen((0.002, 0.0))).error_share_p90 == pytest.approx(2.0)
