"""Owns the steps of a filling: how far it is, and that everybody who waits for one hears it, or what ended it."""

from __future__ import annotations

import asyncio
from enum import StrEnum


class Step(StrEnum):
    """How far a filling is. Each is reached once; PLACED only on the way to DRAM."""

    STARTED = "started"  # its turn came
    PLACED = "placed"  # every chunk has a place in the pool
    READY = "ready"  # the tier that was wanted has every byte
    STORED = "stored"  # and the SSD what it gets of it


class Steps:
    """The steps of one filling."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._steps: dict[Step, asyncio.Future[None]] = {step: loop.create_future() for step in Step}
        for future in self._steps.values():
            # Nobody has to wait for any of them.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def until(self, step: Step) -> None:
        """Raises what ended the filling instead."""
        await asyncio.shield(self._steps[step])

    def has(self, step: Step) -> bool:
        return self._steps[step].done()

    def reach(self, *steps: Step) -> None:
        for step in steps:
            if not self._steps[step].done():
                self._steps[step].set_result(None)

    def fail(self, error: Exception) -> None:
        """What was not reached never will be."""
        for future in self._steps.values():
            if not future.done():
                future.set_exception(error)
