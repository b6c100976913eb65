"""Owns the policies: pure functions from a snapshot and a task to a decision, all with the same estimates (C8).

* `migration`, the default: the server with the least cost, where running instances may move away first. The cost is
  t_load, the time of the moves and the pauses that they cause, and what evicted idle instances cost to bring back. So a
  move is chosen only when all of that together is less than loading where nobody has to move (C6).
* `locality`: the server with the least t_load, whoever is there; it is waited for while it has no slot.
* `availability`: any free slot, before one that an idle instance must leave.
* `random`: any server that can take the model at once.
* `preemption`: as `migration`, but what is in the way is stopped, and starts again elsewhere from its tokens.

For speed, servers are looked at in the order of a bound that their cost can't be below, until the bound of the next is
no better than the best found. That changes nothing in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from services.scheduler.core import displacement, plans
from services.scheduler.core.decisions import (
    Candidate,
    Consider,
    Decision,
    Deferred,
    NeverFits,
    Placement,
    Reasons,
)
from services.scheduler.core.openings import Openings
from services.scheduler.core.preemption import consider as consider_preempting
from services.scheduler.core.queues import NO_WAIT
from services.scheduler.core.views import NO_RESIDENT, ServerView, Snapshot, Task

Policy = Callable[[Snapshot, Task, float], Decision]
Bound = tuple[bool, float, int, int, str]


def migration(snapshot: Snapshot, task: Task, now: float) -> Decision:
    """The cheapest server overall (C2), with the moves that this takes."""
    openings = Openings(snapshot, task, now)

    def look(server: ServerView, cost_s_max: float) -> Candidate | None:
        return displacement.displace(server, task, openings, now, cost_s_max=cost_s_max)

    return _cheapest(snapshot, task, now, look, displacement.consider)


def preemption(snapshot: Snapshot, task: Task, now: float) -> Decision:
    """The cheapest server overall, with what must be stopped there."""

    def look(server: ServerView, cost_s_max: float) -> Candidate | None:
        candidate = consider_preempting(server, task, snapshot, now)
        return None if candidate.refusal is not None else candidate

    return _cheapest(snapshot, task, now, look, consider_preempting)


def availability(snapshot: Snapshot, task: Task, now: float) -> Decision:
    """As few evictions as possible, and of those servers the cheapest."""
    able = _able(snapshot, task, now)
    best = min(able, key=lambda one: (one.is_avoided, len(one.evict), one.rank), default=None)
    return _decide(snapshot, task, now, best, plans.consider)


def random(snapshot: Snapshot, task: Task, now: float) -> Decision:
    """The server that was drawn, of those that can take the task at once and did not just fail to."""
    able = sorted(_able(snapshot, task, now), key=lambda one: one.server_id)
    able = [one for one in able if not one.is_avoided] or able
    best = able[task.draw % len(able)] if able else None
    return _decide(snapshot, task, now, best, plans.consider)


def locality(snapshot: Snapshot, task: Task, now: float) -> Decision:
    """The server with the least t_load, now or when it has a slot."""
    possible = [server for server in snapshot.servers if plans.refusal_of(server, task) is None]
    estimates = {server.server_id: plans.load_estimate(server, task, now).total_s for server in possible}
    nearest = min(
        possible,
        key=lambda server: (server.server_id in task.avoid, estimates[server.server_id], server.server_id),
        default=None,
    )
    if nearest is None:
        return _decide(snapshot, task, now, None, plans.consider)
    candidate = plans.consider(nearest, task, snapshot, now)
    best = candidate if candidate.refusal is None else None
    return _decide(snapshot, task, now, best, plans.consider, wait_for=nearest.server_id)


POLICIES: dict[str, Policy] = {
    "migration": migration,
    "locality": locality,
    "availability": availability,
    "random": random,
    "preemption": preemption,
}


def _cheapest(
    snapshot: Snapshot,
    task: Task,
    now: float,
    look: Callable[[ServerView, float], Candidate | None],
    consider: Consider,
) -> Decision:
    best: Candidate | None = None
    for bound, server in _in_order(snapshot, task, now):
        if best is not None and bound >= best.rank:
            break
        # A server that just failed comes last, whatever it costs.
        is_bounded = best is not None and not best.is_avoided
        candidate = None if server is None else look(server, best.cost_s if best is not None and is_bounded else inf)
        if candidate is not None and (best is None or candidate.rank < best.rank):
            best = candidate
    return _decide(snapshot, task, now, best, consider)


def _in_order(snapshot: Snapshot, task: Task, now: float) -> Iterator[tuple[Bound, ServerView | None]]:
    """Servers in the order of what their rank can't be below. Those that hold some of the checkpoint come first, as
    long as they are below the floor of the others; an entry without a server says that the others come now."""
    near = snapshot.nearness
    if near is None:
        yield from sorted(_bounds(snapshot.servers, task, now), key=_bound_of)
        return
    held_by = near.holders.get(task.checkpoint, {})
    holders = sorted(_bounds([near.views[server_id] for server_id in held_by], task, now), key=_bound_of)
    floor: Bound = (False, near.floor_s(task.size_bytes), 0, 0, "")
    taken = 0
    while taken < len(holders) and holders[taken][0] < floor:
        yield holders[taken]
        taken += 1
    yield floor, None
    others = [server for server in snapshot.servers if server.server_id not in held_by]
    yield from sorted([*holders[taken:], *_bounds(others, task, now)], key=_bound_of)


def _bounds(servers: Sequence[ServerView], task: Task, now: float) -> list[tuple[Bound, ServerView]]:
    """What the rank of each server can't be below: t_load, and the least that must go where no slot is free. Those that
    can't take the task at all are left out.

    This runs for many servers of every decision, so it makes no values that it does not need.
    """
    avoid, size_bytes, checkpoint = task.avoid, task.size_bytes, task.checkpoint
    bounds: list[tuple[Bound, ServerView]] = []
    for server in servers:
        gone_s = server.least_gone_s
        if gone_s == inf or size_bytes > server.capacity_bytes or not server.takes_loads:
            continue
        tier, left_bytes = server.residency.get(checkpoint, NO_RESIDENT)
        if left_bytes < 0:
            left_bytes = size_bytes
        speed = server.speeds[tier]
        wait = server.waits.get(tier)
        queue_s = 0.0 if wait is None or wait is NO_WAIT else wait.queue_s(now)
        # Summed as an estimate is, so that equal costs are equal to the last bit, and the search ends there.
        cost_s = queue_s + left_bytes * speed.seconds_per_byte + speed.overhead_s + gone_s
        server_id = server.server_id
        moves, evictions = (0, 0) if server.free_slots else ((0, 1) if server.idle else (1, 0))
        bounds.append(((server_id in avoid, cost_s, moves, evictions, server_id), server))
    return bounds


def _bound_of(entry: tuple[Bound, ServerView]) -> Bound:
    return entry[0]


def _able(snapshot: Snapshot, task: Task, now: float) -> list[Candidate]:
    """Servers that can take the task without moving anybody."""
    found = (plans.consider(server, task, snapshot, now) for server in snapshot.servers)
    return [candidate for candidate in found if candidate.refusal is None]


def _decide(
    snapshot: Snapshot,
    task: Task,
    now: float,
    best: Candidate | None,
    consider: Consider,
    *,
    wait_for: str = "",
) -> Decision:
    reasons = Reasons(snapshot=snapshot, task=task, now=now, consider=consider)
    if best is None:
        return _never_fits(snapshot, task) or Deferred(model_id=task.model_id, reasons=reasons, wait_for=wait_for)
    assert best.estimate is not None, "a candidate that can take the task has an estimate"
    return Placement(
        model_id=task.model_id,
        server_id=best.server_id,
        slots=best.slots,
        estimate=best.estimate,
        evict=best.evict,
        moves=best.moves,
        stopped=best.stopped,
        cost_s=best.cost_s,
        reasons=reasons,
    )


def _never_fits(snapshot: Snapshot, task: Task) -> NeverFits | None:
    """Whether no server could take the task, even if it were empty; None as long as that is not known."""
    if not snapshot.shapes or any(plans.can_fit(shape, task) for shape in snapshot.shapes):
        return None
    capacity_bytes = max(shape.capacity_bytes for shape in snapshot.shapes)
    if task.size_bytes > capacity_bytes:
        return NeverFits(model_id=task.model_id, need_bytes=task.size_bytes, capacity_bytes=capacity_bytes)
    # The pool would do; the devices do not: their memory together, of the server that has most.
    memory_bytes = max(sum(shape.slot_memories) for shape in snapshot.shapes)
    return NeverFits(model_id=task.model_id, need_bytes=task.size_bytes, capacity_bytes=memory_bytes)
