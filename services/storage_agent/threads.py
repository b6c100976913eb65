"""Owns the threads that touch files: blocking work runs to its end, also when whoever waits for it is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A few threads for one kind of work."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Await a blocking call. Cancelled, it waits for the call first, which may hold files and chunks of ours."""
        return await self.run_until(_nothing, function, *arguments, **named)

    async def run_until(
        self, stop: Callable[[], object], function: Callable[P, T], *arguments: P.args, **named: P.kwargs
    ) -> T:
        """The same for a call that can be told to stop: `stop` is called before a cancelled caller waits for it."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, lambda: function(*arguments, **named))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stop()
            while not future.done():
                with suppress(asyncio.CancelledError):  # however often it is cancelled, it can't leave sooner
                    await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # heard: it was most likely told to stop
            raise

    def submit(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> None:
        """Have something done that nobody waits for and that may fail."""
        self._executor.submit(function, *arguments, **named)

    def close(self) -> None:
        """Wait for what runs, drop what waits."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def _nothing() -> None:
    pass
