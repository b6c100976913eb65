"""Owns the report of what the repository holds, for a scheduler that has lost its records (P2)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import ckptio
import structlog
from ckptio.manifest import MANIFEST_BYTES_MAX, MANIFEST_FILE
from whimbrel.chassis.bus import Bus
from whimbrel.wire.errors import PayloadTooLarge, Unavailable, WhimbrelError
from whimbrel.wire.messages import MODEL_CONFIG_BYTES_MAX, ReportRepository, RepositoryModelFound, RepositoryReported

from services.storage_agent.checkpoints import checkpoint_digest
from services.storage_agent.import_files import CONFIG_FILE
from services.storage_agent.repository import Repository

log = structlog.get_logger()

# Models read at once. A store answers in some tens of milliseconds, so a thousand models take a few seconds.
READERS = 16
# Of the reason why a model can't be read; all of it is in the log.
REASON_LENGTH_MAX = 200


class CatalogueReport:
    """One report at a time; it begins anew for a scheduler that is newer than the one it is made for.

    A repository that can't be reached is not reported on at all: nobody may take that for an empty one. The scheduler
    asks until it has heard everything.
    """

    def __init__(self, *, server_id: str, bus: Bus, repository: Repository, group: asyncio.TaskGroup) -> None:
        self._server_id = server_id
        self._bus = bus
        self._repository = repository
        self._group = group
        self._epoch = 0
        self._work: asyncio.Task[None] | None = None

    def begin(self, command: ReportRepository) -> None:
        """Nothing happens when a report for this scheduler is on its way."""
        if self._work is not None and not self._work.done():
            if command.scheduler_epoch <= self._epoch:
                return
            self._work.cancel()
        self._epoch = command.scheduler_epoch
        self._work = self._group.create_task(self._run(command.scheduler_epoch))

    async def _run(self, epoch: int) -> None:
        try:
            await self._report(epoch)
        except (OSError, WhimbrelError) as error:
            log.warning("repository_not_reported", repository=self._repository.url, reason=str(error))
        except Exception:  # the top of a task: whatever a repository contains, the agent lives on
            log.exception("report_crashed", repository=self._repository.url)

    async def _report(self, epoch: int) -> None:
        report = _Report(self._server_id, self._bus, self._repository)
        await report.read(await self._repository.model_ids())
        if report.unreached:
            # The list tells whether it is the repository or these models; then they have a second chance.
            await self._repository.model_ids()
            again, report.unreached = report.unreached, {}
            await report.read(again)
        unreadable = report.unreadable | report.unreached
        for model_id, reason in sorted(unreadable.items()):
            log.warning("repository_model_unreadable", model_id=model_id, reason=reason)
        log.info("repository_reported", models=report.models, unreadable=len(unreadable), scheduler_epoch=epoch)
        await self._say_end(epoch, report.models, unreadable)

    async def _say_end(self, epoch: int, models: int, unreadable: dict[str, str]) -> None:
        """With as many of the unreadable ones as one message holds; the log has all."""
        named = [(model_id, reason[:REASON_LENGTH_MAX]) for model_id, reason in sorted(unreadable.items())]
        while True:
            message = RepositoryReported(
                server_id=self._server_id, scheduler_epoch=epoch, models=models, unreadable=dict(named)
            )
            try:
                await self._bus.publish(self._bus.subjects.to_scheduler(message), message)
            except PayloadTooLarge:
                if not named:
                    raise
                named = named[: len(named) // 2]
            else:
                return


class _Report:
    """What was said so far: `models` were found, `unreadable` never will be, `unreached` perhaps later."""

    def __init__(self, server_id: str, bus: Bus, repository: Repository) -> None:
        self.models = 0
        self.unreadable: dict[str, str] = {}
        self.unreached: dict[str, str] = {}
        self._server_id = server_id
        self._bus = bus
        self._repository = repository

    async def read(self, model_ids: Iterable[str]) -> None:
        """Say what these models are, some at a time. Raises Unavailable in a group when NATS is away."""
        left = iter(list(model_ids))

        async def work() -> None:
            for model_id in left:
                await self._read_one(model_id)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(READERS):
                    group.create_task(work())
        except* WhimbrelError as errors:
            raise _first(errors) from errors

    async def _read_one(self, model_id: str) -> None:
        try:
            found = await self._find(model_id)
        except FileNotFoundError as error:
            if str(error.filename).endswith(MANIFEST_FILE):
                return  # nothing is published there: a deletion, or an upload, that is half done
            self.unreadable[model_id] = str(error)
        except Unavailable as error:
            self.unreached[model_id] = str(error)
        except (ckptio.CkptioError, WhimbrelError, OSError) as error:
            self.unreadable[model_id] = str(error)
        else:
            await self._say(found)

    async def _find(self, model_id: str) -> RepositoryModelFound:
        repository = self._repository
        raw_manifest = await repository.read(model_id, MANIFEST_FILE, MANIFEST_BYTES_MAX)
        manifest = ckptio.Manifest.from_json(raw_manifest, repository.location(model_id, MANIFEST_FILE))
        return RepositoryModelFound(
            server_id=self._server_id,
            model_id=model_id,
            checkpoint_digest=checkpoint_digest(manifest),
            size_bytes=manifest.total_bytes,
            manifest=raw_manifest,
            model_config=await repository.read(model_id, CONFIG_FILE, MODEL_CONFIG_BYTES_MAX),
        )

    async def _say(self, found: RepositoryModelFound) -> None:
        try:
            await self._bus.publish(self._bus.subjects.to_scheduler(found), found)
        except PayloadTooLarge as error:
            reason = f"its manifest and config make a message of {error.size_bytes} bytes, over {error.limit_bytes}"
            self.unreadable[found.model_id] = f"{reason}; raise max_payload of NATS"
        else:
            self.models += 1


def _first(errors: BaseExceptionGroup[WhimbrelError]) -> WhimbrelError:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
