"""Owns the run of a load task: bytes from the fastest tiers that have them, and the instance they are for.

Reading starts at the moment the worker is asked to attach, so that mapping and binding are hidden by it (L6). What DRAM
holds already is not read at all. Failures are typed, and leave nothing behind but what is good.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.errors import Cancelled, Conflict, LoadFailed, Unavailable, WhimbrelError
from whimbrel.wire.messages import (
    AttachInstance,
    LoadEnded,
    LoadFinished,
    LoadProgressed,
    PartitionChunks,
    Tier,
    WaitStage,
)

from services.storage_agent import metrics
from services.storage_agent.config import AgentConfig
from services.storage_agent.core.path import Crossed, reports, since
from services.storage_agent.core.residency import DramCopy
from services.storage_agent.core.tasks import LoadTask, TaskEvent
from services.storage_agent.failures import explain
from services.storage_agent.filling import Filling
from services.storage_agent.fillings import Fillings
from services.storage_agent.gpu_copies import GpuCopies
from services.storage_agent.outcomes import load_ended
from services.storage_agent.paths import Paths
from services.storage_agent.progress import tell_changes
from services.storage_agent.slots import Slots
from services.storage_agent.steps import Step
from services.storage_agent.tiers import Tiers
from services.storage_agent.workers import Workers

log = structlog.get_logger()

# The device of a slot whose worker maps the chunks; any other gets a copy of them.
CPU = "cpu"

# How many bytes are done, of how many.
Bytes = tuple[WaitStage, int, int]


@dataclass(slots=True, kw_only=True)
class LoadRun:
    """What a running load has done so far, and so what has to be undone when it fails."""

    task: LoadTask
    error: WhimbrelError | None
    copy: DramCopy | None = None
    filling: Filling | None = None
    source: Tier = Tier.DRAM
    is_lent: bool = False
    is_ending: bool = False
    copied: Crossed | None = None
    before: dict[Tier, Crossed] = field(default_factory=dict)

    @property
    def holder(self) -> str:
        """The name under which the task holds chunks."""
        return f"task {self.task.task_id}"

    def done(self) -> Bytes:
        """For progress: what the filling says, or nothing to do when DRAM had it all."""
        if self.filling is None:
            return (WaitStage.QUEUED if self.copy is None else WaitStage.BINDING, 0, 0)
        return (self.filling.stage, self.filling.done_bytes, self.filling.total_bytes)


class Loading:
    """Runs load tasks, several at once: each waits for its turns on the paths that it needs (E4)."""

    def __init__(
        self,
        config: AgentConfig,
        bus: Bus,
        tiers: Tiers,
        *,
        fillings: Fillings,
        paths: Paths,
        slots: Slots,
        agent_epoch: int,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._bus = bus
        self._tiers = tiers
        self._fillings = fillings
        self._paths = paths
        self._slots = slots
        self._agent_epoch = agent_epoch
        self._on_change = on_change
        self._clock = clock
        self._workers = Workers(bus, server_id=config.server_id, away_s_max=config.attach_s_max, clock=clock)
        self._copies = GpuCopies(tiers.pool)
        self._runs: dict[str, LoadRun] = {}

    def close(self) -> None:
        self._copies.close()

    def run_of(self, task_id: str) -> LoadRun | None:
        """How far a task is, while it runs or waits."""
        return self._runs.get(task_id)

    async def run(self, task: LoadTask) -> LoadFinished | LoadEnded:
        """Run a task to its end; the answer is for the scheduler. Cancelled because it was asked to, it ends so; any
        other cancellation is raised."""
        # A task that is stopped before it says anything was cancelled.
        run = self._runs[task.task_id] = LoadRun(task=task, error=Cancelled(what=f"load {task.task_id}"))
        telling = asyncio.create_task(tell_changes(run.done, lambda latest: self._tell(task, *latest)))
        try:
            await self._perform(run)
        except asyncio.CancelledError:
            if not task.is_cancel_requested:
                raise
        finally:
            run.is_ending = True
            telling.cancel()
            await self._clean_up(run)
            del self._runs[task.task_id]
        total_s = self._clock() - (task.started_s or task.queued_s)
        return self._finished(run, total_s) if run.error is None else self._failed(run, run.error)

    async def _perform(self, run: LoadRun) -> None:
        """All of a load; whatever ends it early becomes `run.error`."""
        try:
            async with self._paths.slot(run.task.slot):
                await self._load(run)
            run.error = None
        except Exception as failure:  # the top of a task: one load must not take the server with it
            run.error = explain(failure, model_id=run.task.key.model_id, server_id=self._config.server_id)

    async def _load(self, run: LoadRun) -> None:
        task, tiers = run.task, self._tiers
        tiers.check_capacity(task.key, task.size_bytes)
        tiers.ssd.confirm(task.key)
        if tiers.lending.is_lent(task.instance_id):
            raise Conflict(reason=f"instance {task.instance_id} still holds the lease of an earlier load; try again")
        copy = await self._copy(run)
        task.on(TaskEvent.CHUNKS_RESERVED)
        await self._attach_and_fill(run, copy)
        task.on(TaskEvent.BYTES_ARRIVED)
        await self._workers.activate(task.slot, task.instance_id)
        task.on(TaskEvent.WORKER_ACTIVATED)

    async def _copy(self, run: LoadRun) -> DramCopy:
        """The DRAM copy with a place for every chunk, held for the task: whole, or while a filling fills it."""
        task, tiers = run.task, self._tiers
        copy = tiers.residency.find(task.key)
        if copy is not None and copy.is_whole:
            tiers.hold(copy, run.holder)
            self._start(task)
        else:
            run.filling = self._fillings.join(task.key, Tier.DRAM, run.holder)
            run.before = run.filling.crossings.so_far()
            await run.filling.steps.until(Step.STARTED)
            self._start(task)
            await run.filling.steps.until(Step.PLACED)
            copy = run.filling.copy
            assert copy is not None, "that is what PLACED means"
        run.copy = copy
        return copy

    def _start(self, task: LoadTask) -> None:
        task.start(self._clock())
        self._on_change()

    # --- the worker ---

    async def _attach_and_fill(self, run: LoadRun, copy: DramCopy) -> None:
        """Both at once; on GPUs the bytes go on as they come, as soon as the worker has memory for them."""
        task, filling = run.task, run.filling
        devices = await self._devices(task, copy)
        started_s = self._clock()
        async with asyncio.TaskGroup() as group:
            attached = group.create_task(self._attach(run, copy, devices))
            if filling is not None:
                group.create_task(filling.steps.until(Step.READY))
            handles = await attached
            if devices[0] != CPU:
                await self._copy_to_gpus(run, copy, devices, handles)
        if run.copied is None and filling is None:
            run.copied = Crossed(size_bytes=copy.layout.size_bytes, seconds=self._clock() - started_s)

    async def _copy_to_gpus(
        self, run: LoadRun, copy: DramCopy, devices: tuple[str, ...], handles: tuple[bytes, ...]
    ) -> None:
        checkpoint = await self._tiers.ssd.checkpoint(run.task.key)
        if len(handles) != len(devices):
            worker = f"worker {self._config.server_id}/{run.task.slot}, which gave {len(handles)} handles for"
            raise Unavailable(what=f"{worker} {len(devices)} partitions,")
        with self._tiers.lending.sharing(run.task.instance_id):
            async with self._copies.copying(checkpoint.index, copy, run.filling, devices, handles) as copier:
                if run.filling is not None:
                    await run.filling.steps.until(Step.READY)
                report = await self._copies.finish(copier)
        run.copied = Crossed(size_bytes=report.size_bytes, seconds=report.seconds)
        self._tiers.lending.copied(run.task.instance_id)

    async def _devices(self, task: LoadTask, copy: DramCopy) -> tuple[str, ...]:
        """The device of each partition: that of its slot, or of the only one. Raises LoadFailed for another number."""
        names = [await self._slots.device_of(slot, self._config.attach_s_max) for slot in task.slots]
        count = len(copy.layout.partition_bytes)
        if len(names) == 1 or CPU in names:
            return (names[0],) * count
        if len(names) != count:
            reason = f"it has {count} partitions, and {len(names)} slots were given for them"
            raise LoadFailed(model_id=task.key.model_id, reason=reason)
        return tuple(names)

    async def _attach(self, run: LoadRun, copy: DramCopy, devices: tuple[str, ...]) -> tuple[bytes, ...]:
        task, lending = run.task, self._tiers.lending
        index_digest = (await self._tiers.ssd.checkpoint(task.key)).manifest.index_digest
        lease_path = lending.lend(copy, task.instance_id)
        run.is_lent = True
        attach = AttachInstance(
            instance_id=task.instance_id,
            model_id=task.key.model_id,
            agent_epoch=self._agent_epoch,
            checkpoint_path=str(self._tiers.ssd.path_of(task.key)),
            index_digest=index_digest,
            pool_path=str(self._tiers.pool.path),
            lease_path=str(lease_path),
            chunk_size_bytes=self._config.chunk_size_bytes,
            partitions=tuple(
                PartitionChunks(size_bytes=size_bytes, chunks=pack_tokens(chunks), device=device)
                for size_bytes, chunks, device in zip(
                    copy.layout.partition_bytes, copy.partitions(), devices, strict=True
                )
            ),
        )
        handles = await self._workers.attach(task.slot, attach)
        if not lending.is_held(task.instance_id):
            worker = f"worker {self._config.server_id}/{task.slot}, which answered without taking the lease,"
            raise Unavailable(what=worker)
        lending.settle(task.instance_id)
        task.on(TaskEvent.WORKER_ATTACHED)
        return handles

    # --- the end ---

    async def _clean_up(self, run: LoadRun) -> None:
        """Let go of what the task held; a worker that attached to a load that failed is told to let go as well."""
        task, lending = run.task, self._tiers.lending
        if run.error is not None and run.is_lent:
            await self._workers.detach(task.slot, task.instance_id)
            lending.settle(task.instance_id)
        if run.filling is not None:
            run.source = run.filling.source_tier
            self._fillings.leave(run.filling, run.holder)
        elif run.copy is not None:
            self._tiers.let_go(run.copy.copy_id, run.holder)
        self._tiers.ssd.use(task.key)
        lending.sweep()

    def _failed(self, run: LoadRun, error: WhimbrelError) -> LoadEnded:
        task = run.task
        is_cancelled = isinstance(error, Cancelled)
        task.on(TaskEvent.TASK_CANCELLED if is_cancelled else TaskEvent.TASK_FAILED)
        metrics.LOADS.labels(task.state, run.source).inc()
        log.warning("load_ended", task_id=task.task_id, model_id=task.key.model_id, code=error.code, reason=str(error))
        return load_ended(task, self._config.server_id, error)

    def _finished(self, run: LoadRun, total_s: float) -> LoadFinished:
        task = run.task
        crossed = {} if run.filling is None else since(run.before, run.filling.crossings.so_far())
        if run.copied is not None:
            crossed[Tier.DRAM] = run.copied
        told = reports(crossed)
        queue_s = task.queue_s(self._clock()) + (0.0 if run.filling is None else run.filling.waited_s)
        metrics.LOADS.labels(task.state, run.source).inc()
        metrics.OVERHEAD_SECONDS.observe(max(0.0, total_s - sum(report.seconds for report in told)))
        for report in told:
            metrics.TIER_BYTES.labels(report.tier).inc(report.size_bytes)
            metrics.TIER_SECONDS.labels(report.tier).observe(report.seconds)
        log.info(
            "load_finished",
            task_id=task.task_id,
            model_id=task.key.model_id,
            source_tier=run.source,
            queue_s=round(queue_s, 4),
            total_s=round(total_s, 4),
            **{f"{report.tier}_s": round(report.seconds, 4) for report in told},
        )
        return LoadFinished(
            task_id=task.task_id,
            instance_id=task.instance_id,
            model_id=task.key.model_id,
            server_id=self._config.server_id,
            source_tier=run.source,
            queue_s=queue_s,
            reports=told,
        )

    async def _tell(self, task: LoadTask, stage: WaitStage, done_bytes: int, total_bytes: int) -> None:
        message = LoadProgressed(
            task_id=task.task_id,
            server_id=self._config.server_id,
            stage=stage,
            done_bytes=done_bytes,
            total_bytes=total_bytes,
        )
        await self._bus.publish(self._bus.subjects.to_scheduler(message), message)
