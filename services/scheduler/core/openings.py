"""Owns where running instances could move to: the open servers of one decision, the cheapest for an instance first.

Most servers have nothing of the instance's checkpoint, and differ only in what loading all of it from the repository
costs. They are sorted by that once per size, so that an instance looks at few of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from whimbrel.wire.messages import Tier

from services.scheduler.core.estimates import seconds_to_load
from services.scheduler.core.plans import best_fit, room_of
from services.scheduler.core.views import Occupant, ServerView, Snapshot, Task


class Destination(NamedTuple):
    """A server that an instance could move to, and what that costs when nobody else does: migration and reload."""

    move_s: float
    reload_s: float
    server_id: str
    server: ServerView


class Openings:
    """The servers of a snapshot that something could move to, to make room for the task."""

    def __init__(self, snapshot: Snapshot, task: Task, now: float) -> None:
        self._snapshot = snapshot
        self._task = task
        self._now = now
        self._open: dict[str, ServerView] | None = None
        self._twins: dict[str, list[ServerView]] = {}
        self._remote: dict[int, list[tuple[float, str, ServerView]]] = {}

    def cheapest(self, mover: Occupant, count: int, move_s_max: float) -> list[Destination]:
        """The `count` cheapest destinations of the instance that cost no more than `move_s_max`, the best first."""
        assert mover.resume is not None, "only those that can be resumed move"
        resume_s = mover.resume.seconds(self._now)
        if resume_s > move_s_max:
            return []
        near = self._near(mover)
        found = [self._alone(mover, resume_s, server) for server in near.values()]
        able = [one for one in found if one is not None and one.move_s <= move_s_max]
        far_s_max = move_s_max
        if len(able) >= count:
            able.sort(key=_cheapest_first)
            far_s_max = min(move_s_max, able[count - 1].move_s)
        able += self._far(mover, resume_s, near, count, far_s_max)
        return sorted(able, key=_cheapest_first)[:count]

    @property
    def is_empty(self) -> bool:
        """Whether nothing could move anywhere."""
        return not self._servers()

    def _servers(self) -> dict[str, ServerView]:
        if self._open is None:
            self._open = {
                server.server_id: server
                for server in self._snapshot.servers
                if (server.free_slots or server.idle) and server.takes_loads
            }
            for server in self._open.values():
                for idle in server.idle:
                    self._twins.setdefault(idle.task.model_id, []).append(server)
        return self._open

    def _near(self, mover: Occupant) -> dict[str, ServerView]:
        """Those that hold some of its checkpoint, or an idle instance of its model."""
        servers, checkpoint = self._servers(), mover.task.checkpoint
        nearness = self._snapshot.nearness
        if nearness is None:
            near = {name: server for name, server in servers.items() if checkpoint in server.residency}
        else:
            held_by = nearness.holders.get(checkpoint, {})
            near = {name: servers[name] for name in held_by if name in servers}
        return near | {server.server_id: server for server in self._twins.get(mover.task.model_id, ())}

    def _far(
        self, mover: Occupant, resume_s: float, near: dict[str, ServerView], count: int, move_s_max: float
    ) -> Iterator[Destination]:
        """Of the others the cheapest, and as many more as cost the same and could evict less."""
        found: list[Destination] = []
        for remote_s, server_id, server in self._by_remote(mover.task.size_bytes):
            move_s = remote_s + resume_s
            if move_s > move_s_max:
                break
            if len(found) >= count and (move_s > found[count - 1].move_s or found[count - 1].reload_s == 0.0):
                break
            if server_id in near:
                continue
            fit = best_fit(mover.task, room_of(server), server.evictable(self._task), is_host=server.is_host)
            if fit is not None:
                found.append(Destination(move_s, fit.reload_s, server_id, server))
                found.sort(key=_cheapest_first)
        yield from found[:count]

    def _by_remote(self, size_bytes: int) -> list[tuple[float, str, ServerView]]:
        """Open servers by what loading so many bytes from the repository costs there."""
        known = self._remote.get(size_bytes)
        if known is None:
            known = self._remote[size_bytes] = sorted(
                (self._load_s(server, Tier.REMOTE, size_bytes), server.server_id, server)
                for server in self._servers().values()
            )
        return known

    def _alone(self, mover: Occupant, resume_s: float, server: ServerView) -> Destination | None:
        """What moving there costs when nobody else does; None where that is impossible."""
        for idle in server.idle:
            if idle.task.model_id == mover.task.model_id:
                return Destination(resume_s, 0.0, server.server_id, server)
        fit = best_fit(mover.task, room_of(server), server.evictable(self._task), is_host=server.is_host)
        if fit is None:
            return None
        tier, left_bytes = server.way(mover.task)
        return Destination(self._load_s(server, tier, left_bytes) + resume_s, fit.reload_s, server.server_id, server)

    def _load_s(self, server: ServerView, tier: Tier, size_bytes: int) -> float:
        queue_s = server.queue_s(tier, self._now)
        return seconds_to_load(queue_s=queue_s, size_bytes=size_bytes, speed=server.speeds[tier])


def _cheapest_first(destination: Destination) -> tuple[float, float, str]:
    return destination[:3]
