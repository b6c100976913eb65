"""Owns how many instances a model should have, when they go, and whose turn is over when a model has waited too long.

Demand is the requests that run or wait. What it asks for is ceil(demand / target), within the model's bounds. More
instances are started at once; fewer are kept for a keep-alive, so that demand that swings about a multiple of the
target doesn't start and end instances with every swing (R6).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from whimbrel.wire.messages import Scaling

from services.scheduler.core.views import SlotView, Task, choose_slots


def desired(demand: int, scaling: Scaling) -> int:
    """How many instances `demand` requests ask for. A minimum above the maximum wins: it was asked for."""
    wanted = -(-demand // scaling.target_concurrency)
    return max(scaling.min_instances, min(wanted, scaling.max_instances))


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A ready instance as scaling sees it. `keep_alive_s` is its model's; `is_idle` says that nothing runs on it.
    `room_bytes` is what its going leaves in the server's pool."""

    instance_id: str
    model_id: str
    slots: tuple[SlotView, ...]
    room_bytes: int
    ready_s: float
    idle_since_s: float
    keep_alive_s: float
    demand: int
    is_idle: bool
    is_promised: bool
    is_reserved: bool
    is_minimum: bool


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A server as scaling sees it: what it holds, and what is free."""

    server_id: str
    is_host: bool
    capacity_bytes: int
    used_bytes: int
    free_slots: tuple[SlotView, ...]
    held: tuple[Held, ...]


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """These instances must give up their slots; `slots` is what the model gets then."""

    server_id: str
    slots: tuple[int, ...]
    instance_ids: tuple[str, ...]


def expired(instances: Iterable[Held], now: float) -> list[str]:
    """Idle instances whose keep-alive has run out, counted from the end of the last request (R6): with the last of
    them, a model is scaled to zero. Those of a model's minimum stay."""
    return [
        held.instance_id
        for held in instances
        if held.is_idle and not held.is_minimum and now - held.idle_since_s >= held.keep_alive_s
    ]


def choose_surplus(instances: Iterable[Held]) -> str | None:
    """Which of a model's instances goes when it has too many: the one with the least to do, the youngest of equals."""
    able = [held for held in instances if not held.is_reserved and not held.is_promised]
    least = min(able, key=lambda held: (held.demand, -held.ready_s, held.instance_id), default=None)
    return None if least is None else least.instance_id


def choose_drain(holders: Iterable[Holder], task: Task) -> Drain | None:
    """What must give up its slots to a model that has waited too long, on one server where the model fits then: as few
    running instances as possible, and of as few those that have been ready longest. Idle ones alone are no case for
    this: placement would have evicted them. None when no server can be emptied enough."""
    drains = [found for holder in holders if (found := _drain(holder, task)) is not None]
    return min(drains, key=lambda found: found[0])[1] if drains else None


def _drain(holder: Holder, task: Task) -> tuple[tuple[int, float, str], Drain] | None:
    able = [held for held in holder.held if held.model_id != task.model_id and _may_be_drained(held)]
    able.sort(key=lambda held: (not held.is_idle, held.ready_s, held.instance_id))
    chosen: list[Held] = []
    while (slots := _fitting(holder, task, chosen)) is None:
        if not able:
            return None
        chosen.append(able.pop(0))
    for held in sorted(chosen, key=lambda held: held.is_idle):
        fewer = [other for other in chosen if other is not held]
        enough = _fitting(holder, task, fewer)
        if enough is not None:
            chosen, slots = fewer, enough
    running = [held for held in chosen if not held.is_idle]
    if not running:
        return None
    cost = (len(running), max(held.ready_s for held in running), holder.server_id)
    return cost, Drain(server_id=holder.server_id, slots=slots, instance_ids=tuple(held.instance_id for held in chosen))


def _may_be_drained(held: Held) -> bool:
    """Not one whose first requests have not reached it, nor one whose slot is kept for another model already."""
    return not held.is_promised and not held.is_reserved and not held.is_minimum


def _fitting(holder: Holder, task: Task, gone: Sequence[Held]) -> tuple[int, ...] | None:
    """The slots that the model would get when these are gone, if it fits then."""
    used_bytes = holder.used_bytes - sum(held.room_bytes for held in gone)
    if task.size_bytes > holder.capacity_bytes - used_bytes:
        return None
    freed = [slot for held in gone for slot in held.slots]
    return choose_slots(task, [*holder.free_slots, *freed], is_host=holder.is_host)
