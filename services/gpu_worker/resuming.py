"""Owns the computing of what runs elsewhere and will go on here: pieces of prefill, between the steps of requests."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.errors import Conflict, InternalError, WhimbrelError
from whimbrel.wire.messages import InferenceResumed, ResumeInference, StartInference

from services.gpu_worker import metrics
from services.gpu_worker.core.requests import Requests
from services.gpu_worker.core.resumptions import Resumption, Resumptions, check_resume, refusal
from services.gpu_worker.core.sequence import Sequence
from services.gpu_worker.engine_thread import EngineThread
from services.gpu_worker.engines.engine import Engine, Limits

log = structlog.get_logger()


class Resuming:
    """`on_work` is called when there is something to compute or to forget. Whoever runs requests calls
    `forget_dropped` before anything is computed, and `compute` in between."""

    def __init__(
        self, bus: Bus, requests: Requests, engine: Engine, thread: EngineThread, *, on_work: Callable[[], None]
    ) -> None:
        self._bus = bus
        self._requests = requests
        self._engine = engine
        self._thread = thread
        self._on_work = on_work
        self._resumptions = Resumptions()

    async def resume(self, message: ResumeInference, serving: Callable[[str], Limits]) -> None:
        """Take a round's tokens; `serving` are the limits of an instance, or it raises InstanceGone."""
        source = message.source_server_id, message.source_slot
        try:
            limits = serving(message.instance_id)
            check_resume(message, context_tokens=limits.context_tokens, vocabulary_size=limits.vocabulary_size)
            if self._requests.is_active(message.request_id):
                raise Conflict(reason=f"request {message.request_id!r} runs here already")
            answer = self._resumptions.hear(message, time.monotonic())
        except WhimbrelError as error:
            log.info("resume_refused", request_id=message.request_id, code=error.code, reason=str(error))
            answer = refusal(message.migration_id, message.request_id, error)
        self._on_work()
        if answer is not None:
            await self._answer(source, answer)

    def next(self) -> Resumption | None:
        return self._resumptions.next()

    async def compute(self, resumption: Resumption, tokens_max: int) -> None:
        """One piece, and the answer when it was the last."""
        end, begun_at = resumption.piece_end(tokens_max), time.monotonic()
        tokens = end - resumption.computed
        try:
            await self._thread.run(self._engine.prefill, resumption, end)
        except Exception:  # whatever a model may do; the source carries on
            log.exception("resume_failed", request_id=resumption.request_id)
            answer = self._resumptions.fail(resumption, InternalError(service="gpu_worker"))
        else:
            now = time.monotonic()
            metrics.MIGRATION_RESUMED_TOKENS.inc(tokens)
            answer = self._resumptions.advance(resumption, end, now - begun_at, now)
        if answer is not None:
            if answer.error is None:
                metrics.MIGRATION_RESUME_SECONDS.observe(answer.prefill_s)
            await self._answer(resumption.source, answer)

    def complete(self, request: StartInference) -> StartInference:
        """The request with all of its tokens. Raises InferenceLost when it builds on some that are not here."""
        return self._resumptions.complete(request)

    def start(self, sequence: Sequence) -> None:
        """The request goes on here, from what is computed of it."""
        sequence.computed = self._resumptions.take(sequence.request, sequence.tokens)
        if sequence.computed:
            log.debug("inference_resumed", request_id=sequence.request_id, computed_tokens=sequence.computed)

    def abandon(self, migration_id: str) -> None:
        self._resumptions.abandon(migration_id)
        self._on_work()

    def clear(self) -> None:
        """The instance goes."""
        self._resumptions.clear()
        self._on_work()

    def expire(self) -> None:
        self._resumptions.expire(time.monotonic())
        if self._resumptions.dropped:
            self._on_work()

    def drop(self, request_id: str) -> None:
        """Nobody will go on from what was computed of it."""
        self._resumptions.dropped.append(request_id)
        self._on_work()

    async def forget_dropped(self) -> None:
        """When it returns, no KV cache is there that does not belong to the tokens that are known of its request."""
        while self._resumptions.dropped:
            await self._thread.run(self._engine.forget, self._resumptions.dropped.popleft())

    async def _answer(self, source: tuple[str, int], answer: InferenceResumed) -> None:
        """The source asks again when this is lost."""
        try:
            await self._bus.publish(self._bus.subjects.to_worker(*source, answer), answer)
        except WhimbrelError as error:
            log.warning("news_lost", message=type(answer).__name__, code=error.code)
