"""Import jobs on an in-memory bus with a real repository, and a scheduler that listens to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from whimbrel.chassis.bus import Received
from whimbrel.chassis.testing import InMemoryBus, InMemoryHub
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import WhimbrelError
from whimbrel.wire.ids import directory_name, new_id
from whimbrel.wire.messages import Ack, ImportEnded, ImportFinished, ImportModel, ImportProgressed, JobStage, Message

from services.storage_agent.imports import ImportJobs
from services.storage_agent.repository import Repository

SERVER = "server-0"
CHUNK_BYTES = 64 * 1024
# Anything that is awaited here takes milliseconds; only a hang takes this long.
PATIENCE_S = 20.0

M = TypeVar("M", bound=Message)


@dataclass
class ImportBench:
    """Jobs that run, and what the scheduler was told."""

    home: Path
    jobs: ImportJobs
    heard: list[Message] = field(default_factory=list)
    may_answer: bool = True
    #: Set while no job is there, nor an end that the scheduler has not acknowledged.
    nothing_left: asyncio.Event = field(default_factory=asyncio.Event)
    _bus: InMemoryBus | None = None
    _heard_one: asyncio.Event = field(default_factory=asyncio.Event)

    async def on_message(self, received: Received) -> None:
        self.heard.append(received.message)
        self._heard_one.set()
        if self.may_answer and isinstance(received.message, ImportFinished | ImportEnded):
            assert self._bus is not None
            await self._bus.reply(received.reply_to, Ack())

    def on_change(self) -> None:
        if self.jobs.job_ids():
            self.nothing_left.clear()
        else:
            self.nothing_left.set()

    async def until(self, kind: type[M], condition: Callable[[M], bool] = lambda _: True) -> M:
        """The first message of this kind, heard or still to come, for which `condition` holds."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self._heard_one.clear()
                for message in self.heard:
                    if isinstance(message, kind) and condition(message):
                        return message
                await self._heard_one.wait()

    async def at_stage(self, command: ImportModel, stage: JobStage) -> ImportProgressed:
        return await self.until(ImportProgressed, lambda m: m.job_id == command.job_id and m.stage is stage)

    def start(self, model_id: str, source: Path | str, *, job_id: str | None = None) -> ImportModel:
        command = ImportModel(job_id=job_id or new_id("job"), model_id=model_id, source=str(source), scheduler_epoch=1)
        self.jobs.submit(command)
        return command

    async def end_of(self, command: ImportModel) -> ImportFinished | ImportEnded:
        return await self.until(ImportFinished | ImportEnded, lambda end: end.job_id == command.job_id)  # type: ignore[arg-type]

    async def finish(self, model_id: str, source: Path | str) -> ImportFinished:
        end = await self.end_of(self.start(model_id, source))
        assert isinstance(end, ImportFinished), error_of(end.error)
        return end

    async def fail(self, model_id: str, source: Path | str) -> WhimbrelError:
        end = await self.end_of(self.start(model_id, source))
        assert isinstance(end, ImportEnded)
        return error_of(end.error)

    @property
    def repository(self) -> Path:
        return self.home / "repository"

    @property
    def staging(self) -> Path:
        return self.home / "staging" / SERVER

    def published(self, model_id: str) -> Path:
        return self.repository / directory_name(model_id)

    def left(self) -> list[str]:
        """Everything that is staged, downloaded or half, anywhere."""
        hidden = [path.name for path in self.repository.iterdir() if path.name.startswith(".")]
        return hidden + ([path.name for path in self.staging.iterdir()] if self.staging.exists() else [])


@asynccontextmanager
async def import_jobs(home: Path, repository: Repository | None = None) -> AsyncIterator[ImportBench]:
    """By default with a `file://` repository in `home`."""
    hub = InMemoryHub()
    bus, scheduler = hub.bus(name="agent"), hub.bus(name="scheduler")
    (home / "repository").mkdir(exist_ok=True)
    jobs = ImportJobs(
        server_id=SERVER,
        bus=bus,
        repository=repository or Repository(f"file://{home / 'repository'}"),
        chunk_size_bytes=CHUNK_BYTES,
        staging_dir=home / "staging",
        on_change=lambda: bench.on_change(),
    )
    bench = ImportBench(home=home, jobs=jobs, _bus=scheduler)
    await scheduler.subscribe(scheduler.subjects.all_to_scheduler(), bench.on_message)
    jobs.remove_leftovers()
    running = asyncio.create_task(jobs.run())
    try:
        yield bench
    finally:
        running.cancel()
        await asyncio.wait([running], timeout=PATIENCE_S)
        jobs.close()
        for each in (bus, scheduler):
            await each.drain()
