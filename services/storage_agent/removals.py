"""Owns the removal of models: what works on one is stopped, then every copy goes, and the scheduler hears of it."""

from __future__ import annotations

import asyncio

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.errors import WhimbrelError
from whimbrel.wire.ids import check_model_id
from whimbrel.wire.messages import ModelRemoved, RemoveModel

from services.storage_agent.fillings import Fillings
from services.storage_agent.imports import ImportJobs
from services.storage_agent.loop import LoadLoop
from services.storage_agent.prefetching import Prefetching
from services.storage_agent.tiers import Tiers

log = structlog.get_logger()


class Removals:
    """The models that have to go from one server. One whose chunks an instance maps goes when that lets go."""

    def __init__(
        self,
        *,
        server_id: str,
        bus: Bus,
        tiers: Tiers,
        loop: LoadLoop,
        prefetching: Prefetching,
        fillings: Fillings,
        imports: ImportJobs,
    ) -> None:
        self._server_id = server_id
        self._bus = bus
        self._tiers = tiers
        self._loop = loop
        self._prefetching = prefetching
        self._fillings = fillings
        self._imports = imports
        self._removals: dict[str, RemoveModel] = {}
        self._work = asyncio.Event()

    def add(self, command: RemoveModel) -> None:
        """Remove a model as soon as nothing works on it. Raises InvalidRequest."""
        model_id = check_model_id(command.model_id)
        known = self._removals.get(model_id)
        if known is None or not known.remove_from_repository:
            self._removals[model_id] = command
        self._imports.stop(model_id)
        self._work.set()

    def keep(self, model_id: str) -> None:
        """The model is wanted again: a newer command counts more than a removal that waits."""
        self._removals.pop(model_id, None)

    def look(self) -> None:
        """Something was let go: what waited for that goes on."""
        if self._removals:
            self._work.set()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            for model_id, command in list(self._removals.items()):
                try:
                    await self._remove(model_id, command)
                except (OSError, WhimbrelError) as error:
                    log.warning("removal_failed", model_id=model_id, reason=str(error))

    async def _remove(self, model_id: str, command: RemoveModel) -> None:
        """Whatever began after the model was wanted again, or a stronger command came, is not for us to stop."""
        await self._imports.stopped(model_id)
        if self._removals.get(model_id) is not command:
            return
        self._prefetching.stop(model_id)
        await self._loop.stop(model_id)
        if self._removals.get(model_id) is not command:
            return
        await self._fillings.stop(model_id)
        if self._removals.get(model_id) is not command:
            return
        await self._tiers.remove_model(model_id, from_repository=command.remove_from_repository)
        if self._removals.get(model_id) is command and not self._tiers.holds(model_id):
            del self._removals[model_id]
            log.info("model_removed", model_id=model_id)
            message = ModelRemoved(model_id=model_id, server_id=self._server_id)
            await self._bus.publish(self._bus.subjects.to_scheduler(message), message)
