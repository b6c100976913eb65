"""Owns prefetches: checkpoints brought up to a tier before anybody needs them, by the same fillings as loads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Cancelled, InvalidRequest, QueueFull, Unavailable, WhimbrelError
from whimbrel.wire.ids import check_model_id
from whimbrel.wire.messages import LoadSummary, PrefetchEnded, PrefetchModel, Tier

from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.core.path import Crossed, reports, since
from services.storage_agent.core.residency import PINNABLE
from services.storage_agent.filling import Filling
from services.storage_agent.fillings import Fillings
from services.storage_agent.steps import Step
from services.storage_agent.summaries import summarise
from services.storage_agent.tiers import Tiers

log = structlog.get_logger()

# Prefetches are commanded one by one; more than this at once is a loop somewhere.
PREFETCHES_MAX = 64


class Prefetching:
    """The prefetches of one server, by task id. Commanding one twice is commanding it once."""

    def __init__(
        self,
        *,
        server_id: str,
        bus: Bus,
        tiers: Tiers,
        fillings: Fillings,
        group: asyncio.TaskGroup,
        clock: Callable[[], float],
    ) -> None:
        self._server_id = server_id
        self._bus = bus
        self._tiers = tiers
        self._fillings = fillings
        self._group = group
        self._clock = clock
        self._commands: dict[str, tuple[PrefetchModel, Filling, asyncio.Task[None]]] = {}

    async def begin(self, command: PrefetchModel) -> None:
        """Raises InvalidRequest for a wrong id or tier, ModelTooLarge and QueueFull."""
        check_model_id(command.model_id)
        if command.tier not in PINNABLE:
            raise InvalidRequest(field="tier", reason=f"{command.tier} is no cache; use ssd or dram")
        if command.task_id in self._commands:
            return
        if len(self._commands) >= PREFETCHES_MAX:
            raise QueueFull(queue="the list of prefetches", limit=PREFETCHES_MAX)
        is_new_pin = command.is_pinned and command.tier not in self._tiers.residency.pinned(command.model_id)
        if is_new_pin:
            await self._tiers.pin(command.model_id, command.tier)
        key = CheckpointKey(model_id=command.model_id, checkpoint_digest=command.checkpoint_digest)
        self._tiers.ssd.confirm(key)
        filling = self._fillings.join(key, command.tier, command.task_id)
        work = self._run(command, filling, filling.crossings.so_far(), unpins=is_new_pin)
        task = self._group.create_task(work)
        self._commands[command.task_id] = (command, filling, task)

    def cancel(self, task_id: str) -> None:
        """Stop a prefetch between two chunks; nothing happens when it is not here."""
        if task_id in self._commands:
            # Not before its first step: without one it would never say how it ended.
            asyncio.get_running_loop().call_soon(self._commands[task_id][2].cancel)

    def stop(self, model_id: str) -> None:
        for task_id, (command, _, _) in list(self._commands.items()):
            if command.model_id == model_id:
                self.cancel(task_id)

    def summaries(self) -> tuple[LoadSummary, ...]:
        return tuple(self._summary(command, filling) for command, filling, _ in self._commands.values())

    async def _run(
        self, command: PrefetchModel, filling: Filling, before: dict[Tier, Crossed], *, unpins: bool
    ) -> None:
        error: WhimbrelError | None = None
        try:
            await filling.steps.until(Step.STORED if command.tier is Tier.SSD else Step.READY)
        except asyncio.CancelledError:
            error = Cancelled(what=f"prefetch {command.task_id}")
        except WhimbrelError as failure:
            error = failure
        finally:
            self._fillings.leave(filling, command.task_id)
            del self._commands[command.task_id]
        if error is not None and unpins:
            with suppress(Unavailable):  # it is not pinned now; the disk may say so still
                await self._tiers.unpin(command.model_id, command.tier)
        log.info("prefetch_ended", task_id=command.task_id, model_id=command.model_id, error=error and error.code)
        ended = PrefetchEnded(
            task_id=command.task_id,
            model_id=command.model_id,
            server_id=self._server_id,
            source_tier=filling.source_tier,
            reports=reports(since(before, filling.crossings.so_far())),
            error=None if error is None else error_reply(error),
        )
        try:
            await self._bus.publish(self._bus.subjects.to_scheduler(ended), ended)
        except WhimbrelError as failure:  # its effect shows in heartbeats
            log.warning("message_unsent", message="PrefetchEnded", code=failure.code)

    def _summary(self, command: PrefetchModel, filling: Filling) -> LoadSummary:
        return summarise(
            filling,
            task_id=command.task_id,
            instance_id="",
            model_id=command.model_id,
            size_bytes=filling.total_bytes,
            running_s=filling.running_s(self._clock()) if filling.steps.has(Step.STARTED) else None,
            probe_bytes_per_s=self._tiers.probe.bandwidth_bytes_per_s,
        )
