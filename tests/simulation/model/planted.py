"""Owns the planted bugs: slips of the cores, one at a time, each of which the search has to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from services.gpu_worker.core.requests import Requests
from services.gpu_worker.core.resumptions import Resumptions
from services.gpu_worker.core.rounds import Rounds
from services.router.core.progress import Progress
from services.scheduler.core import migration_ends, rebuilding
from tests.simulation.model.world import Bounds

TOKEN_BYTES = 4
NO_FAULT = Bounds(tokens=(2,), faults=0)
ONE_FAULT = Bounds(tokens=(2,), detours=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """`owner.name` is replaced by what `make` makes of it; within `bounds` it is found."""

    what: str
    owner: Any
    name: str
    make: Callable[[Any], Any]
    bounds: Bounds = NO_FAULT


def _any_epoch_counts(original: Any) -> Any:
    def accept(self: Progress, entry: Any, now: float) -> Any:
        return original(self, msgspec.structs.replace(entry, epoch=self.epoch), now)

    return accept


def _gaps_are_skipped(original: Any) -> Any:
    def accept(self: Progress, entry: Any, now: float) -> Any:
        return original(self, msgspec.structs.replace(entry, position=min(entry.position, self.position)), now)

    return accept


def _the_last_token_counts_twice(original: Any) -> Any:
    def complete(self: Resumptions, request: Any) -> Any:
        whole = original(self, request)
        if request.base_tokens:
            whole = msgspec.structs.replace(whole, tokens=whole.tokens + whole.tokens[-TOKEN_BYTES:])
        return whole

    return complete


def _they_go_on(original: Any) -> Any:
    def move(self: Requests, moved: Any, now: float) -> Any:
        waiting = list(self._waiting)
        ended = original(self, moved, now)
        for sequence in waiting:
            sequence.finish_reason = None
            self._waiting.append(sequence)
        return ended

    return move


def _never(original: Any) -> Any:
    """The original is not called."""
    return lambda *args, **kwargs: None


PLANTED = (
    Planted(
        what="routers accept frames of old epochs",
        owner=Progress,
        name="accept",
        make=_any_epoch_counts,
        bounds=ONE_FAULT,
    ),
    Planted(
        what="the destination begins one token late",
        owner=Resumptions,
        name="complete",
        make=_the_last_token_counts_twice,
    ),
    Planted(
        what="the source forgets to stop who waits",
        owner=Requests,
        name="move",
        make=_they_go_on,
        bounds=Bounds(faults=0, detours=0),
    ),
    Planted(what="missing tokens are skipped", owner=Progress, name="accept", make=_gaps_are_skipped, bounds=ONE_FAULT),
    Planted(what="sources do not hear of the end", owner=Rounds, name="abandon", make=_never, bounds=ONE_FAULT),
    Planted(
        what="what a lost leader moved is forgotten",
        owner=rebuilding,
        name="_add_known_migration",
        make=_never,
        bounds=ONE_FAULT,
    ),
    Planted(what="a source that is given up stays closed", owner=migration_ends, name="_reopen_source", make=_never),
)
