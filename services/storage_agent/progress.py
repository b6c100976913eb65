"""Owns how running work says how far it is: written from any thread, told from the event loop, a few times a second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from whimbrel.wire.errors import WhimbrelError

S = TypeVar("S")
T = TypeVar("T")

# A bar looks alive at five a second; more only costs messages.
PROGRESS_S = 0.2


class Progress(Generic[S]):
    """The latest stage, bytes done and bytes in all."""

    def __init__(self, stage: S) -> None:
        # One tuple, replaced as a whole: readers in other threads never see half of it.
        self._latest = (stage, 0, 0)

    def set(self, stage: S, done_bytes: int = 0, total_bytes: int = 0) -> None:
        """Callable from any thread."""
        self._latest = (stage, done_bytes, total_bytes)

    @property
    def stage(self) -> S:
        return self._latest[0]

    async def tell(self, publish: Callable[[S, int, int], Awaitable[None]]) -> None:
        """Publish what is new, until cancelled."""
        await tell_changes(lambda: self._latest, lambda latest: publish(*latest))


async def tell_changes(read: Callable[[], T], publish: Callable[[T], Awaitable[None]]) -> None:
    """Publish what `read` gives whenever it is new, until cancelled. Work that is over before the first pause says
    nothing."""
    told = read()
    while True:
        await asyncio.sleep(PROGRESS_S)
        latest = read()
        if latest == told:
            continue
        told = latest
        try:
            await publish(told)
        except WhimbrelError:  # the next one says more
            continue
