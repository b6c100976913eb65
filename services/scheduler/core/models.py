"""Owns what is known of models: their durable record, who waits for them, how their loads went, and their imports."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import msgspec
from whimbrel.wire.messages import JobStatus, ModelState
from whimbrel.wire.records import JobRecord, ModelRecord

from services.scheduler.core.decisions import Placement
from services.scheduler.core.views import Task


class Waiter(msgspec.Struct, kw_only=True, eq=False):
    """A request that waits for an instance. Not durable: its router repeats it."""

    request_id: str
    router_id: str
    since_s: float
    repeated_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class Model:
    """A deployed model. Waiters stand in the order of their arrival; `oldest_wait_s` is when the oldest of them came,
    infinity when nobody waits. Only the methods here change either."""

    record: ModelRecord
    waiters: dict[str, Waiter] = field(default_factory=dict)
    oldest_wait_s: float = inf
    instances: dict[str, None] = field(default_factory=dict)
    # How loads went since somebody was served: tries, and the servers to try last.
    load_failures: int = 0
    losses: int = 0
    avoid: frozenset[str] = frozenset()
    #: What loading it takes, as long as neither record nor `avoid` is another one.
    task: Task | None = None
    # Scaling: since when there are more instances than its demand asks for, and when one had to go for another model.
    surplus_since_s: float | None = None
    displaced_s: float = -inf
    #: When something was last to be drained for it.
    drain_tried_s: float = -inf
    #: Its last load failed for good; until then it is not loaded again for its minimum alone.
    blocked_until_s: float = -inf
    # Deletion: who removed its copies, who was asked and when, who removes it from the repository.
    removed: set[str] = field(default_factory=set)
    remove_sent_s: dict[str, float] = field(default_factory=dict)
    repository_server_id: str | None = None

    @property
    def model_id(self) -> str:
        return self.record.model_id

    @property
    def is_servable(self) -> bool:
        return self.record.state is ModelState.READY

    def add_waiter(self, waiter: Waiter) -> None:
        """Or what is known of it now: it may have waited for longer than we thought."""
        self.waiters[waiter.request_id] = waiter
        self.oldest_wait_s = min(self.oldest_wait_s, waiter.since_s)

    def remove_waiter(self, request_id: str) -> bool:
        """False when it does not wait."""
        waiter = self.waiters.pop(request_id, None)
        if waiter is None:
            return False
        if waiter.since_s <= self.oldest_wait_s:
            self.oldest_wait_s = min((other.since_s for other in self.waiters.values()), default=inf)
        return True

    def remove_all_waiters(self) -> None:
        self.waiters.clear()
        self.oldest_wait_s = inf

    def forgive(self) -> None:
        """The next waiters start with all tries."""
        self.load_failures = 0
        self.losses = 0
        self.avoid = frozenset()


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """An import; `done_bytes` of `total_bytes` move too often to be durable."""

    record: JobRecord
    done_bytes: int = 0
    total_bytes: int = 0
    sent_s: float = -inf

    @property
    def job_id(self) -> str:
        return self.record.job.job_id

    @property
    def model_id(self) -> str:
        return self.record.job.model_id

    def status(self) -> JobStatus:
        """With the progress that is not durable."""
        known = self.record.job
        return JobStatus(
            job_id=known.job_id,
            model_id=known.model_id,
            stage=known.stage,
            done_bytes=self.done_bytes,
            total_bytes=self.total_bytes,
            error=known.error,
        )


class Reservation(msgspec.Struct, kw_only=True, eq=False):
    """Slots that a model waits for. `waiting_for` are the instances that must go first; a drain may take long, so
    meanwhile the model may be placed elsewhere."""

    model_id: str
    server_id: str
    slots: tuple[int, ...]
    waiting_for: set[str]
    is_drain: bool
    since_s: float = 0.0
    #: What was decided; None for a drain.
    placement: Placement | None = None
    #: The migration whose destination is to be loaded there. Its slots are its own, not those that the model waits for.
    migration_id: str | None = None

    @property
    def is_move(self) -> bool:
        """Running instances go first, which may take long: meanwhile the model may take a slot that is free."""
        return self.placement is not None and bool(self.placement.moves or self.placement.stopped)

    @property
    def key(self) -> str:
        """Whom the slots are kept for."""
        return self.migration_id or self.model_id
