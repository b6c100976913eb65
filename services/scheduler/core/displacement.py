"""Owns displacement: which running instances move away from a server, and where to, so that a model fits there (M5).

Rules. A destination needs free slots and room, or idle instances whose going leaves them, or an idle instance of the
very model that moves. It may be the same server, when a slot that the new model can't use suffices. No slot, room or
idle instance is used twice. Moves to one destination queue behind each other, in the order of the ids of what moves.

What is minimised. On one server: the sum of migration times (load at the destination, queue included, and t_migrate),
then what evicted instances cost to bring back: so an idle instance always goes before a running one moves. Then fewer
moves, fewer evictions, the rest of the cost, ids.

Theory of operation. It is a dynamic program over the running instances in the order of their ids: each stays, or takes
one of its destinations; the state is what of the destinations is used up, the value the sums so far. Sums only grow, so
a branch that is no better than the best plan found is left (branch and bound). An instance needs to look only at its
cheapest destinations, one more than instances may move: the others can occupy all but one of them, the task itself one
more, and whichever is left costs the same as if it were alone there. So the result is exact, and small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import inf
from typing import NamedTuple

from whimbrel.wire.messages import Tier

from services.scheduler.core.decisions import Candidate, Move
from services.scheduler.core.estimates import Estimate
from services.scheduler.core.openings import Destination, Openings
from services.scheduler.core.plans import (
    Fit,
    Room,
    all_fits,
    best_fit,
    candidate_of,
    load_estimate,
    refusal_of,
    room_of,
    why_not,
)
from services.scheduler.core.views import Occupant, ServerView, Snapshot, Task

Queued = tuple[tuple[str, Tier, float], ...]
Key = tuple[float, float, int, int, float, tuple[tuple[str, str], ...], tuple[str, ...]]


class Taken(NamedTuple):
    """What a plan uses up so far: slots by server, bytes of pools, idle instances that go or are moved into, those that
    go by server, and loads that it puts into queues."""

    slots: frozenset[tuple[str, int]] = frozenset()
    room_bytes: tuple[tuple[str, int], ...] = ()
    idle: frozenset[str] = frozenset()
    gone: tuple[tuple[str, Occupant], ...] = ()
    queued: Queued = ()

    def behind_s(self, server: ServerView, task: Task) -> float:
        """What a load of the task there waits for, beside the queue that the server has."""
        tier = server.way(task).tier
        if tier not in server.waits:
            return 0.0
        return sum(load_s for server_id, path, load_s in self.queued if (server_id, path) == (server.server_id, tier))

    def room_at(self, server: ServerView, leaving: Sequence[Occupant] = ()) -> Room:
        """What is left there, also of what went for earlier moves, and when those in `leaving` have left."""
        gone = [occupant for server_id, occupant in self.gone if server_id == server.server_id]
        room = room_of(server).plus([*gone, *leaving])
        used_bytes = sum(size for server_id, size in self.room_bytes if server_id == server.server_id)
        slots = tuple(slot for slot in room.slots if (server.server_id, slot.slot) not in self.slots)
        return Room(slots, room.free_bytes - used_bytes)

    def idle_at(self, server: ServerView, task: Task) -> list[Occupant]:
        """Those that may still go for the task, or be moved into."""
        return [occupant for occupant in server.evictable(task) if occupant.instance_id not in self.idle]


class Plan(NamedTuple):
    """Moves so far, with the sums that are minimised."""

    moves: tuple[Move, ...] = ()
    movers: tuple[Occupant, ...] = ()
    move_s: float = 0.0
    reload_s: float = 0.0
    taken: Taken = Taken()


def consider(server: ServerView, task: Task, snapshot: Snapshot, now: float) -> Candidate:
    """A server's terms: loading there at once, or after the cheapest displacement."""
    refusal = refusal_of(server, task)
    if refusal is not None:
        return Candidate(server_id=server.server_id, refusal=refusal)
    found = displace(server, task, Openings(snapshot, task, now), now)
    return Candidate(server_id=server.server_id, refusal=why_not(server, task)) if found is None else found


