"""The route table, and the watch over workers' lives."""

from __future__ import annotations

import pytest
from whimbrel.wire.messages import InstanceActivity, Route, RouteState, WorkerHeartbeat, WorkerState

from services.router.core.routes import RouteTable
from services.router.core.workers import WorkerWatch
from tests.unit.router.peers import a_route


def a_draining_route(model_id: str, instance_id: str) -> Route:
    route = a_route(model_id, instance_id)
    return Route(
        instance_id=route.instance_id,
        model_id=route.model_id,
        server_id=route.server_id,
        slot=route.slot,
        state=RouteState.DRAINING,
    )


def a_table(*routes: Route) -> RouteTable:
    table = RouteTable()
    for route in routes:
        table.add(route)
    return table


def test_a_model_without_instance_has_no_route() -> None:
    """R1: no running instance, so the scheduler has to be asked."""
    assert a_table(a_route("a")).choose("b") is None


def test_the_instance_with_the_fewest_requests_is_chosen() -> None:
    table = a_table(a_route("a", "i1"), a_route("a", "i2"))
    table.acquire("i1")
    chosen = table.choose("a")
    assert chosen is not None
    assert chosen.instance_id == "i2"


def test_of_equal_instances_the_oldest_is_chosen_however_often_it_is_told_of() -> None:
    table = a_table(a_route("a", "i1"), a_route("a", "i2"), a_route("a", "i1"))
    assert table.choose("a") == a_route("a", "i1")


def test_a_draining_instance_gets_no_new_request() -> None:
    table = a_table(a_route("a", "i1"))
    table.add(a_draining_route("a", "i1"))
    assert table.choose("a") is None
    assert "i1" in table


def test_an_expected_instance_is_known_and_gets_no_new_request_until_it_is_added() -> None:
    """G10: a request was handed over to it, and the scheduler has not told of it yet."""
    table = a_table()
    table.expect(a_route("a", "i1"))
    assert table.choose("a") is None
    assert "i1" in table
    assert [route.instance_id for route in table.on_worker("server-0", 0)] == ["i1"]
    table.add(a_route("a", "i1"))
    table.expect(a_route("a", "i1"))
    assert table.choose("a") == a_route("a", "i1")


def test_an_instance_that_may_not_be_used_is_passed_over() -> None:
    table = a_table(a_route("a", "i1"), a_route("a", "i2"))
    chosen = table.choose("a", lambda instance_id: instance_id != "i1")
    assert chosen is not None
    assert chosen.instance_id == "i2"


def test_removing_a_route_keeps_its_requests_counted_until_they_end() -> None:
    table = a_table(a_route("a", "i1"))
    table.acquire("i1")
    table.acquire("i1")
    assert table.remove("i1") == a_route("a", "i1")
    assert table.remove("i1") is None
    assert table.activity() == (InstanceActivity(instance_id="i1", requests=2),)
    table.release("i1")
    table.release("i1")
    assert table.activity() == ()
    assert len(table) == 0


def test_activity_sums_up_what_the_requests_of_an_instance_say() -> None:
    """M2, M3: t_in, and the d of t_out = d / t, without asking the GPU server."""
    table = a_table(a_route("a", "i1"), a_route("b", "i2"))
    for instance_id in ("i1", "i1", "i2"):
        table.acquire(instance_id)
    running = [
        InstanceActivity(instance_id="i1", requests=1, prompt_tokens=100, running_s=2.0),
        InstanceActivity(instance_id="i1", requests=1, prompt_tokens=7, running_s=0.5),
        InstanceActivity(instance_id="i3", requests=1, prompt_tokens=9, running_s=1.0),
    ]
    assert table.activity(running) == (
        InstanceActivity(instance_id="i1", requests=2, prompt_tokens=107, running_s=2.5),
        InstanceActivity(instance_id="i2", requests=1),
    )


def test_releasing_more_often_than_acquiring_is_a_programmer_error() -> None:
    with pytest.raises(AssertionError, match="more often"):
        a_table().release("i1")


def test_the_instances_of_a_worker_are_found() -> None:
    table = a_table(a_route("a", "i1", slot=0), a_route("b", "i2", slot=1))
    assert [route.instance_id for route in table.on_worker("server-0", 1)] == ["i2"]
    assert table.on_worker("server-9", 0) == []


def a_heartbeat(epoch: int) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        server_id="server-0",
        slot=0,
        epoch=epoch,
        device="cpu",
        state=WorkerState.READY,
        instance_id="i1",
        model_id="a",
        active_requests=0,
    )


WORKER = ("server-0", 0)


def test_a_silent_worker_is_lost_once() -> None:
    watch = WorkerWatch(3.0)
    watch.on_heartbeat(a_heartbeat(1), 0.0)
    assert watch.take_lost(2.9) == []
    assert watch.take_lost(3.0) == [WORKER]
    assert watch.take_lost(9.0) == []


def test_a_worker_that_was_only_heard_of_is_expected_to_speak() -> None:
    watch = WorkerWatch(3.0)
    watch.expect(WORKER, 0.0)
    watch.expect(WORKER, 2.0)
    assert watch.take_lost(3.0) == [WORKER]


def test_a_new_epoch_is_a_new_life_and_an_old_one_is_late_news() -> None:
    watch = WorkerWatch(3.0)
    is_new = [watch.on_heartbeat(a_heartbeat(epoch), 0.0) for epoch in (5, 5, 6, 5, 6)]
    assert is_new == [False, False, True, False, False]


def test_nobody_is_lost_while_we_could_not_hear() -> None:
    watch = WorkerWatch(3.0)
    watch.on_heartbeat(a_heartbeat(1), 0.0)
    watch.forgive(10.0)
    assert watch.take_lost(12.0) == []
