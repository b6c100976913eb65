"""Owns the scheduler's shell: it stands by until it has the lease, leads for a term, and stands by again."""

from __future__ import annotations

import asyncio
import time

import structlog
from whimbrel.chassis.bus import Bus, NatsBus
from whimbrel.chassis.heartbeat import Heart
from whimbrel.chassis.store import Claim, RedisStore, Store
from whimbrel.wire.errors import StaleEpoch
from whimbrel.wire.events import SchedulerStarted
from whimbrel.wire.ids import new_id
from whimbrel.wire.messages import SchedulerHeartbeat

from services.scheduler import recovery
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.controller import Controller
from services.scheduler.leader import Lease
from services.scheduler.recovery import Memory
from services.scheduler.term import Term

log = structlog.get_logger()


class SchedulerService:
    """The shell around `Controller`. Give it a bus and a store to rehearse it without servers."""

    name = "scheduler"

    def __init__(self, config: SchedulerConfig, *, bus: Bus | None = None, store: Store | None = None) -> None:
        self._config = config
        self._bus = bus
        self._store = store
        self._lease: Lease | None = None
        self._term: Term | None = None
        self._epoch = 0
        self._leading: asyncio.Task[None] | None = None
        self._is_draining = False
        self._is_store_away = False

    async def start(self, group: asyncio.TaskGroup) -> None:
        config = self._config
        if self._store is None:
            self._store = await RedisStore.connect(config.redis_url, cluster=config.cluster)
        if self._bus is None:
            name = f"scheduler/{config.scheduler_id}"
            self._bus = await NatsBus.connect(config.nats_url, cluster=config.cluster, name=name)
        self._lease = Lease(self._store, config.scheduler_id, on_away=self._on_store_away)
        leading = self._lead(self._bus, self._store, self._lease)
        self._leading = group.create_task(leading, name="leading")

    async def drain(self) -> None:
        """A term ends when everything that had arrived is decided; a standby has nothing to end."""
        self._is_draining = True
        assert self._leading is not None, "drained before it was started"
        if self._term is not None:
            await self._term.drain()
        else:
            self._leading.cancel()
        await asyncio.wait({self._leading})

    async def close(self) -> None:
        if self._lease is not None:
            # Also after a failure: whatever it was, a standby may do better.
            await self._lease.release()
        if self._bus is not None:
            await self._bus.drain()
        if self._store is not None:
            await self._store.close()

    @property
    def is_leader(self) -> bool:
        return self._term is not None

    def readiness(self) -> str | None:
        """A standby is ready, too: the metric whimbrel_scheduler_is_leader tells them apart."""
        if self._bus is None or self._lease is None:
            return "the state is not loaded yet"
        if self._is_store_away:
            return "the store is away"
        if not self._bus.is_connected:
            return "NATS is away"
        if self._term is None:
            is_standby = self._lease.leader not in ("", self._config.scheduler_id)
            return None if is_standby else "the state is not loaded yet"
        waits = (model.oldest_wait_s for model in self._term.controller.cluster.models.values() if model.waiters)
        oldest_wait_s = time.monotonic() - min(waits, default=time.monotonic())
        if oldest_wait_s > self._config.wait_s_max:
            return f"a request has waited for {oldest_wait_s:.0f} s"
        return None

    async def _lead(self, bus: Bus, store: Store, lease: Lease) -> None:
        """One term after another, until we drain. What we knew when the store lost its data is kept until it has it."""
        heart = Heart(bus, lambda: SchedulerHeartbeat(scheduler_id=self._config.scheduler_id, epoch=self._epoch))
        memory: Memory | None = None
        while not self._is_draining:
            claim = await lease.acquire(is_sure=memory is not None)
            try:
                async with asyncio.TaskGroup() as group:
                    keeping = group.create_task(lease.keep(), name="lease")
                    self._term = await self._take_over(claim, memory, bus, store, lease)
                    self._epoch, memory = claim.epoch, None
                    await self._term.run(heart.run)
                    keeping.cancel()
            except* StaleEpoch as lost:
                memory = self._remember(claim, lost, memory)
                lease.lose()
            finally:
                self._term = None
        await lease.release()

    async def _take_over(self, claim: Claim, memory: Memory | None, bus: Bus, store: Store, lease: Lease) -> Term:
        config = self._config
        recovered = await recovery.take_over(store, claim, memory)
        controller = Controller(
            records=recovered.records,
            settings=config.settings(),
            epoch=claim.epoch,
            now=time.monotonic(),
            new_id=new_id,
            scheduler_id=config.scheduler_id,
            is_emptied=recovered.is_emptied and config.restore_catalogue,
        )
        await bus.publish_event(SchedulerStarted(scheduler_id=config.scheduler_id, epoch=claim.epoch))
        log.info("scheduler_leads", scheduler_id=config.scheduler_id, epoch=claim.epoch)
        return Term(controller, bus=bus, store=store, lease=lease, on_away=self._on_store_away)

    def _remember(self, claim: Claim, lost: ExceptionGroup[StaleEpoch], memory: Memory | None) -> Memory | None:
        """All we know, when it is more than the store does; None when somebody else leads now."""
        current_epoch = _first(lost).current_epoch
        if current_epoch > claim.epoch:
            log.warning("deposed", epoch=claim.epoch, current_epoch=current_epoch)
            return None
        log.error("store_lost_its_data", epoch=claim.epoch, current_epoch=current_epoch)
        if self._term is None:
            return memory
        return Memory(epoch=claim.epoch, records=tuple(self._term.controller.cluster.durable().values()))

    def _on_store_away(self, is_away: bool) -> None:
        self._is_store_away = is_away


def _first(failure: BaseExceptionGroup[StaleEpoch]) -> StaleEpoch:
    part = failure.exceptions[0]
    return _first(part) if isinstance(part, BaseExceptionGroup) else part
