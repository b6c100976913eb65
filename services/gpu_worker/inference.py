"""Owns the running of requests: one after another, step by step, each token said the moment it is known.

A step runs in the engine's thread; everything is decided between steps, in the event loop. So an abort takes effect
after the step that runs, and nobody else ever writes to a sequence.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import InferenceLost, WhimbrelError
from whimbrel.wire.messages import (
    AbortInference,
    FinishReason,
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

log = structlog.get_logger()

# A piece takes about as long as some ten decode steps: long enough to be efficient, short enough to be aborted between,
# and a bound on the memory of activations.
PREFILL_TOKENS_MAX = 512


class Inference:
    """`on_idle` is called when no request runs or waits any more, `on_change` when the heartbeat has news."""

    def __init__(
        self,
        config: WorkerConfig,
        bus: Bus,
        engine: Engine,
        thread: EngineThread,
        *,
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

    @property
    def active(self) -> int:
        return self._requests.active

    def knows(self, request: StartInference) -> bool:
        """Whether this start of the request has been heard before."""
        return self._requests.knows(request.request_id, request.epoch)

    async def start(self, request: StartInference) -> None:
        """Let a checked request wait its turn. Raises QueueFull, StaleEpoch."""
        sequence = self._requests.start(request, time.monotonic())
        if sequence is None:
            return
        log.debug("inference_started", request_id=request.request_id, tokens=len(sequence.tokens))
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

    async def resend(self, message: ResendTokens) -> None:
        """Say everything from a position on again. Raises InferenceLost, StaleEpoch, InvalidRequest."""
        entry, router_id = self._requests.resend(message.request_id, message.epoch, message.position)
        if entry is not None:
            await self._publish(router_id, entry)

    def expire(self) -> None:
        self._requests.expire(time.monotonic())

    async def run(self) -> None:
        """Runs requests until cancelled."""
        while True:
            sequence = self._requests.next(time.monotonic())
            if sequence is None:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            try:
                last = await self._run(sequence)
            except Exception as failure:  # whatever a model may do; the next request may go well
                log.exception("inference_failed", request_id=sequence.request_id)
                last = _failed(sequence, failure)
            # Before the end is said: whoever hears it may at once ask for the place, or for the slot.
            self._requests.end_turn()
            self._note_change()
            if last is not None:
                await self._say_last(sequence, last)
            await self._thread.run(self._engine.forget, sequence.request_id)

    async def _run(self, sequence: Sequence) -> TokenEntry | None:
        """Say every token but the last; the answer is that one, with the end. None when the request was aborted."""
        metrics.QUEUE_SECONDS.observe(sequence.queue_s)
        for end in prefill_ends(sequence, PREFILL_TOKENS_MAX):
            await self._thread.run(self._engine.prefill, sequence, end)
            if sequence.is_finished:
                return None
        tokens = metrics.TOKENS.labels(sequence.request.model_id)
        while True:
            token = await self._thread.run(self._engine.decode, sequence)
            entry = sequence.advance(token, time.monotonic())
            if entry is None:
                return None
            if entry.prefill_s is not None:
                metrics.PREFILL_SECONDS.labels(sequence.request.model_id).observe(entry.prefill_s)
            tokens.inc(token is not None)
            if entry.finish_reason is not None:
                return entry
            await self._publish(sequence.request.router_id, entry)

    async def _after_abort(self, ended: Iterable[Sequence]) -> None:
        for sequence in ended:
            await self._say_last(sequence, sequence.entry(sequence.position))
        self._note_change()

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
    sequence.finish(FinishReason.FAILED, time.monotonic(), error_reply(error))
    return sequence.entry(sequence.position)
