"""Owns what a client gets to see of one request: the items of its stream, and the text made from its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whimbrel.wire.logprobs import unpack_logprob

from services.router.core.logprobs import Alignment, ShownToken
from services.router.core.progress import Progress
from services.router.core.request_states import RequestState
from services.router.core.requests import Request
from services.router.core.stops import StopMatcher
from services.router.core.timings import StageTimes, stage_times
from services.router.texts import TextStream

# Until then an error can still become an HTTP status and the times a header; a client sees nothing of it.
HEADERS_HELD_S = 2.0
# The promise to clients and proxies is a sign every 10 s.
SIGN_EVERY_S = 9.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Nothing new; the caller may tell its client that somebody is there. `stage` says what is being waited for."""

    stage: str
    remaining_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The first token is here, or the end without one."""

    times: StageTimes
    server_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """More of the output, with the tokens that begin in it if the client asked for their log probabilities; with a
    finish reason ("stop" or "length") the last of it."""

    text: str
    tokens: tuple[ShownToken, ...] = ()
    finish_reason: str | None = None


Item = Waiting | Begun | Text


class Output:
    """What was shown of one request so far, and what is to be shown next.

    `output_tokens` counts the tokens that were looked at: at the end, those up to the one that ended the output.
    """

    def __init__(
        self,
        decoder: TextStream,
        stops: tuple[str, ...],
        stop_tokens: tuple[int, ...],
        *,
        arrived_at: float,
        has_logprobs: bool = False,
    ) -> None:
        self.begun: Begun | None = None
        self.finish_reason: str | None = None
        self.output_tokens = 0
        self._decoder = decoder
        self._stops = StopMatcher(stops)
        self._stop_tokens = frozenset(stop_tokens)
        self._alignment = Alignment() if has_logprobs else None
        self._arrived_at = arrived_at
        self._shown_at = arrived_at
        self._has_waited = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.is_stopped

    def next(self, request: Request, progress: Progress, now: float) -> Item | None:
        """What the client is to see now; None while there is nothing new."""
        item = self._next(request, progress, now)
        if item is not None:
            self._shown_at = now
        return item

    def is_sign_due(self, now: float) -> bool:
        """Whether the client has seen nothing for so long that it should see a sign."""
        is_held = not self._has_waited and self.begun is None
        return now - self._shown_at >= (HEADERS_HELD_S if is_held else SIGN_EVERY_S)

    def take(self, tokens: Sequence[int], finish_reason: str | None, logprobs: Sequence[bytes] = ()) -> Text | None:
        """What the tokens not looked at yet add; None when that is nothing and the output goes on.

        `tokens` are all so far, and `logprobs` their records if any; `finish_reason` says that no more will come.
        """
        pieces: list[str] = []
        while self.output_tokens < len(tokens) and not self.is_stopped:
            token = tokens[self.output_tokens]
            self.output_tokens += 1
            text = "" if token in self._stop_tokens else self._decoder.step(token)
            if self._alignment is not None:
                self._alignment.decoded(text)
            pieces.append(self._stops.feed(text))
        if finish_reason is not None and not self.is_stopped:
            pieces.append(self._stops.feed(self._decoder.flush()))
            pieces.append(self._stops.flush())
        self.finish_reason = "stop" if self.is_stopped else finish_reason
        text = "".join(pieces)
        if not text and self.finish_reason is None:
            return None
        return Text(text=text, tokens=self._shown(text, tokens, logprobs), finish_reason=self.finish_reason)

    def _shown(self, text: str, tokens: Sequence[int], logprobs: Sequence[bytes]) -> tuple[ShownToken, ...]:
        if self._alignment is None:
            return ()
        is_end = self.finish_reason is not None and not self.is_stopped
        shown = self._alignment.show(text, is_end=is_end)
        return tuple(ShownToken(tokens[n], offset, unpack_logprob(logprobs[n])) for n, offset in shown)

    def _next(self, request: Request, progress: Progress, now: float) -> Item | None:
        is_ended = request.state is RequestState.FINISHED
        if is_ended or progress.first_token_at is not None:
            if self.begun is None:
                self.begun = self._begin(request, progress, now)
                return self.begun
            finish_reason = str(progress.finish_reason) if is_ended else None
            text = self.take(progress.tokens, finish_reason, progress.logprobs)
            if text is not None:
                return text
        if self.is_sign_due(now) and not request.is_over:
            self._has_waited = True
            return self._wait(request)
        return None

    def _wait(self, request: Request) -> Waiting:
        if request.is_waiting:
            return Waiting(stage=str(request.waiting_for or "placement"), remaining_s=request.remaining_s)
        return Waiting(stage="first token" if self.begun is None else "next token", remaining_s=None)

    def _begin(self, request: Request, progress: Progress, now: float) -> Begun:
        first_token_at = now if progress.first_token_at is None else progress.first_token_at
        times = stage_times(
            request.stages,
            worker_queue_s=progress.queue_s,
            prefill_s=progress.prefill_s,
            first_token_s=first_token_at - self._arrived_at,
        )
        assert request.server_id, "tokens came from an instance"
        return Begun(times=times, server_id=request.server_id)
