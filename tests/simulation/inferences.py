"""Owns the requests of a simulated worker: the real cores of the service (requests, sequence, routers, rounds,
resumptions), driven as its shell drives them: one request after the other, a step at a time, and in between a piece of
what is resumed here for another worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from whimbrel.chassis.heartbeat import HEARTBEAT_S, HEARTBEATS_MISSED_MAX
from whimbrel.wire.errors import Conflict, WhimbrelError
from whimbrel.wire.messages import (
    AbandonMigration,
    AbortInference,
    HandOver,
    InferenceResumed,
    MigrateInstance,
    ResendTokens,
    ResumeInference,
    Route,
    StartInference,
    StartRound,
    TokenEntry,
    TokenFrame,
)

from services.gpu_worker.core.instance import SERVING, State
from services.gpu_worker.core.requests import Requests
from services.gpu_worker.core.resumptions import Resumption, Resumptions, refusal
from services.gpu_worker.core.rounds import Output, Rounds
from services.gpu_worker.core.routers import Routers
from services.gpu_worker.core.sequence import Sequence, prefill_ends

if TYPE_CHECKING:
    from tests.simulation.workers import SimWorker

#: A pass over several tokens; a single one takes as long as a token of its request.
PREFILL_S = 0.02
PREFILL_TOKENS_MAX = 16
REQUESTS_MAX = 64


def token_of(request_id: str, position: int) -> int:
    """What the engine says at this position: a function of the request, whoever computes it."""
    return (hash_of(request_id) + 7919 * position) % 50_000


def hash_of(text: str) -> int:
    return sum((k + 1) * ord(letter) for k, letter in enumerate(text)) * 2654435761 % 2**31


class KVCaches:
    """What the engine has computed, by request; it would go on from a cache of other tokens without noticing."""

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}

    def compute(self, known: Sequence | Resumption, end: int) -> None:
        computed = self._tokens.get(known.request_id, [])
        assert computed == known.tokens[: len(computed)], f"{known.request_id}: the KV cache is that of other tokens"
        self._tokens[known.request_id] = known.tokens[: max(end, len(computed))]

    def missing(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - len(self._tokens.get(sequence.request_id, []))

    def forget(self, request_id: str) -> None:
        self._tokens.pop(request_id, None)

    def clear(self) -> None:
        self._tokens.clear()


class Inferences:
    """`token_s` says how long a token of a request takes."""

    def __init__(self, worker: SimWorker, token_s: Callable[[str], float]) -> None:
        self._worker = worker
        self._token_s = token_s
        self.requests = Requests(active_max=REQUESTS_MAX, queue=f"worker {worker.server_id}/{worker.slot}")
        self.rounds = Rounds(self.requests, server_id=worker.server_id, slot=worker.slot)
        self.resumptions = Resumptions()
        self.kv_caches = KVCaches()
        self._routers = Routers(lost_after_s=HEARTBEATS_MISSED_MAX * HEARTBEAT_S)
        self._destination: Route | None = None
        self._turn: Sequence | None = None
        self._ends: Iterator[int] = iter(())
        self._is_computing = self._is_resumption_next = False

    @property
    def active(self) -> int:
        return self.requests.active

    # Requests.

    def start(self, message: StartInference) -> None:
        """Raises InstanceGone when the instance does not serve, InferenceLost, StaleEpoch, QueueFull."""
        if self.requests.knows(message.request_id, message.epoch):
            return
        self.hear_router(message.router_id, message.router_epoch)
        self._worker.check_serving(message.instance_id)
        request = self.resumptions.complete(message)
        was_active = self.requests.is_active(request.request_id)
        sequence = self.requests.start(request, self._worker.now)
        assert sequence is not None
        sequence.computed = self.resumptions.take(request, sequence.tokens)
        if was_active or sequence.is_finished:
            self.resumptions.dropped.append(sequence.request_id)
        if sequence.is_finished:
            self._say(sequence.request.router_id, sequence.entry(sequence.position))
        self._note_change()
        self._go_on()

    def abort(self, message: AbortInference) -> None:
        ended = self.requests.abort(message.request_id, message.epoch, self._worker.now)
        self._after_abort([] if ended is None else [ended])

    def resend(self, message: ResendTokens) -> None:
        """Raises InferenceLost, StaleEpoch, InvalidRequest."""
        entries, router_id = self.requests.resend(message.request_id, message.epoch, message.position)
        for entry in entries:
            self._say(router_id, entry)

    def hear_router(self, router_id: str, epoch: int) -> None:
        try:
            is_new_life = self._routers.hear(router_id, epoch, self._worker.now)
        except WhimbrelError:
            return
        if is_new_life:
            self._after_abort(self.requests.abort_router(router_id, self._worker.now, epoch=epoch))

    def watch(self) -> None:
        now = self._worker.now
        for router_id in self._routers.take_lost(now):
            self._after_abort(self.requests.abort_router(router_id, now))
        self.requests.expire(now)
        self.resumptions.expire(now)
        self._tell(self.rounds.tick(now))
        self._go_on()

    # The source of a migration.

    def migrate(self, message: MigrateInstance, *, is_here: bool) -> None:
        known = self.rounds.migration_id
        outputs = self.rounds.migrate(message, self._worker.now, is_here=is_here)
        if self.rounds.migration_id != known:
            self._destination = message.destination
            self._worker.beat()
        self._tell(outputs)

    def start_round(self, message: StartRound) -> None:
        self._tell(self.rounds.start_round(message, self._worker.now))

    def hand_over(self, message: HandOver) -> None:
        self._tell(self.rounds.hand_over(message))
        self._go_on()

    def on_resumed(self, message: InferenceResumed) -> None:
        self._tell(self.rounds.on_resumed(message, self._worker.now))

    def abandon(self, message: AbandonMigration) -> None:
        """At the destination, too."""
        self.rounds.abandon(message)
        self.resumptions.abandon(message.migration_id)
        self._worker.beat()
        self._go_on()

    # The destination of one.

    def resume(self, message: ResumeInference) -> None:
        source = message.source_server_id, message.source_slot
        try:
            self._worker.check_serving(message.instance_id)
            if self.requests.is_active(message.request_id):
                raise Conflict(reason=f"request {message.request_id!r} runs here already")
            answer = self.resumptions.hear(message, self._worker.now)
        except WhimbrelError as error:
            answer = refusal(message.migration_id, message.request_id, error)
        if answer is not None:
            self._to_worker(source, answer)
        self._go_on()

    def follow(self, state: State) -> None:
        """The instance is in this state."""
        if state is not State.READY:
            self.resumptions.clear()
        if state not in SERVING:
            self.rounds.leave()

    # The engine, between two steps.

    def _go_on(self) -> None:
        if self._is_computing:
            return
        while self.resumptions.dropped:
            self.kv_caches.forget(self.resumptions.dropped.popleft())
        if self._turn is None and not self.rounds.is_stopping:
            self._next_turn()
        turn, resumption = self._turn, self.resumptions.next()
        if turn is not None and turn.is_finished:
            self._end_turn(turn, None)
        elif self.rounds.is_stopping:
            self._hand_over(None)
        elif turn is not None and not (self._is_resumption_next and resumption is not None):
            self._is_resumption_next = True
            self._step(turn)
        elif resumption is not None:
            self._is_resumption_next = False
            self._resume_piece(resumption)

    def _next_turn(self) -> None:
        self._turn = self.requests.next(self._worker.now)
        if self._turn is not None:
            self._ends = iter(prefill_ends(self._turn, PREFILL_TOKENS_MAX))

    def _compute(self, seconds: float, done: Callable[[], None]) -> None:
        def computed() -> None:
            self._is_computing = False
            done()
            self._go_on()

        self._is_computing = True
        self._worker.perform(seconds, computed)

    def _step(self, sequence: Sequence) -> None:
        end = next(self._ends, None)
        if end is not None:
            self._compute(PREFILL_S, lambda: self.kv_caches.compute(sequence, end))
        else:
            is_prefill = self.kv_caches.missing(sequence) > 1
            seconds = PREFILL_S if is_prefill else self._token_s(sequence.request_id)
            self._compute(seconds, lambda: self._decoded(sequence))

    def _decoded(self, sequence: Sequence) -> None:
        assert self.kv_caches.missing(sequence) > 0, f"{sequence.request_id}: nothing is left to compute"
        self.kv_caches.compute(sequence, len(sequence.tokens))
        token = token_of(sequence.request_id, sequence.position)
        entry = sequence.advance(token, self._worker.now)
        if sequence.is_finished:
            self._end_turn(sequence, entry)
        elif entry is not None and self.rounds.is_stopping:
            self._hand_over(entry)
        elif entry is not None:
            self._say(sequence.request.router_id, entry)

    def _resume_piece(self, resumption: Resumption) -> None:
        end = resumption.piece_end(PREFILL_TOKENS_MAX)

        def done() -> None:
            self.kv_caches.compute(resumption, end)
            answer = self.resumptions.advance(resumption, end, PREFILL_S, self._worker.now)
            if answer is not None:
                self._to_worker(resumption.source, answer)

        self._compute(PREFILL_S, done)

    def _end_turn(self, sequence: Sequence, last: TokenEntry | None) -> None:
        self._turn = None
        self.requests.end_turn()
        outputs = self.rounds.on_requests_ended(self._worker.now)
        self._note_change()
        if last is not None:
            self._say(sequence.request.router_id, last)
        self._tell(outputs)
        self.resumptions.dropped.append(sequence.request_id)
        self._go_on()

    def preempt(self) -> None:
        self._after_abort(self.requests.preempt(self._worker.now))

    def _hand_over(self, unsaid: TokenEntry | None) -> None:
        moved, stopped = self.rounds.stop(self._worker.now)
        if self._turn is not None:
            self._turn = None
            self.requests.end_turn()
        for sequence in moved:
            is_last_step = unsaid is not None and unsaid.request_id == sequence.request_id
            position = unsaid.position if unsaid is not None and is_last_step else sequence.position
            self._say(sequence.request.router_id, sequence.entry(position))
            self.resumptions.dropped.append(sequence.request_id)
        self._tell([stopped])
        self._note_change()
        self._go_on()

    def _after_abort(self, ended: list[Sequence]) -> None:
        outputs = self.rounds.on_requests_ended(self._worker.now)
        for sequence in ended:
            if sequence is not self._turn:
                self.resumptions.dropped.append(sequence.request_id)
            self._say(sequence.request.router_id, sequence.entry(sequence.position))
        self._note_change()
        self._tell(outputs)
        self._go_on()

    def _note_change(self) -> None:
        self._worker.beat()
        if self.active == 0:
            self._worker.end_of_requests()

    # What is said.

    def _say(self, router_id: str, entry: TokenEntry) -> None:
        worker = self._worker
        frame = TokenFrame(server_id=worker.server_id, slot=worker.slot, entries=(entry,))
        worker.network.send(worker, ("router", router_id), frame)

    def _tell(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if isinstance(output, ResumeInference):
                assert self._destination is not None
                self._to_worker((self._destination.server_id, self._destination.slot), output)
            else:
                self._worker.beat()
                self._worker.tell_scheduler(output)

    def _to_worker(self, worker: tuple[str, int], message: ResumeInference | InferenceResumed) -> None:
        self._worker.network.send(self._worker, ("worker", *worker), message)
