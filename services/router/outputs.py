"""Owns what a client gets to see of one request: the items of its stream, and the text made from its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.wire.messages import WaitStage

from services.router.core.stops import StopMatcher
from services.router.core.timings import StageTimes
from services.router.texts import TextStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Nothing yet; the caller may tell its client that somebody is there."""

    stage: WaitStage | None
    remaining_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The first token is here."""

    times: StageTimes
    server_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """More of the output; with a finish reason ("stop" or "length") the last of it."""

    text: str
    finish_reason: str | None = None


Item = Waiting | Begun | Text


class Output:
    """The text of one request's output tokens, up to its stop token, stop string or last token.

    `output_tokens` counts the tokens that were looked at: at the end, those up to the one that ended the output.
    """

    def __init__(self, decoder: TextStream, stops: tuple[str, ...], stop_tokens: tuple[int, ...]) -> None:
        self._decoder = decoder
        self._stops = StopMatcher(stops)
        self._stop_tokens = frozenset(stop_tokens)
        self.output_tokens = 0
        self.is_stopped = False

    def take(self, tokens: list[int], finish_reason: str | None) -> Text | None:
        """What the tokens not looked at yet add; None when that is nothing and the output goes on.

        `tokens` are all so far; `finish_reason` says that no more will come.
        """
        pieces: list[str] = []
        while self.output_tokens < len(tokens) and not self._stops.is_stopped:
            token = tokens[self.output_tokens]
            self.output_tokens += 1
            if token not in self._stop_tokens:
                pieces.append(self._stops.feed(self._decoder.step(token)))
        if finish_reason is not None and not self._stops.is_stopped:
            pieces.append(self._stops.feed(self._decoder.flush()))
            pieces.append(self._stops.flush())
        self.is_stopped = self._stops.is_stopped
        if self.is_stopped:
            finish_reason = "stop"
        text = "".join(pieces)
        return Text(text=text, finish_reason=finish_reason) if text or finish_reason else None
