"""Owns the one path of a server: load commands come in, run one at a time in order, and their outcomes go out (E4, E5).

Models are removed between two loads by the same loop, so that never two things move the files of a model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.errors import Cancelled, QueueFull, Unavailable, WhimbrelError
from whimbrel.wire.ids import check_model_id, check_service_id
from whimbrel.wire.messages import LoadEnded, LoadFinished, LoadModel, Message, ModelRemoved, RemoveModel

from services.storage_agent import metrics
from services.storage_agent.core.tasks import LoadQueue, LoadTask
from services.storage_agent.imports import ImportJobs
from services.storage_agent.loading import Loading
from services.storage_agent.outcomes import Outcomes, load_ended
from services.storage_agent.tiers import Tiers

log = structlog.get_logger()

Outcome = LoadFinished | LoadEnded


class LoadLoop:
    """The load queue at work. `on_change` is called when `task_ids` changes."""

    def __init__(
        self,
        *,
        server_id: str,
        bus: Bus,
        tiers: Tiers,
        loading: Loading,
        imports: ImportJobs,
        on_change: Callable[[], None],
    ) -> None:
        self._server_id = server_id
        self._bus = bus
        self._tiers = tiers
        self._loading = loading
        self._imports = imports
        self._on_change = on_change
        self._queue = LoadQueue()
        self._outcomes: Outcomes[Outcome] = Outcomes()
        self._removals: dict[str, RemoveModel] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False

    def task_ids(self) -> tuple[str, ...]:
        """Running and waiting ones, in order."""
        return tuple(task.task_id for task in self._queue.tasks())

    # --- commands ---

    async def load(self, command: LoadModel) -> None:
        """Queue a load, or say again how it ended. Raises InvalidRequest for ids that could be paths."""
        check_model_id(command.model_id)
        check_service_id(command.instance_id)
        outcome = self._outcome_of(command)
        if outcome is not None:
            await self._say(outcome)
            return
        task = LoadTask(
            task_id=command.task_id,
            instance_id=command.instance_id,
            model_id=command.model_id,
            checkpoint_digest=command.checkpoint_digest,
            size_bytes=command.size_bytes,
            slot=command.slots[0],
            queued_s=time.monotonic(),
        )
        if self._is_draining:
            await self._say(load_ended(task, self._server_id, self._away()))
            return
        try:
            is_new = self._queue.add(task)
        except QueueFull as error:
            await self._say(load_ended(task, self._server_id, error))
            return
        if is_new:
            self.keep(task.model_id)
            self._work.set()
            self._on_change()

    async def cancel(self, task_id: str) -> None:
        """End a load that waits now, one that runs between two chunks; nothing happens when it is not here."""
        running = self._queue.running
        was_asked = running is not None and running.is_cancel_requested
        task = self._queue.cancel(task_id)
        if task is None:
            return
        if task is not running:
            outcome = load_ended(task, self._server_id, Cancelled(what=f"load {task_id}"))
            self._outcomes.remember(task_id, outcome)
            await self._say(outcome)
            self._on_change()
        elif not was_asked:
            self._loading.cancel()

    async def remove(self, command: RemoveModel) -> None:
        """Stop what works on a model, then remove it as soon as the path is free."""
        model_id = check_model_id(command.model_id)
        known = self._removals.get(model_id)
        if known is None or not known.remove_from_repository:
            self._removals[model_id] = command
        self._imports.stop(model_id)
        for task in self._queue.tasks():
            if task.model_id == model_id:
                await self.cancel(task.task_id)
        self._work.set()

    def keep(self, model_id: str) -> None:
        """The model is wanted again: a newer command counts more than a removal that waits."""
        self._removals.pop(model_id, None)

    def sweep(self) -> None:
        """End the leases that no worker holds; what waited for one goes on."""
        self._tiers.sweep()
        if self._removals:
            self._work.set()

    async def drain(self) -> None:
        """The running load ends; those that wait are for another server."""
        self._is_draining = True
        for task in self._queue.tasks():
            if task is not self._queue.running:
                self._queue.cancel(task.task_id)
                await self._say(load_ended(task, self._server_id, self._away()))
        await self._idle.wait()

    # --- the loop ---

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            self._idle.clear()
            await self._remove_models()
            while (task := self._queue.start_next(now=time.monotonic())) is not None:
                await self._run_load(task)
                await self._remove_models()
            self._idle.set()

    async def _run_load(self, task: LoadTask) -> None:
        metrics.QUEUE_TASKS.set(len(self._queue.tasks()))
        self._on_change()
        outcome = await self._loading.run(task)
        self._queue.release(task)
        self._outcomes.remember(task.task_id, outcome)
        await self._say(outcome)
        metrics.QUEUE_TASKS.set(len(self._queue.tasks()))
        self._on_change()

    async def _remove_models(self) -> None:
        """Remove every copy of the models that have to go; said when there is none left, leased ones included."""
        for model_id, command in list(self._removals.items()):
            try:
                await self._imports.stopped(model_id)
                await self._tiers.remove_model(model_id, from_repository=command.remove_from_repository)
            except OSError as error:
                log.warning("removal_failed", model_id=model_id, reason=str(error))
                continue
            if self._removals.get(model_id) is command and not self._tiers.holds(model_id):
                del self._removals[model_id]
                log.info("model_removed", model_id=model_id)
                await self._say(ModelRemoved(model_id=model_id, server_id=self._server_id))

    def _outcome_of(self, command: LoadModel) -> Outcome | None:
        """How this load ended, when it did and that still holds."""
        outcome = self._outcomes.get(command.task_id)
        if isinstance(outcome, LoadFinished) and command.instance_id not in self._tiers.attached():
            return None  # its worker was lost since then
        return outcome

    def _away(self) -> Unavailable:
        return Unavailable(what=f"storage agent {self._server_id} (it is shutting down)")

    async def _say(self, message: Message) -> None:
        """Tell the scheduler. What gets lost is said again when it repeats its command."""
        try:
            await self._bus.publish(self._bus.subjects.to_scheduler(message), message)
        except WhimbrelError as error:
            log.warning("message_unsent", message=type(message).__name__, code=error.code, reason=str(error))
