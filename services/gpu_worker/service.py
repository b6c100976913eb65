"""Owns the worker's shell: what it listens to, who gets it, what it says of itself, and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog
from whimbrel.chassis.bus import Bus, NatsBus, Received
from whimbrel.chassis.heartbeat import HEARTBEAT_S, HEARTBEATS_MISSED_MAX, Heart
from whimbrel.wire.errors import Conflict, InstanceGone, ProtocolError, StaleEpoch, Unavailable, WhimbrelError
from whimbrel.wire.messages import (
    AbandonMigration,
    AbortInference,
    Ack,
    ActivateInstance,
    AgentHeartbeat,
    AttachInstance,
    DetachInstance,
    HandOver,
    InferenceResumed,
    Message,
    MigrateInstance,
    PrepareInstance,
    ResendTokens,
    ResumeInference,
    RouterHeartbeat,
    SchedulerHeartbeat,
    StartInference,
    StartRound,
    UnloadInstance,
    UnloadRefused,
    WorkerHeartbeat,
    WorkerState,
)

from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.core.instance import SERVING, WORKER_STATES, State
from services.gpu_worker.core.routers import Routers
from services.gpu_worker.core.sequence import check_request
from services.gpu_worker.devices import Device
from services.gpu_worker.engine_thread import EngineThread
from services.gpu_worker.engines.engine import Engine, Limits
from services.gpu_worker.inference import Inference
from services.gpu_worker.presence import PresenceClient
from services.gpu_worker.slot import Slot

log = structlog.get_logger()

# How often routers are looked after, and finished requests forgotten.
WATCH_S = 0.5
# A watch that comes this late was kept from running, and so was the reading of heartbeats.
STALLED_S = 2.0


class WorkerService:
    """One GPU slot. `bus` and `clock` are given by tests; `make_engine` is called once, at start."""

    name = "gpu_worker"

    def __init__(
        self,
        config: WorkerConfig,
        make_engine: Callable[[], Engine],
        *,
        bus: Bus | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._make_engine = make_engine
        self._given_bus = bus
        self._clock = clock
        self._epoch = time.time_ns()
        self._thread = EngineThread()
        self._device = Device(config.device)
        self._presence = PresenceClient(slot=config.slot, worker_epoch=self._epoch)
        self._routers = Routers(lost_after_s=HEARTBEATS_MISSED_MAX * HEARTBEAT_S)
        self._scheduler_epoch = 0
        self._is_stopping = False
        self._is_serving = False

    async def start(self, group: asyncio.TaskGroup) -> None:
        config = self._config
        await asyncio.to_thread(self._device.check)
        # Nothing is heard of this worker before it is warm: otherwise a model would be placed here to wait for imports.
        engine = await self._thread.run(self._make_engine)
        if config.prewarm:
            started_at = time.monotonic()
            await self._thread.run(engine.prewarm)
            log.info("engine_prewarmed", engine=engine.name, prewarm_s=round(time.monotonic() - started_at, 3))
        self._bus: Bus = self._given_bus or await NatsBus.connect(
            config.nats_url, cluster=config.cluster, name=f"worker/{config.server_id}/{config.slot}"
        )
        self._heart = Heart(self._bus, self._heartbeat)
        self._slot = Slot(
            config,
            engine,
            self._thread,
            group,
            epoch=self._epoch,
            tell=self._tell_scheduler,
            on_change=self._on_slot_change,
        )
        self._inference = Inference(
            config,
            self._bus,
            engine,
            self._thread,
            tell=self._tell_scheduler,
            on_idle=self._slot.end_of_requests,
            on_change=self._heart.beat,
        )
        self._bus.on_reconnect(lambda: self._routers.forgive(self._clock()))
        subjects = self._bus.subjects
        await self._bus.subscribe(subjects.all_to_worker(config.server_id, config.slot), self._on_command)
        await self._bus.subscribe(subjects.all_heartbeats("router"), self._on_router)
        await self._bus.subscribe(subjects.all_heartbeats("scheduler"), self._on_scheduler)
        await self._bus.subscribe(subjects.all_heartbeats("agent"), self._on_agent)
        group.create_task(self._heart.run(), name="heartbeat")
        group.create_task(self._inference.run(), name="inference")
        group.create_task(self._watch(), name="watch")
        group.create_task(self._presence.run(), name="presence")
        self._is_serving = True

    async def drain(self) -> None:
        """Running and waiting requests end, then the instance is unloaded; the chassis bounds the time."""
        self._is_stopping = True
        self._heart.beat()
        await self._slot.drain(is_idle=self._inference.active == 0)
        with contextlib.suppress(WhimbrelError):
            await self._bus.flush()

    async def close(self) -> None:
        if self._is_serving:
            await self._bus.drain()
        self._thread.close()

    def readiness(self) -> str | None:
        if not self._is_serving:
            return "the engine is warming up"
        if self._is_stopping:
            return "the worker is stopping"
        return None if self._bus.is_connected else "NATS is away"

    async def _on_command(self, received: Received) -> None:
        message = received.message
        match message:
            case StartInference():
                await self._start_inference(message)
            case AbortInference():
                await self._inference.abort(message)
            case ResendTokens():
                await self._inference.resend(message)
            case PrepareInstance():
                self._obey(message.scheduler_epoch)
                await self._slot.prepare(message)
            case AttachInstance():
                await self._bus.reply(received.reply_to, await self._slot.attach(message))
                return
            case ActivateInstance():
                self._slot.activate(message)
            case UnloadInstance():
                self._obey(message.scheduler_epoch)
                if message.preempt and self._slot.has_requests_of(message.instance_id):
                    await self._inference.preempt()
                try:
                    await self._slot.unload(message, is_idle=self._inference.active == 0)
                except Conflict:
                    await self._tell_scheduler(UnloadRefused(instance_id=message.instance_id))
            case DetachInstance():
                await self._slot.unload(message, is_idle=self._inference.active == 0)
            case MigrateInstance() | StartRound() | HandOver() | AbandonMigration():
                self._obey(message.scheduler_epoch)
                await self._migrate(message)
            case InferenceResumed():
                await self._inference.migrating.on_resumed(message)
            case ResumeInference():
                await self._inference.resuming.resume(message, self._serving)
            case _:
                raise ProtocolError(size_bytes=0, reason=f"{type(message).__name__} is no command to a worker")
        await self._bus.reply(received.reply_to, Ack())

    async def _start_inference(self, message: StartInference) -> None:
        # First of all: a repetition is answered as the first time, also by an instance that takes nothing new.
        if self._inference.knows(message):
            return
        if self._is_stopping:
            raise Unavailable(what=f"worker {self._config.server_id}/{self._config.slot}, which is stopping,")
        await self._hear_router(message.router_id, message.router_epoch)
        limits = self._serving(message.instance_id)
        request = self._inference.resuming.complete(message)
        check_request(request, context_tokens=limits.context_tokens, vocabulary_size=limits.vocabulary_size)
        await self._inference.start(request)

    def _serving(self, instance_id: str) -> Limits:
        """What the instance can take. Raises InstanceGone when it is not here, not ready, or on its way elsewhere."""
        limits = self._slot.serving(instance_id)
        if self._inference.migrating.migration_id is not None:
            raise InstanceGone(instance_id=instance_id)
        return limits

    async def _migrate(self, message: MigrateInstance | StartRound | HandOver | AbandonMigration) -> None:
        migrating = self._inference.migrating
        match message:
            case MigrateInstance():
                await migrating.migrate(message, is_here=self._slot.has_requests_of(message.instance_id))
            case StartRound():
                await migrating.start_round(message)
            case HandOver():
                await migrating.hand_over(message)
            case AbandonMigration():
                migrating.abandon(message)
                self._inference.resuming.abandon(message.migration_id)

    def _on_slot_change(self) -> None:
        self._heart.beat()
        if self._slot.state is not State.READY:
            self._inference.resuming.clear()
        if self._slot.state not in SERVING:
            self._inference.migrating.leave()

    async def _on_router(self, received: Received) -> None:
        if isinstance(received.message, RouterHeartbeat):
            await self._hear_router(received.message.router_id, received.message.epoch)

    async def _hear_router(self, router_id: str, epoch: int) -> None:
        if self._routers.hear(router_id, epoch, self._clock()):
            await self._inference.abort_router(router_id, epoch=epoch)

    async def _on_scheduler(self, received: Received) -> None:
        """A new scheduler wants to know who is there."""
        message = received.message
        if isinstance(message, SchedulerHeartbeat) and message.epoch > self._scheduler_epoch:
            self._scheduler_epoch = message.epoch
            self._heart.beat()

    async def _on_agent(self, received: Received) -> None:
        message = received.message
        if isinstance(message, AgentHeartbeat) and message.server_id == self._config.server_id:
            self._presence.hear(message)

    def _obey(self, scheduler_epoch: int) -> None:
        """Raise StaleEpoch for a command of a scheduler that has a successor."""
        if scheduler_epoch < self._scheduler_epoch:
            raise StaleEpoch(epoch=scheduler_epoch, current_epoch=self._scheduler_epoch)
        self._scheduler_epoch = scheduler_epoch

    async def _watch(self) -> None:
        while True:
            watched_at = self._clock()
            await asyncio.sleep(WATCH_S)
            now = self._clock()
            if now - watched_at > STALLED_S or not self._bus.is_connected:
                self._routers.forgive(now)
            for router_id in self._routers.take_lost(now):
                await self._inference.abort_router(router_id)
            self._inference.expire()
            await self._inference.migrating.tick()

    async def _tell_scheduler(self, message: Message) -> None:
        """The heartbeat says the same thing, in case this is lost."""
        try:
            await self._bus.publish(self._bus.subjects.to_scheduler(message), message)
        except WhimbrelError as error:
            log.warning("news_lost", message=type(message).__name__, code=error.code)

    def _heartbeat(self) -> WorkerHeartbeat:
        state = WORKER_STATES[self._slot.state]
        instance = None if state is WorkerState.EMPTY else self._slot.instance
        memory = self._device.memory()
        return WorkerHeartbeat(
            server_id=self._config.server_id,
            slot=self._config.slot,
            epoch=self._epoch,
            device=self._config.device,
            memory_size_bytes=memory.size_bytes,
            memory_free_bytes=memory.free_bytes,
            state=WorkerState.DRAINING if self._is_stopping else state,
            instance_id=None if instance is None else instance.instance_id,
            model_id=None if instance is None else instance.model_id,
            active_requests=self._inference.active,
            migration_id=self._inference.migrating.migration_id,
        )
