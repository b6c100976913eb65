"""The worker's end of presence, against the agent's real one: through every life of the agent, and without any."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from whimbrel.chassis.unix_sockets import ADDRESS_BYTES_MAX
from whimbrel.wire.messages import AgentHeartbeat

from services.gpu_worker import presence as presence_module
from services.gpu_worker.presence import PresenceClient
from services.storage_agent.presence import Presence
from tests.unit.gpu_worker.builders import Lender
from tests.unit.gpu_worker.harness import a_worker
from tests.unit.gpu_worker.tiny_models import TinyModel

ROOT = Path(__file__).parents[3]
S_MAX = 20.0

# A worker's client in a process of its own: argv are the path, the slot and the worker's epoch.
WORKER = """
import asyncio, sys
from services.gpu_worker.presence import PresenceClient
from tests.unit.gpu_worker.test_presence import a_beat

async def main():
    client = PresenceClient(slot=int(sys.argv[2]), worker_epoch=int(sys.argv[3]))
    client.hear(a_beat(sys.argv[1]))
    await client.run()

asyncio.run(main())
"""


def a_beat(path: Path | str, epoch: int = 1, server_id: str = "server-1") -> AgentHeartbeat:
    return AgentHeartbeat(
        server_id=server_id,
        epoch=epoch,
        resident=(),
        tasks=(),
        jobs=(),
        attached=(),
        pool_size_bytes=0,
        pool_free_bytes=0,
        ssd_size_bytes=0,
        ssd_used_bytes=0,
        probe_bandwidth_bytes_per_s=0.0,
        presence_path=str(path),
    )


class Agent:
    """The agent's presence, and who it lost."""

    def __init__(self, path: Path) -> None:
        self.lost: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self.presence = Presence(path, on_exit=lambda *life: self.lost.put_nowait(life))

    async def next_lost(self) -> tuple[int, int]:
        async with asyncio.timeout(S_MAX):
            return await self.lost.get()

    async def until_connected(self, expected: dict[int, int]) -> None:
        await until(lambda: self.presence.connected() == expected)


@asynccontextmanager
async def an_agent(path: Path) -> AsyncIterator[Agent]:
    agent = Agent(path)
    await agent.presence.start()
    try:
        yield agent
    finally:
        await agent.presence.close()


@asynccontextmanager
async def a_client(**changes: int) -> AsyncIterator[PresenceClient]:
    client = PresenceClient(**({"slot": 3, "worker_epoch": 77} | changes))
    running = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(S_MAX):
        while not claim():  # noqa: ASYNC110  the agent asks who is there, and is told only of ends
            await asyncio.sleep(0.001)


async def test_a_killed_worker_process_is_known_to_its_agent_at_once(tmp_path: Path) -> None:
    async with an_agent(tmp_path / "a.sock") as agent:
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", WORKER, os.fspath(agent.presence.path), "2", "99"),
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'libs'}"},
        )
        try:
            await agent.until_connected({2: 99})
            worker.send_signal(signal.SIGKILL)
            assert await agent.next_lost() == (2, 99)
        finally:
            if worker.returncode is None:
                worker.kill()
            await worker.wait()


async def test_a_worker_connects_again_to_each_life_of_its_agent(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with a_client() as client:
        for epoch in (1, 2, 3):
            async with an_agent(path) as agent:
                client.hear(a_beat(path, epoch))
                await agent.until_connected({3: 77})
                assert agent.lost.empty()


async def test_a_connection_that_drops_is_made_again_without_a_word_of_the_agent(tmp_path: Path) -> None:
    """The agent was started again, and its first heartbeat is not here yet."""
    path = tmp_path / "a.sock"
    async with a_client() as client:
        async with an_agent(path) as agent:
            client.hear(a_beat(path))
            await agent.until_connected({3: 77})
        async with an_agent(path) as agent:
            await agent.until_connected({3: 77})
            assert agent.lost.empty(), "it connected once"


async def test_a_worker_follows_its_agent_to_another_path(tmp_path: Path) -> None:
    async with a_client() as client, an_agent(tmp_path / "a.sock") as old, an_agent(tmp_path / "b.sock") as new:
        client.hear(a_beat(old.presence.path, 1))
        await old.until_connected({3: 77})
        client.hear(a_beat(new.presence.path, 2))
        await new.until_connected({3: 77})
        assert await old.next_lost() == (3, 77)
        client.hear(a_beat(old.presence.path, 1))
        await asyncio.sleep(0.05)
        assert new.lost.empty(), "a heartbeat of a former life changes nothing"


async def test_a_path_that_is_too_long_for_the_kernel_is_connected_to_all_the_same(tmp_path: Path) -> None:
    directory = tmp_path / ("long-" * 20) / ("deep-" * 10)
    directory.mkdir(parents=True)
    path = directory / "a.sock"
    assert len(os.fspath(path)) > ADDRESS_BYTES_MAX
    async with an_agent(path) as agent, a_client() as client:
        client.hear(a_beat(path))
        await agent.until_connected({3: 77})


async def test_a_worker_that_cannot_connect_says_so_once_and_keeps_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence_module, "RETRY_S_MIN", 0.001)
    monkeypatch.setattr(presence_module, "RETRY_S_MAX", 0.002)
    tries: list[Path] = []
    connect = presence_module.connect_unix
    monkeypatch.setattr(presence_module, "connect_unix", lambda path: tries.append(path) or connect(path))
    path = tmp_path / "elsewhere" / "a.sock"
    with structlog.testing.capture_logs() as logs:
        async with a_client() as client:
            client.hear(a_beat(path))
            await until(lambda: len(tries) >= 10)
            path.parent.mkdir()
            async with an_agent(path) as agent:
                await agent.until_connected({3: 77})
    (entry,) = [entry for entry in logs if entry["event"] == "presence_unreachable"]
    assert entry["path"] == os.fspath(path)
    assert entry["reason"]


async def test_an_agent_without_a_path_is_waited_for(tmp_path: Path) -> None:
    async with a_client() as client, an_agent(tmp_path / "a.sock") as agent:
        client.hear(a_beat("", 1))
        await asyncio.sleep(0.01)
        assert agent.presence.connected() == {}
        client.hear(a_beat(agent.presence.path, 2))
        await agent.until_connected({3: 77})
        assert agent.lost.empty()


async def test_a_running_worker_connects_to_the_agent_of_its_own_server(
    lender: Lender, tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    async with an_agent(tmp_path / "own.sock") as own, an_agent(tmp_path / "other.sock") as other:
        async with a_worker(lender, tiny_models["llama"]) as outside:
            for agent, server_id in ((other, "server-2"), (own, "server-1")):
                beat = a_beat(agent.presence.path, server_id=server_id)
                await outside.bus.publish(outside.bus.subjects.heartbeat(beat), beat)
            await own.until_connected({3: outside.beat.epoch})
            assert other.presence.connected() == {}
        # A worker that stops is gone as well.
        assert (await own.next_lost())[0] == 3
