"""Owns the run of a load task: bytes from the fastest tier that has them into the pool, and the instance they are for.

Reading starts at the moment the worker is asked to map the chunks, so that mapping and binding are hidden by it (L6).
What DRAM holds already is not read at all. Failures are typed, and leave nothing behind but what is whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import ckptio
import structlog
from ckptio.manifest import partition_file
from whimbrel.chassis.bus import Bus
from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.errors import Cancelled, Conflict, InternalError, LoadFailed, Unavailable, WhimbrelError
from whimbrel.wire.messages import (
    ActivateInstance,
    AttachInstance,
    LoadEnded,
    LoadFinished,
    LoadProgressed,
    PartitionChunks,
    Tier,
    WaitStage,
)

from services.storage_agent import metrics
from services.storage_agent.checkpoints import Checkpoint
from services.storage_agent.config import AgentConfig
from services.storage_agent.core.path import reports, source_tier
from services.storage_agent.core.residency import CheckpointKey, DramCopy
from services.storage_agent.core.tasks import LoadTask, TaskEvent
from services.storage_agent.outcomes import load_ended
from services.storage_agent.progress import Progress
from services.storage_agent.threads import Threads
from services.storage_agent.tiers import Tiers
from services.storage_agent.workers import Workers

log = structlog.get_logger()

# What says that a copy is damaged, rather than that something is away.
DAMAGE = (ckptio.CorruptCheckpoint, ckptio.TruncatedCheckpoint, ckptio.MissingFile, ckptio.UnsupportedFormat, OSError)


@dataclass(slots=True, kw_only=True)
class _Run:
    """What a running load has done so far, and so what has to be undone when it fails."""

    task: LoadTask
    key: CheckpointKey
    source: Tier
    progress: Progress[WaitStage]
    error: WhimbrelError | None
    copy: DramCopy | None = None
    is_leased: bool = False
    seconds: dict[Tier, float] = field(default_factory=dict)


class Loading:
    """Runs load tasks. The caller sees to it that it is one at a time (E4)."""

    def __init__(
        self, config: AgentConfig, bus: Bus, tiers: Tiers, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._bus = bus
        self._tiers = tiers
        self._clock = clock
        self._workers = Workers(bus, server_id=config.server_id, away_s_max=config.attach_s_max, clock=clock)
        self._reader = ckptio.Reader(config.reader_threads)
        # Reading blocks a thread of ours while the reader's own threads work.
        self._thread = Threads(1, "agent-reader")
        self._work: asyncio.Task[None] | None = None

    def close(self) -> None:
        self._thread.close()
        self._reader.close()

    def cancel(self) -> None:
        """Stop the running task, which was asked to, between two chunks."""
        if self._work is not None:
            self._work.cancel()

    async def run(self, task: LoadTask) -> LoadFinished | LoadEnded:
        """Run a task to its end; the answer is for the scheduler. Only a cancellation of the caller is raised."""
        key = CheckpointKey(model_id=task.model_id, checkpoint_digest=task.checkpoint_digest)
        self._tiers.confirm_ssd(key)
        source = source_tier(self._tiers.residency, key)
        # A task that is stopped before it says anything was cancelled.
        error = Cancelled(what=f"load {task.task_id}")
        run = _Run(task=task, key=key, source=source, progress=Progress(WaitStage.QUEUED), error=error)
        started_s = self._clock()
        try:
            async with asyncio.TaskGroup() as group:
                telling = group.create_task(run.progress.tell(lambda *latest: self._tell(task, *latest)))
                self._work = group.create_task(self._perform(run))
                await asyncio.wait([self._work])
                telling.cancel()
        finally:
            self._work = None
            await self._clean_up(run)
        total_s = self._clock() - started_s
        if run.error is not None:
            return self._failed(run, run.error)
        return self._finished(run, total_s)

    async def _perform(self, run: _Run) -> None:
        """All of a load; whatever ends it early becomes `run.error`."""
        try:
            await self._load(run)
            run.error = None
        except WhimbrelError as error:
            run.error = error
        except ckptio.CkptioError as error:
            run.error = LoadFailed(model_id=run.task.model_id, reason=str(error))
        except OSError as error:  # a full or failing disk is this server's trouble, not the checkpoint's
            run.error = Unavailable(what=f"storage of server {self._config.server_id} ({error})")
        except Exception:  # the top of a task: a load that fails in an unknown way must not take the server with it
            log.exception("load_crashed", task_id=run.task.task_id, model_id=run.task.model_id)
            run.error = InternalError(service=f"storage agent {self._config.server_id}")

    async def _load(self, run: _Run) -> None:
        task, tiers = run.task, self._tiers
        started_s = self._clock()
        tiers.check_capacity(run.key, task.size_bytes)
        if run.source is Tier.REMOTE:
            await self._fetch(run, TaskEvent.FETCH_STARTED)
        run.copy = tiers.residency.find(run.key)
        checkpoint = None
        if run.copy is not None:
            tiers.begin_load(run.copy)
        else:
            checkpoint = await self._open(run)
            run.copy = await tiers.reserve(checkpoint)
        task.on(TaskEvent.CHUNKS_RESERVED)
        damage = await self._attach_and_read(run, run.copy, checkpoint)
        if damage is not None:
            await self._replace(run, run.copy, damage)
        task.on(TaskEvent.BYTES_ARRIVED)
        await self._workers.ask(task.slot, ActivateInstance(instance_id=task.instance_id))
        task.on(TaskEvent.WORKER_ACTIVATED)
        if run.source is Tier.DRAM:
            run.seconds[Tier.DRAM] = self._clock() - started_s

    # --- REMOTE → SSD ---

    async def _fetch(self, run: _Run, event: TaskEvent) -> None:
        run.task.on(event)
        run.source = Tier.REMOTE
        run.progress.set(WaitStage.FETCHING)
        started_s = self._clock()
        await self._tiers.fetch(run.key, lambda done, total: run.progress.set(WaitStage.FETCHING, done, total))
        run.seconds[Tier.REMOTE] = self._clock() - started_s

    async def _open(self, run: _Run) -> Checkpoint:
        """The index of the SSD copy; a copy whose small files are damaged is fetched anew, once."""
        try:
            checkpoint = await self._tiers.checkpoint(run.key)
        except DAMAGE as damage:
            if run.source is Tier.REMOTE:
                raise
            await self._reject(run, damage)
            await self._fetch(run, TaskEvent.FETCH_STARTED)
            checkpoint = await self._tiers.checkpoint(run.key)
        theirs, ours = checkpoint.index.chunk_size_bytes, self._config.chunk_size_bytes
        if theirs != ours:
            reason = f"its chunks have {theirs} bytes, those of the pool {ours}; deploy it again"
            raise LoadFailed(model_id=run.key.model_id, reason=reason)
        return checkpoint

    async def _reject(self, run: _Run, damage: Exception) -> None:
        log.warning("ssd_copy_rejected", model_id=run.key.model_id, reason=str(damage))
        await self._tiers.reject(run.key)

    async def _replace(self, run: _Run, copy: DramCopy, damage: Exception) -> None:
        """The SSD copy was bad: fetch it again and read that into the same chunks, once. The worker is attached by now,
        so it does not see the directory change under it."""
        await self._reject(run, damage)
        await self._fetch(run, TaskEvent.COPY_REJECTED)
        checkpoint = await self._tiers.checkpoint(run.key)
        run.task.on(TaskEvent.COPY_REPLACED)
        still = await self._read(run, copy, checkpoint)
        if still is not None:
            # The fetch verified every chunk, so it is this server's disk that damages them.
            await self._reject(run, still)
            raise still

    # --- SSD → DRAM, and the worker ---

    async def _attach_and_read(self, run: _Run, copy: DramCopy, checkpoint: Checkpoint | None) -> Exception | None:
        """Both at once. Returns what damage the SSD copy has; raises everything else."""
        if self._tiers.residency.leased(run.task.instance_id) is not None:
            raise Conflict(reason=f"instance {run.task.instance_id} still maps chunks of an earlier load; try again")
        lease_path = self._tiers.lease(copy, run.task.instance_id)
        run.is_leased = True
        attach = AttachInstance(
            instance_id=run.task.instance_id,
            model_id=run.key.model_id,
            agent_epoch=0,
            checkpoint_path=str(self._tiers.path_of(run.key)),
            pool_path=str(self._tiers.pool.path),
            lease_path=str(lease_path),
            chunk_size_bytes=self._config.chunk_size_bytes,
            partitions=tuple(
                PartitionChunks(size_bytes=size_bytes, chunks=pack_tokens(chunks))
                for size_bytes, chunks in zip(copy.partition_bytes, copy.partitions, strict=True)
            ),
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._attach(run, attach))
                reading = group.create_task(self._read(run, copy, checkpoint))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return reading.result()

    async def _attach(self, run: _Run, attach: AttachInstance) -> None:
        await self._workers.ask(run.task.slot, attach)
        if not self._tiers.is_mapped(run.task.instance_id):
            # It attached to a former life of this agent, whose chunks nobody fills now, and took this for a repeat.
            worker = f"worker {self._config.server_id}/{run.task.slot}, which holds chunks of an agent that is gone,"
            raise Unavailable(what=worker)
        self._tiers.settle(run.task.instance_id)
        run.task.on(TaskEvent.WORKER_ATTACHED)

    async def _read(self, run: _Run, copy: DramCopy, checkpoint: Checkpoint | None) -> Exception | None:
        """Fill the chunks, verified; nothing to do when DRAM has it. Returns damage, raises everything else."""
        if checkpoint is None:
            return None
        started_s = self._clock()
        cancel = ckptio.CancelToken()
        try:
            # Cancelled, the reader's threads have to stop before the chunks that they fill are given away.
            await self._thread.run_until(cancel.cancel, self._read_blocking, run, copy, checkpoint, cancel)
        except DAMAGE as damage:
            return damage
        run.seconds[Tier.SSD] = self._clock() - started_s
        self._tiers.complete(copy)
        return None

    def _read_blocking(self, run: _Run, copy: DramCopy, checkpoint: Checkpoint, cancel: ckptio.CancelToken) -> None:
        total_bytes = sum(copy.partition_bytes)
        before_bytes = 0
        for number, (partition, chunks) in enumerate(zip(checkpoint.index.partitions, copy.partitions, strict=True)):

            def progress(done_bytes: int, before_bytes: int = before_bytes) -> None:
                run.progress.set(WaitStage.LOADING, before_bytes + done_bytes, total_bytes)

            self._reader.read(
                self._tiers.pool,
                checkpoint.path / partition_file(number),
                chunks,
                partition.padded_bytes,
                digests=partition.digests,
                # None: direct, but for chunks that are in the page cache already.
                direct=None if self._tiers.probe.is_direct else False,
                progress=progress,
                cancel=cancel,
            )
            before_bytes += partition.padded_bytes

    # --- the end ---

    async def _clean_up(self, run: _Run) -> None:
        """Let go of what the task held; a worker that attached to a load that failed is told to let go as well."""
        if run.is_leased and run.error is not None:
            await self._workers.detach(run.task.slot, run.task.instance_id)
            self._tiers.settle(run.task.instance_id)
        if run.copy is not None:
            self._tiers.end_load(run.copy)
        self._tiers.use(run.key)
        self._tiers.sweep()

    def _failed(self, run: _Run, error: WhimbrelError) -> LoadEnded:
        task = run.task
        is_cancelled = isinstance(error, Cancelled)
        task.on(TaskEvent.TASK_CANCELLED if is_cancelled else TaskEvent.TASK_FAILED)
        metrics.LOADS.labels(task.state, run.source).inc()
        log.warning("load_ended", task_id=task.task_id, model_id=task.model_id, code=error.code, reason=str(error))
        return load_ended(task, self._config.server_id, error)

    def _finished(self, run: _Run, total_s: float) -> LoadFinished:
        task, copy = run.task, run.copy
        assert copy is not None
        crossed = reports(run.source, size_bytes=copy.size_bytes, seconds=run.seconds)
        metrics.LOADS.labels(task.state, run.source).inc()
        metrics.OVERHEAD_SECONDS.observe(max(0.0, total_s - sum(report.seconds for report in crossed)))
        for report in crossed:
            metrics.TIER_BYTES.labels(report.tier).inc(report.size_bytes)
            metrics.TIER_SECONDS.labels(report.tier).observe(report.seconds)
        log.info(
            "load_finished",
            task_id=task.task_id,
            model_id=task.model_id,
            source_tier=run.source,
            queue_s=round(task.queue_s, 4),
            total_s=round(total_s, 4),
            **{f"{report.tier}_s": round(report.seconds, 4) for report in crossed},
        )
        return LoadFinished(
            task_id=task.task_id,
            instance_id=task.instance_id,
            model_id=task.model_id,
            server_id=self._config.server_id,
            source_tier=run.source,
            queue_s=task.queue_s,
            reports=crossed,
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
