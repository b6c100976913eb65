"""Loads in which nothing moves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.messages import LoadEnded, LoadFinished, Tier

from tests.unit.storage_agent.gated_repository import GatedRepository
from tests.unit.storage_agent.hand_clock import STALL_S_MAX, HandClock
from tests.unit.storage_agent.harness import CHUNK_BYTES, PATIENCE_S, Harness, a_config, an_agent, publish


async def until_looked_at() -> None:
    """What is watched is looked at meanwhile; if it is not, nothing is proved and nothing fails."""
    await asyncio.sleep(2 * STALL_S_MAX)


async def until_stored(agent: Harness, chunks: int) -> None:
    """The last that a chunk does: nothing moves after it."""
    async with asyncio.timeout(PATIENCE_S):
        while stored_bytes(agent) != chunks * CHUNK_BYTES:  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.002)


def stored_bytes(agent: Harness) -> int:
    return sum(copy.stored_bytes for copy in agent.service.tiers.residency.ssd_copies("m"))


async def test_a_load_in_which_no_byte_moves_is_given_up_and_says_where(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load has a progress deadline, never one of the wall clock."""
    clock = HandClock(monkeypatch)
    digest = publish(a_config(home), "m", size_bytes=12 * CHUNK_BYTES)
    async with (
        GatedRepository(home / "repository") as gate,
        an_agent(a_config(home, repository_url=gate.url, stall_s_max=STALL_S_MAX)) as agent,
    ):
        command = await agent.start_load("m", digest)
        for chunk in range(6):  # more than the limit in all, and never so long without a byte
            await gate.until_waiting(1)
            clock.pass_by(0.4)
            await until_looked_at()
            gate.open_gate(1)
            await until_stored(agent, chunk + 1)
        assert not any(isinstance(said, LoadEnded) for said in agent.heard)
        clock.pass_by(1.1)
        end = await agent.end_of(command)
        assert isinstance(end, LoadEnded)
        error = error_of(end.error)
        assert isinstance(error, Unavailable)
        assert f"remote tier of m (no byte came for {STALL_S_MAX} s)" in str(error)
        agent.check()
        gate.open_gate()
        await agent.load("m", digest)


async def test_a_load_that_waits_for_its_turn_is_not_given_up(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = HandClock(monkeypatch)
    config = a_config(home, stall_s_max=STALL_S_MAX)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        async with agent.service._paths.turn(Tier.REMOTE):
            command = await agent.start_load("m", digest)
            await agent.heartbeat_with(lambda beat: beat.tasks == (command.task_id,))
            clock.pass_by(4)
            await until_looked_at()
            assert agent.service._heartbeat().tasks == (command.task_id,)
        assert isinstance(await agent.end_of(command), LoadFinished)
