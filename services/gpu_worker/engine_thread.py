"""Owns the one thread in which the engine works: models are not thread-safe, and torch has threads for each caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class EngineThread:
    """Runs calls one after another, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of `call`. Cancelling the caller takes back a call that has not begun, and none that has."""
        assert not kwargs
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)

    def close(self) -> None:
        """Nothing more is started; what runs, runs to its end."""
        self._executor.shutdown(wait=False, cancel_futures=True)