def displace(
    server: ServerView, task: Task, openings: Openings, now: float, *, cost_s_max: float = inf
) -> Candidate | None:
    """The best plan for the server, without moves if there is one. None when no plan is enough, or those that are cost
    more than `cost_s_max`."""
    fit = best_fit(task, room_of(server), server.evictable(task), is_host=server.is_host)
    if fit is not None:
        # Nothing has a lower sum of migration times than nobody who moves.
        return candidate_of(server, task, fit, now)
    movable = [o for o in server.running if o.resume is not None and o.task.model_id != task.model_id]
    if not movable or openings.is_empty:
        return None
    least_s = load_estimate(server, task, now).total_s
    search = _Search(
        server=server, task=task, now=now, movable=movable, openings=openings, move_s_max=cost_s_max - least_s
    )
    return search.best()


class _Search:
    """One search for the best plan on one server."""

    def __init__(
        self,
        *,
        server: ServerView,
        task: Task,
        now: float,
        movable: Sequence[Occupant],
        openings: Openings,
        move_s_max: float,
    ) -> None:
        self._server = server
        self._task = task
        self._now = now
        self._movable = movable
        self._openings = openings
        self._move_s_max = move_s_max
        self._best: tuple[Key, Candidate] | None = None
        self._destinations: dict[str, tuple[int, list[Destination]]] = {}

    def best(self) -> Candidate | None:
        """With as many moves as it takes; each further one only adds to their sum."""
        everything = room_of(self._server).plus([*self._server.evictable(self._task), *self._movable])
        if everything.fit(self._task, is_host=self._server.is_host) is None:
            return None
        # The cheapest first: the sooner a good plan is found, the sooner others are seen to be worse.
        able = [mover for mover in self._movable if self._least_s(mover) < inf]
        movable = sorted(able, key=lambda mover: (self._least_s(mover), mover.instance_id))
        for count in range(1, len(movable) + 1):
            if sum(map(self._least_s, movable[:count])) > self._worst_s():
                break
            for movers in combinations(movable, count):
                if self._is_worth_it(movers):
                    self._branch(Plan(), sorted(movers, key=_by_id), count)
        return None if self._best is None else self._best[1]

    def _worst_s(self) -> float:
        """A plan whose moves take longer than this is of no use."""
        return self._move_s_max if self._best is None else self._best[0][0]

    def _least_s(self, mover: Occupant) -> float:
        """What moving it costs at least."""
        destinations = self._destinations_of(mover, 2)
        return destinations[0].move_s if destinations else inf

    def _is_worth_it(self, movers: Sequence[Occupant]) -> bool:
        """Whether moving these could be better than the best plan, and is enough once all idle ones are gone, too."""
        if sum(map(self._least_s, movers)) > self._worst_s():
            return False
        room = room_of(self._server).plus([*self._server.evictable(self._task), *movers])
        return room.fit(self._task, is_host=self._server.is_host) is not None

    def _branch(self, plan: Plan, movers: Sequence[Occupant], count: int) -> None:
        """Send the first of `movers` to each of its destinations in turn."""
        if plan.move_s > self._worst_s():
            return
        if self._best is not None and (plan.move_s, plan.reload_s) > self._best[0][:2]:
            return
        if not movers:
            self._close(plan)
            return
        mover, *others = movers
        for destination in self._destinations_of(mover, count + 1):
            for further in self._moved(plan, mover, destination.server):
                self._branch(further, others, count)

    def _destinations_of(self, mover: Occupant, count: int) -> list[Destination]:
        """The cheapest `count`, if there are so many."""
        known = self._destinations.get(mover.instance_id)
        if known is None or known[0] < count:
            found = self._openings.cheapest(mover, count, self._worst_s())
            known = self._destinations[mover.instance_id] = (count, found)
        return known[1][:count]

    def _moved(self, plan: Plan, mover: Occupant, server: ServerView) -> Iterator[Plan]:
        """The plan with this move, in every way that may be needed."""
        idle = plan.taken.idle_at(server, self._task)
        for twin in idle:
            if twin.task.model_id == mover.task.model_id:
                yield self._into(plan, mover, server, twin)
        room = plan.taken.room_at(server)
        for fit in all_fits(mover.task, room, idle, is_host=server.is_host):
            yield self._loaded(plan, mover, server, fit)

    def _into(self, plan: Plan, mover: Occupant, server: ServerView, twin: Occupant) -> Plan:
        slots = tuple(slot.slot for slot in twin.slots)
        move = self._move(mover, server, slots, load=None, into=twin.instance_id, evict=())
        taken = plan.taken._replace(idle=plan.taken.idle | {twin.instance_id})
        return Plan(
            moves=(*plan.moves, move),
            movers=(*plan.movers, mover),
            move_s=plan.move_s + move.total_s,
            reload_s=plan.reload_s,
            taken=taken,
        )

    def _loaded(self, plan: Plan, mover: Occupant, server: ServerView, fit: Fit) -> Plan:
        behind_s = plan.taken.behind_s(server, mover.task)
        load = load_estimate(server, mover.task, self._now, behind_s=behind_s)
        evict = tuple(occupant.instance_id for occupant in fit.evict)
        move = self._move(mover, server, fit.slots, load=load, into=None, evict=evict)
        server_id = server.server_id
        taken = Taken(
            slots=plan.taken.slots | {(server_id, slot) for slot in fit.slots},
            room_bytes=(*plan.taken.room_bytes, (server_id, mover.task.size_bytes)),
            idle=plan.taken.idle | set(evict),
            gone=(*plan.taken.gone, *((server_id, occupant) for occupant in fit.evict)),
            queued=(*plan.taken.queued, (server_id, load.source_tier, load.load_s)),
        )
        return Plan(
            moves=(*plan.moves, move),
            movers=(*plan.movers, mover),
            move_s=plan.move_s + move.total_s,
            reload_s=plan.reload_s + fit.reload_s,
            taken=taken,
        )

    def _move(
        self,
        mover: Occupant,
        server: ServerView,
        slots: tuple[int, ...],
        *,
        load: Estimate | None,
        into: str | None,
        evict: tuple[str, ...],
    ) -> Move:
        assert mover.resume is not None, "only those that can be resumed move"
        return Move(
            instance_id=mover.instance_id,
            model_id=mover.task.model_id,
            server_id=server.server_id,
            slots=slots,
            load=load,
            into=into,
            resume_s=mover.resume.seconds(self._now),
            pause_s=mover.pause_s,
            evict=evict,
        )

    def _close(self, plan: Plan) -> None:
        """The task itself: it gets what is left on its server."""
        server, task, taken = self._server, self._task, plan.taken
        room = taken.room_at(server, plan.movers)
        fit = best_fit(task, room, taken.idle_at(server, task), is_host=server.is_host)
        if fit is None:
            return
        candidate = Candidate(
            server_id=server.server_id,
            slots=fit.slots,
            estimate=load_estimate(server, task, self._now, behind_s=taken.behind_s(server, task)),
            evict=(*(o.instance_id for _, o in taken.gone), *(o.instance_id for o in fit.evict)),
            eviction_s=plan.reload_s + fit.reload_s,
            moves=plan.moves,
            is_avoided=server.server_id in task.avoid,
        )
        key = _key(plan.move_s, candidate)
        if self._best is None or key < self._best[0]:
            self._best = (key, candidate)


def _by_id(occupant: Occupant) -> str:
    return occupant.instance_id


def _key(move_s: float, candidate: Candidate) -> Key:
    """What plans of one server are compared by."""
    return (
        move_s,
        candidate.eviction_s,
        len(candidate.moves),
        len(candidate.evict),
        candidate.cost_s,
        tuple((move.instance_id, move.server_id) for move in candidate.moves),
        candidate.evict,
    )
