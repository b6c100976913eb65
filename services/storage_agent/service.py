"""Owns the life of a storage agent: how it starts and stops, what it listens to, and what it says of itself."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import structlog
from whimbrel.chassis.bus import Bus, NatsBus, Received, Subscription
from whimbrel.chassis.heartbeat import Heart
from whimbrel.wire.errors import ProtocolError, StaleEpoch
from whimbrel.wire.messages import (
    Ack,
    AgentHeartbeat,
    CancelLoad,
    ImportModel,
    LoadModel,
    RemoveModel,
    SchedulerHeartbeat,
    WorkerHeartbeat,
)

from services.storage_agent.config import AgentConfig
from services.storage_agent.imports import ImportJobs
from services.storage_agent.loading import Loading
from services.storage_agent.loop import LoadLoop
from services.storage_agent.tiers import Tiers

log = structlog.get_logger()

# How often leases are tested when nobody says anything: a worker that was killed says nothing.
SWEEP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What there is once the agent has started."""

    bus: Bus
    imports: ImportJobs
    loading: Loading
    loop: LoadLoop
    heart: Heart


class StorageAgentService:
    """The storage agent of one server. `bus` is given by tests; otherwise it connects to NATS."""

    name = "storage_agent"

    def __init__(self, config: AgentConfig, *, bus: Bus | None = None) -> None:
        self.config = config
        self.tiers = Tiers(config, on_change=self._beat)
        self._given_bus = bus
        self._epoch = time.time_ns()
        self._scheduler_epoch = 0
        self._subscriptions: list[Subscription] = []
        self._is_draining = False
        self._started: _Parts | None = None

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Rebuild the tiers, then connect; until then nobody hears of this server."""
        config = self.config
        await self.tiers.open()
        bus = self._given_bus or await NatsBus.connect(
            config.nats_url, cluster=config.cluster, name=f"storage_agent/{config.server_id}"
        )
        parts = self._started = self._assemble(bus)
        await self.tiers.threads.run(parts.imports.remove_leftovers)
        for work in (parts.heart.run(), parts.loop.run(), parts.imports.run(), self._sweep_forever()):
            group.create_task(work)
        subjects = bus.subjects
        self._subscriptions = [
            await bus.subscribe(subjects.all_to_agent(config.server_id), self._on_command),
            await bus.subscribe(subjects.all_heartbeats("scheduler"), self._on_scheduler_heartbeat),
            await bus.subscribe(subjects.worker_heartbeats_of(config.server_id), self._on_worker_heartbeat),
        ]

    async def drain(self) -> None:
        """No new work; the running load ends. Imports are left to another agent: they can take long."""
        self._is_draining = True
        await self._parts.loop.drain()
        for subscription in self._subscriptions:
            await subscription.drain()

    async def close(self) -> None:
        if self._started is not None:
            self._started.imports.close()
            self._started.loading.close()
        await self.tiers.close()
        if self._started is not None:
            await self._started.bus.drain()

    def readiness(self) -> str | None:
        if self._started is None:
            return "the tiers of this server are being rebuilt"
        return None if self._started.bus.is_connected else "NATS is away"

    # --- what is heard ---

    async def _on_command(self, received: Received) -> None:
        """Commands only change what is queued; whoever sent one hears an Ack, or a typed error."""
        message, loop = received.message, self._parts.loop
        match message:
            case LoadModel():
                self._check_epoch(message.scheduler_epoch)
                await loop.load(message)
            case CancelLoad():
                await loop.cancel(message.task_id)
            case ImportModel():
                self._check_epoch(message.scheduler_epoch)
                if not self._is_draining:
                    loop.keep(message.model_id)
                    self._parts.imports.submit(message)
            case RemoveModel():
                self._check_epoch(message.scheduler_epoch)
                await loop.remove(message)
            case _:
                raise ProtocolError(size_bytes=0, reason=f"{type(message).__name__} is not for storage agents")
        await self._parts.bus.reply(received.reply_to, Ack())

    async def _on_scheduler_heartbeat(self, received: Received) -> None:
        message = received.message
        if isinstance(message, SchedulerHeartbeat) and message.epoch > self._scheduler_epoch:
            self._scheduler_epoch = message.epoch
            self._beat()

    async def _on_worker_heartbeat(self, received: Received) -> None:
        """A worker of this server says something new: it may have let go of an instance."""
        if isinstance(received.message, WorkerHeartbeat):
            self._parts.loop.sweep()

    def _check_epoch(self, epoch: int) -> None:
        """A scheduler that was replaced has nothing to say any more."""
        if epoch < self._scheduler_epoch:
            raise StaleEpoch(epoch=epoch, current_epoch=self._scheduler_epoch)
        self._scheduler_epoch = epoch

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._parts.loop.sweep()

    # --- what is said ---

    def _beat(self) -> None:
        if self._started is not None:
            self._started.heart.beat()

    def _heartbeat(self) -> AgentHeartbeat:
        tiers, config = self.tiers, self.config
        return AgentHeartbeat(
            server_id=config.server_id,
            epoch=self._epoch,
            resident=tiers.residency.resident(),
            tasks=self._parts.loop.task_ids(),
            jobs=self._parts.imports.job_ids(),
            attached=tiers.attached(),
            pool_size_bytes=config.chunk_count * config.chunk_size_bytes,
            pool_free_bytes=tiers.pool_free_bytes(),
            ssd_size_bytes=config.ssd_bytes,
            ssd_used_bytes=tiers.residency.ssd_used_bytes(),
            probe_bandwidth_bytes_per_s=tiers.probe.bandwidth_bytes_per_s,
        )

    # --- parts ---

    def _assemble(self, bus: Bus) -> _Parts:
        config = self.config
        imports = ImportJobs(
            server_id=config.server_id,
            bus=bus,
            repository=self.tiers.repository,
            chunk_size_bytes=config.chunk_size_bytes,
            on_change=self._beat,
        )
        loading = Loading(config, bus, self.tiers)
        loop = LoadLoop(
            server_id=config.server_id,
            bus=bus,
            tiers=self.tiers,
            loading=loading,
            imports=imports,
            on_change=self._beat,
        )
        return _Parts(bus=bus, imports=imports, loading=loading, loop=loop, heart=Heart(bus, self._heartbeat))

    @property
    def _parts(self) -> _Parts:
        assert self._started is not None, "start() comes first"
        return self._started
