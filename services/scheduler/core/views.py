"""Owns what placement sees of the cluster at one moment: tasks, servers, who holds their slots, and what they are for.

All of it is immutable, so a decision can be explained later from what it was made from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

import msgspec
from whimbrel.wire.messages import Tier

from services.scheduler.core.estimates import PathSpeed
from services.scheduler.core.queues import NO_WAIT, PathWait
from services.scheduler.core.residency import Resident

#: For a checkpoint of which a server has nothing: all of its bytes come from the repository.
NO_RESIDENT = Resident(Tier.REMOTE, -1)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A model that needs an instance. `partition_bytes` has at least one entry, the largest first: on GPUs each of them
    needs a slot of its own. Servers in `avoid` just failed to load it and come last. `draw` is a number that somebody
    drew for it: the random policy is a pure function, too."""

    model_id: str
    checkpoint_digest: str
    size_bytes: int
    partition_bytes: tuple[int, ...]
    avoid: frozenset[str] = frozenset()
    draw: int = 0

    @property
    def checkpoint(self) -> tuple[str, str]:
        """The key of residency: only the very same bytes count (C1)."""
        return self.model_id, self.checkpoint_digest


class SlotView(NamedTuple):
    """A slot; `memory_bytes` is what its device has, 0 when unknown or when the pool counts."""

    slot: int
    memory_bytes: int = 0


class Resume(NamedTuple):
    """t_migrate of all requests of an instance (D4): `base_s` at `since_s`, and so much more per second of decoding."""

    base_s: float
    growth: float
    since_s: float

    def seconds(self, now: float) -> float:
        return self.base_s + self.growth * max(0.0, now - self.since_s)


class Occupant(msgspec.Struct, frozen=True, kw_only=True):
    """An instance that could go: at once when it is idle, by a move when it is running.

    `task` is what loading its model elsewhere takes, `room_bytes` what its going leaves in the server's pool.
    `reload_s` estimates bringing an idle one back from DRAM. A running one whose worker can't hand its requests over
    has no `resume`. `pause_s` is what its clients would see of a move.
    """

    instance_id: str
    slots: tuple[SlotView, ...]
    task: Task
    room_bytes: int
    idle_since_s: float = 0.0
    reload_s: float = 0.0
    resume: Resume | None = None
    pause_s: float = 0.0


class ServerView(msgspec.Struct, kw_only=True):
    """What placement sees of a server. Not frozen only because `least_gone_s` is worked out from the rest.

    On a host server (CPU slots) a model is mapped from the pool: one slot is enough, and `capacity_bytes` of the pool
    is what bounds it. On the others each partition needs a slot with memory for it, and its bytes pass the pool.
    `used_bytes` of the capacity are held by instances, idle ones included. `free_slots` are sorted by memory, the least
    first. `idle` is sorted, the longest idle first; `running` by id. Instances that can't go are in neither.
    `waits` are the queues of its paths, `residency` what it has of a checkpoint (id and digest).
    """

    server_id: str
    capacity_bytes: int
    used_bytes: int
    free_slots: tuple[SlotView, ...]
    idle: tuple[Occupant, ...]
    waits: Mapping[Tier, PathWait]
    residency: Mapping[tuple[str, str], Resident]
    speeds: Mapping[Tier, PathSpeed]
    running: tuple[Occupant, ...] = ()
    is_host: bool = True
    takes_loads: bool = True
    #: Where no slot is free, what loading anything here costs at least beside the load: somebody must go.
    least_gone_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.free_slots:
            costs = [occupant.reload_s for occupant in self.idle]
            costs += [o.resume.base_s for o in self.running if o.resume is not None]
            self.least_gone_s = min(costs, default=inf)

    def evictable(self, task: Task) -> tuple[Occupant, ...]:
        """Idle instances that could go for the task: none of its own model, which would be loaded again for itself."""
        model_id = task.model_id
        for occupant in self.idle:
            if occupant.task.model_id == model_id:
                return tuple(other for other in self.idle if other.task.model_id != model_id)
        return self.idle

    def way(self, task: Task) -> Resident:
        """From which tier the task's checkpoint would be loaded here, and the bytes to move."""
        return self.residency.get(task.checkpoint) or Resident(Tier.REMOTE, task.size_bytes)

    def queue_s(self, source: Tier, now: float) -> float:
        """q of the path from `source`."""
        return self.waits.get(source, NO_WAIT).queue_s(now)


class Shape(NamedTuple):
    """How large a server is, whatever is on it: its slots' memories, the most first."""

    is_host: bool
    capacity_bytes: int
    slot_memories: tuple[int, ...]


class Nearness(msgspec.Struct, kw_only=True, eq=False):
    """Where to look first: the views by server, the servers that hold some of a checkpoint, and what a byte and a load
    from the repository cost on each, and at least. It belongs to whoever makes snapshots, and is true only until the
    next one."""

    views: dict[str, ServerView] = msgspec.field(default_factory=dict)
    holders: dict[tuple[str, str], dict[str, None]] = msgspec.field(default_factory=dict)
    costs: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    least: tuple[float, float] | None = None

    @classmethod
    def of(cls, servers: Sequence[ServerView]) -> Nearness:
        """For servers that do not change."""
        near = cls(views={server.server_id: server for server in servers})
        for server in servers:
            near.price(server.server_id, server.speeds[Tier.REMOTE])
            for checkpoint in server.residency:
                near.holders.setdefault(checkpoint, {})[server.server_id] = None
        return near

    def price(self, server_id: str, speed: PathSpeed | None) -> None:
        """What the path from the repository costs on a server from now on; None when it is gone."""
        cost = None if speed is None else (speed.seconds_per_byte, speed.overhead_s)
        if cost == self.costs.get(server_id):
            return
        if cost is None:
            del self.costs[server_id]
        else:
            self.costs[server_id] = cost
        self.least = None

    def floor_s(self, size_bytes: int) -> float:
        """What loading so many bytes from the repository costs at least, on any server."""
        if self.least is None:
            bytes_s, overheads_s = zip(*self.costs.values(), strict=True) if self.costs else ((0.0,), (0.0,))
            self.least = (min(bytes_s), min(overheads_s))
        return size_bytes * self.least[0] + self.least[1]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster at one moment. `servers` are those that live. `shapes` are those of all servers that are known, also
    of lately lost ones; None while not all had the time to say how large they are, so nothing is said to never fit.
    `nearness` makes a decision faster, and never another one."""

    servers: tuple[ServerView, ...]
    shapes: frozenset[Shape] | None
    nearness: Nearness | None = None


def choose_slots(task: Task, slots: Sequence[SlotView], *, is_host: bool) -> tuple[int, ...] | None:
    """Slots for the task, one per partition in their order (on a host one for all): for each the smallest that is large
    enough, which leaves most for others. None when they don't suffice."""
    left = sorted(slots, key=lambda slot: (slot.memory_bytes, slot.slot))
    if is_host:
        return (left[0].slot,) if left else None
    chosen: list[int] = []
    for size_bytes in task.partition_bytes:
        fitting = next((slot for slot in left if slot.memory_bytes == 0 or slot.memory_bytes >= size_bytes), None)
        if fitting is None:
            return None
        left.remove(fitting)
        chosen.append(fitting.slot)
    return tuple(chosen)
