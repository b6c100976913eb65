"""Owns the GPU slot: does for the instance in it what `core.instance` decides, in the engine's thread.

Commands come one at a time, in order, from one subscription; what the engine's thread has finished comes in between.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Awaitable, Callable

import structlog
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Conflict, InstanceGone, LoadFailed, Unavailable, WhimbrelError
from whimbrel.wire.messages import (
    ActivateInstance,
    AttachInstance,
    DetachInstance,
    InstanceBecameReady,
    InstanceEnded,
    Message,
    PrepareInstance,
    UnloadInstance,
)

from services.gpu_worker import metrics
from services.gpu_worker.chunks import LentChunks, read_config
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.core.instance import (
    ChunksMapped,
    Emptied,
    Event,
    Instance,
    ModelActivated,
    SkeletonBuilt,
    State,
    TensorsBound,
    Work,
    WorkFailed,
)
from services.gpu_worker.engine_thread import EngineThread
from services.gpu_worker.engines.engine import Engine, EngineError, Limits

log = structlog.get_logger()

# Instances that have ended, so that a late command does not bring one back; commands are repeated for seconds.
ENDED_MAX = 64


class Slot:
    """`tell` publishes a message to the scheduler, `on_change` says that the heartbeat has news."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        thread: EngineThread,
        group: asyncio.TaskGroup,
        *,
        epoch: int,
        tell: Callable[[Message], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._engine = engine
        self._thread = thread
        self._group = group
        self._epoch = epoch
        self._tell = tell
        self._on_change = on_change
        self._instance: Instance | None = None
        self._limits: Limits | None = None
        self._chunks: LentChunks | None = None
        self._model_config = b""
        self._ended: deque[str] = deque(maxlen=ENDED_MAX)
        self._emptied = asyncio.Event()
        self._emptied.set()
        # Unloads that may still have chunks to give back, although the slot is empty already.
        self._unloads: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    @property
    def instance(self) -> Instance | None:
        return self._instance

    @property
    def state(self) -> State:
        return State.EMPTY if self._instance is None else self._instance.state

    def serving(self, instance_id: str) -> Limits:
        """What the ready instance can take. Raises InstanceGone when that is not the one asked for."""
        instance = self._instance
        if instance is None or instance.instance_id != instance_id or instance.state is not State.READY:
            raise InstanceGone(instance_id=instance_id)
        assert self._limits is not None
        return self._limits

    async def prepare(self, message: PrepareInstance) -> None:
        instance = await self._instance_for(message.instance_id, message.model_id)
        if instance.state is State.EMPTY:
            self._model_config = message.model_config
        self._do(instance, instance.prepare(time.monotonic()))

    async def attach(self, message: AttachInstance) -> None:
        """Returns when the chunks are mapped and the lease is held."""
        instance = await self._instance_for(message.instance_id, message.model_id)
        if not instance.wants_chunks:
            return
        try:
            if instance.state is State.EMPTY:
                self._model_config = await asyncio.to_thread(read_config, message)
            chunks = await asyncio.to_thread(LentChunks.take, message)
        except WhimbrelError:
            if instance.state is State.EMPTY:
                self._instance = None
            raise
        # Meanwhile the skeleton may have failed, or this worker been told to stop.
        if self._instance is not instance or instance.state is State.UNLOADING or self._is_stopping:
            chunks.close()
            raise InstanceGone(instance_id=message.instance_id)
        self._chunks = chunks
        self._group.create_task(asyncio.to_thread(chunks.touch))
        self._on(instance, ChunksMapped())

    def activate(self, message: ActivateInstance) -> None:
        instance = self._instance
        if instance is None or instance.instance_id != message.instance_id:
            raise InstanceGone(instance_id=message.instance_id)
        self._do(instance, instance.verify(time.monotonic()))

    async def unload(self, message: UnloadInstance | DetachInstance, *, is_idle: bool) -> None:
        """Returns when the instance is gone, or drains. Raises Conflict when it is busy and may not drain."""
        instance = self._instance
        if instance is None or instance.instance_id != message.instance_id:
            # Nothing of it will come any more either, whatever is still on the way.
            self._ended.append(message.instance_id)
            return
        may_drain = isinstance(message, DetachInstance) or message.drain
        self._do(instance, instance.unload(time.monotonic(), is_idle=is_idle, may_drain=may_drain))
        if self.state is State.UNLOADING:
            await self._emptied.wait()

    def end_of_requests(self) -> None:
        """No request runs or waits: a draining instance goes."""
        if self._instance is not None:
            self._do(self._instance, self._instance.end_of_requests(time.monotonic()))

    async def drain(self, *, is_idle: bool) -> None:
        """Takes no instance any more; returns when nothing is held. A busy instance lets its requests end first."""
        self._is_stopping = True
        if self._instance is not None and self._instance.state is not State.EMPTY:
            self._do(self._instance, self._instance.unload(time.monotonic(), is_idle=is_idle, may_drain=True))
        await self._emptied.wait()
        if self._unloads:
            await asyncio.wait(self._unloads)

    async def _instance_for(self, instance_id: str, model_id: str) -> Instance:
        """The instance that a loading command is about; one that leaves makes room first, which takes milliseconds.

        Raises Conflict when another one is there, InstanceGone when this one has ended, Unavailable on the way out.
        """
        if self._is_stopping:
            raise Unavailable(what=f"worker {self._config.server_id}/{self._config.slot}, which is stopping,")
        if self.state is State.UNLOADING:
            await self._emptied.wait()
        if instance_id in self._ended:
            raise InstanceGone(instance_id=instance_id)
        if self._instance is None:
            self._instance = Instance(instance_id, model_id)
        if self._instance.instance_id != instance_id:
            reason = f"instance {self._instance.instance_id!r} is on this slot; unload it first"
            raise Conflict(reason=reason)
        return self._instance

    def _on(self, instance: Instance, event: Event) -> None:
        self._do(instance, instance.on(event, time.monotonic()))

    def _do(self, instance: Instance, work: Work | None) -> None:
        if instance.state is not State.EMPTY:
            self._emptied.clear()
        for state in State:
            metrics.INSTANCE_STATE.labels(state).set(state is instance.state)
        match work:
            case Work.BUILD:
                self._group.create_task(self._perform(instance, SkeletonBuilt(), self._build))
            case Work.BIND:
                self._group.create_task(self._perform(instance, TensorsBound(), self._bind))
            case Work.ACTIVATE:
                self._group.create_task(self._perform(instance, ModelActivated(), self._engine.activate))
            case Work.UNLOAD:
                unload = self._group.create_task(self._unload(instance))
                self._unloads.add(unload)
                unload.add_done_callback(self._unloads.discard)
            case Work.ANNOUNCE:
                self._group.create_task(self._announce(instance))
            case Work.TELL_END:
                self._group.create_task(self._tell_end(instance))
            case None:
                pass
        self._on_change()

    async def _perform(self, instance: Instance, event: Event, call: Callable[[], None]) -> None:
        """One piece of the engine's work on a loading instance; what goes wrong ends the instance, not the worker."""
        try:
            await self._thread.run(call)
        except EngineError as failure:
            event = WorkFailed(LoadFailed(model_id=instance.model_id, reason=str(failure)))
        except Exception as failure:  # whatever an engine may do with a strange checkpoint
            log.exception("engine_failed", instance_id=instance.instance_id, model_id=instance.model_id)
            event = WorkFailed(LoadFailed(model_id=instance.model_id, reason=f"{type(failure).__name__}: {failure}"))
        self._on(instance, event)

    def _build(self) -> None:
        started_at = time.monotonic()
        self._limits = self._engine.prepare(self._model_config)
        metrics.SKELETON_SECONDS.observe(time.monotonic() - started_at)

    def _bind(self) -> None:
        assert self._chunks is not None
        self._engine.bind(self._chunks.index, self._chunks.mappings)

    async def _unload(self, instance: Instance) -> None:
        # In the engine's thread, after whatever it was doing.
        await self._thread.run(self._engine.unload)
        chunks, self._chunks, self._limits, self._instance = self._chunks, None, None, None
        self._ended.append(instance.instance_id)
        self._on(instance, Emptied())
        self._emptied.set()
        if chunks is not None:
            # Taking the pages of a large model apart takes tens of milliseconds, for which the next one need not wait.
            await asyncio.to_thread(_give_back, chunks)
            # The agent looks at its leases when it hears a heartbeat.
            self._on_change()

    async def _announce(self, instance: Instance) -> None:
        unhidden = instance.unhidden
        metrics.BIND_SECONDS.observe(unhidden.bind_s)
        log.info(
            "instance_became_ready",
            instance_id=instance.instance_id,
            model_id=instance.model_id,
            skeleton_s=round(unhidden.skeleton_s, 4),
            bind_s=round(unhidden.bind_s, 4),
        )
        await self._tell(
            InstanceBecameReady(
                instance_id=instance.instance_id,
                model_id=instance.model_id,
                server_id=self._config.server_id,
                slot=self._config.slot,
                worker_epoch=self._epoch,
                skeleton_s=unhidden.skeleton_s,
                bind_s=unhidden.bind_s,
            )
        )

    async def _tell_end(self, instance: Instance) -> None:
        code = None if instance.error is None else instance.error.code
        log.info("instance_ended", instance_id=instance.instance_id, model_id=instance.model_id, code=code)
        await self._tell(
            InstanceEnded(
                instance_id=instance.instance_id,
                model_id=instance.model_id,
                server_id=self._config.server_id,
                slot=self._config.slot,
                error=None if instance.error is None else error_reply(instance.error),
            )
        )


def _give_back(chunks: LentChunks) -> None:
    try:
        chunks.close()
    except BufferError:
        # Only a failure inside the engine can leave a view, in the frames of its exception. A normal unload never does:
        # it would pay for a collection each time.
        log.warning("views_outlived_the_model")
        gc.collect()
        chunks.close()
