"""Owns the language of the scenarios: a text of servers, models and requests, and what each request must lead to.

Lines of input build up a cluster; `#` starts prose. A request, a line `----` and the decision end a block, up to an
empty line. Further blocks go on with the same cluster, so that something can happen between two requests. Every server
has GPUs; all have the same speeds. Bringing an instance back takes what loading it from DRAM takes, as in the real one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace
from whimbrel.wire.messages import Tier

from services.scheduler.core.decisions import Decision
from services.scheduler.core.estimates import PathSpeed
from services.scheduler.core.policies import POLICIES
from services.scheduler.core.queues import PathWait
from services.scheduler.core.residency import Resident
from services.scheduler.core.views import Occupant, Resume, ServerView, Shape, SlotView, Snapshot, Task
from tests.scenarios.telling import tell

GB = 10**9
NOW_S = 100.0
END_OF_INPUT = "----"


class StoryError(Exception):
    """A scenario says what can't be understood."""


@dataclass(kw_only=True)
class Server:
    """A server as the story has told it so far."""

    pool_bytes: int
    gpus: dict[int, int] = field(default_factory=dict)
    holds: dict[tuple[str, str], Resident] = field(default_factory=dict)
    queue_s: dict[Tier, float] = field(default_factory=dict)
    idle: dict[str, Occupant] = field(default_factory=dict)
    running: dict[str, Occupant] = field(default_factory=dict)
    is_cordoned: bool = False

    def view(self, server_id: str, speeds: dict[Tier, PathSpeed]) -> ServerView:
        held = {slot.slot for one in (*self.idle.values(), *self.running.values()) for slot in one.slots}
        free = [SlotView(number, memory) for number, memory in self.gpus.items() if number not in held]
        return ServerView(
            server_id=server_id,
            capacity_bytes=self.pool_bytes,
            used_bytes=0,
            free_slots=tuple(sorted(free, key=lambda slot: (slot.memory_bytes, slot.slot))),
            idle=tuple(sorted(self.idle.values(), key=lambda one: (one.idle_since_s, one.instance_id))),
            running=tuple(self.running[name] for name in sorted(self.running)),
            waits={tier: PathWait(0.0, self.queue_s.get(tier, 0.0)) for tier in (Tier.REMOTE, Tier.SSD)},
            residency=self.holds,
            speeds=speeds,
            is_host=False,
            takes_loads=not self.is_cordoned,
        )


