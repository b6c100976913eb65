"""Owns the source's side of a migration: which tokens the destination has of each request, and what it is sent when.

A round sends what a request has beyond what the destination has computed of it (G5-G7), and is completed when the
destination has computed that too. Meanwhile tokens are generated; whether that gap is small enough is the scheduler's
to say, after each round. Its states are those of `core.round_states`.

Rule 1: commands come late and twice; the methods of `Rounds` absorb that before it becomes an event. Who asks again
what was done already hears again what was said last, also after the migration's end.
Rule 2: what the destination says it has is believed, also when that is less than it said before: at worst some tokens
are sent twice, and those it knows it does not compute again.
Rule 3: a request that waits its turn has computed nothing, so nothing of it is sent; it moves at the handover.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.messages import (
    AbandonMigration,
    ErrorReply,
    HandOver,
    InferenceResumed,
    MigrateInstance,
    MigrationEnd,
    MigrationEnded,
    Moved,
    ResumeInference,
    RoundCompleted,
    SourceStopped,
    StartRound,
    StoppedRequest,
)

from services.gpu_worker.core.requests import Requests
from services.gpu_worker.core.round_states import FOLLOWED, TRANSITIONS, Event, IllegalTransition, State
from services.gpu_worker.core.sequence import Sequence

# A lost message costs as much as this; a prefill that takes longer costs a question without tokens.
REPEAT_S = 1.0
# Migrations that have ended, so that a late command does not begin one again; commands are repeated for seconds.
ENDED_MAX = 64

ToScheduler: TypeAlias = RoundCompleted | SourceStopped | MigrationEnded
#: ResumeInference is for the destination.
Output: TypeAlias = ResumeInference | ToScheduler


@dataclass(slots=True)
class _Part:
    """One request: the destination has `computed` of its tokens, and has to have `target` of them after this round."""

    sequence: Sequence
    computed: int = 0
    target: int = 0
    asked_at: float = 0.0

    @property
    def is_due(self) -> bool:
        return self.computed < self.target and not self.sequence.is_finished

    @property
    def gap_tokens(self) -> int:
        return len(self.sequence.tokens) - self.computed


class Rounds:
    """The requests of one worker on their way elsewhere; its `server_id` and `slot` are where answers go. `now` is in
    monotonic seconds."""

    def __init__(self, requests: Requests, *, server_id: str, slot: int) -> None:
        self._requests = requests
        self._server_id = server_id
        self._slot = slot
        self.state = State.IDLE
        self._command: MigrateInstance | None = None
        self._parts: dict[str, _Part] = {}
        self._round = 0
        self._round_began_at = 0.0
        self._round_tokens = self._sent_tokens = 0
        self._last: ToScheduler | None = None
        # What was said last of migrations that have ended; None of those that the scheduler ended.
        self._ended: dict[str, ToScheduler | None] = {}

    @property
    def is_stopping(self) -> bool:
        return self.state is State.STOPPING

    @property
    def migration_id(self) -> str | None:
        return None if self._command is None else self._command.migration_id

    def migrate(self, command: MigrateInstance, now: float, *, is_here: bool) -> list[Output]:
        """Begin with the first round; `is_here` says whether the instance is the one here, and can be migrated."""
        if command.migration_id == self.migration_id or command.migration_id in self._ended:
            return self._say_again(command.migration_id)
        if not is_here or self.state in (State.STOPPING, State.STOPPED):
            return [self._refuse(command, MigrationEnd.REFUSED)]
        if self._requests.active == 0:
            return [self._refuse(command, MigrationEnd.FINISHED)]
        if self._command is not None:
            self._remember(self._command.migration_id, None)
        self._enter(Event.MIGRATION_ASKED)
        self._command = command
        self._parts = {}
        self._sent_tokens = 0
        self._last = None
        return self._begin_round(1, now)

    def start_round(self, command: StartRound, now: float) -> list[Output]:
        if command.migration_id != self.migration_id or self.state is not State.BETWEEN or command.round <= self._round:
            return self._say_again(command.migration_id)
        self._enter(Event.ROUND_ASKED)
        return self._begin_round(command.round, now)

    def hand_over(self, command: HandOver) -> list[Output]:
        """From now on `is_stopping`: whoever runs the requests calls `stop` when no step runs."""
        if command.migration_id != self.migration_id or self.state not in (State.ROUND, State.BETWEEN):
            return self._say_again(command.migration_id)
        self._enter(Event.HANDOVER_ASKED)
        return []

    def stop(self, now: float) -> tuple[list[Sequence], SourceStopped]:
        """No step runs: every request goes on elsewhere. The answer are those, and what the scheduler is told."""
        self._enter(Event.STEP_FINISHED)
        assert self._command is not None
        moved = self._requests.move(self._moved, now)
        self._last = SourceStopped(
            migration_id=self._command.migration_id,
            instance_id=self._command.instance_id,
            requests=tuple(
                StoppedRequest(
                    request_id=sequence.request_id, router_id=sequence.request.router_id, position=sequence.position
                )
                for sequence in moved
            ),
            sent_tokens=self._sent_tokens,
        )
        return moved, self._last

    def abandon(self, command: AbandonMigration) -> None:
        """Also when it is not known (yet): its MigrateInstance may still be on the way."""
        if command.migration_id == self.migration_id:
            self._end(Event.ABANDONED, None)
        elif command.migration_id not in self._ended:
            self._remember(command.migration_id, None)

    def leave(self) -> None:
        """The instance goes."""
        if self.state is not State.IDLE:
            self._end(Event.INSTANCE_LEFT, self._last)

    def on_resumed(self, message: InferenceResumed, now: float) -> list[Output]:
        """The destination says what it has of a request."""
        if message.migration_id != self.migration_id or self.state not in FOLLOWED:
            return []
        if message.error is not None:
            return [self._end_by_itself(Event.RESUME_FAILED, MigrationEnd.RESUME_FAILED, message.error)]
        part = self._parts.get(message.request_id)
        if part is None:
            return []
        part.computed = min(message.tokens, len(part.sequence.tokens))
        if self.state is State.ROUND and part.is_due:
            return [self._send(part, now)]
        return self._complete(now)

    def on_requests_ended(self, now: float) -> list[Output]:
        """Some request has ended: the last one ends the migration (X1), another one may complete the round."""
        if self.state in FOLLOWED and self._requests.active == 0:
            return [self._end_by_itself(Event.REQUESTS_ENDED, MigrationEnd.FINISHED)]
        return self._complete(now)

    def tick(self, now: float) -> list[Output]:
        """Ask again what was not answered in time, without tokens: who does not have them says so."""
        if self.state is not State.ROUND:
            return []
        late = [part for part in self._parts.values() if part.is_due and now - part.asked_at >= REPEAT_S]
        return [self._resume(part, part.target, now) for part in late]

    def _begin_round(self, number: int, now: float) -> list[Output]:
        self._round = number
        self._round_began_at = now
        self._round_tokens = 0
        self._parts = {sequence.request_id: self._part(sequence) for sequence in self._requests.running}
        for part in self._parts.values():
            part.target = len(part.sequence.tokens)
        sent: list[Output] = [self._send(part, now) for part in self._parts.values() if part.is_due]
        return [*sent, *self._complete(now)]

    def _part(self, sequence: Sequence) -> _Part:
        known = self._parts.get(sequence.request_id)
        return known if known is not None and known.sequence is sequence else _Part(sequence)

    def _send(self, part: _Part, now: float) -> ResumeInference:
        tokens = part.target - part.computed
        self._round_tokens += tokens
        self._sent_tokens += tokens
        return self._resume(part, part.computed, now)

    def _resume(self, part: _Part, position: int, now: float) -> ResumeInference:
        assert self._command is not None
        part.asked_at = now
        return ResumeInference(
            migration_id=self._command.migration_id,
            instance_id=self._command.destination.instance_id,
            source_server_id=self._server_id,
            source_slot=self._slot,
            request_id=part.sequence.request_id,
            position=position,
            tokens=pack_tokens(part.sequence.tokens[position : part.target]),
        )

    def _complete(self, now: float) -> list[Output]:
        if self.state is not State.ROUND or any(part.is_due for part in self._parts.values()):
            return []
        self._enter(Event.ROUND_RESUMED)
        assert self._command is not None
        self._last = RoundCompleted(
            migration_id=self._command.migration_id,
            instance_id=self._command.instance_id,
            round=self._round,
            requests=self._requests.active,
            gap_tokens=max((self._part(sequence).gap_tokens for sequence in self._requests.running), default=0),
            round_tokens=self._round_tokens,
            sent_tokens=self._sent_tokens,
            round_s=max(0.0, now - self._round_began_at),
        )
        return [self._last]

    def _moved(self, sequence: Sequence) -> Moved:
        assert self._command is not None
        return Moved(route=self._command.destination, base_tokens=self._part(sequence).computed)

    def _say_again(self, migration_id: str) -> list[Output]:
        if migration_id == self.migration_id:
            # What is being done is said when it is done.
            said = self._last if self.state in (State.BETWEEN, State.STOPPED) else None
        else:
            said = self._ended.get(migration_id)
        return [] if said is None else [said]

    def _refuse(self, command: MigrateInstance, reason: MigrationEnd) -> MigrationEnded:
        """A migration that ends before it began."""
        ended = MigrationEnded(migration_id=command.migration_id, instance_id=command.instance_id, reason=reason)
        self._remember(command.migration_id, ended)
        return ended

    def _end_by_itself(self, event: Event, reason: MigrationEnd, error: ErrorReply | None = None) -> MigrationEnded:
        assert self._command is not None
        ended = MigrationEnded(
            migration_id=self._command.migration_id, instance_id=self._command.instance_id, reason=reason, error=error
        )
        self._end(event, ended)
        return ended

    def _end(self, event: Event, said: ToScheduler | None) -> None:
        self._enter(event)
        assert self._command is not None
        self._remember(self._command.migration_id, said)
        self._command = self._last = None
        self._parts = {}

    def _remember(self, migration_id: str, said: ToScheduler | None) -> None:
        self._ended[migration_id] = said
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def _enter(self, event: Event) -> None:
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            raise IllegalTransition(self.state, event)
        self.state = state
