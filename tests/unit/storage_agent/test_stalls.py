"""Loads in which nothing moves."""

from __future__ import annotations

import asyncio
from pathlib import Path

from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.messages import LoadEnded, LoadFinished, Tier

from tests.unit.storage_agent.gated_repository import GatedRepository
from tests.unit.storage_agent.harness import CHUNK_BYTES, a_config, an_agent, publish


async def test_a_load_in_which_no_byte_moves_is_given_up_and_says_where(home: Path) -> None:
    """A load has a progress deadline, never one of the wall clock."""
    digest = publish(a_config(home), "m", size_bytes=12 * CHUNK_BYTES)
    async with (
        GatedRepository(home / "repository") as gate,
        an_agent(a_config(home, repository_url=gate.url, stall_s_max=0.25)) as agent,
    ):
        command = await agent.start_load("m", digest)
        started_s = asyncio.get_running_loop().time()
        for _ in range(6):  # more than the limit in all, and never so long without a byte
            await gate.until_waiting(1)
            await asyncio.sleep(0.1)
            gate.open_gate(1)
        end = await agent.end_of(command)
        assert asyncio.get_running_loop().time() - started_s > 0.6 + 0.25
        assert isinstance(end, LoadEnded)
        error = error_of(end.error)
        assert isinstance(error, Unavailable)
        assert "remote tier of m (no byte came for 0.25 s)" in str(error)
        agent.check()
        gate.open_gate()
        await agent.load("m", digest)


async def test_a_load_that_waits_for_its_turn_is_not_given_up(home: Path) -> None:
    config = a_config(home, stall_s_max=0.1)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        async with agent.service._paths.turn(Tier.REMOTE):
            command = await agent.start_load("m", digest)
            await asyncio.sleep(0.4)
            assert agent.service._heartbeat().tasks == (command.task_id,)
        assert isinstance(await agent.end_of(command), LoadFinished)
