"""Owns an answer as its client saw it: its text, and when each piece of it came."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from math import inf

from whimbrel.client import AdminClient
from whimbrel.client.admin import Answer


@dataclass(slots=True)
class Seen:
    """`pieces_s` are the times of its pieces, monotonic seconds; something was done to it from `disturbed_s` to
    `settled_s`, after so many pieces as `disturbed_at` says."""

    text: str = ""
    answer: Answer = field(default_factory=Answer)
    asked_s: float = 0.0
    pieces_s: list[float] = field(default_factory=list)
    disturbed_s: float = 0.0
    settled_s: float = inf
    disturbed_at: int = 0

    @property
    def start_s(self) -> float:
        """From the request to its first piece."""
        return self.pieces_s[0] - self.asked_s

    @property
    def gap_s(self) -> float:
        """The usual time between two pieces, before it was disturbed if it was."""
        gaps = [later - earlier for earlier, later in zip(self.pieces_s, self.pieces_s[1:], strict=False)]
        return statistics.median(gaps[: self.disturbed_at - 1] if self.disturbed_at > 1 else gaps)

    @property
    def pause_s(self) -> float:
        """The longest time between two pieces, of those during which it was disturbed for a while."""
        pairs = zip(self.pieces_s, self.pieces_s[1:], strict=False)
        during = (pair for pair in pairs if pair[1] >= self.disturbed_s and pair[0] <= self.settled_s)
        return max((later - earlier for earlier, later in during), default=0.0)


async def watch(
    client: AdminClient,
    model: str,
    question: str,
    *,
    max_tokens: int,
    at: int = 0,
    disturb: Callable[[], Awaitable[object]] | None = None,
) -> Seen:
    """One greedy answer, streamed; when `at` pieces have come, `disturb` is done while it goes on."""
    seen = Seen(disturbed_at=at, asked_s=time.perf_counter())
    disturbing: asyncio.Future[object] | None = None
    messages = [{"role": "user", "content": question}]
    async for text in client.chat(model, messages, seen.answer, temperature=0, max_tokens=max_tokens):
        seen.text += text
        seen.pieces_s.append(time.perf_counter())
        if disturb is not None and len(seen.pieces_s) == at:
            seen.disturbed_s = seen.pieces_s[-1]
            disturbing = asyncio.ensure_future(_settle(seen, disturb))
    if disturbing is not None:
        await disturbing
    return seen


async def _settle(seen: Seen, disturb: Callable[[], Awaitable[object]]) -> None:
    await disturb()
    seen.settled_s = time.perf_counter()
