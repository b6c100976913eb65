"""Owns how the agent speaks to the workers of its server: patiently when one is away, briefly when it has to let go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.errors import Unavailable, WhimbrelError
from whimbrel.wire.messages import ActivateInstance, AttachInstance, AttachInstanceReply, DetachInstance, Message

log = structlog.get_logger()

# A worker answers in milliseconds; one that does not is asked again, because attaching twice is attaching once. A load
# whose question or answer was lost with the bus stands still for this long.
ANSWER_S_MAX = 2.0
# Between two tries to reach a worker that is away: it takes seconds to start.
RETRY_S = 1.0
# A worker that is well lets go at once; one that is not is noticed by its lease, not by waiting for it.
DETACH_S_MAX = 2.0


class Workers:
    """The workers of one server, by slot. `away_s_max` is how long one may stay away while it is needed."""

    def __init__(
        self, bus: Bus, *, server_id: str, away_s_max: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus = bus
        self._server_id = server_id
        self._away_s_max = away_s_max
        self._clock = clock

    async def attach(self, slot: int, message: AttachInstance) -> tuple[bytes, ...]:
        """Until the worker has what it needs; the handles of its memory where it has GPUs."""
        reply = await self._ask(slot, message)
        return reply.handles if isinstance(reply, AttachInstanceReply) else ()

    async def activate(self, slot: int, instance_id: str) -> None:
        await self._ask(slot, ActivateInstance(instance_id=instance_id))

    async def detach(self, slot: int, instance_id: str) -> None:
        """Tell a worker to let go; whether it did is what its lease says."""
        message = DetachInstance(instance_id=instance_id)
        subject = self._bus.subjects.to_worker(self._server_id, slot, message)
        try:
            await self._bus.request(subject, message, timeout_s=DETACH_S_MAX)
        except WhimbrelError as error:
            log.info("detach_unanswered", instance_id=instance_id, code=error.code)

    async def _ask(self, slot: int, message: AttachInstance | ActivateInstance) -> Message:
        """Until the worker has answered; raises its refusal, and Unavailable when it stays away too long."""
        subject = self._bus.subjects.to_worker(self._server_id, slot, message)
        deadline_s = self._clock() + self._away_s_max
        while True:
            asked_s = self._clock()
            try:
                return await self._bus.request(subject, message, timeout_s=min(ANSWER_S_MAX, self._away_s_max))
            except Unavailable as error:
                # Who is away says so at once; who did not answer has had its time.
                wait_s = max(0.0, asked_s + RETRY_S - self._clock())
                if self._clock() + wait_s >= deadline_s:
                    worker = f"worker {self._server_id}/{slot}, asked for {self._away_s_max:g} s,"
                    raise Unavailable(what=worker) from error
            await asyncio.sleep(wait_s)
