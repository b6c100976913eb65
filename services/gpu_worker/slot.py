"""Owns the GPU slot: does for the instance in it what `core.instance` decides, in the engine's thread.

Commands come one at a time, in order, from one subscription; what the engine's thread has finished comes in between.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog
from whimbrel.wire.errors import Conflict, InstanceGone, LoadFailed, Unavailable, WhimbrelError
from whimbrel.wire.messages import (
    ActivateInstance,
    AttachInstance,
    AttachInstanceReply,
    DetachInstance,
    Message,
    PrepareInstance,
    UnloadInstance,
)

from services.gpu_worker import metrics
from services.gpu_worker.announcements import Announcements
from services.gpu_worker.chunks import LentChunks, read_config
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.core.instance import LEAVING, SERVING, Instance, State, Work
from services.gpu_worker.core.instance_events import (
    Emptied,
    Event,
    ModelActivated,
    SkeletonBuilt,
    TensorsBound,
    WorkFailed,
)
from services.gpu_worker.engine_thread import EngineThread
from services.gpu_worker.engines.engine import Engine, EngineError, Limits
from services.gpu_worker.holding import Holding, give_back

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
        self._announcements = Announcements(config, epoch=epoch, tell=tell)
        self._on_change = on_change
        self._instance: Instance | None = None
        self._limits: Limits | None = None
        self._holding = Holding()
        self._model_config = b""
        self._ended: deque[str] = deque(maxlen=ENDED_MAX)
        self._emptied = asyncio.Event()
        self._emptied.set()
        # What may still have chunks to give back, although the slot is empty already.
        self._givings: set[asyncio.Task[None]] = set()
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

    def has_requests_of(self, instance_id: str) -> bool:
        """Whether requests of this instance may run here."""
        instance = self._instance
        return instance is not None and instance.instance_id == instance_id and instance.state in SERVING

    async def prepare(self, message: PrepareInstance) -> None:
        instance = await self._instance_for(message.instance_id, message.model_id)
        if instance.state is State.EMPTY:
            self._model_config = message.model_config
        self._do(instance, instance.prepare(time.monotonic()))

    async def attach(self, message: AttachInstance) -> AttachInstanceReply:
        """Returns when the chunks are mapped, or memory of GPUs is allocated, and the lease is held.

        An attach of the agent's next life replaces what is held, as long as the instance loads.
        """
        instance = await self._instance_for(message.instance_id, message.model_id)
        if instance.wants_chunks(message.agent_epoch):
            await self._take(instance, message)
        assert self._holding.current is not None
        return AttachInstanceReply(handles=self._holding.current.handles)

    async def _take(self, instance: Instance, message: AttachInstance) -> None:
        try:
            if instance.state is State.EMPTY:
                self._model_config = await asyncio.to_thread(read_config, message)
            chunks = await asyncio.to_thread(LentChunks.take, message, self._holding.current)
        except WhimbrelError:
            if instance.state is State.EMPTY:
                self._instance = None
            raise
        # Meanwhile the skeleton may have failed, or this worker been told to stop.
        if self._instance is not instance or instance.state in LEAVING or self._is_stopping:
            chunks.close()
            raise InstanceGone(instance_id=message.instance_id)
        if not instance.wants_chunks(message.agent_epoch):
            # It became ready with what it had; that is as good.
            chunks.close()
            return
        self._holding.put(chunks)
        self._group.create_task(asyncio.to_thread(chunks.touch))
        work = instance.attach(message.agent_epoch, time.monotonic())
        self._do(instance, work)
        if work is not Work.BIND:
            self._give_back_replaced()

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
        if self._givings:
            await asyncio.wait(self._givings)

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
                self._group.create_task(self._bind(instance))
            case Work.ACTIVATE:
                chunks = self._holding.current
                self._group.create_task(self._perform(instance, ModelActivated(), self._engine.activate, chunks))
            case Work.UNLOAD:
                self._spawn_giving(self._unload(instance))
            case Work.ANNOUNCE:
                self._group.create_task(self._announcements.became_ready(instance))
            case Work.TELL_END:
                self._group.create_task(self._announcements.ended(instance))
            case None:
                pass
        self._on_change()

    async def _perform(
        self, instance: Instance, event: Event, call: Callable[[], None], chunks: LentChunks | None = None
    ) -> None:
        """One piece of the engine's work on a loading instance; what goes wrong ends the instance, not the worker.

        Work on `chunks` that were replaced meanwhile says nothing: the same is done with those that replaced them.
        """
        try:
            await self._thread.run(call)
        except EngineError as failure:
            event = WorkFailed(LoadFailed(model_id=instance.model_id, reason=str(failure)))
        except Exception as failure:  # whatever an engine may do with a strange checkpoint
            log.exception("engine_failed", instance_id=instance.instance_id, model_id=instance.model_id)
            event = WorkFailed(LoadFailed(model_id=instance.model_id, reason=f"{type(failure).__name__}: {failure}"))
        if chunks is None or chunks is self._holding.current:
            self._on(instance, event)

    def _build(self) -> None:
        started_at = time.monotonic()
        self._limits = self._engine.prepare(self._model_config)
        metrics.SKELETON_SECONDS.observe(time.monotonic() - started_at)

    async def _bind(self, instance: Instance) -> None:
        chunks = self._holding.current
        assert chunks is not None
        await self._perform(instance, TensorsBound(), lambda: self._engine.bind(chunks.index, chunks.memories), chunks)
        if chunks is self._holding.current and instance.state is not State.UNLOADING:
            # Bound to these, the engine sees nothing of what they replaced.
            self._give_back_replaced()

    async def _unload(self, instance: Instance) -> None:
        # In the engine's thread, after whatever it was doing.
        await self._thread.run(self._engine.unload)
        chunks = self._holding.take_all()
        self._limits = self._instance = None
        self._ended.append(instance.instance_id)
        self._on(instance, Emptied())
        self._emptied.set()
        if chunks:
            # The next instance need not wait for this.
            await self._give_back(chunks)

    def _give_back_replaced(self) -> None:
        replaced = self._holding.take_replaced()
        if replaced:
            self._spawn_giving(self._give_back(replaced))

    async def _give_back(self, chunks: list[LentChunks]) -> None:
        await give_back(chunks)
        # The agent looks at its leases when it hears a heartbeat.
        self._on_change()

    def _spawn_giving(self, giving: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(giving)
        self._givings.add(task)
        task.add_done_callback(self._givings.discard)
