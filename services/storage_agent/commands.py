"""Owns the commands to an agent: what each sets going, and what whoever sent it hears."""

from __future__ import annotations

from collections.abc import Callable

from whimbrel.wire.errors import ProtocolError, StaleEpoch, Unavailable
from whimbrel.wire.messages import (
    Ack,
    CancelImport,
    CancelLoad,
    EvictModel,
    GetLoads,
    GetLoadsReply,
    ImportModel,
    LoadModel,
    MeasureStorage,
    MeasureStorageReply,
    Message,
    PinModel,
    PrefetchModel,
    RemoveModel,
    ReportRepository,
    ResendResidency,
    Tier,
    UnpinModel,
)

from services.storage_agent.catalogue_report import CatalogueReport
from services.storage_agent.config import AgentConfig
from services.storage_agent.imports import ImportJobs
from services.storage_agent.loop import LoadLoop
from services.storage_agent.measuring import storage_warnings
from services.storage_agent.paths import Paths
from services.storage_agent.prefetching import Prefetching
from services.storage_agent.removals import Removals
from services.storage_agent.tiers import Tiers


class Commands:
    """What schedulers and people ask of one server. `tell_all` has the next heartbeat say everything."""

    def __init__(
        self,
        config: AgentConfig,
        tiers: Tiers,
        *,
        paths: Paths,
        loop: LoadLoop,
        prefetching: Prefetching,
        removals: Removals,
        imports: ImportJobs,
        report: CatalogueReport,
        tell_all: Callable[[], None],
    ) -> None:
        self.is_draining = False
        self._config = config
        self._tiers = tiers
        self._paths = paths
        self._loop = loop
        self._prefetching = prefetching
        self._removals = removals
        self._imports = imports
        self._report = report
        self._tell_all = tell_all
        self._scheduler_epoch = 0

    def hear_epoch(self, epoch: int) -> bool:
        """A scheduler lives; True when it is a new one."""
        is_new = epoch > self._scheduler_epoch
        self._scheduler_epoch = max(epoch, self._scheduler_epoch)
        return is_new

    async def answer(self, message: Message) -> Message:
        """Do what is commanded, as far as that takes no time. Raises typed errors, StaleEpoch for a scheduler that was
        replaced."""
        match message:
            case LoadModel():
                self._check_epoch(message.scheduler_epoch)
                self._removals.keep(message.model_id)
                await self._loop.load(message)
            case CancelLoad():
                await self._loop.cancel(message.task_id)
                self._prefetching.cancel(message.task_id)
            case ImportModel():
                self._check_epoch(message.scheduler_epoch)
                if not self.is_draining:
                    self._removals.keep(message.model_id)
                    self._imports.submit(message)
            case CancelImport():
                self._check_epoch(message.scheduler_epoch)
                self._imports.cancel(message.job_id)
            case RemoveModel():
                self._check_epoch(message.scheduler_epoch)
                self._removals.add(message)
            case ReportRepository():
                self._check_epoch(message.scheduler_epoch)
                if not self.is_draining:
                    self._report.begin(message)
            case ResendResidency():
                self._tell_all()
            case _:
                return await self._answer_operator(message)
        return Ack()

    async def _answer_operator(self, message: Message) -> Message:
        """What people ask of this one server, by way of a router."""
        match message:
            case PrefetchModel():
                if self.is_draining:
                    raise Unavailable(what=f"storage agent {self._config.server_id} (it is shutting down)")
                await self._prefetching.begin(message)
            case PinModel():
                await self._tiers.pin(message.model_id, message.tier)
            case UnpinModel():
                await self._tiers.unpin(message.model_id, message.tier)
            case EvictModel():
                await self._tiers.evict(message.model_id, message.tier)
            case GetLoads():
                return GetLoadsReply(loads=(*self._loop.summaries(), *self._prefetching.summaries()))
            case MeasureStorage():
                return await self._measure()
            case _:
                raise ProtocolError(size_bytes=0, reason=f"{type(message).__name__} is not for storage agents")
        return Ack()

    async def _measure(self) -> MeasureStorageReply:
        """In a turn of its own, so that neither a load nor the measurement is disturbed."""
        async with self._paths.turn(Tier.SSD):
            probe = await self._tiers.measure()
        pool = self._tiers.pool
        return MeasureStorageReply(
            server_id=self._config.server_id,
            ssd_directory=str(self._config.ssd_dir),
            ssd_direct_bytes_per_s=probe.direct_bytes_per_s,
            ssd_buffered_bytes_per_s=probe.buffered_bytes_per_s,
            is_direct=probe.is_direct,
            pool_size_bytes=pool.size_bytes,
            has_huge_pages=pool.report.has_huge_pages,
            is_locked=pool.report.is_locked,
            warnings=storage_warnings(probe, pool.report),
        )

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._scheduler_epoch:
            raise StaleEpoch(epoch=epoch, current_epoch=self._scheduler_epoch)
        self._scheduler_epoch = epoch
