"""Owns what one request asks for, and the messages that say so to workers and the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs
from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.messages import (
    InferenceFinished,
    InferenceStarted,
    InstanceActivity,
    PlaceModel,
    Route,
    Sampling,
    StartInference,
)

from services.router.core.progress import Progress
from services.router.core.requests import Request
from services.router.core.sampling import SEED_MAX
from services.router.texts import ModelText


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """The router, as its messages name it."""

    router_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """A request that was understood and tokenised. `arrived_at` is monotonic seconds."""

    request_id: str
    model_id: str
    text: ModelText
    is_chat: bool
    tokens: list[int]
    output_tokens_max: int
    sampling: Sampling
    stops: tuple[str, ...]
    arrived_at: float
    may_fail_over: bool = True
    top_logprobs: int | None = None

    def choice(self, index: int) -> Specification:
        """One of several answers to it. The first is the only answer to a request that asks for one; each other has an
        id and a seed of its own."""
        if index == 0:
            return self
        sampling = structs.replace(self.sampling, seed=(self.sampling.seed + index) & SEED_MAX)
        return replace(self, request_id=f"{self.request_id}-{index}", sampling=sampling)

    def place(self, speaker: Speaker, request: Request, now: float) -> PlaceModel:
        return PlaceModel(
            request_id=self.request_id,
            model_id=self.model_id,
            router_id=speaker.router_id,
            waited_s=now - request.waiting_since,
        )

    def start(
        self, speaker: Speaker, route: Route, epoch: int, output: list[int], base_tokens: int = 0
    ) -> StartInference:
        """Go on after `output`; so many of all its tokens are computed there already."""
        return StartInference(
            request_id=self.request_id,
            epoch=epoch,
            router_id=speaker.router_id,
            router_epoch=speaker.epoch,
            instance_id=route.instance_id,
            model_id=self.model_id,
            tokens=pack_tokens([*self.tokens, *output][base_tokens:]),
            prompt_tokens=len(self.tokens),
            output_tokens_max=self.output_tokens_max,
            stop_tokens=self.text.settings.stop_tokens,
            sampling=self.sampling,
            base_tokens=base_tokens,
            top_logprobs=self.top_logprobs,
        )

    def started(self, speaker: Speaker, route: Route) -> InferenceStarted:
        return InferenceStarted(
            request_id=self.request_id,
            router_id=speaker.router_id,
            instance_id=route.instance_id,
            model_id=self.model_id,
            prompt_tokens=len(self.tokens),
        )

    def activity(self, route: Route, progress: Progress, now: float) -> InstanceActivity:
        """M2, M3: what this request alone adds to what runs on its instance."""
        return InstanceActivity(
            instance_id=route.instance_id,
            requests=1,
            prompt_tokens=len(self.tokens),
            running_s=progress.decoding_s(now),
        )

    def finished(self, speaker: Speaker, route: Route, progress: Progress) -> InferenceFinished:
        """R5, M3: the request left this instance; the numbers are those of its stay there.

        A prefill that computed more or less than the prompt says nothing of prompts, and stays untold.
        """
        start = progress.start
        return InferenceFinished(
            request_id=self.request_id,
            router_id=speaker.router_id,
            instance_id=route.instance_id,
            model_id=self.model_id,
            prompt_tokens=len(self.tokens),
            output_tokens=start.output_tokens,
            duration_s=start.duration_s,
            token_s=start.token_s,
            prefill_s=start.prefill_s or None if start.prefill_tokens == len(self.tokens) else None,
        )
