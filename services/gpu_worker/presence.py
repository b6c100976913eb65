"""Owns the worker's end of presence: a connection to its server's agent that the kernel closes with this process."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from whimbrel.chassis.unix_sockets import connect_unix
from whimbrel.wire.messages import AgentHeartbeat, WorkerHello

log = structlog.get_logger()

# An agent that starts again listens before it says so; what is tried more often only costs.
RETRY_S_MIN = 0.1
RETRY_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class _Agent:
    """A life of the agent, and where it listens."""

    epoch: int
    path: str


class PresenceClient:
    """Stays connected to the agent whose heartbeats it is given, through every life of that agent."""

    def __init__(self, *, slot: int, worker_epoch: int) -> None:
        self._hello = msgspec.json.encode(WorkerHello(slot=slot, worker_epoch=worker_epoch, pid=os.getpid())) + b"\n"
        self._agent: _Agent | None = None
        self._is_new = asyncio.Event()

    def hear(self, beat: AgentHeartbeat) -> None:
        """An agent's heartbeat; one of a former life that comes late is ignored."""
        agent = _Agent(beat.epoch, beat.presence_path)
        if agent == self._agent or (self._agent is not None and beat.epoch < self._agent.epoch):
            return
        self._agent = agent
        self._is_new.set()

    async def run(self) -> None:
        """Connect, and connect again whenever the connection ends or the agent changes; until cancelled."""
        retry_s = RETRY_S_MIN
        unreachable: _Agent | None = None
        while True:
            await self._until_there_is_a_path()
            self._is_new.clear()
            agent = self._agent
            assert agent is not None
            try:
                await self._stay_connected(agent)
                retry_s = RETRY_S_MIN
            except OSError as error:
                # Another mount, or another user: inference goes on, and the agent notices our end by its timers.
                if agent != unreachable:
                    log.warning("presence_unreachable", path=agent.path, reason=str(error))
                unreachable = agent
            await self._pause(retry_s)
            retry_s = min(2 * retry_s, RETRY_S_MAX)

    async def _until_there_is_a_path(self) -> None:
        while self._agent is None or not self._agent.path:
            await self._is_new.wait()
            self._is_new.clear()

    async def _stay_connected(self, agent: _Agent) -> None:
        """Returns when the agent hung up, or another one was heard of. Raises OSError when there is nobody."""
        reader, writer = await asyncio.open_unix_connection(sock=connect_unix(Path(agent.path)))
        try:
            writer.write(self._hello)
            log.info("presence_connected", path=agent.path, agent_epoch=agent.epoch)
            ends = [asyncio.ensure_future(_until_hung_up(reader)), asyncio.ensure_future(self._is_new.wait())]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
                await asyncio.gather(*ends, return_exceptions=True)
        finally:
            writer.transport.abort()

    async def _pause(self, seconds: float) -> None:
        """Cut short by an agent that was not heard of before."""
        try:
            async with asyncio.timeout(seconds):
                await self._is_new.wait()
        except TimeoutError:
            pass


async def _until_hung_up(reader: asyncio.StreamReader) -> None:
    """The agent says nothing; whatever it says is dropped."""
    try:
        while await reader.read(1024):
            pass
    except OSError:
        pass
