"""Owns the choices of one request: `n` answers, each an inference that queues, moves and fails over on its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from whimbrel.wire.errors import Cancelled, WhimbrelError

from services.router.core.openai import Usage
from services.router.core.requests import Limits
from services.router.outputs import Begun, Item
from services.router.specification import Specification
from services.router.streams import Stream

if TYPE_CHECKING:
    from services.router.dispatch import Dispatch


class Choices:
    """All of them end together: when one fails, or when the client leaves. `begun` tells of the first that began."""

    def __init__(self, specification: Specification, count: int, dispatch: Dispatch, limits: Limits) -> None:
        self.begun: Begun | None = None
        self._dispatch = dispatch
        self._wake = asyncio.Event()
        self._streams = [Stream(specification.choice(index), dispatch, limits, self._wake) for index in range(count)]

    @property
    def is_over(self) -> bool:
        return all(stream.is_over for stream in self._streams)

    @property
    def usage(self) -> Usage:
        """The prompt counts once, however many answers there are to it."""
        return Usage(
            prompt_tokens=len(self._streams[0].specification.tokens),
            output_tokens=sum(stream.output.output_tokens for stream in self._streams),
        )

    async def items(self) -> AsyncGenerator[tuple[int, Item], None]:
        """What the client is to see of which choice; for each in order, and last a Text with a finish reason.

        Raises the typed error that ended the request otherwise. Closing the generator early is the client's leaving:
        inferences are aborted, placements cancelled.
        """
        left: dict[int, Stream] = {}
        try:
            for index, stream in enumerate(self._streams):
                left[index] = stream
                stream.enter()
            while left:
                is_news = False
                for index, stream in list(left.items()):
                    item = stream.next()
                    if isinstance(item, Begun):
                        self.begun = self.begun or item
                    if item is not None:
                        is_news = True
                        yield index, item
                    if stream.is_over:
                        await self._dispatch.remove([left.pop(index)])
                if not is_news:
                    await self._wake.wait()
                    self._wake.clear()
        except WhimbrelError:
            for stream in left.values():
                stream.on_failed(Cancelled(what="the request (another of its choices failed)"))
            raise
        finally:
            for stream in left.values():
                stream.leave()
            await self._dispatch.remove(left.values())
