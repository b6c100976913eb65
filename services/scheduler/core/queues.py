"""Owns the load queues of a server as the scheduler sees them: first in, first out; the drain time of one is q.

One load at a time per shared path (E4) makes q the sum of the estimates that are queued there, plus what remains of the
running one (E1). It is updated when a task is queued, progresses, completes or is cancelled (E5). What DRAM has crosses
no shared path, so it waits for nobody.
"""

from __future__ import annotations

import msgspec
from whimbrel.wire.messages import Tier


class QueuedTask(msgspec.Struct, kw_only=True):
    """A task and its own estimate, the time it will take once it runs."""

    task_id: str
    load_s: float


class LoadQueue:
    """The first task runs; the others wait for it. Bounded by the slots of the server: a slot loads one instance."""

    def __init__(self) -> None:
        self._tasks: list[QueuedTask] = []
        self._running_ends_s = 0.0

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def running_ends_s(self) -> float:
        """When the running task should end."""
        return self._running_ends_s if self._tasks else 0.0

    @property
    def queued_s(self) -> float:
        """Sum of the estimates of the tasks that wait."""
        return sum(task.load_s for task in self._tasks[1:])

    def drain_s(self, now: float) -> float:
        """q: seconds until a task that is queued now would start."""
        return max(0.0, self.running_ends_s - now) + self.queued_s

    def enqueue(self, task_id: str, load_s: float, *, now: float) -> None:
        assert load_s >= 0.0
        self._tasks.append(QueuedTask(task_id=task_id, load_s=load_s))
        if len(self._tasks) == 1:
            self._start_first(now)

    def progress(self, task_id: str, done_share: float, *, now: float) -> None:
        """The agent runs this task and `done_share` of it is done: what remains is known better than by the clock."""
        position = self._find(task_id)
        if position is None:
            return
        task = self._tasks.pop(position)
        self._tasks.insert(0, task)
        self._running_ends_s = now + (1.0 - min(1.0, max(0.0, done_share))) * task.load_s

    def remove(self, task_id: str, *, now: float) -> bool:
        """The task completed or was cancelled; the next one starts. False when it is not here."""
        position = self._find(task_id)
        if position is None:
            return False
        del self._tasks[position]
        if position == 0 and self._tasks:
            self._start_first(now)
        return True

    def _start_first(self, now: float) -> None:
        self._running_ends_s = now + self._tasks[0].load_s

    def _find(self, task_id: str) -> int | None:
        return next((k for k, task in enumerate(self._tasks) if task.task_id == task_id), None)


class PathWait(msgspec.Struct, frozen=True):
    """What a task that is queued on a path now would wait for; `running_ends_s` is a time, `queued_s` a duration."""

    running_ends_s: float = 0.0
    queued_s: float = 0.0

    def queue_s(self, now: float) -> float:
        """q"""
        running_s = self.running_ends_s - now
        return running_s + self.queued_s if running_s > 0.0 else self.queued_s


NO_WAIT = PathWait()


class PathQueues:
    """The queues of the shared paths of one server, by the tier that their loads start from."""

    def __init__(self) -> None:
        self._queues = {Tier.REMOTE: LoadQueue(), Tier.SSD: LoadQueue()}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def enqueue(self, source: Tier, task_id: str, load_s: float, *, now: float) -> None:
        if source in self._queues:
            self._queues[source].enqueue(task_id, load_s, now=now)

    def progress(self, task_id: str, done_share: float, *, now: float) -> None:
        for queue in self._queues.values():
            queue.progress(task_id, done_share, now=now)

    def remove(self, task_id: str, *, now: float) -> None:
        for queue in self._queues.values():
            queue.remove(task_id, now=now)

    def waits(self) -> dict[Tier, PathWait]:
        """q of every path, as it can be worked out later."""
        return {
            tier: PathWait(queue.running_ends_s, queue.queued_s) if len(queue) else NO_WAIT
            for tier, queue in self._queues.items()
        }
