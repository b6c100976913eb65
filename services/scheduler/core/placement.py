"""Owns the choice of a server for a cold model: a pure function of a snapshot, with the reasons of its answer (D5).

For each server: the estimate of loading there from the fastest tier that has the model (C1), plus, where an idle
instance must be evicted first, the time to load that one again from DRAM, which is what its next request may pay:
models count equally (C6). Then the cheapest server overall (C2). Ties go to fewer evictions, then to the lower
server id (C5); of a server's free slots the lowest. No slot anywhere is no error: the task is deferred (C4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from whimbrel.wire.messages import Tier

from services.scheduler.core.estimates import Estimate, PathSpeed, estimate_load, seconds_to_load
from services.scheduler.core.queues import NO_WAIT, PathWait
from services.scheduler.core.residency import Resident


class Refusal(StrEnum):
    """Why a server is no candidate."""

    TOO_SMALL = "too_small"  # the model can never be there
    BUSY = "busy"  # no slot is free or idle
    NO_ROOM = "no_room"  # a slot is, but busy instances hold the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleInstance:
    """An instance that could go at once. `reload_s` estimates bringing it back from DRAM."""

    instance_id: str
    slot: int
    size_bytes: int
    idle_since_s: float
    reload_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """What placement sees of a server. `used_bytes` is held by instances, idle ones included; `idle` is sorted, the
    longest idle first; `waits` are the queues of its paths, `residency` what it has of a checkpoint (id and digest)."""

    server_id: str
    capacity_bytes: int
    used_bytes: int
    free_slots: tuple[int, ...]
    idle: tuple[IdleInstance, ...]
    waits: Mapping[Tier, PathWait]
    residency: Mapping[tuple[str, str], Resident]
    speeds: Mapping[Tier, PathSpeed]

    @property
    def is_open(self) -> bool:
        """Whether a slot is free or could be at once."""
        return bool(self.free_slots or self.idle)

    def way(self, task: Task, checkpoint: tuple[str, str]) -> Resident:
        """From which tier the task's checkpoint would be loaded here, and the bytes to move."""
        return self.residency.get(checkpoint) or Resident(Tier.REMOTE, task.size_bytes)

    def queue_s(self, source: Tier, now: float) -> float:
        """q of the path from `source`."""
        return self.waits.get(source, NO_WAIT).queue_s(now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster at one moment. `capacity_bytes_max` is the room of its largest server, None while not all known
    servers had the time to say how large they are."""

    servers: tuple[ServerView, ...]
    capacity_bytes_max: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model that needs an instance; servers in `avoid` just failed to load it and come last."""

    model_id: str
    checkpoint_digest: str
    size_bytes: int
    avoid: frozenset[str] = frozenset()

    @property
    def checkpoint(self) -> tuple[str, str]:
        """The key of residency: only the very same bytes count (C1)."""
        return self.model_id, self.checkpoint_digest


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One server's terms: either an estimate and a slot, or why not."""

    server_id: str
    refusal: Refusal | None = None
    slot: int = 0
    estimate: Estimate | None = None
    evict: tuple[str, ...] = ()
    eviction_s: float = 0.0
    is_avoided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """What a decision was made from. Its candidates are worked out when somebody asks why, which is seldom."""

    snapshot: Snapshot
    task: Task
    now: float

    def candidates(self) -> tuple[Candidate, ...]:
        """Every server with its terms."""
        return tuple(_candidate(server, self.task, self.now) for server in self.snapshot.servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Load here. The instances in `evict` must go first; they are idle."""

    model_id: str
    server_id: str
    slot: int
    estimate: Estimate
    evict: tuple[str, ...]
    reasons: Reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """Nowhere now: held, and tried again when a slot is released."""

    model_id: str
    reasons: Reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverFits:
    """No server is large enough."""

    model_id: str
    need_bytes: int
    capacity_bytes: int


Decision = Placement | Deferred | NeverFits


def choose(snapshot: Snapshot, task: Task, now: float) -> Decision:
    """Where to load the task's model, and from what that was concluded."""
    if snapshot.capacity_bytes_max is not None and task.size_bytes > snapshot.capacity_bytes_max:
        return NeverFits(model_id=task.model_id, need_bytes=task.size_bytes, capacity_bytes=snapshot.capacity_bytes_max)
    reasons = Reasons(snapshot=snapshot, task=task, now=now)
    checkpoint = task.checkpoint
    ranks = [rank for server in snapshot.servers if (rank := _rank(server, task, checkpoint, now)) is not None]
    if not ranks:
        return Deferred(model_id=task.model_id, reasons=reasons)
    *_, server = min(ranks)
    best = _candidate(server, task, now)
    assert best.estimate is not None, "what has a rank can take the model"
    return Placement(
        model_id=task.model_id,
        server_id=best.server_id,
        slot=best.slot,
        estimate=best.estimate,
        evict=best.evict,
        reasons=reasons,
    )


def _rank(
    server: ServerView, task: Task, checkpoint: tuple[str, str], now: float
) -> tuple[bool, float, int, str, ServerView] | None:
    """What servers are compared by, the least being best; None for one that can't take the model now. The same terms as
    in `_candidate`, without making values of them: this runs for every server of every decision."""
    size_bytes = task.size_bytes
    if size_bytes > server.capacity_bytes or not (server.free_slots or server.idle):
        return None
    is_easy = server.free_slots and size_bytes <= server.capacity_bytes - server.used_bytes
    evicted = () if is_easy else _evictions(server, size_bytes)
    if evicted is None:
        return None
    tier, left_bytes = server.way(task, checkpoint)
    cost_s = seconds_to_load(queue_s=server.queue_s(tier, now), size_bytes=left_bytes, speed=server.speeds[tier])
    for instance in evicted:
        cost_s += instance.reload_s
    return server.server_id in task.avoid, cost_s, len(evicted), server.server_id, server


def _candidate(server: ServerView, task: Task, now: float) -> Candidate:
    if task.size_bytes > server.capacity_bytes:
        return Candidate(server_id=server.server_id, refusal=Refusal.TOO_SMALL)
    if not server.is_open:
        return Candidate(server_id=server.server_id, refusal=Refusal.BUSY)
    evicted = _evictions(server, task.size_bytes)
    if evicted is None:
        return Candidate(server_id=server.server_id, refusal=Refusal.NO_ROOM)
    tier, left_bytes = server.way(task, task.checkpoint)
    return Candidate(
        server_id=server.server_id,
        slot=server.free_slots[0] if server.free_slots else evicted[0].slot,
        estimate=estimate_load(queue_s=server.queue_s(tier, now), size_bytes=left_bytes, speed=server.speeds[tier]),
        evict=tuple(instance.instance_id for instance in evicted),
        eviction_s=sum(instance.reload_s for instance in evicted),
        is_avoided=server.server_id in task.avoid,
    )


def _evictions(server: ServerView, size_bytes: int) -> tuple[IdleInstance, ...] | None:
    """The longest idle instances whose going leaves a slot and room; None when all idle ones are not enough."""
    evicted: tuple[IdleInstance, ...] = ()
    has_slot = bool(server.free_slots)
    room_bytes = server.capacity_bytes - server.used_bytes
    for instance in server.idle:
        if has_slot and size_bytes <= room_bytes:
            break
        evicted = (*evicted, instance)
        has_slot = True
        room_bytes += instance.size_bytes
    return evicted if has_slot and size_bytes <= room_bytes else None