class Story:
    """A cluster that is told line by line."""

    def __init__(self) -> None:
        self._speeds: dict[Tier, PathSpeed] = {}
        self._models: dict[str, Task] = {}
        self._servers: dict[str, Server] = {}
        self._last: Server | None = None

    def hear(self, line: str) -> Decision | None:
        """Take one line in; a request gives a decision. Raises StoryError."""
        for pattern, take in _LINES:
            match = pattern.fullmatch(line)
            if match is not None:
                try:
                    return take(self, *match.groups())
                except KeyError as unknown:
                    raise StoryError(f"{line!r}: nobody has told of {unknown} before") from unknown
        raise StoryError(f"{line!r} is none of the lines that a story has (see _LINES)")

    def _on_speed(self, tier: str, gb_per_s: str, overhead_s: str) -> None:
        source = Tier(tier)
        self._speeds[source] = PathSpeed(
            source_tier=source,
            seconds_per_byte=1 / (float(gb_per_s) * GB),
            overhead_s=float(overhead_s),
            is_prior=False,
        )

    def _on_model(self, model_id: str, gb: str, partitions: str | None) -> None:
        size_bytes, count = int(gb) * GB, int(partitions or 1)
        self._models[model_id] = Task(
            model_id=model_id,
            checkpoint_digest=f"digest-{model_id}",
            size_bytes=size_bytes,
            partition_bytes=(size_bytes // count,) * count,
        )

    def _on_server(self, server_id: str, gb: str) -> None:
        self._last = self._servers[server_id] = Server(pool_bytes=int(gb) * GB)

    def _on_at(self, server_id: str) -> None:
        self._last = self._servers[server_id]

    def _on_gpu(self, number: str, gb: str) -> None:
        self._here.gpus[int(number)] = int(gb) * GB

    def _on_holds(self, model_id: str, tier: str) -> None:
        task = self._models[model_id]
        self._here.holds[task.checkpoint] = Resident(Tier(tier), task.size_bytes)

    def _on_queue(self, tier: str, seconds: str) -> None:
        self._here.queue_s[Tier(tier)] = float(seconds)

    def _on_cordoned(self) -> None:
        self._here.is_cordoned = True

    def _on_runs(self, model_id: str, name: str, gpus: str, resume_s: str, pause_s: str) -> None:
        running = self._occupant(model_id, name, gpus)
        resume = Resume(float(resume_s), 0.0, NOW_S)
        self._here.running[name] = replace(running, resume=resume, pause_s=float(pause_s))

    def _on_runs_unmovable(self, model_id: str, name: str, gpus: str) -> None:
        self._here.running[name] = self._occupant(model_id, name, gpus)

    def _on_keeps(self, model_id: str, name: str, gpus: str, seconds: str) -> None:
        self._here.idle[name] = replace(self._occupant(model_id, name, gpus), idle_since_s=NOW_S - float(seconds))

    def _on_ends(self, name: str) -> None:
        """Its instance is gone, and its slots are free."""
        holder = {held: server for server in self._servers.values() for held in (*server.idle, *server.running)}[name]
        holder.idle.pop(name, None)
        holder.running.pop(name, None)

    def _on_request(self, model_id: str, policy: str, draw: str | None, failed: str | None) -> Decision:
        avoid = frozenset() if failed is None else frozenset({failed})
        task = replace(self._models[model_id], draw=int(draw or 0), avoid=avoid)
        servers = tuple(server.view(server_id, self._speeds) for server_id, server in self._servers.items())
        shapes = frozenset(
            Shape(False, server.pool_bytes, tuple(sorted(server.gpus.values(), reverse=True)))
            for server in self._servers.values()
        )
        return POLICIES[policy](Snapshot(servers=servers, shapes=shapes), task, NOW_S)

    def _occupant(self, model_id: str, name: str, gpus: str) -> Occupant:
        """On a GPU server an instance holds none of the pool."""
        task, memory, dram = self._models[model_id], self._here.gpus, self._speeds[Tier.DRAM]
        return Occupant(
            instance_id=name,
            slots=tuple(SlotView(int(number), memory[int(number)]) for number in gpus.split("+")),
            task=task,
            room_bytes=0,
            reload_s=task.size_bytes * dram.seconds_per_byte + dram.overhead_s,
        )

    @property
    def _here(self) -> Server:
        if self._last is None:
            raise StoryError("name a server first: 'server S1, pool 64 GB'")
        return self._last


_TIER, _NAME, _GPUS, _SECONDS = "(remote|ssd|dram)", r"([\w-]+)", r"gpu ([\d+]+)", r"(\d+(?:\.\d+)?) s"
_LINES: tuple[tuple[re.Pattern[str], Callable[..., Decision | None]], ...] = tuple(
    (re.compile(pattern), take)
    for pattern, take in (
        (rf"{_TIER} gives (\d+) GB/s after {_SECONDS}", Story._on_speed),
        (rf"model {_NAME}, (\d+) GB(?:, (\d+) partitions)?", Story._on_model),
        (rf"server {_NAME}, pool (\d+) GB", Story._on_server),
        (rf"at {_NAME}", Story._on_at),
        (r"gpu (\d+), (\d+) GB", Story._on_gpu),
        (rf"holds {_NAME} in {_TIER}", Story._on_holds),
        (rf"queues {_TIER} for {_SECONDS}", Story._on_queue),
        (r"cordoned", Story._on_cordoned),
        (rf"runs {_NAME} as {_NAME} on {_GPUS}, resumes in {_SECONDS} with a pause of {_SECONDS}", Story._on_runs),
        (rf"runs {_NAME} as {_NAME} on {_GPUS}, can not move", Story._on_runs_unmovable),
        (rf"keeps {_NAME} as {_NAME} on {_GPUS}, idle for {_SECONDS}", Story._on_keeps),
        (rf"{_NAME} ends", Story._on_ends),
        (rf"{_NAME} is requested, policy (\w+)(?:, draw (\d+))?(?:, just failed on {_NAME})?", Story._on_request),
    )
)


def retell(text: str) -> tuple[str, list[Decision]]:
    """The text with the outputs that are true now, and the decisions. Raises StoryError that names the line."""
    story, lines, decisions = Story(), list[str](), list[Decision]()
    decision: Decision | None = None
    is_output = False
    for number, line in enumerate(text.splitlines(), start=1):
        said = line.partition("#")[0].strip()
        if is_output:
            # What the output was is left out: it has been written anew.
            is_output = bool(line)
            if not line:
                lines.append(line)
            continue
        lines.append(line)
        if line == END_OF_INPUT:
            if decision is None:
                raise StoryError(f"line {number}: a request comes before {END_OF_INPUT!r}")
            lines += tell(decision)
            decisions.append(decision)
            decision, is_output = None, True
        elif said:
            if decision is not None:
                raise StoryError(f"line {number}: {END_OF_INPUT!r} comes after a request")
            try:
                decision = story.hear(said)
            except StoryError as wrong:
                raise StoryError(f"line {number}: {wrong}") from wrong
    if decision is not None or not decisions:
        raise StoryError(f"a story ends with a request and its {END_OF_INPUT!r}")
    return "\n".join(lines) + "\n", decisions
