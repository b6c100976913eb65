"""Owns the running of requests: one after another, step by step, each token said the moment it is known.

A step runs in the engine's thread; everything is decided between steps, in the event loop. So an abort takes effect
after the step that runs, a handover too, and nobody else ever writes to a sequence. What is resumed here for another
worker is computed in between: a piece of the one, a step of the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import InferenceLost, WhimbrelError
from whimbrel.wire.messages import (
    AbortInference,
    FinishReason,
    Message,
    ResendTokens,
    StartInference,
    TokenEntry,
    TokenFrame,
)

from services.gpu_worker import metrics
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.core.requests import Requests
from services.gpu_worker.core.sequence import Sequence, prefill_ends
from services.gpu_worker.engine_thread import EngineThread
from services.gpu_worker.engines.engine import Engine
from services.gpu_worker.migrating import Migrating
from services.gpu_worker.resuming import Resuming

log = structlog.get_logger()

# A piece takes about as long as some ten decode steps: long enough to be efficient, short enough to be aborted between,
# and a bound on the memory of activations.
PREFILL_TOKENS_MAX = 512


@dataclass(slots=True)
class _Turn:
    """The request that runs, and where the pieces of its prefill end that are still to come."""

    sequence: Sequence
    ends: Iterator[int]


class Inference:
    """`tell` publishes a message to the scheduler; `on_idle` is called when no request runs or waits any more,
    `on_change` when the heartbeat has news."""

    def __init__(
        self,
        config: WorkerConfig,
        bus: Bus,
        engine: Engine,
        thread: EngineThread,
        *,
        tell: Callable[[Message], Awaitable[None]],
        on_idle: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._bus = bus
        self._engine = engine
        self._thread = thread
        self._on_idle = on_idle
        self._on_change = on_change
        self._requests = Requests(active_max=config.requests_max, queue=f"worker {config.server_id}/{config.slot}")
        self._arrived = asyncio.Event()
        self._turn: _Turn | None = None
        self.migrating = Migrating(
            config, bus, self._requests, tell=tell, on_stop=self._arrived.set, on_change=on_change
        )
        self.resuming = Resuming(bus, self._requests, engine, thread, on_work=self._arrived.set)

    @property
    def active(self) -> int:
        return self._requests.active

    def knows(self, request: StartInference) -> bool:
        """Whether this start of the request has been heard before."""
        return self._requests.knows(request.request_id, request.epoch)

    async def start(self, request: StartInference) -> None:
        """Let a checked request, with all of its tokens, wait its turn. Raises QueueFull, StaleEpoch."""
        was_active = self._requests.is_active(request.request_id)
        sequence = self._requests.start(request, time.monotonic())
        if sequence is None:
            return
        log.debug("inference_started", request_id=request.request_id, tokens=len(sequence.tokens))
        self.resuming.start(sequence)
        if was_active or sequence.is_finished:
            # What was computed for an earlier start of it, or for one that is over already.
            self.resuming.drop(sequence.request_id)
        if sequence.is_finished:
            # Moved here with all its tokens: the finish is all that is left to say.
            await self._say_last(sequence, sequence.entry(sequence.position))
        self._arrived.set()
        self._note_change()

    async def abort(self, message: AbortInference) -> None:
        sequence = self._requests.abort(message.request_id, message.epoch, time.monotonic())
        await self._after_abort([] if sequence is None else [sequence])

    async def abort_router(self, router_id: str, *, epoch: int | None = None) -> None:
        """Nobody awaits what this router started: all of it, or all but that of its life `epoch`."""
        ended = self._requests.abort_router(router_id, time.monotonic(), epoch=epoch)
        if ended:
            log.info("router_lost", router_id=router_id, requests=len(ended))
        await self._after_abort(ended)

    async def preempt(self) -> None:
        """Another model takes the slot: everything ends here, and starts again wherever its router finds a place."""
        await self._after_abort(self._requests.preempt(time.monotonic()))

    async def resend(self, message: ResendTokens) -> None:
        """Say everything from a position on again. Raises InferenceLost, StaleEpoch, InvalidRequest."""
        entries, router_id = self._requests.resend(message.request_id, message.epoch, message.position)
        for entry in entries:
            await self._publish(router_id, entry)

    def expire(self) -> None:
        self._requests.expire(time.monotonic())
        self.resuming.expire()

    async def run(self) -> None:
        """Runs requests, and what is resumed here, until cancelled."""
        is_resumption_next = False
        while True:
            await self.resuming.forget_dropped()
            # No step runs, and nothing is awaited between this and the next one.
            if self._turn is None and not self.migrating.is_stopping:
                self._turn = self._next_turn()
            turn, resumption = self._turn, self.resuming.next()
            if turn is not None and turn.sequence.is_finished:
                await self._end_turn(turn.sequence, None)
            elif self.migrating.is_stopping:
                await self._hand_over(None)
            elif turn is not None and not (is_resumption_next and resumption is not None):
                is_resumption_next = True
                await self._take_step(turn)
                self._requests.note_step()
            elif resumption is not None:
                is_resumption_next = False
                await self.resuming.compute(resumption, PREFILL_TOKENS_MAX)
                self._requests.note_step()
            else:
                self._arrived.clear()
                await self._arrived.wait()

    def _next_turn(self) -> _Turn | None:
        sequence = self._requests.next(time.monotonic())
        if sequence is None:
            return None
        metrics.QUEUE_SECONDS.observe(sequence.queue_s)
        return _Turn(sequence, iter(prefill_ends(sequence, PREFILL_TOKENS_MAX)))

    async def _take_step(self, turn: _Turn) -> None:
        """A piece of the prefill, or the next token."""
        sequence = turn.sequence
        try:
            entry = await self._compute(turn)
        except Exception as failure:  # whatever a model may do; the next request may go well
            log.exception("inference_failed", request_id=sequence.request_id)
            entry = _failed(sequence, failure)
        if sequence.is_finished:
            await self._end_turn(sequence, entry)
        elif entry is not None and self.migrating.is_stopping:
            await self._hand_over(entry)
        elif entry is not None:
            await self._publish(sequence.request.router_id, entry)

    async def _compute(self, turn: _Turn) -> TokenEntry | None:
        """What is new, if anything: not after a piece of prefill, and not of a request that was aborted meanwhile."""
        sequence = turn.sequence
        end = next(turn.ends, None)
        if end is not None:
            await self._thread.run(self._engine.prefill, sequence, end)
            return None
        decoded = await self._thread.run(self._engine.decode, sequence)
        entry = sequence.advance(decoded.token, time.monotonic(), decoded.logprobs)
        if entry is not None:
            model_id = sequence.request.model_id
            if entry.prefill_s is not None:
                metrics.PREFILL_SECONDS.labels(model_id).observe(entry.prefill_s)
            metrics.TOKENS.labels(model_id).inc(decoded.token is not None)
        return entry

    async def _end_turn(self, sequence: Sequence, last: TokenEntry | None) -> None:
        """The running request has finished; `last` is what it still has to say, if anybody listens."""
        # Before the end is said: whoever hears it may at once ask for the place, or for the slot.
        self._turn = None
        self._requests.end_turn()
        outputs = self.migrating.on_requests_ended()
        self._note_change()
        if last is not None:
            await self._say_last(sequence, last)
        await self.migrating.say(outputs)
        await self._thread.run(self._engine.forget, sequence.request_id)

    async def _hand_over(self, unsaid: TokenEntry | None) -> None:
        """Every request ends here and goes on elsewhere. `unsaid` is what the last step brought."""
        moved, stopped = self.migrating.stop()
        if self._turn is not None:
            self._turn = None
            self._requests.end_turn()
        # First of all the routers: their clients wait.
        for sequence in moved:
            is_last_step = unsaid is not None and unsaid.request_id == sequence.request_id
            position = unsaid.position if unsaid is not None and is_last_step else sequence.position
            await self._say_last(sequence, sequence.entry(position))
        await self.migrating.say([stopped])
        self._note_change()
        for sequence in moved:
            self.resuming.drop(sequence.request_id)

    async def _after_abort(self, ended: Iterable[Sequence]) -> None:
        outputs = self.migrating.on_requests_ended()
        for sequence in ended:
            if self._turn is None or sequence is not self._turn.sequence:
                # It never had its turn, but perhaps it was resumed here.
                self.resuming.drop(sequence.request_id)
            await self._say_last(sequence, sequence.entry(sequence.position))
        self._note_change()
        await self.migrating.say(outputs)

    async def _say_last(self, sequence: Sequence, entry: TokenEntry) -> None:
        assert entry.finish_reason is not None
        metrics.REQUESTS.labels(entry.finish_reason).inc()
        log.debug(
            "inference_finished",
            request_id=sequence.request_id,
            finish_reason=entry.finish_reason,
            output_tokens=sequence.position,
        )
        await self._publish(sequence.request.router_id, entry)

    async def _publish(self, router_id: str, entry: TokenEntry) -> None:
        """One frame per step. While the bus is away frames are lost: the router notices the gap and asks again."""
        frame = TokenFrame(server_id=self._config.server_id, slot=self._config.slot, entries=(entry,))
        try:
            await self._bus.publish(self._bus.subjects.tokens(router_id), frame)
        except WhimbrelError as error:
            metrics.FRAMES_LOST.inc()
            log.debug("frame_lost", request_id=entry.request_id, position=entry.position, code=error.code)

    def _note_change(self) -> None:
        metrics.ACTIVE_REQUESTS.set(self.active)
        self._on_change()
        if self.active == 0:
            self._on_idle()


def _failed(sequence: Sequence, failure: Exception) -> TokenEntry | None:
    """End a request because its model failed; None when it was aborted meanwhile, and that was said."""
    if sequence.is_finished:
        return None
    reason = f"{type(failure).__name__}: {failure}"
    error = InferenceLost(reason=reason, output_tokens=sequence.position)
    sequence.finish(FinishReason.FAILED, time.monotonic(), error=error_reply(error))
    return sequence.entry(sequence.position)
