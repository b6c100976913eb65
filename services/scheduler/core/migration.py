"""Owns the state machine of a migration: its states, what may happen in each, and how rounds end.

A migration moves one instance, with every request that it serves, to another place (D8). `TRANSITIONS` is the whole
truth about legality; `migrations.py` has the effects. Nothing moves before HANDOVER, so until then giving up costs the
source nothing; from then on nothing runs at the source, so there is no way back: its requests go on at the destination,
or, when that is lost, wherever their routers find a place for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

import msgspec
from whimbrel.wire.messages import MigrationState
from whimbrel.wire.records import MigrationRecord, ResumeRecord

# So few tokens are prefilled in about the time of one decode step, whatever the model: handing over is worth it then.
GAP_TOKENS_MIN = 2
# A gap that costs more to prefill than so many decode steps is worth another round.
GAP_STEPS_MAX = 1.0
# The gap shrinks by the ratio of decode and prefill times each round, about tenfold; who needs more rounds than this
# does not converge.
ROUNDS_MAX = 8
# Handing over a gap that does not shrink pauses clients for its prefill: more than this is worse than staying.
PAUSE_S_MAX = 2.0


class MigrationEvent(StrEnum):
    DESTINATION_READY = "destination_ready"
    ROUND_COMPLETED = "round_completed"
    SOURCE_STOPPED = "source_stopped"
    ROUTES_SWITCHED = "routes_switched"
    INFERENCE_FINISHED = "inference_finished"  # all requests of the source
    SOURCE_LOST = "source_lost"
    DESTINATION_LOST = "destination_lost"  # also: its load failed, or nothing can be loaded there any more
    RESUME_FAILED = "resume_failed"
    NOT_CONVERGING = "not_converging"  # the gap does not shrink, and handing it over would pause clients for too long
    DEADLINE_EXCEEDED = "deadline_exceeded"  # no progress for too long
    CANCELLED = "cancelled"  # nobody wants it any more, or its source is to go anyway
    LEADER_CHANGED = "leader_changed"


_S, _E = MigrationState, MigrationEvent

TRANSITIONS: dict[MigrationState, dict[MigrationEvent, MigrationState]] = {
    _S.PREPARING: {
        _E.DESTINATION_READY: _S.RESUMING,
        _E.INFERENCE_FINISHED: _S.ABANDONED,
        _E.SOURCE_LOST: _S.ABANDONED,
        _E.DESTINATION_LOST: _S.ABANDONED,
        _E.DEADLINE_EXCEEDED: _S.ABANDONED,
        _E.CANCELLED: _S.ABANDONED,
        _E.LEADER_CHANGED: _S.PREPARING,
    },
    _S.RESUMING: {
        _E.ROUND_COMPLETED: _S.RESUMING,
        _E.SOURCE_STOPPED: _S.HANDOVER,
        _E.INFERENCE_FINISHED: _S.ABANDONED,
        _E.SOURCE_LOST: _S.ABANDONED,
        _E.DESTINATION_LOST: _S.ABANDONED,
        _E.RESUME_FAILED: _S.ABANDONED,
        _E.NOT_CONVERGING: _S.ABANDONED,
        _E.DEADLINE_EXCEEDED: _S.ABANDONED,
        _E.CANCELLED: _S.ABANDONED,
        _E.LEADER_CHANGED: _S.RESUMING,
    },
    _S.HANDOVER: {
        _E.ROUTES_SWITCHED: _S.FINISHED,
        _E.SOURCE_LOST: _S.HANDOVER,
        _E.DESTINATION_LOST: _S.REQUEUED,
        _E.DEADLINE_EXCEEDED: _S.REQUEUED,
        _E.LEADER_CHANGED: _S.HANDOVER,
    },
    _S.FINISHED: {},
    _S.ABANDONED: {},
    _S.REQUEUED: {},
}


class IllegalTransition(Exception):
    """We broke our own table: `event` means nothing to a migration in `state`."""

    def __init__(self, state: MigrationState, event: MigrationEvent) -> None:
        self.state = state
        self.event = event
        super().__init__(f"a migration that is {state} can't take {event}")


class AfterRound(StrEnum):
    """What follows a round."""

    ANOTHER_ROUND = "another_round"
    HAND_OVER = "hand_over"
    GIVE_UP = "give_up"


@dataclass(slots=True, kw_only=True, eq=False)
class Migration:
    """A migration: its durable record, and what is known of it besides. Times are monotonic seconds.

    `progress_s` is when anything last moved, `sent_s` when the source was last told what to do; `asked_round` is the
    round that it was told to make, and `is_stopping` says that it was told to stop.
    """

    record: MigrationRecord
    started_s: float
    progress_s: float
    ready_s: float | None = None
    stopped_s: float | None = None
    sent_s: float = -inf
    asked_round: int = 1
    is_stopping: bool = False
    #: Somebody's slots are kept until the source has gone. A scheduler that found the migration knows of nobody.
    is_for_reservation: bool = False
    #: Requests that asked for another place in the handover: the destination did not take them.
    requeued: int = 0
    #: What computing all tokens again is estimated to take.
    resume_s: float = 0.0
    end: str = ""

    @property
    def migration_id(self) -> str:
        return self.record.migration_id

    @property
    def state(self) -> MigrationState:
        return self.record.state

    @property
    def observed_resume_s(self) -> float | None:
        """From the destination being ready to the stop of the source; None when this scheduler has not seen both."""
        return None if self.ready_s is None or self.stopped_s is None else self.stopped_s - self.ready_s

    @property
    def is_over(self) -> bool:
        return not TRANSITIONS[self.record.state]

    def accepts(self, event: MigrationEvent) -> bool:
        """Whether the event is news in this state."""
        return event in TRANSITIONS[self.record.state]

    def enter(self, event: MigrationEvent) -> None:
        """The only writer of the state; raises IllegalTransition."""
        state = TRANSITIONS[self.record.state].get(event)
        if state is None:
            raise IllegalTransition(self.record.state, event)
        self.record = msgspec.structs.replace(self.record, state=state)


def gap_tokens_max(known: ResumeRecord) -> int:
    """The gap that is handed over: its prefill costs about a decode step (G7)."""
    if known.seconds_per_token <= 0.0:
        return GAP_TOKENS_MIN
    return max(GAP_TOKENS_MIN, int(GAP_STEPS_MAX * known.token_s / known.seconds_per_token))


def after_round(*, round: int, gap_tokens: int, before_tokens: int | None, known: ResumeRecord) -> AfterRound:
    """What follows a round that left `gap_tokens` to send; `before_tokens` is the gap of the round before (G7).

    The gap must shrink. When it does not, or too many rounds were needed, it is handed over as it is if the pause that
    its prefill causes, a · gap + b, is bearable, and given up otherwise: never another round.
    """
    if gap_tokens <= gap_tokens_max(known):
        return AfterRound.HAND_OVER
    is_shrinking = before_tokens is None or gap_tokens < before_tokens
    if is_shrinking and round < ROUNDS_MAX:
        return AfterRound.ANOTHER_ROUND
    pause_s = known.seconds_per_token * gap_tokens + known.overhead_s
    return AfterRound.HAND_OVER if pause_s <= PAUSE_S_MAX else AfterRound.GIVE_UP
