"""The load queue of a server and its drain time q."""

from __future__ import annotations

import pytest

from services.scheduler.core.queues import LoadQueue


def a_queue(*loads_s: float, now: float = 100.0) -> LoadQueue:
    queue = LoadQueue()
    for number, load_s in enumerate(loads_s):
        queue.enqueue(f"t{number}", load_s, now=now)
    return queue


def test_an_empty_queue_drains_at_once() -> None:
    """E1"""
    assert a_queue().drain_s(100.0) == 0.0
    assert len(a_queue()) == 0


def test_q_is_the_sum_of_the_estimates_in_the_queue() -> None:
    """E1"""
    assert a_queue(2.0, 3.0, 4.0).drain_s(100.0) == pytest.approx(9.0)


def test_the_running_task_counts_with_what_remains_of_it() -> None:
    """E1"""
    queue = a_queue(2.0, 3.0)
    assert queue.drain_s(101.5) == pytest.approx(3.5)
    assert queue.drain_s(109.0) == pytest.approx(3.0), "late is not negative"


def test_progress_tells_what_remains_better_than_the_clock() -> None:
    """E5"""
    queue = a_queue(2.0, 3.0)
    queue.progress("t0", 0.5, now=104.0)
    assert queue.drain_s(104.0) == pytest.approx(1.0 + 3.0)
    queue.progress("t0", 7.0, now=105.0)
    assert queue.drain_s(105.0) == pytest.approx(3.0)
    queue.progress("unknown", 0.1, now=105.0)
    assert queue.drain_s(105.0) == pytest.approx(3.0)


def test_the_next_task_starts_when_the_running_one_completes() -> None:
    """E4, E5: first in, first out."""
    queue = a_queue(2.0, 3.0, 4.0)
    assert queue.remove("t0", now=110.0)
    assert queue.drain_s(110.0) == pytest.approx(7.0)
    assert queue.drain_s(111.0) == pytest.approx(6.0)


def test_cancelling_a_waiting_task_shortens_the_queue_only() -> None:
    """E5"""
    queue = a_queue(2.0, 3.0, 4.0)
    assert queue.remove("t1", now=101.0)
    assert queue.drain_s(101.0) == pytest.approx(1.0 + 4.0)
    assert not queue.remove("t1", now=101.0)
    assert queue.remove("t0", now=101.0)
    assert queue.remove("t2", now=101.0)
    assert queue.drain_s(101.0) == 0.0


def test_the_task_that_the_agent_runs_is_the_running_one() -> None:
    """E4: after a restart the agent's order may be another one than ours."""
    queue = a_queue(2.0, 3.0)
    queue.progress("t1", 0.0, now=101.0)
    assert queue.drain_s(101.0) == pytest.approx(3.0 + 2.0)
    assert queue.running_ends_s == pytest.approx(104.0)
