"""Owns the life of a storage agent: how it starts and stops, what it listens to, and what it says of itself."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

import structlog
from whimbrel.chassis.bus import Bus, NatsBus, Received, Subscription
from whimbrel.chassis.heartbeat import Heart
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import WhimbrelError
from whimbrel.wire.messages import (
    AgentHeartbeat,
    MeasureStorage,
    SchedulerHeartbeat,
    Tier,
    WorkerExited,
    WorkerHeartbeat,
)

from services.storage_agent.catalogue_report import CatalogueReport
from services.storage_agent.commands import Commands
from services.storage_agent.config import AgentConfig
from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.core.news import ResidencyNews
from services.storage_agent.failures import explain
from services.storage_agent.fetch import Source
from services.storage_agent.filling import Filling
from services.storage_agent.fillings import Fillings
from services.storage_agent.imports import ImportJobs
from services.storage_agent.loading import Loading
from services.storage_agent.loop import LoadLoop
from services.storage_agent.paths import Paths
from services.storage_agent.prefetching import Prefetching
from services.storage_agent.presence import Presence, presence_path
from services.storage_agent.removals import Removals
from services.storage_agent.repository import Repository
from services.storage_agent.slots import Slots
from services.storage_agent.ssd_reads import SsdReads
from services.storage_agent.tiers import Tiers

log = structlog.get_logger()

# How often leases are tested when nobody says anything: a worker that lets go without a word is noticed by this.
SWEEP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What there is once the agent has started."""

    bus: Bus
    commands: Commands
    imports: ImportJobs
    fillings: Fillings
    reads: SsdReads
    loading: Loading
    loop: LoadLoop
    removals: Removals
    presence: Presence
    heart: Heart


