"""Storage agents that are killed as by SIGKILL: nothing is put in order, the kernel closes what they had open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

from whimbrel.chassis.memory_bus import InMemoryBus, InMemoryHub
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.messages import Message

from services.storage_agent.config import AgentConfig
from services.storage_agent.service import StorageAgentService
from services.storage_agent.ssd import JOURNAL_FILE


class MortalBus(InMemoryBus):
    """A bus whose owner can die: then nothing more is said."""

    def __init__(self, hub: InMemoryHub) -> None:
        super().__init__(hub, cluster="wb", name="agent")
        self.is_dead = False

    async def publish(self, subject: str, message: Message) -> None:
        if not self.is_dead:
            await super().publish(subject, message)

    async def reply(self, reply_to: str | None, message: Message) -> None:
        if not self.is_dead:
            await super().reply(reply_to, message)

    async def request(self, subject: str, message: Message, timeout_s: float) -> Message:
        if self.is_dead:
            raise Unavailable(what="the bus of the dead")
        return await super().request(subject, message, timeout_s)


class Life:
    """One life of an agent on `config`."""

    def __init__(self, config: AgentConfig, hub: InMemoryHub) -> None:
        self.config = config
        self.bus = MortalBus(hub)
        self.service = StorageAgentService(config, bus=self.bus)
        self._started = asyncio.Event()
        self._living: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it serves."""
        self._living = asyncio.create_task(self._live())
        starting = asyncio.create_task(self._started.wait())
        await asyncio.wait({self._living, starting}, return_when=asyncio.FIRST_COMPLETED)
        if self._living.done():
            starting.cancel()
            self._living.result()

    async def _live(self) -> None:
        async with asyncio.TaskGroup() as group:
            await self.service.start(group)
            self._started.set()
            await asyncio.Event().wait()

    def check_alive(self) -> None:
        """Raises what ended it."""
        assert self._living is not None
        if self._living.done():
            self._living.result()

    async def stop(self) -> None:
        """As SIGTERM does it."""
        await self.service.drain()
        await self._end()
        await self.service.close()

    async def kill(self) -> None:
        """The disk is at once as it will stay: what tasks and threads still write on their way out is taken back."""
        service, ssd_dir = self.service, self.config.ssd_dir
        self.bus.is_dead = True
        frozen = ssd_dir.with_name("ssd.frozen")
        _freeze(ssd_dir, frozen)
        for subscription in list(service._subscriptions):
            await subscription.unsubscribe()
        await self._end()
        parts = service._parts
        await parts.presence.close()
        parts.imports.close()
        parts.loading.close()
        parts.reads.close()
        service.tiers.lending.close()
        service.tiers.threads.close()
        service.tiers.ssd.close()
        self._close_pool()
        shutil.rmtree(ssd_dir)
        frozen.rename(ssd_dir)

    async def _end(self) -> None:
        assert self._living is not None
        self._living.cancel()
        await asyncio.wait([self._living])
        if not self._living.cancelled():
            self._living.result()

    def _close_pool(self) -> None:
        """Closing unlinks; the file of a killed owner stays."""
        path = self.config.pool_path
        saved = path.with_name(f"{path.name}.saved")
        os.link(path, saved)
        self.service.tiers.pool.close()
        saved.rename(path)


def _freeze(source: Path, target: Path) -> None:
    """A copy of a directory in which threads may still work: journals first, so that none names more than there is, and
    an empty one for what began meanwhile."""
    for journal in source.glob(f"*/{JOURNAL_FILE}"):
        (target / journal.parent.name).mkdir(parents=True)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(journal, target / journal.parent.name / JOURNAL_FILE)
    target.mkdir(exist_ok=True)
    for directory, _, names in os.walk(source):  # which skips what vanishes meanwhile
        copy = target / Path(directory).relative_to(source)
        with contextlib.suppress(FileNotFoundError):
            copy.mkdir(parents=True, exist_ok=True)
            for name in names:
                if name != JOURNAL_FILE:
                    shutil.copy2(Path(directory, name), copy / name)
            shutil.copystat(directory, copy)
    for journal in source.glob(f"*/{JOURNAL_FILE}"):
        if (target / journal.parent.name).exists():
            (target / journal.parent.name / JOURNAL_FILE).touch()
