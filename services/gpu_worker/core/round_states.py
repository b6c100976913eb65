"""Owns the states of a migration at its source; `core.rounds` says what is sent when.

    IDLE        no migration: an ordinary instance
    ROUND       tokens were sent, the destination computes
    BETWEEN     it has computed them; the scheduler says whether there is another round
    STOPPING    the scheduler said that it is enough: the step that runs is finished first
    STOPPED     every request goes on elsewhere, and the instance takes nothing until it is unloaded or told otherwise

Legality is in `TRANSITIONS` and nowhere else; a pair that is missing there raises `IllegalTransition`.
"""

from __future__ import annotations

from enum import StrEnum, auto


class State(StrEnum):
    IDLE = auto()
    ROUND = auto()
    BETWEEN = auto()
    STOPPING = auto()
    STOPPED = auto()


class Event(StrEnum):
    MIGRATION_ASKED = auto()
    ROUND_ASKED = auto()
    ROUND_RESUMED = auto()
    HANDOVER_ASKED = auto()
    STEP_FINISHED = auto()
    RESUME_FAILED = auto()
    REQUESTS_ENDED = auto()
    ABANDONED = auto()
    INSTANCE_LEFT = auto()


_ENDS = {
    Event.RESUME_FAILED: State.IDLE,
    Event.REQUESTS_ENDED: State.IDLE,
    Event.ABANDONED: State.IDLE,
    Event.INSTANCE_LEFT: State.IDLE,
}

TRANSITIONS: dict[State, dict[Event, State]] = {
    State.IDLE: {Event.MIGRATION_ASKED: State.ROUND},
    State.ROUND: {
        # Another migration, which replaces this one.
        Event.MIGRATION_ASKED: State.ROUND,
        Event.ROUND_RESUMED: State.BETWEEN,
        Event.HANDOVER_ASKED: State.STOPPING,
        **_ENDS,
    },
    State.BETWEEN: {
        Event.MIGRATION_ASKED: State.ROUND,
        Event.ROUND_ASKED: State.ROUND,
        Event.HANDOVER_ASKED: State.STOPPING,
        **_ENDS,
    },
    State.STOPPING: {Event.STEP_FINISHED: State.STOPPED, **_ENDS},
    State.STOPPED: {Event.ABANDONED: State.IDLE, Event.INSTANCE_LEFT: State.IDLE},
}

#: Requests run, and the destination follows them.
FOLLOWED = frozenset({State.ROUND, State.BETWEEN, State.STOPPING})


class IllegalTransition(Exception):
    """An event that cannot happen in this state: the code that sent it is wrong."""

    def __init__(self, state: State, event: Event) -> None:
        super().__init__(f"{event} in state {state}")
