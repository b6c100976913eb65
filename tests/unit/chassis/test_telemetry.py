"""Metrics: one registry, named instruments."""

from __future__ import annotations

import pytest
from whimbrel.chassis import telemetry


def test_the_same_name_is_the_same_instrument() -> None:
    first = telemetry.counter("whimbrel_test_things_total", "Things.", ["kind"])
    again = telemetry.counter("whimbrel_test_things_total", "Things.", ["kind"])
    first.labels(kind="a").inc(2)

    assert again is first
    assert b'whimbrel_test_things_total{kind="a"} 2.0' in telemetry.render()


def test_every_kind_of_instrument_is_rendered() -> None:
    telemetry.gauge("whimbrel_test_depth_messages", "Depth.").set(7)
    telemetry.histogram("whimbrel_test_wait_seconds", "Wait.").observe(0.02)

    text = telemetry.render().decode()

    assert "whimbrel_test_depth_messages 7.0" in text
    assert 'whimbrel_test_wait_seconds_bucket{le="0.01"} 0.0' in text
    assert 'whimbrel_test_wait_seconds_bucket{le="0.03"} 1.0' in text
    assert "process_resident_memory_bytes" in text


def test_one_name_cannot_be_two_kinds() -> None:
    telemetry.counter("whimbrel_test_once_total", "Once.")
    with pytest.raises(AssertionError, match="already a Counter"):
        telemetry.gauge("whimbrel_test_once_total", "Twice.")


@pytest.mark.parametrize("name", ["requests", "whimbrel", "whimbrel_requests", "whimbrel_Test_x", "router_x_total"])
def test_a_name_outside_the_grammar_is_refused(name: str) -> None:
    with pytest.raises(AssertionError, match="whimbrel_<service>_<what>_<unit>"):
        telemetry.counter(name, "Wrong.")
