"""Owns virtual time: what happens when, and coroutines that wait for it. Nothing here sleeps; a seed decides it all."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Process:
    """Something that can die; what it had planned dies with it. `cut_until_s`: nobody hears it, and it hears nobody."""

    def __init__(self, clock: Clock, name: tuple[str | int, ...]) -> None:
        self.clock = clock
        self.name = name
        self.is_alive = True
        self.cut_until_s = 0.0
        #: When what it last said reaches others: a connection keeps its order.
        self.heard_s: dict[tuple[str | int, ...], float] = {}

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        """As long as it lives; the first time after a part of the interval, so that not all are at once."""

        def again() -> None:
            act()
            self.clock.after(seconds, self, again)

        self.clock.after(seconds * self.clock.random.random(), self, again)

    def spawn(self, work: Coroutine[Any, Any, None]) -> Job:
        job = Job(self, work)
        job.resume()
        return job


class Clock:
    """`now` in virtual seconds. Two things due at the same moment happen in the order in which they were planned."""

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self.random = random.Random(seed)
        self._plan: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._planned = 0

    def after(self, delay_s: float, owner: Process | None, act: Callable[[], None]) -> None:
        """Do it later, if its owner still lives then."""
        self._planned += 1
        heapq.heappush(self._plan, (self.now + delay_s, self._planned, owner, act))

    def run(self, seconds: float) -> None:
        end_s = self.now + seconds
        plan, pop = self._plan, heapq.heappop
        while plan[0][0] <= end_s:
            self.now, _, owner, act = pop(plan)
            if owner is None or owner.is_alive:
                act()
        self.now = end_s

    def sleep(self, seconds: float) -> Promise[None]:
        promise: Promise[None] = Promise(self)
        self.after(seconds, None, promise.keep_nothing)
        return promise


class Promise(Generic[T]):
    """A value that will be there, or an error. What comes second counts for nothing."""

    __slots__ = ("_clock", "_error", "_value", "_waiting", "is_kept")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._value: T | None = None
        self._error: Exception | None = None
        self._waiting: list[Job] = []
        self.is_kept = False

    def keep(self, value: T) -> None:
        if not self.is_kept:
            self.is_kept, self._value = True, value
            self._wake()

    def keep_nothing(self) -> None:
        self.keep(None)  # type: ignore[arg-type]

    def fail(self, error: Exception) -> None:
        if not self.is_kept:
            self.is_kept, self._error = True, error
            self._wake()

    def __await__(self) -> Generator[Promise[T], None, T]:
        if not self.is_kept:
            yield self
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def wait(self, job: Job) -> None:
        self._waiting.append(job)

    def _wake(self) -> None:
        for job in self._waiting:
            if job.waits_for is self:
                self._clock.after(0.0, job.owner, lambda job=job: job.go_on(self))  # type: ignore[misc]


class Stopped(Exception):
    """Somebody stopped this job."""


class Job:
    """A coroutine of a process, on virtual time. `done` is kept when it ended well, and fails as it failed."""

    __slots__ = ("_work", "done", "is_over", "owner", "waits_for")

    def __init__(self, owner: Process, work: Coroutine[Any, Any, None]) -> None:
        self.owner = owner
        self._work = work
        self.waits_for: Promise[Any] | None = None
        self.done: Promise[None] = Promise(owner.clock)
        self.is_over = False

    def go_on(self, promise: Promise[Any]) -> None:
        """What it waited for is there; nothing happens when it was stopped meanwhile."""
        if not self.is_over and self.waits_for is promise:
            self.resume()

    def stop(self) -> None:
        """It sees `Stopped` where it waits. Only for jobs that do wait."""
        if not self.is_over:
            self.resume(Stopped())

    def resume(self, error: Exception | None = None) -> None:
        try:
            waits_for = self._work.throw(error) if error is not None else self._work.send(None)
        except StopIteration:
            self.is_over, self.waits_for = True, None
            self.done.keep_nothing()
        except Stopped as stopped:
            self.is_over, self.waits_for = True, None
            self.done.fail(stopped)
        else:
            self.waits_for = waits_for
            waits_for.wait(self)


class Turns:
    """First come, first served, one at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: deque[Promise[None]] = deque()

    async def take(self) -> Promise[None]:
        """Returns when it is our turn, with what to give up afterwards."""
        turn: Promise[None] = Promise(self._clock)
        self._queue.append(turn)
        if self._queue[0] is turn:
            turn.keep_nothing()
        try:
            await turn
        except Stopped:
            self.give_up(turn)
            raise
        return turn

    def give_up(self, turn: Promise[None] | None) -> None:
        if turn is None or turn not in self._queue:
            return
        is_first = self._queue[0] is turn
        self._queue.remove(turn)
        if is_first and self._queue:
            self._queue[0].keep_nothing()
