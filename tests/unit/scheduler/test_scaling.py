"""Keep-alive and the choice of whose turn is over."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.core.scaling import Held, choose_drain, expired

HELD = Held(
    instance_id="i1",
    model_id="a",
    capacity_bytes=100,
    ready_s=10.0,
    idle_since_s=20.0,
    keep_alive_s=5.0,
    is_idle=True,
    is_promised=False,
    is_reserved=False,
)
BUSY = replace(HELD, is_idle=False)


def test_keep_alive_counts_from_the_end_of_the_last_request() -> None:
    """R6"""
    assert expired([HELD], 24.9) == []
    assert expired([HELD], 25.0) == ["i1"]


def test_each_model_has_its_own_keep_alive_and_busy_instances_have_none() -> None:
    """R6"""
    longer = replace(HELD, instance_id="i2", keep_alive_s=50.0)
    busy = replace(HELD, instance_id="i3", is_idle=False)
    assert expired([HELD, longer, busy], 30.0) == ["i1"]


def test_the_instance_that_has_been_ready_longest_is_drained() -> None:
    younger = replace(BUSY, instance_id="i0", ready_s=11.0)
    assert choose_drain([younger, BUSY], model_id="b", size_bytes=100) == "i1"
    tied = replace(BUSY, instance_id="i0")
    assert choose_drain([BUSY, tied], model_id="b", size_bytes=100) == "i0"


def test_some_instances_are_not_drained() -> None:
    others = [
        HELD,  # idle: evicted rather than drained
        replace(BUSY, model_id="b"),  # its own
        replace(BUSY, capacity_bytes=99),  # the model would not fit there
        replace(BUSY, is_promised=True),  # its first requests have not reached it
        replace(BUSY, is_reserved=True),  # its slot is kept for another model
    ]
    assert choose_drain(others, model_id="b", size_bytes=100) is None
