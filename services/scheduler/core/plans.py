"""Owns what it takes to load a model on one server without moving anybody: slots, and idle instances that must go.

Of all sets of idle instances whose going leaves slots and room, the one is chosen that costs least to bring back; ties
go to fewer instances, then to those that have been idle longest. Models count equally (C6).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec

from services.scheduler.core.decisions import Candidate, Placement, Refusal
from services.scheduler.core.estimates import Estimate, estimate_load
from services.scheduler.core.views import Occupant, ServerView, Shape, SlotView, Snapshot, Task, choose_slots


class Room(NamedTuple):
    """What is there for a task on a server: slots, and bytes of the pool."""

    slots: tuple[SlotView, ...]
    free_bytes: int

    def plus(self, gone: Sequence[Occupant]) -> Room:
        """When these are gone."""
        slots = (*self.slots, *(slot for occupant in gone for slot in occupant.slots))
        return Room(slots, self.free_bytes + sum(occupant.room_bytes for occupant in gone))

    def fit(self, task: Task, *, is_host: bool) -> tuple[int, ...] | None:
        """The slots that the task would get; None when it does not fit."""
        if task.size_bytes > self.free_bytes:
            return None
        return choose_slots(task, self.slots, is_host=is_host)


class Fit(NamedTuple):
    """Slots for a task, and the idle instances that must go for it."""

    slots: tuple[int, ...]
    evict: tuple[Occupant, ...]
    reload_s: float


def room_of(server: ServerView) -> Room:
    return Room(server.free_slots, server.capacity_bytes - server.used_bytes)


def best_fit(task: Task, room: Room, idle: Sequence[Occupant], *, is_host: bool) -> Fit | None:
    """The cheapest way to fit the task; None when all idle instances together are not enough."""
    slots = room.fit(task, is_host=is_host)
    if slots is not None:
        return Fit(slots, (), 0.0)
    if not idle or room.plus(idle).fit(task, is_host=is_host) is None:
        return None
    one = _best_single(task, room, idle, is_host=is_host)
    best: tuple[tuple[float, int, tuple[tuple[float, str], ...]], Fit] | None = None
    cheapest = sorted([occupant.reload_s for occupant in idle])
    if one is not None:
        if len(idle) == 1 or one.reload_s <= cheapest[0] + cheapest[1]:
            return one
        best = ((one.reload_s, 1, ((one.evict[0].idle_since_s, one.evict[0].instance_id),)), one)
    for count in range(2, len(idle) + 1):
        if best is not None and sum(cheapest[:count]) >= best[0][0]:
            break
        for gone in combinations(idle, count):
            reload_s = sum(occupant.reload_s for occupant in gone)
            if best is not None and reload_s > best[0][0]:
                continue
            slots = room.plus(gone).fit(task, is_host=is_host)
            if slots is None:
                continue
            key = (reload_s, count, tuple(sorted((o.idle_since_s, o.instance_id) for o in gone)))
            if best is None or key < best[0]:
                best = (key, Fit(slots, gone, reload_s))
    assert best is not None, "all of them together are enough"
    return best[1]


def _best_single(task: Task, room: Room, idle: Sequence[Occupant], *, is_host: bool) -> Fit | None:
    """The best single instance to evict: nearly always one is enough."""
    for occupant in sorted(idle, key=_cheapest_first) if len(idle) > 1 else idle:
        slots = room.plus((occupant,)).fit(task, is_host=is_host)
        if slots is not None:
            return Fit(slots, (occupant,), occupant.reload_s)
    return None


def _cheapest_first(occupant: Occupant) -> tuple[float, float, str]:
    return occupant.reload_s, occupant.idle_since_s, occupant.instance_id


def all_fits(task: Task, room: Room, idle: Sequence[Occupant], *, is_host: bool) -> Iterator[Fit]:
    """Every set of idle instances that is enough for the task, but for those in which somebody goes for nothing: fewer
    would do, and leave it the same slots. More than enough may go for a slot that fits better, as the larger one is
    then left for another."""
    found: list[tuple[frozenset[str], tuple[int, ...]]] = []
    for count in range(len(idle) + 1):
        for gone in combinations(idle, count):
            slots = room.plus(gone).fit(task, is_host=is_host)
            names = frozenset(occupant.instance_id for occupant in gone)
            if slots is None or any(fewer <= names and same == slots for fewer, same in found):
                continue
            found.append((names, slots))
            yield Fit(slots, gone, sum(occupant.reload_s for occupant in gone))


def load_estimate(server: ServerView, task: Task, now: float, *, behind_s: float = 0.0) -> Estimate:
    """t_load here from the fastest tier that has the model (C1); `behind_s` is queued on its path by this very plan."""
    way = server.way(task)
    return estimate_load(
        queue_s=server.queue_s(way.tier, now) + behind_s,
        size_bytes=way.left_bytes,
        speed=server.speeds[way.tier],
    )


def consider(server: ServerView, task: Task, snapshot: Snapshot, now: float) -> Candidate:
    """A server's terms when nobody is moved."""
    refusal = refusal_of(server, task)
    if refusal is not None:
        return Candidate(server_id=server.server_id, refusal=refusal)
    fit = best_fit(task, room_of(server), server.evictable(task), is_host=server.is_host)
    if fit is None:
        return Candidate(server_id=server.server_id, refusal=why_not(server, task))
    return candidate_of(server, task, fit, now)


def renewed(placement: Placement, task: Task, server: ServerView | None, now: float) -> Placement | None:
    """A placement whose evictions are done, with the estimate of now. None when its slots are not there any more, the
    model does not fit them, or the server is no candidate."""
    if server is None or refusal_of(server, task) is not None or task.size_bytes > room_of(server).free_bytes:
        return None
    free = {slot.slot: slot for slot in server.free_slots}
    slots = [free[slot] for slot in placement.slots if slot in free]
    if len(slots) < len(placement.slots) or choose_slots(task, slots, is_host=server.is_host) is None:
        return None
    estimate = load_estimate(server, task, now)
    return msgspec.structs.replace(placement, estimate=estimate, evict=(), cost_s=estimate.total_s)


def candidate_of(server: ServerView, task: Task, fit: Fit, now: float) -> Candidate:
    return Candidate(
        server_id=server.server_id,
        slots=fit.slots,
        estimate=load_estimate(server, task, now),
        evict=tuple(occupant.instance_id for occupant in fit.evict),
        eviction_s=fit.reload_s,
        is_avoided=server.server_id in task.avoid,
    )


def refusal_of(server: ServerView, task: Task) -> Refusal | None:
    """Why the server is out of the question, whatever is on it now."""
    if not server.takes_loads:
        return Refusal.CLOSED
    return Refusal.TOO_SMALL if task.size_bytes > server.capacity_bytes else None


def why_not(server: ServerView, task: Task) -> Refusal:
    """What a server lacks that has no plan: memory, when the slots would be enough."""
    slots = room_of(server).plus(server.evictable(task)).slots
    return Refusal.BUSY if choose_slots(task, slots, is_host=server.is_host) is None else Refusal.NO_ROOM


def can_fit(shape: Shape, task: Task) -> bool:
    """Whether a server of this shape could take the task if it were empty. Workers of a host may still join: a slot is
    a slot there."""
    if task.size_bytes > shape.capacity_bytes:
        return False
    slots = [SlotView(number, memory) for number, memory in enumerate(shape.slot_memories)]
    return shape.is_host or choose_slots(task, slots, is_host=False) is not None