class StorageAgentService:
    """The storage agent of one server. `bus` and `repository` are given by tests; otherwise it connects to NATS and to
    what the configuration names."""

    name = "storage_agent"

    def __init__(self, config: AgentConfig, *, bus: Bus | None = None, repository: Repository | None = None) -> None:
        self.config = config
        self.tiers = Tiers(config, on_change=self._beat, repository=repository)
        self._given_bus = bus
        self._epoch = time.time_ns()
        self._news = ResidencyNews()
        self._paths = Paths()
        self._slots = Slots()
        self._subscriptions: list[Subscription] = []
        self._started: _Parts | None = None
        self._group: asyncio.TaskGroup | None = None

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Rebuild the tiers, then connect; until then nobody hears of this server."""
        config = self.config
        self._group = group
        await self.tiers.open()
        bus = self._given_bus or await NatsBus.connect(
            config.nats_url, cluster=config.cluster, name=f"storage_agent/{config.server_id}"
        )
        parts = self._started = self._assemble(bus, group)
        await parts.presence.start()
        await self.tiers.threads.run(parts.imports.remove_leftovers)
        for work in (parts.heart.run(), parts.removals.run(), parts.imports.run(), self._sweep_forever()):
            group.create_task(work)
        subjects = bus.subjects
        self._subscriptions = [
            await bus.subscribe(subjects.all_to_agent(config.server_id), self._on_command),
            await bus.subscribe(subjects.all_heartbeats("scheduler"), self._on_scheduler_heartbeat),
            await bus.subscribe(subjects.worker_heartbeats_of(config.server_id), self._on_worker_heartbeat),
        ]

    async def drain(self) -> None:
        """No new work; the running loads end, and what runs on this server has time to go on elsewhere. Imports are
        left to another agent: they can take long."""
        self._parts.commands.is_draining = True
        self._beat()
        await self._parts.loop.drain()
        await self._slots.until_idle()
        for subscription in self._subscriptions:
            await subscription.drain()

    async def close(self) -> None:
        if self._started is not None:
            await self._started.presence.close()
            self._started.imports.close()
            await self._started.fillings.close()
            self._started.loading.close()
            self._started.reads.close()
        await self.tiers.close()
        if self._started is not None:
            await self._started.bus.drain()

    def readiness(self) -> str | None:
        if self._started is None:
            return "the tiers of this server are being rebuilt"
        return None if self._started.bus.is_connected else "NATS is away"

    # --- what is heard ---

    async def _on_command(self, received: Received) -> None:
        """Commands only change what is queued; whoever sent one hears an Ack, an answer, or a typed error."""
        if isinstance(received.message, MeasureStorage):
            # This waits for the loads before it; the commands behind it must not.
            assert self._group is not None
            self._group.create_task(self._answer_later(received))
            return
        await self._parts.bus.reply(received.reply_to, await self._parts.commands.answer(received.message))

    async def _answer_later(self, received: Received) -> None:
        try:
            reply = await self._parts.commands.answer(received.message)
        except Exception as error:  # the top of a task: whoever asked hears what went wrong, and the agent lives on
            reply = error_reply(explain(error, model_id="", server_id=self.config.server_id))
        try:
            await self._parts.bus.reply(received.reply_to, reply)
        except WhimbrelError as error:
            log.warning("message_unsent", message=type(reply).__name__, code=error.code)

    async def _on_scheduler_heartbeat(self, received: Received) -> None:
        message = received.message
        if isinstance(message, SchedulerHeartbeat) and self._parts.commands.hear_epoch(message.epoch):
            self._tell_all()

    async def _on_worker_heartbeat(self, received: Received) -> None:
        """A worker of this server says something new: it may have let go of an instance."""
        if isinstance(received.message, WorkerHeartbeat):
            self._slots.hear(received.message)
            self._look()

    def _on_worker_exit(self, slot: int, worker_epoch: int) -> None:
        """The process of a worker is gone: its leases are over, and the scheduler need not wait for silence."""
        log.warning("worker_exited", slot=slot, worker_epoch=worker_epoch)
        self._slots.forget(slot, worker_epoch)
        self._look()
        assert self._group is not None
        telling = self._tell_exit(slot, worker_epoch)
        try:
            self._group.create_task(telling)
        except RuntimeError:  # this agent is ending as well, and its server with it
            telling.close()

    async def _tell_exit(self, slot: int, worker_epoch: int) -> None:
        message = WorkerExited(server_id=self.config.server_id, slot=slot, worker_epoch=worker_epoch)
        bus = self._parts.bus
        try:
            await bus.publish(bus.subjects.to_scheduler(message), message)
        except WhimbrelError as error:  # its heartbeats will be missed
            log.warning("message_unsent", message="WorkerExited", code=error.code)

    def _look(self) -> None:
        """End the leases that no worker holds; what waited for one goes on."""
        self.tiers.lending.sweep()
        self._parts.removals.look()

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self._look()

    # --- what is said ---

    def _tell_all(self) -> None:
        """Somebody may know nothing of this server, or too little."""
        self._news.ask_whole()
        self._beat()

    def _beat(self) -> None:
        if self._started is not None:
            self._started.heart.beat()

    def _heartbeat(self) -> AgentHeartbeat:
        tiers, config, parts = self.tiers, self.config, self._parts
        news = self._news.tell(tiers.residency.resident())
        return AgentHeartbeat(
            server_id=config.server_id,
            epoch=self._epoch,
            resident=news.resident,
            residency_version=news.version,
            base_version=news.base_version,
            tasks=parts.loop.task_ids(),
            running=parts.loop.running_ids(),
            jobs=parts.imports.job_ids(),
            attached=tiers.lending.attached(),
            pool_size_bytes=config.chunk_count * config.chunk_size_bytes,
            pool_free_bytes=tiers.pool_free_bytes(),
            ssd_size_bytes=config.ssd_bytes,
            ssd_used_bytes=tiers.residency.ssd_used_bytes(),
            probe_bandwidth_bytes_per_s=min(tiers.probe.bandwidth_bytes_per_s, config.ssd_bytes_per_s_max or math.inf),
            presence_path=str(parts.presence.path),
            is_stopping=parts.commands.is_draining,
        )

    # --- parts ---

    def _assemble(self, bus: Bus, group: asyncio.TaskGroup) -> _Parts:
        config, tiers, server_id = self.config, self.tiers, self.config.server_id
        source, reads = Source(tiers.repository, tiers.threads), SsdReads(config, tiers)

        def make_filling(key: CheckpointKey, wanted: Tier) -> Filling:
            return Filling(
                key,
                wanted,
                tiers=tiers,
                paths=self._paths,
                source=source,
                reads=reads,
                server_id=server_id,
                stall_s_max=config.stall_s_max,
            )

        fillings = Fillings(make_filling, group.create_task)
        imports = ImportJobs(
            server_id=server_id,
            bus=bus,
            repository=tiers.repository,
            chunk_size_bytes=config.chunk_size_bytes,
            staging_dir=config.staging_dir or config.ssd_dir / ".staging",
            on_change=self._beat,
        )
        loading = Loading(
            config,
            bus,
            tiers,
            fillings=fillings,
            paths=self._paths,
            slots=self._slots,
            agent_epoch=self._epoch,
            on_change=self._beat,
        )
        loop = LoadLoop(server_id=server_id, bus=bus, tiers=tiers, loading=loading, group=group, on_change=self._beat)
        prefetching = Prefetching(
            server_id=server_id, bus=bus, tiers=tiers, fillings=fillings, group=group, clock=time.monotonic
        )
        removals = Removals(
            server_id=server_id,
            bus=bus,
            tiers=tiers,
            loop=loop,
            prefetching=prefetching,
            fillings=fillings,
            imports=imports,
        )
        commands = Commands(
            config,
            tiers,
            paths=self._paths,
            loop=loop,
            prefetching=prefetching,
            removals=removals,
            imports=imports,
            report=CatalogueReport(server_id=server_id, bus=bus, repository=tiers.repository, group=group),
            tell_all=self._tell_all,
        )
        return _Parts(
            bus=bus,
            commands=commands,
            imports=imports,
            fillings=fillings,
            reads=reads,
            loading=loading,
            loop=loop,
            removals=removals,
            presence=Presence(presence_path(config.pool_path), on_exit=self._on_worker_exit),
            heart=Heart(bus, self._heartbeat),
        )

    @property
    def _parts(self) -> _Parts:
        assert self._started is not None, "start() comes first"
        return self._started
