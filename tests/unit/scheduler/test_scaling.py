"""How many instances a model should have, keep-alive, and the choice of whose turn is over."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from whimbrel.wire.messages import Scaling

from services.scheduler.core.scaling import Drain, Held, Holder, choose_drain, choose_surplus, desired, expired
from services.scheduler.core.views import SlotView, Task

IDLE = Held(
    instance_id="i1",
    model_id="a",
    slots=(SlotView(0),),
    room_bytes=100,
    ready_s=10.0,
    idle_since_s=20.0,
    keep_alive_s=5.0,
    demand=0,
    is_idle=True,
    is_promised=False,
    is_reserved=False,
    is_minimum=False,
)
BUSY = replace(IDLE, is_idle=False, demand=1)
TASK = Task(model_id="b", checkpoint_digest="d", size_bytes=100, partition_bytes=(100,))


def a_holder(*held: Held, server_id: str = "s0", capacity_bytes: int = 100, free: tuple[SlotView, ...] = ()) -> Holder:
    return Holder(
        server_id=server_id,
        is_host=True,
        capacity_bytes=capacity_bytes,
        used_bytes=sum(one.room_bytes for one in held),
        free_slots=free,
        held=held,
    )


def a_gpu_holder(*held: Held, free: tuple[SlotView, ...] = ()) -> Holder:
    return Holder(
        server_id="g0",
        is_host=False,
        capacity_bytes=1000,
        used_bytes=0,
        free_slots=free,
        held=tuple(replace(one, room_bytes=0) for one in held),
    )


@pytest.mark.parametrize(
    ("demand", "scaling", "instances"),
    [
        (0, Scaling(), 0),
        (1, Scaling(), 1),
        (100, Scaling(), 1),
        (9, Scaling(max_instances=4), 2),
        (16, Scaling(max_instances=4), 2),
        (17, Scaling(max_instances=4), 3),
        (1000, Scaling(max_instances=4), 4),
        (0, Scaling(min_instances=2, max_instances=4), 2),
        (3, Scaling(max_instances=4, target_concurrency=1), 3),
    ],
)
def test_demand_over_target_within_the_bounds_is_how_many_there_should_be(
    demand: int, scaling: Scaling, instances: int
) -> None:
    """R6: desired = ceil(demand / target)."""
    assert desired(demand, scaling) == instances


def test_keep_alive_counts_from_the_end_of_the_last_request() -> None:
    """R6"""
    assert expired([IDLE], 24.9) == []
    assert expired([IDLE], 25.0) == ["i1"]


def test_each_model_has_its_own_keep_alive_and_busy_instances_have_none() -> None:
    """R6"""
    longer = replace(IDLE, instance_id="i2", keep_alive_s=50.0)
    busy = replace(IDLE, instance_id="i3", is_idle=False)
    assert expired([IDLE, longer, busy], 30.0) == ["i1"]


def test_instances_of_a_minimum_outlive_their_keep_alive() -> None:
    """R6"""
    assert expired([replace(IDLE, is_minimum=True)], 1000.0) == []


def test_of_too_many_instances_the_one_with_the_least_to_do_goes() -> None:
    """R6"""
    least = replace(BUSY, instance_id="i2", demand=1)
    most = replace(BUSY, instance_id="i0", demand=5)
    assert choose_surplus([most, least]) == "i2"
    younger = replace(least, instance_id="i3", ready_s=11.0)
    assert choose_surplus([most, least, younger]) == "i3"
    assert choose_surplus([replace(least, is_promised=True), replace(most, is_reserved=True)]) is None


def test_the_instance_that_has_been_ready_longest_is_drained() -> None:
    younger = replace(BUSY, instance_id="i0", ready_s=11.0, slots=(SlotView(1),))
    holder = a_holder(younger, BUSY, capacity_bytes=200)
    assert choose_drain([holder], TASK) == Drain(server_id="s0", slots=(0,), instance_ids=("i1",))
    other = a_holder(replace(BUSY, instance_id="i9", ready_s=9.0), server_id="s1")
    assert choose_drain([holder, other], TASK) == Drain(server_id="s1", slots=(0,), instance_ids=("i9",))


def test_as_few_instances_as_possible_are_drained() -> None:
    small = replace(BUSY, room_bytes=50, ready_s=1.0)
    two = a_holder(small, replace(small, instance_id="i2", slots=(SlotView(1),)), capacity_bytes=100)
    one = a_holder(replace(BUSY, instance_id="i3", ready_s=99.0), server_id="s1")
    drain = choose_drain([two, one], TASK)
    assert drain is not None
    assert drain.instance_ids == ("i3",)
    assert choose_drain([two], TASK) == Drain(server_id="s0", slots=(0,), instance_ids=("i1", "i2"))


@pytest.mark.parametrize(
    "held",
    [
        IDLE,  # alone it would have been evicted
        replace(BUSY, model_id="b"),  # its own
        replace(BUSY, is_promised=True),  # its first requests have not reached it
        replace(BUSY, is_reserved=True),  # its slot is kept for another model
        replace(BUSY, is_minimum=True),  # an operator wants it there
    ],
)
def test_some_instances_are_not_drained(held: Held) -> None:
    assert choose_drain([a_holder(held)], TASK) is None


def test_nothing_is_drained_where_the_model_would_not_fit_anyway() -> None:
    assert choose_drain([a_holder(BUSY, capacity_bytes=99)], TASK) is None


def test_a_model_of_two_partitions_gets_two_slots_with_memory_for_each() -> None:
    """E2: on GPUs each partition needs a slot of its own."""
    task = replace(TASK, partition_bytes=(60, 40))
    small, large = SlotView(0, 40), SlotView(1, 80)
    holder = a_gpu_holder(replace(BUSY, slots=(large,)), free=(small,))
    assert choose_drain([holder], task) == Drain(server_id="g0", slots=(1, 0), instance_ids=("i1",))
    assert choose_drain([a_gpu_holder(replace(BUSY, slots=(small,)), free=(small,))], task) is None
