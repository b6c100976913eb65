"""The matrix: which harm comes to whom in which state, and what is noted of each cell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Victim(StrEnum):
    SOURCE_WORKER = "source's worker"
    DESTINATION_WORKER = "destination's worker"
    SOURCE_AGENT = "source's agent"
    DESTINATION_AGENT = "destination's agent"
    SOURCE_SERVER = "source's server"  # its agent and its worker
    LEADER = "scheduler leader"
    NATS = "NATS"
    REDIS = "Redis"
    ROUTER = "router"
    CONNECTION = "router's connection"


class Way(StrEnum):
    KILL = "killed"
    PAUSE = "paused"
    CUT = "cut"


class State(StrEnum):
    """Of the migration; ENDED is any of its ends."""

    PREPARING = "preparing"
    RESUMING = "resuming"
    HANDOVER = "handover"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Cell:
    victim: Victim
    way: Way
    state: State

    @property
    def name(self) -> str:
        return f"{self.victim} {self.way}, {self.state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one cell gave. `struck` names the state in which the harm really came, `end` how the migration ended,
    `cause` why, if it was given up, and `end_s` how long after the harm; no `faults` is what it takes to pass."""

    cell: Cell
    struck: str = ""
    end: str = ""
    cause: str = ""
    end_s: float = 0.0
    longest_pause_s: float = 0.0
    is_cut_short: bool = False
    seconds: float = 0.0
    faults: tuple[str, ...] = ()

    @property
    def is_passed(self) -> bool:
        return not self.faults


HARMS: tuple[tuple[Victim, Way], ...] = (
    *((victim, way) for victim in Victim if victim is not Victim.CONNECTION for way in (Way.KILL, Way.PAUSE)),
    (Victim.CONNECTION, Way.CUT),
)


def choose_cells(*, only: str = "", states: str = "") -> list[Cell]:
    """All cells whose victim and state have one of these words (comma-separated); "" is every one.

    State by state, so that the same process is not killed twice in a row: a supervisor would wait ever longer.
    """
    return [
        Cell(victim, way, state)
        for state in State
        for victim, way in HARMS
        if _is_named(f"{victim} {way}", only) and _is_named(state, states)
    ]


def _is_named(name: str, words: str) -> bool:
    return not words or any(word.strip().lower() in name.lower() for word in words.split(","))
