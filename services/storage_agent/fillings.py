"""Owns which fillings are under way: one per checkpoint, begun by the first who wants it, given up with the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from whimbrel.wire.messages import Tier

from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.filling import Filling
from services.storage_agent.steps import Step


class Fillings:
    """Single flight: two who want one checkpoint cause one filling. `spawn` starts a task of the service."""

    def __init__(
        self,
        make: Callable[[CheckpointKey, Tier], Filling],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._make = make
        self._spawn = spawn
        self._running: dict[CheckpointKey, tuple[Filling, asyncio.Task[None]]] = {}
        # Every one that has not ended, also those that were given up and only let go of what they have.
        self._tasks: dict[asyncio.Task[None], CheckpointKey] = {}

    def join(self, key: CheckpointKey, wanted: Tier, holder: str) -> Filling:
        """The filling of a checkpoint, begun now where there is none that can still help: whoever asks for DRAM after
        one is ready saw that its bytes are gone again."""
        known = self._running.get(key)
        if (
            known is not None
            and not known[1].cancelling()
            and not (wanted is Tier.DRAM and known[0].steps.has(Step.READY))
        ):
            filling = known[0]
        else:
            filling = self._make(key, wanted)
            task = self._spawn(self._run(filling, after=[task for task, of in self._tasks.items() if of == key]))
            self._running[key] = (filling, task)
            self._tasks[task] = key
            task.add_done_callback(self._tasks.pop)
        filling.join(holder, wanted)
        return filling

    def leave(self, filling: Filling, holder: str) -> None:
        """Nobody waits for what only the SSD still gets: that goes on. Anything else stops with its last waiter."""
        is_alone = filling.leave(holder)
        running = self._running.get(filling.key)
        if is_alone and running is not None and running[0] is filling and not filling.steps.has(Step.READY):
            _cancel([running[1]])

    def find(self, key: CheckpointKey) -> Filling | None:
        running = self._running.get(key)
        return None if running is None else running[0]

    async def stop(self, model_id: str) -> None:
        """Give up what works on a model, and return when nothing does."""
        tasks = [task for task, key in self._tasks.items() if key.model_id == model_id]
        _cancel(tasks)
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Give up everything."""
        tasks = list(self._tasks)
        _cancel(tasks)
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, filling: Filling, after: list[asyncio.Task[None]]) -> None:
        try:
            if after:
                # Their chunks and files are ours when they have let go of them.
                await asyncio.wait(after)
            await filling.run()
        except asyncio.CancelledError:
            filling.give_up()
        finally:
            if self._running.get(filling.key, (None,))[0] is filling:
                del self._running[filling.key]


def _cancel(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Once each: one that is waiting for its threads to let go of chunks must not leave before they did."""
    for task in tasks:
        if not task.cancelling():
            task.cancel()
