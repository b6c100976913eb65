"""Owns the terms of preemption (Shepherd*): what runs in the way is stopped and starts again elsewhere (C8).

The same estimates as for a move tell what that costs: loading its model again and computing its tokens again. Nobody
looks for a place for it beforehand, so its client may wait long: that is the policy's weakness, not the estimate's.
"""

from __future__ import annotations

from itertools import combinations

from services.scheduler.core.decisions import Candidate
from services.scheduler.core.plans import best_fit, candidate_of, load_estimate, refusal_of, room_of, why_not
from services.scheduler.core.views import Occupant, ServerView, Snapshot, Task


def consider(server: ServerView, task: Task, snapshot: Snapshot, now: float) -> Candidate:
    """A server's terms: loading there at once, or after what costs least has been stopped."""
    refusal = refusal_of(server, task)
    if refusal is not None:
        return Candidate(server_id=server.server_id, refusal=refusal)
    fit = best_fit(task, room_of(server), server.evictable(task), is_host=server.is_host)
    if fit is not None:
        return candidate_of(server, task, fit, now)
    return _stopping(server, task, now) or Candidate(server_id=server.server_id, refusal=why_not(server, task))


def _stopping(server: ServerView, task: Task, now: float) -> Candidate | None:
    costs = {o.instance_id: _stop_s(o, now) for o in server.running if o.resume is not None}
    stoppable = [o for o in server.running if o.instance_id in costs and o.task.model_id != task.model_id]
    best: tuple[tuple[float, float, int, tuple[str, ...]], Candidate] | None = None
    for count in range(1, len(stoppable) + 1):
        for stopped in combinations(stoppable, count):
            stop_s = sum(costs[occupant.instance_id] for occupant in stopped)
            if best is not None and stop_s > best[0][0]:
                continue
            fit = best_fit(task, room_of(server).plus(stopped), server.evictable(task), is_host=server.is_host)
            if fit is None:
                continue
            names = tuple(occupant.instance_id for occupant in stopped)
            key = (stop_s, fit.reload_s, count, names)
            if best is None or key < best[0]:
                candidate = Candidate(
                    server_id=server.server_id,
                    slots=fit.slots,
                    estimate=load_estimate(server, task, now),
                    evict=tuple(occupant.instance_id for occupant in fit.evict),
                    eviction_s=fit.reload_s,
                    stopped=names,
                    stop_s=stop_s,
                    is_avoided=server.server_id in task.avoid,
                )
                best = (key, candidate)
    return None if best is None else best[1]


def _stop_s(occupant: Occupant, now: float) -> float:
    """Loading its model again and computing its tokens again."""
    assert occupant.resume is not None, "only those that can be resumed are stopped"
    return occupant.reload_s + occupant.resume.seconds(now)
