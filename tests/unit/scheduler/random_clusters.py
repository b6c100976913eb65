"""Small random clusters for placement, and its optimum by brute force, written from the rules and nothing else.

Sizes and speeds are whole numbers over powers of two, so that sums of seconds are exact in any order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

from whimbrel.wire.messages import Tier

from services.scheduler.core.estimates import PathSpeed
from services.scheduler.core.queues import PathWait
from services.scheduler.core.residency import Resident
from services.scheduler.core.views import Occupant, Resume, ServerView, Shape, SlotView, Snapshot, Task

MODELS = ("a", "b", "c", "d")
NOW_S = 64.0


def a_task(model_id: str, size: int, partitions: int, *, avoid: frozenset[str] = frozenset()) -> Task:
    first = size - size // partitions * (partitions - 1)
    sizes = (first, *[size // partitions] * (partitions - 1))
    return Task(
        model_id=model_id,
        checkpoint_digest=f"digest-{model_id}",
        size_bytes=size,
        partition_bytes=tuple(sorted(sizes, reverse=True)),
        avoid=avoid,
    )


def random_snapshot(chance: random.Random) -> tuple[Snapshot, Task]:
    """One to three servers of one to three slots, of both kinds, with free, idle, running and fixed slots."""
    tasks = {model_id: a_task(model_id, chance.choice([2, 4, 6, 8]), chance.choice([1, 1, 2])) for model_id in MODELS}
    if chance.random() < 0.3:
        # A model of two partitions, a full server, and room elsewhere: what takes several moves.
        tasks["d"] = a_task("d", chance.choice([6, 8]), 2)
        servers = (
            _server(chance, "s0", tasks, kinds=("running",), is_host=False, models=MODELS[:3]),
            *(_server(chance, f"s{number}", tasks, kinds=("free", "idle", "idle")) for number in (1, 2)),
        )
        wanted = tasks["d"]
    else:
        servers = tuple(_server(chance, f"s{number}", tasks) for number in range(chance.choice([1, 2, 3])))
        wanted = tasks[chance.choice(MODELS)]
    avoid = frozenset(chance.sample([s.server_id for s in servers], k=1)) if chance.random() < 0.1 else frozenset()
    task = a_task(wanted.model_id, wanted.size_bytes, len(wanted.partition_bytes), avoid=avoid)
    return Snapshot(servers=servers, shapes=frozenset({Shape(True, 1000, ())})), task


def _server(
    chance: random.Random,
    server_id: str,
    tasks: dict[str, Task],
    *,
    kinds: tuple[str, ...] = ("free", "idle", "running", "running", "running", "fixed"),
    models: tuple[str, ...] = MODELS,
    is_host: bool | None = None,
) -> ServerView:
    is_host = chance.random() < 0.5 if is_host is None else is_host
    slots = [SlotView(k, 0 if is_host else chance.choice([2, 4, 8, 8])) for k in range(chance.choice([1, 2, 3, 3]))]
    left, idle, running = list(slots), list[Occupant](), list[Occupant]()
    used = 0
    while left:
        kind = chance.choice(kinds)
        model = chance.choice(models)
        count = 1 if is_host else len(tasks[model].partition_bytes)
        if kind == "free" or count > len(left):
            break
        held = tuple(left.pop() for _ in range(count))
        room = tasks[model].size_bytes if is_host else 0
        used += room
        occupant = Occupant(
            instance_id=f"i-{server_id}-{len(left)}",
            slots=held,
            task=tasks[model],
            room_bytes=room,
            idle_since_s=float(chance.randrange(4)),
            reload_s=chance.choice([1, 2, 4]) / 4,
            resume=Resume(chance.choice([1, 2, 4]) / 8, chance.choice([0, 1]) / 64, NOW_S - 8.0),
            pause_s=chance.choice([0, 1]) / 8,
        )
        if kind == "idle":
            idle.append(occupant)
        elif kind == "running":
            running.append(occupant)
    idle.sort(key=lambda one: (one.idle_since_s, one.instance_id))
    running.sort(key=lambda one: one.instance_id)
    free = sorted(left, key=lambda slot: (slot.memory_bytes, slot.slot))
    residency = {
        task.checkpoint: Resident(chance.choice([Tier.SSD, Tier.DRAM]), task.size_bytes)
        for task in tasks.values()
        if chance.random() < 0.5
    }
    speeds = {
        tier: PathSpeed(
            source_tier=tier,
            seconds_per_byte=chance.choice([1, 2]) / divisor,
            overhead_s=chance.choice([0, 1]) / 16,
            is_prior=False,
        )
        for tier, divisor in {Tier.REMOTE: 2, Tier.SSD: 8, Tier.DRAM: 64}.items()
    }
    return ServerView(
        server_id=server_id,
        capacity_bytes=used + chance.choice([0, 4, 8, 16, 16]),
        used_bytes=used,
        free_slots=tuple(free),
        idle=tuple(idle),
        running=tuple(running),
        waits={tier: PathWait(NOW_S + chance.choice([-1, 0, 1, 2]), 0.25) for tier in (Tier.REMOTE, Tier.SSD)},
        residency=residency,
        speeds=speeds,
        is_host=is_host,
        takes_loads=chance.random() >= 0.05,
    )


# The optimum, by trying everything.


@dataclass(frozen=True)
class Way:
    """One whole plan for one server."""

    server_id: str
    is_avoided: bool
    load_s: float
    move_s: float
    pause_s: float
    reload_s: float
    moves: int
    evictions: int

    @property
    def on_server(self) -> tuple[float, float, int, int]:
        return self.move_s, self.reload_s, self.moves, self.evictions

    @property
    def rank(self) -> tuple[bool, float, int, int, str]:
        cost_s = self.load_s + self.move_s + self.pause_s + self.reload_s
        return self.is_avoided, cost_s, self.moves, self.evictions, self.server_id


class World:
    """What is left of slots, room and idle instances while a plan is carried out."""

    def __init__(self, snapshot: Snapshot, model_id: str) -> None:
        self.servers = {server.server_id: server for server in snapshot.servers}
        self.slots = {s.server_id: set(s.free_slots) for s in snapshot.servers}
        self.room = {s.server_id: s.capacity_bytes - s.used_bytes for s in snapshot.servers}
        # Nobody goes for another instance of the own model.
        self.idle = {
            s.server_id: {o.instance_id: o for o in s.idle if o.task.model_id != model_id} for s in snapshot.servers
        }
        self.queued: list[tuple[str, Tier, float]] = []
        self.reload_s = 0.0
        self.evictions = 0

    def copy(self) -> World:
        other = World.__new__(World)
        other.servers = self.servers
        other.slots = {k: set(v) for k, v in self.slots.items()}
        other.room = dict(self.room)
        other.idle = {k: dict(v) for k, v in self.idle.items()}
        other.queued = list(self.queued)
        other.reload_s, other.evictions = self.reload_s, self.evictions
        return other

    def leave(self, server_id: str, occupant: Occupant) -> None:
        self.slots[server_id] |= set(occupant.slots)
        self.room[server_id] += occupant.room_bytes

    def with_evictions(self, server_id: str) -> Iterator[World]:
        names = sorted(self.idle[server_id])
        for count in range(len(names) + 1):
            for gone in combinations(names, count):
                other = self.copy()
                for name in gone:
                    occupant = other.idle[server_id].pop(name)
                    other.leave(server_id, occupant)
                    other.reload_s += occupant.reload_s
                    other.evictions += 1
                yield other

    def with_load(self, server_id: str, task: Task) -> Iterator[tuple[World, float]]:
        """Every way to put the task there, with its t_load."""
        if task.size_bytes > self.room[server_id]:
            return
        server = self.servers[server_id]
        tier = server.residency[task.checkpoint].tier if task.checkpoint in server.residency else Tier.REMOTE
        speed = server.speeds[tier]
        own_s = task.size_bytes * speed.seconds_per_byte + speed.overhead_s
        behind_s = 0.0
        if tier is not Tier.DRAM:
            wait = server.waits[tier]
            behind_s = max(0.0, wait.running_ends_s - NOW_S) + wait.queued_s
            behind_s += sum(s for place, path, s in self.queued if (place, path) == (server_id, tier))
        for chosen in _slot_choices(sorted(self.slots[server_id]), task, is_host=server.is_host):
            other = self.copy()
            other.slots[server_id] -= set(chosen)
            other.room[server_id] -= task.size_bytes
            other.queued.append((server_id, tier, own_s))
            yield other, behind_s + own_s


def _slot_choices(slots: Sequence[SlotView], task: Task, *, is_host: bool) -> Iterator[tuple[SlotView, ...]]:
    count = 1 if is_host else len(task.partition_bytes)
    for chosen in permutations(slots, count):
        if is_host or all(s.memory_bytes >= n for s, n in zip(chosen, task.partition_bytes, strict=True)):
            yield chosen


def _sent_away(world: World, movers: Sequence[Occupant]) -> Iterator[tuple[World, float]]:
    """Every way to send these away, with the sum of the migration times."""
    if not movers:
        yield world, 0.0
        return
    mover, *others = movers
    assert mover.resume is not None
    resume_s = mover.resume.base_s + mover.resume.growth * (NOW_S - mover.resume.since_s)
    for server_id, server in world.servers.items():
        if not server.takes_loads:
            continue
        for name, twin in sorted(world.idle[server_id].items()):
            if twin.task.model_id == mover.task.model_id:
                other = world.copy()
                del other.idle[server_id][name]
                for end, rest_s in _sent_away(other, others):
                    yield end, resume_s + rest_s
        for emptied in world.with_evictions(server_id):
            for other, load_s in emptied.with_load(server_id, mover.task):
                for end, rest_s in _sent_away(other, others):
                    yield end, load_s + resume_s + rest_s


def all_ways(snapshot: Snapshot, task: Task, server: ServerView) -> Iterator[Way]:
    """Every plan for one server."""
    if not server.takes_loads:
        return
    able = [o for o in server.running if o.resume is not None and o.task.model_id != task.model_id]
    for is_moving in product([False, True], repeat=len(able)):
        movers = [occupant for occupant, moves in zip(able, is_moving, strict=True) if moves]
        for world, move_s in _sent_away(World(snapshot, task.model_id), movers):
            left = world.copy()
            for mover in movers:
                left.leave(server.server_id, mover)
            for emptied in left.with_evictions(server.server_id):
                for end, load_s in emptied.with_load(server.server_id, task):
                    yield Way(
                        server_id=server.server_id,
                        is_avoided=server.server_id in task.avoid,
                        load_s=load_s,
                        move_s=move_s,
                        pause_s=sum(mover.pause_s for mover in movers),
                        reload_s=end.reload_s,
                        moves=len(movers),
                        evictions=end.evictions,
                    )


def optimum(snapshot: Snapshot, task: Task) -> list[Way]:
    """The best plans: of each server the best, and of these the cheapest; several where ties are left to ids."""
    best: list[Way] = []
    for server in snapshot.servers:
        ways = list(all_ways(snapshot, task, server))
        if ways:
            least = min(way.on_server for way in ways)
            best += [way for way in ways if way.on_server == least]
    least_rank = min((way.rank for way in best), default=None)
    return [way for way in best if way.rank == least_rank]
