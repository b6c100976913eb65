"""Owns the tasks of a server: what each is for, the states of a load task, and the order in which they came.

Rules. Everything that changes a task's state is an event, and `TRANSITIONS` says which event is legal when; a pair that
is missing there is a fault of ours and raises. An instance has at most one live task. Tasks take their turns on the
paths that their bytes cross (`turns`), in the order they came (E4, E5): reading two checkpoints over one path at once
would make both late and neither predictable (L9).

Theory of operation. A task is about an instance; bytes are the business of a filling, which several tasks may share.
ATTACHING and LOADING overlap in time: bytes move in both, the states differ in what the worker has said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from whimbrel.wire.errors import QueueFull

from services.storage_agent.core.chunks import CheckpointKey

# A server whose slots all wait for models needs one task per slot; this is far above that, so a full queue is a loop
# somewhere, and each entry costs a heartbeat a few dozen bytes.
TASKS_MAX = 64


class TaskState(StrEnum):
    QUEUED = "queued"  # waits for the loads before it
    FILLING = "filling"  # its path is free: room is made, or bytes move already
    ATTACHING = "attaching"  # every chunk has its place, the worker has not answered yet
    LOADING = "loading"  # the worker has what it needs, bytes are still on their way
    ACTIVATING = "activating"  # every byte is in place and verified; the worker is being told
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TaskEvent(StrEnum):
    TURN_CAME = "turn_came"
    CHUNKS_RESERVED = "chunks_reserved"
    WORKER_ATTACHED = "worker_attached"
    BYTES_ARRIVED = "bytes_arrived"
    WORKER_ACTIVATED = "worker_activated"
    TASK_FAILED = "task_failed"
    TASK_CANCELLED = "task_cancelled"


_ENDS = {TaskEvent.TASK_FAILED: TaskState.FAILED, TaskEvent.TASK_CANCELLED: TaskState.CANCELLED}

TRANSITIONS: dict[TaskState, dict[TaskEvent, TaskState]] = {
    TaskState.QUEUED: {TaskEvent.TURN_CAME: TaskState.FILLING, **_ENDS},
    TaskState.FILLING: {TaskEvent.CHUNKS_RESERVED: TaskState.ATTACHING, **_ENDS},
    TaskState.ATTACHING: {TaskEvent.WORKER_ATTACHED: TaskState.LOADING, **_ENDS},
    TaskState.LOADING: {TaskEvent.BYTES_ARRIVED: TaskState.ACTIVATING, **_ENDS},
    TaskState.ACTIVATING: {TaskEvent.WORKER_ACTIVATED: TaskState.FINISHED, **_ENDS},
    TaskState.FINISHED: {},
    TaskState.FAILED: {},
    TaskState.CANCELLED: {},
}


class IllegalTransition(Exception):
    """We broke our own table: `event` means nothing to a task in `state`."""

    def __init__(self, state: TaskState, event: TaskEvent) -> None:
        self.state = state
        self.event = event
        super().__init__(f"a load task that is {state} can't take {event}")


@dataclass(slots=True, kw_only=True, eq=False)
class LoadTask:
    """Make a checkpoint resident and give it to an instance. Times are monotonic seconds."""

    task_id: str
    instance_id: str
    key: CheckpointKey
    size_bytes: int
    slots: tuple[int, ...]
    queued_s: float
    started_s: float | None = None
    state: TaskState = TaskState.QUEUED
    is_cancel_requested: bool = field(default=False)

    @property
    def slot(self) -> int:
        """The slot whose worker serves the instance."""
        return self.slots[0]

    def on(self, event: TaskEvent) -> None:
        """The only writer of `state`; raises IllegalTransition."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            raise IllegalTransition(self.state, event)
        self.state = state

    def start(self, now: float) -> None:
        """Its path is free; what it waited until now was for others."""
        self.on(TaskEvent.TURN_CAME)
        self.started_s = now

    @property
    def is_running(self) -> bool:
        return self.state is not TaskState.QUEUED and not self.is_over

    @property
    def is_over(self) -> bool:
        return not TRANSITIONS[self.state]

    def queue_s(self, now: float) -> float:
        """How long it waited for the tasks before it: its `q` (E1)."""
        return (now if self.started_s is None else self.started_s) - self.queued_s


class Tasks:
    """The live tasks of a server in the order they came."""

    def __init__(self, *, tasks_max: int = TASKS_MAX) -> None:
        self._tasks_max = tasks_max
        self._tasks: dict[str, LoadTask] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def all(self) -> tuple[LoadTask, ...]:
        """Those that run first, then those that wait, each in the order they came."""
        return tuple(sorted(self._tasks.values(), key=lambda task: not task.is_running))

    def find(self, task_id: str) -> LoadTask | None:
        return self._tasks.get(task_id)

    def add(self, task: LoadTask) -> bool:
        """A new task. False when its task or its instance is here already; raises QueueFull."""
        assert task.state is TaskState.QUEUED
        if any(t.task_id == task.task_id or t.instance_id == task.instance_id for t in self._tasks.values()):
            return False
        if len(self._tasks) >= self._tasks_max:
            raise QueueFull(queue="the load queue", limit=self._tasks_max)
        self._tasks[task.task_id] = task
        return True

    def remove(self, task: LoadTask) -> None:
        """The task is over."""
        assert task.is_over
        del self._tasks[task.task_id]
