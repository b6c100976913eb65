"""Owns the search: breadth first, so that what is found is found on a shortest way."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from whimbrel.wire.messages import MigrationState

from services.scheduler.core import migration
from services.scheduler.core.migration import Migration, MigrationEvent
from tests.simulation.model.world import Bounds, State, World

DETOURS = State._fields.index("detours")
#: How each state was reached: from which, by what, and with how many detours left. Who comes there with no more of them
#: finds nothing new from there on.
Came = dict[tuple[Any, ...], tuple[State | None, str, tuple[Any, ...], int]]
Row = tuple[MigrationState, MigrationEvent]


@dataclass(slots=True)
class Found:
    """What a search has seen; `trace` is the way to the first violation."""

    states: int = 0
    transitions: int = 0
    ends: int = 0
    process_states: int = 0
    process_transitions: int = 0
    seconds: float = 0.0
    moves: Counter[str] = field(default_factory=Counter)
    rows: set[Row] = field(default_factory=set)
    violation: str | None = None
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        moves = ", ".join(f"{count} × {what}" for what, count in sorted(self.moves.items()))
        return (
            f"{self.states} states, {self.transitions} transitions ({moves}), {self.ends} ends, {self.seconds:.1f} s; "
            f"{self.process_states} states and {self.process_transitions} transitions of single processes"
        )


def explore(bounds: Bounds, *, states_max: int | None = None) -> Found:
    """Everything that can happen within the bounds, until something is wrong."""
    found, began_s = Found(), monotonic()
    with _rows_noted(found.rows), _gap_tokens_min(bounds.gap_tokens_min):
        world = World(bounds)
        _search(world, found, states_max)
    found.process_states, found.process_transitions = len(world.states), world.states.transitions
    found.seconds = monotonic() - began_s
    return found


def _search(world: World, found: Found, states_max: int | None) -> None:
    first = world.first()
    came: Came = {first[:DETOURS]: (None, "", (), first.detours)}
    queue = deque([first])
    while queue:
        state = queue.popleft()
        if came[state[:DETOURS]][-1] > state.detours:
            continue
        found.states += 1
        if world.is_over(state):
            found.ends += 1
            failure = world.broken_at_the_end(state)
            if failure is not None:
                _report(world, found, came, state, f"at the end: {failure}")
                return
        for what, args, following, failure in world.moves(state):
            found.transitions += 1
            found.moves[what] += 1
            known = came.get(following[:DETOURS])
            is_new = known is None or known[-1] < following.detours
            if failure is None and is_new:
                failure = world.broken(following)
            if failure is not None:
                _report(world, found, came, state, failure)
                found.trace.append(world.told(what, args))
                return
            if is_new:
                came[following[:DETOURS]] = state, what, args, following.detours
                queue.append(following)
        if states_max is not None and found.states >= states_max:
            return


def _report(world: World, found: Found, came: Came, state: State, failure: str) -> None:
    found.violation = failure
    before, what, args, _ = came[state[:DETOURS]]
    while before is not None:
        found.trace.insert(0, world.told(what, args))
        before, what, args, _ = came[before[:DETOURS]]


@contextmanager
def _gap_tokens_min(tokens: int) -> Iterator[None]:
    original = migration.GAP_TOKENS_MIN
    migration.GAP_TOKENS_MIN = tokens
    try:
        yield
    finally:
        migration.GAP_TOKENS_MIN = original


@contextmanager
def _rows_noted(rows: set[Row]) -> Iterator[None]:
    """Which rows of the scheduler's table are used."""
    original = Migration.enter

    def enter(self: Migration, event: MigrationEvent) -> None:
        rows.add((self.state, event))
        original(self, event)

    Migration.enter = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        Migration.enter = original  # type: ignore[method-assign]
