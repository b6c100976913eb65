"""Owns the load queue of a server: load tasks, the states of each, and the order in which they run.

Rules. Everything that changes a task's state is an event, and `TRANSITIONS` says which event is legal when; a pair that
is missing there is a fault of ours and raises. Tasks run one at a time in the order they came (E4, E5): reading two
checkpoints at once would make both late and neither predictable (L9). An instance has at most one live task.

Theory of operation. ATTACHING and LOADING overlap in time: bytes are being read in both, the states differ in what the
worker has said. A copy on the SSD that turns out to be bad sends a task from LOADING back to FETCHING, once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from whimbrel.wire.errors import QueueFull

# A server whose slots all wait for models needs one task per slot; this is far above that, so a full queue is a loop
# somewhere, and each entry costs a heartbeat a few dozen bytes.
TASKS_MAX = 64


class TaskState(StrEnum):
    QUEUED = "queued"  # waits for the tasks before it
    FETCHING = "fetching"  # bytes move from the repository to the SSD
    ATTACHING = "attaching"  # chunks are reserved, reading began, the worker has not answered yet
    LOADING = "loading"  # the worker maps the chunks, bytes are still on their way
    ACTIVATING = "activating"  # every byte is in place and verified; the worker is being told
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TaskEvent(StrEnum):
    FETCH_STARTED = "fetch_started"
    CHUNKS_RESERVED = "chunks_reserved"
    WORKER_ATTACHED = "worker_attached"
    COPY_REJECTED = "copy_rejected"
    COPY_REPLACED = "copy_replaced"
    BYTES_ARRIVED = "bytes_arrived"
    WORKER_ACTIVATED = "worker_activated"
    TASK_FAILED = "task_failed"
    TASK_CANCELLED = "task_cancelled"


TRANSITIONS: dict[TaskState, dict[TaskEvent, TaskState]] = {
    TaskState.QUEUED: {
        TaskEvent.FETCH_STARTED: TaskState.FETCHING,
        TaskEvent.CHUNKS_RESERVED: TaskState.ATTACHING,
        TaskEvent.TASK_FAILED: TaskState.FAILED,
        TaskEvent.TASK_CANCELLED: TaskState.CANCELLED,
    },
    TaskState.FETCHING: {
        TaskEvent.CHUNKS_RESERVED: TaskState.ATTACHING,
        TaskEvent.COPY_REPLACED: TaskState.LOADING,
        TaskEvent.TASK_FAILED: TaskState.FAILED,
        TaskEvent.TASK_CANCELLED: TaskState.CANCELLED,
    },
    TaskState.ATTACHING: {
        TaskEvent.WORKER_ATTACHED: TaskState.LOADING,
        TaskEvent.TASK_FAILED: TaskState.FAILED,
        TaskEvent.TASK_CANCELLED: TaskState.CANCELLED,
    },
    TaskState.LOADING: {
        TaskEvent.BYTES_ARRIVED: TaskState.ACTIVATING,
        TaskEvent.COPY_REJECTED: TaskState.FETCHING,
        TaskEvent.TASK_FAILED: TaskState.FAILED,
        TaskEvent.TASK_CANCELLED: TaskState.CANCELLED,
    },
    TaskState.ACTIVATING: {
        TaskEvent.WORKER_ACTIVATED: TaskState.FINISHED,
        TaskEvent.TASK_FAILED: TaskState.FAILED,
        TaskEvent.TASK_CANCELLED: TaskState.CANCELLED,
    },
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
    model_id: str
    checkpoint_digest: str
    size_bytes: int
    slot: int
    queued_s: float
    started_s: float | None = None
    state: TaskState = TaskState.QUEUED
    is_cancel_requested: bool = field(default=False)

    def on(self, event: TaskEvent) -> None:
        """The only writer of `state`; raises IllegalTransition."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            raise IllegalTransition(self.state, event)
        self.state = state

    @property
    def is_over(self) -> bool:
        return not TRANSITIONS[self.state]

    @property
    def queue_s(self) -> float:
        """How long it waited for the tasks before it: its `q` (E1)."""
        return 0.0 if self.started_s is None else self.started_s - self.queued_s


class LoadQueue:
    """FIFO, one task runs at a time, one live task per instance."""

    def __init__(self, *, tasks_max: int = TASKS_MAX) -> None:
        self._tasks_max = tasks_max
        self._waiting: deque[LoadTask] = deque()
        self._running: LoadTask | None = None

    @property
    def running(self) -> LoadTask | None:
        return self._running

    def tasks(self) -> tuple[LoadTask, ...]:
        """Running and waiting ones, in order."""
        return (*(() if self._running is None else (self._running,)), *self._waiting)

    def find(self, task_id: str) -> LoadTask | None:
        return next((task for task in self.tasks() if task.task_id == task_id), None)

    def add(self, task: LoadTask) -> bool:
        """Queue a task. False when its task or its instance is here already; raises QueueFull."""
        assert task.state is TaskState.QUEUED
        if any(t.task_id == task.task_id or t.instance_id == task.instance_id for t in self.tasks()):
            return False
        if len(self.tasks()) >= self._tasks_max:
            raise QueueFull(queue="the load queue", limit=self._tasks_max)
        self._waiting.append(task)
        return True

    def start_next(self, *, now: float) -> LoadTask | None:
        """The task that may run now, or None while one runs or none waits."""
        if self._running is not None or not self._waiting:
            return None
        self._running = self._waiting.popleft()
        self._running.started_s = now
        return self._running

    def release(self, task: LoadTask) -> None:
        """The running task is over; the next one may start."""
        assert task is self._running
        assert task.is_over
        self._running = None

    def cancel(self, task_id: str) -> LoadTask | None:
        """Cancel a task: one that waits is over now, one that runs is asked to stop. None when it isn't here."""
        task = self.find(task_id)
        if task is None:
            return None
        task.is_cancel_requested = True
        if task is not self._running:
            self._waiting.remove(task)
            task.on(TaskEvent.TASK_CANCELLED)
        return task
