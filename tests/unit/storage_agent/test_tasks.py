"""The load tasks: every state with every event, and which of them are here."""

from __future__ import annotations

import itertools

import pytest
from whimbrel.wire.errors import QueueFull

from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.core.tasks import (
    TRANSITIONS,
    IllegalTransition,
    LoadTask,
    TaskEvent,
    Tasks,
    TaskState,
)

OVER = {TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED}


def a_task(number: int = 1, *, instance: int | None = None, now: float = 0.0) -> LoadTask:
    return LoadTask(
        task_id=f"task-{number}",
        instance_id=f"inst-{number if instance is None else instance}",
        key=CheckpointKey(model_id="m", checkpoint_digest="xxh3:1"),
        size_bytes=1,
        slots=(2, 3),
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


def test_every_state_can_be_reached() -> None:
    reached = {TaskState.QUEUED}
    for _ in TaskState:
        reached |= {target for state in reached for target in TRANSITIONS[state].values()}
    assert reached == set(TaskState)


def test_a_load_succeeds_in_one_way_wherever_its_bytes_come_from() -> None:
    task = a_task()
    for event in ("turn_came", "chunks_reserved", "worker_attached", "bytes_arrived", "worker_activated"):
        assert not task.is_over
        task.on(TaskEvent(event))
        assert task.is_running is not task.is_over
    assert task.state is TaskState.FINISHED


def test_a_task_waits_until_its_turn_comes_and_that_was_its_q() -> None:
    """E1: `q` is the time in the queue, not the time of the load."""
    task = a_task(now=5.0)
    assert not task.is_running
    assert task.queue_s(now=8.0) == 3.0
    task.start(now=9.0)
    assert task.is_running
    assert task.queue_s(now=100.0) == 4.0
    assert task.slot == 2, "the first of its slots has the worker of the instance"


def test_tasks_are_listed_running_ones_first_and_in_the_order_they_came() -> None:
    """E4, E5: the scheduler's order is kept."""
    tasks = Tasks()
    here = [a_task(number) for number in range(4)]
    assert all(tasks.add(task) for task in here)
    here[2].start(now=1.0)
    assert [task.task_id for task in tasks.all()] == ["task-2", "task-0", "task-1", "task-3"]
    assert len(tasks) == 4
    assert tasks.find("task-1") is here[1]
    here[2].on(TaskEvent.TASK_FAILED)
    tasks.remove(here[2])
    assert tasks.find("task-2") is None
    assert len(tasks) == 3


def test_a_repeated_command_and_a_second_load_of_an_instance_are_one_task() -> None:
    """E5: single flight per instance."""
    tasks = Tasks()
    first = a_task(1)
    assert tasks.add(first)
    assert not tasks.add(a_task(1, instance=7))
    assert not tasks.add(a_task(2, instance=1))
    first.start(now=0.0)
    assert not tasks.add(a_task(1)), "a running task is known too"
    assert tasks.all() == (first,)


def test_a_full_queue_says_so_and_has_room_when_a_task_ended() -> None:
    tasks = Tasks(tasks_max=2)
    first = a_task(1)
    assert tasks.add(first)
    assert tasks.add(a_task(2))
    with pytest.raises(QueueFull, match="holds 2"):
        tasks.add(a_task(3))
    first.on(TaskEvent.TASK_CANCELLED)
    tasks.remove(first)
    assert tasks.add(a_task(3))
