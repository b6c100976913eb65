"""Owns the answers of placement: where a model is loaded and what goes first, or why not, with the reasons (D5)."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from services.scheduler.core.estimates import Estimate
from services.scheduler.core.views import ServerView, Snapshot, Task


class Refusal(StrEnum):
    """Why a server is no candidate."""

    CLOSED = "closed"  # an operator took it out, or its agent is about to end
    TOO_SMALL = "too_small"  # the model can never be there
    BUSY = "busy"  # too few slots are free, idle or movable
    NO_ROOM = "no_room"  # slots are, but others hold the memory


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A running instance that goes to another place first.

    It is loaded there (`load`), or an idle instance of its model is there already (`into`). `resume_s` is t_migrate of
    its requests, `pause_s` what its clients see of it. `evict` must go at the destination.
    """

    instance_id: str
    model_id: str
    server_id: str
    slots: tuple[int, ...]
    load: Estimate | None
    into: str | None
    resume_s: float
    pause_s: float
    evict: tuple[str, ...] = ()

    @property
    def load_s(self) -> float:
        return 0.0 if self.load is None else self.load.total_s

    @property
    def total_s(self) -> float:
        """Until the instance is gone from here."""
        return self.load_s + self.resume_s


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One server's terms: the estimate and what goes first, or why not.

    `evict` are idle instances on the server or at destinations of moves; `eviction_s` is what bringing them back costs.
    `stopped` are running ones that are to start again elsewhere, which costs `stop_s`.
    """

    server_id: str
    refusal: Refusal | None = None
    slots: tuple[int, ...] = ()
    estimate: Estimate | None = None
    evict: tuple[str, ...] = ()
    eviction_s: float = 0.0
    moves: tuple[Move, ...] = ()
    stopped: tuple[str, ...] = ()
    stop_s: float = 0.0
    is_avoided: bool = False

    @property
    def cost_s(self) -> float:
        """t_load + migration times + pauses + what evicted and stopped ones cost: what servers are compared by."""
        assert self.estimate is not None, "a refused server has no cost"
        moving_s = sum(move.total_s + move.pause_s for move in self.moves)
        return self.estimate.total_s + moving_s + self.stop_s + self.eviction_s

    @property
    def rank(self) -> tuple[bool, float, int, int, str]:
        """The least is the best; ties go to fewer moves, then fewer evictions, then the lower server id (C5)."""
        return (
            self.is_avoided,
            self.cost_s,
            len(self.moves) + len(self.stopped),
            len(self.evict),
            self.server_id,
        )


#: The terms of one server for a task.
Consider = Callable[[ServerView, Task, Snapshot, float], Candidate]


class Reasons(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision was made from. Its candidates are worked out when somebody asks why, which is seldom."""

    snapshot: Snapshot
    task: Task
    now: float
    consider: Consider

    def candidates(self) -> tuple[Candidate, ...]:
        """Every server with its terms, the best first, refused ones at the end."""
        found = [self.consider(server, self.task, self.snapshot, self.now) for server in self.snapshot.servers]
        able = sorted((one for one in found if one.refusal is None), key=lambda one: one.rank)
        return (*able, *sorted((one for one in found if one.refusal is not None), key=lambda one: one.server_id))


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Load here, on these slots (one per partition, the largest first). Idle instances in `evict` go first; running
    ones in `moves` move, those in `stopped` are stopped."""

    model_id: str
    server_id: str
    slots: tuple[int, ...]
    estimate: Estimate
    evict: tuple[str, ...]
    moves: tuple[Move, ...]
    stopped: tuple[str, ...]
    cost_s: float
    reasons: Reasons


class Deferred(msgspec.Struct, frozen=True, kw_only=True):
    """Nowhere now: held, and tried again when a slot is released (C4). `wait_for` names the server that a policy wants
    to wait for."""

    model_id: str
    reasons: Reasons
    wait_for: str = ""


class NeverFits(msgspec.Struct, frozen=True, kw_only=True):
    """No server is large enough, even when it is empty."""

    model_id: str
    need_bytes: int
    capacity_bytes: int


Decision = Placement | Deferred | NeverFits
