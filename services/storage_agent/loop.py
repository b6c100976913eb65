"""Owns the tasks of a server: load commands come in, run in their order, and their outcomes go out (E4, E5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.errors import QueueFull, Unavailable, WhimbrelError
from whimbrel.wire.ids import check_model_id, check_service_id
from whimbrel.wire.messages import LoadEnded, LoadFinished, LoadModel, LoadSummary, Message

from services.storage_agent import metrics
from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.core.tasks import LoadTask, Tasks
from services.storage_agent.loading import Loading
from services.storage_agent.outcomes import Outcomes, load_ended
from services.storage_agent.summaries import summarise
from services.storage_agent.tiers import Tiers

log = structlog.get_logger()

Outcome = LoadFinished | LoadEnded


class LoadLoop:
    """Load tasks at work. `on_change` is called when `task_ids` or `running_ids` change."""

    def __init__(
        self,
        *,
        server_id: str,
        bus: Bus,
        tiers: Tiers,
        loading: Loading,
        group: asyncio.TaskGroup,
        on_change: Callable[[], None],
    ) -> None:
        self._server_id = server_id
        self._bus = bus
        self._tiers = tiers
        self._loading = loading
        self._group = group
        self._on_change = on_change
        self._tasks = Tasks()
        self._working: dict[str, asyncio.Task[None]] = {}
        self._outcomes: Outcomes[Outcome] = Outcomes()
        self._is_draining = False

    def task_ids(self) -> tuple[str, ...]:
        """Running and waiting ones, in order."""
        return tuple(task.task_id for task in self._tasks.all())

    def running_ids(self) -> tuple[str, ...]:
        """Those that are being worked on: not those that wait for their turn, be it their second."""
        return tuple(task.task_id for task in self._tasks.all() if task.is_running and not self._waits(task))

    def summaries(self) -> tuple[LoadSummary, ...]:
        """What every task does, and how long the rest of it should take (E1)."""
        return tuple(self._summary(task) for task in self._tasks.all())

    # --- commands ---

    async def load(self, command: LoadModel) -> None:
        """Begin a load, or say again how it ended. Raises InvalidRequest for ids that could be paths."""
        check_model_id(command.model_id)
        check_service_id(command.instance_id)
        outcome = self._outcome_of(command)
        if outcome is not None:
            await self._say(outcome)
            return
        task = LoadTask(
            task_id=command.task_id,
            instance_id=command.instance_id,
            key=CheckpointKey(model_id=command.model_id, checkpoint_digest=command.checkpoint_digest),
            size_bytes=command.size_bytes,
            slots=command.slots,
            queued_s=time.monotonic(),
        )
        if self._is_draining:
            await self._say(load_ended(task, self._server_id, self._away()))
            return
        try:
            is_new = self._tasks.add(task)
        except QueueFull as error:
            await self._say(load_ended(task, self._server_id, error))
            return
        if is_new:
            self._working[task.task_id] = self._group.create_task(self._run(task))
            self._changed()
            # A task that is cancelled before its first step would never say how it ended.
            await asyncio.sleep(0)

    async def cancel(self, task_id: str) -> None:
        """End a load, between two chunks when it runs; nothing happens when it is not here, or ends already."""
        # Not before its first step: without one it would never say how it ended.
        asyncio.get_running_loop().call_soon(self._cancel, task_id)

    def _cancel(self, task_id: str) -> None:
        task, run = self._tasks.find(task_id), self._loading.run_of(task_id)
        if task is not None and run is not None and not (task.is_cancel_requested or run.is_ending):
            task.is_cancel_requested = True
            self._working[task_id].cancel()

    async def stop(self, model_id: str) -> None:
        """Cancel every load of a model, and return when they have let go of everything."""
        working = [self._working[task.task_id] for task in self._tasks.all() if task.key.model_id == model_id]
        for task in self._tasks.all():
            if task.key.model_id == model_id:
                await self.cancel(task.task_id)
        if working:
            await asyncio.wait(working)

    async def drain(self) -> None:
        """The running loads end; those that wait are for another server."""
        self._is_draining = True
        for task in self._tasks.all():
            if not task.is_running:
                await self.cancel(task.task_id)
        if self._working:
            await asyncio.wait(list(self._working.values()))

    # --- the run of a task ---

    async def _run(self, task: LoadTask) -> None:
        try:
            outcome = await self._loading.run(task)
        finally:
            del self._working[task.task_id]
        self._tasks.remove(task)
        if self._is_draining and isinstance(outcome, LoadEnded):
            outcome = load_ended(task, self._server_id, self._away())
        self._outcomes.remember(task.task_id, outcome)
        await self._say(outcome)
        self._changed()

    def _running_s(self, task: LoadTask, now: float) -> float:
        """Of the bytes, which may have been on their way before the task came."""
        run = self._loading.run_of(task.task_id)
        if run is not None and run.filling is not None:
            return run.filling.running_s(now)
        return now - (task.started_s or now)

    def _waits(self, task: LoadTask) -> bool:
        run = self._loading.run_of(task.task_id)
        return run is not None and run.filling is not None and run.filling.is_waiting

    def _summary(self, task: LoadTask) -> LoadSummary:
        run = self._loading.run_of(task.task_id)
        return summarise(
            None if run is None else run.filling,
            task_id=task.task_id,
            instance_id=task.instance_id,
            model_id=task.key.model_id,
            size_bytes=task.size_bytes,
            running_s=None if task.started_s is None else self._running_s(task, time.monotonic()),
            probe_bytes_per_s=self._tiers.probe.bandwidth_bytes_per_s,
        )

    def _outcome_of(self, command: LoadModel) -> Outcome | None:
        """How this load ended, when it did and that still holds."""
        outcome = self._outcomes.get(command.task_id)
        if isinstance(outcome, LoadFinished) and command.instance_id not in self._tiers.lending.attached():
            return None  # its worker was lost since then
        return outcome

    def _changed(self) -> None:
        metrics.QUEUE_TASKS.set(len(self._tasks))
        self._on_change()

    def _away(self) -> Unavailable:
        return Unavailable(what=f"storage agent {self._server_id} (it is shutting down)")

    async def _say(self, message: Message) -> None:
        """Tell the scheduler. What gets lost is said again when it repeats its command."""
        try:
            await self._bus.publish(self._bus.subjects.to_scheduler(message), message)
        except WhimbrelError as error:
            log.warning("message_unsent", message=type(message).__name__, code=error.code, reason=str(error))
