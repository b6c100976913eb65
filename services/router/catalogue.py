"""Owns what the router knows of deployed models: the scheduler's list, kept fresh, and each ready model's tokenizer."""

from __future__ import annotations

import asyncio
import time

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.errors import Conflict, InternalError, ModelNotFound, WhimbrelError
from whimbrel.wire.messages import GetModels, GetModelsReply, ModelState, ModelSummary

from services.router.texts import ModelText
from services.router.tokenizers import TOKENIZERS_MAX, Tokenizers

log = structlog.get_logger()

# How stale the list may get: a model that another router deployed is known here after this long, or when asked for.
REFRESH_S = 3.0
# While a model is being imported its end is near, and its first request should find the tokenizer loaded.
REFRESH_IMPORTING_S = 0.5
# However many clients ask for unknown models, the scheduler is asked no more often than this.
ASK_GAP_S = 0.05
GET_MODELS_S_MAX = 2.0


class Catalogue:
    """Models by id. A list that cannot be refreshed stays: warm models are served while the scheduler is away."""

    def __init__(self, bus: Bus, tokenizers: Tokenizers) -> None:
        self._bus = bus
        self._tokenizers = tokenizers
        self._models: dict[str, ModelSummary] = {}
        self._asked_at = float("-inf")
        self._error: WhimbrelError | None = None
        self._asking = asyncio.Lock()
        self._is_wanted = asyncio.Event()
        #: Set once the tokenizers of the models known at the start are loaded, or cannot be.
        self.is_preloaded = asyncio.Event()

    async def text(self, model_id: str) -> ModelText:
        """The tokenizer of a deployed model; raises ModelNotFound, Conflict, LoadFailed or Unavailable."""
        summary = await self._find(model_id)
        return await self._tokenizers.get(model_id, summary.checkpoint_digest)

    async def models(self) -> list[ModelSummary]:
        """All models, asked for now; the last known ones when the scheduler does not answer and some are known."""
        try:
            await self.refresh()
        except WhimbrelError:
            if not self._models:
                raise
        return list(self._models.values())

    async def refresh(self) -> None:
        """Ask the scheduler, unless somebody has since this was called; raises Unavailable."""
        wanted_at = time.monotonic()
        async with self._asking:
            if self._asked_at < wanted_at:
                await asyncio.sleep(max(0.0, self._asked_at + ASK_GAP_S - time.monotonic()))
                await self._ask()
            if self._error is not None:
                raise self._error

    def want(self) -> None:
        """Something changed: refresh soon."""
        self._is_wanted.set()

    async def run(self) -> None:
        """Keeps the list fresh and loads the tokenizers of ready models before anybody asks."""
        while True:
            try:
                await self.refresh()
                await self._preload()
            except WhimbrelError as error:
                log.info("catalogue_stale", code=error.code, reason=str(error))
            self.is_preloaded.set()
            await self._pause()

    async def _pause(self) -> None:
        is_importing = any(summary.state is ModelState.IMPORTING for summary in self._models.values())
        try:
            async with asyncio.timeout(REFRESH_IMPORTING_S if is_importing else REFRESH_S):
                await self._is_wanted.wait()
        except TimeoutError:
            return
        self._is_wanted.clear()

    async def _ask(self) -> None:
        asked_at = time.monotonic()
        message = GetModels()
        try:
            reply = await self._bus.request(self._bus.subjects.to_scheduler(message), message, GET_MODELS_S_MAX)
            if not isinstance(reply, GetModelsReply):
                raise InternalError(service="scheduler")
        except WhimbrelError as error:
            self._error = error
        else:
            self._error = None
            self._models = {summary.model_id: summary for summary in reply.models}
        self._asked_at = asked_at

    async def _find(self, model_id: str) -> ModelSummary:
        summary = self._models.get(model_id)
        if summary is None or summary.state is not ModelState.READY:
            await self.refresh()
            summary = self._models.get(model_id)
        if summary is None or summary.state is ModelState.DELETING:
            raise ModelNotFound(model_id=model_id)
        if summary.state is not ModelState.READY:
            raise Conflict(reason=_not_ready(summary))
        return summary

    async def _preload(self) -> None:
        for summary in list(self._models.values()):
            is_ready = summary.state is ModelState.READY
            is_loaded = self._tokenizers.has(summary.model_id, summary.checkpoint_digest)
            if is_ready and not is_loaded and len(self._tokenizers) < TOKENIZERS_MAX:
                try:
                    await self._tokenizers.get(summary.model_id, summary.checkpoint_digest)
                except WhimbrelError as error:
                    log.warning("tokenizer_not_loaded", model_id=summary.model_id, reason=str(error))


def _not_ready(summary: ModelSummary) -> str:
    if summary.state is ModelState.IMPORTING:
        return f"model {summary.model_id!r} is still being imported; job {summary.job_id} tells how far it is"
    return f"the import of model {summary.model_id!r} failed; job {summary.job_id} tells why; deploy it again"
