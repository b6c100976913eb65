"""The load queue: every state with every event, and the order of the queue."""

from __future__ import annotations

import itertools

import pytest
from whimbrel.wire.errors import QueueFull

from services.storage_agent.core.tasks import (
    TRANSITIONS,
    IllegalTransition,
    LoadQueue,
    LoadTask,
    TaskEvent,
    TaskState,
)

OVER = {TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED}


def a_task(number: int = 1, *, instance: int | None = None, now: float = 0.0) -> LoadTask:
    return LoadTask(
        task_id=f"task-{number}",
        instance_id=f"inst-{number if instance is None else instance}",
        model_id="m",
        checkpoint_digest="xxh3:1",
        size_bytes=1,
        slot=0,
        queued_s=now,
    )


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TaskState, TaskEvent)))
def test_a_task_moves_as_the_table_says_or_not_at_all(state: TaskState, event: TaskEvent) -> None:
    task = a_task()
    task.state = state
    expected = TRANSITIONS[state].get(event)
    if expected is None:
        with pytest.raises(IllegalTransition, match=f"{state} can't take {event}"):
            task.on(event)
        assert task.state is state
    else:
        task.on(event)
        assert task.state is expected


def test_the_table_is_total_and_every_live_state_can_fail_and_be_cancelled() -> None:
    assert set(TRANSITIONS) == set(TaskState)
    for state, row in TRANSITIONS.items():
        if state in OVER:
            assert row == {}
        else:
            assert row[TaskEvent.TASK_FAILED] is TaskState.FAILED
            assert row[TaskEvent.TASK_CANCELLED] is TaskState.CANCELLED


def test_every_state_can_be_reached_and_every_live_state_can_end() -> None:
    reached = {TaskState.QUEUED}
    for _ in TaskState:
        reached |= {target for state in reached for target in TRANSITIONS[state].values()}
    assert reached == set(TaskState)


@pytest.mark.parametrize(
    "events",
    [
        "chunks_reserved worker_attached bytes_arrived worker_activated",
        "fetch_started chunks_reserved worker_attached bytes_arrived worker_activated",
        "chunks_reserved worker_attached copy_rejected copy_replaced bytes_arrived worker_activated",
    ],
    ids=["from DRAM or SSD", "from REMOTE", "from a bad SSD copy"],
)
def test_the_ways_a_load_succeeds(events: str) -> None:
    task = a_task()
    for event in events.split():
        assert not task.is_over
        task.on(TaskEvent(event))
    assert task.state is TaskState.FINISHED


def test_tasks_run_one_at_a_time_in_the_order_they_came() -> None:
    """E4, E5: one loading task at a time, first in first out."""
    queue = LoadQueue()
    tasks = [a_task(number, now=float(number)) for number in range(3)]
    assert all(queue.add(task) for task in tasks)
    for number, task in enumerate(tasks):
        assert queue.start_next(now=10.0 + number) is task
        assert queue.start_next(now=99.0) is None, "one at a time"
        assert queue.running is task
        assert task.queue_s == 10.0
        task.on(TaskEvent.TASK_FAILED)
        queue.release(task)
    assert queue.start_next(now=99.0) is None
    assert queue.tasks() == ()


def test_a_repeated_command_and_a_second_load_of_an_instance_are_one_task() -> None:
    queue = LoadQueue()
    assert queue.add(a_task(1))
    assert not queue.add(a_task(1))
    assert not queue.add(a_task(2, instance=1)), "single flight per instance"
    assert queue.start_next(now=0.0) is not None
    assert not queue.add(a_task(1)), "a running task is known too"
    assert [task.task_id for task in queue.tasks()] == ["task-1"]


def test_a_full_queue_says_so() -> None:
    queue = LoadQueue(tasks_max=2)
    queue.add(a_task(1))
    queue.add(a_task(2))
    with pytest.raises(QueueFull, match="holds 2"):
        queue.add(a_task(3))


def test_a_waiting_task_is_cancelled_at_once() -> None:
    queue = LoadQueue()
    queue.add(a_task(1))
    queue.add(a_task(2))
    cancelled = queue.cancel("task-2")
    assert cancelled is not None
    assert cancelled.state is TaskState.CANCELLED
    assert [task.task_id for task in queue.tasks()] == ["task-1"]


def test_a_running_task_is_asked_to_stop_and_stays_until_it_did() -> None:
    queue = LoadQueue()
    queue.add(a_task(1))
    running = queue.start_next(now=0.0)
    assert running is not None
    assert queue.cancel("task-1") is running
    assert running.is_cancel_requested
    assert not running.is_over
    assert queue.running is running


def test_cancelling_a_task_that_is_not_here_does_nothing() -> None:
    assert LoadQueue().cancel("task-9") is None
