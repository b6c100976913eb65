"""Pins, and eviction on command: what stays where it is, and what goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import (
    Conflict,
)
from whimbrel.wire.messages import (
    Ack,
    EvictModel,
    PinModel,
    Tier,
    UnpinModel,
)

from tests.unit.storage_agent.gated_repository import GatedRepository
from tests.unit.storage_agent.harness import (
    CHUNK_BYTES,
    a_config,
    an_agent,
)
from tests.unit.storage_agent.operators import ask, begin, end_of, models, prefetch, refusal, resident, until_quiet

CACHES = [Tier.SSD, Tier.DRAM]


# --- pins ---


async def test_a_pinned_model_stays_in_dram_when_others_need_room(home: Path) -> None:
    """L2: what is pinned is not evicted."""
    digests = models(home, "abcd")
    async with an_agent(a_config(home, pool_bytes=20 * CHUNK_BYTES)) as agent:
        await prefetch(agent, "a", digests["a"], Tier.DRAM, is_pinned=True)
        for name in "bcd":
            await prefetch(agent, name, digests[name], Tier.DRAM)
        assert (await resident(agent, "a")).pinned == (Tier.DRAM,)
        assert (await resident(agent, "a")).tier is Tier.DRAM
        assert (await resident(agent, "b")).tier is Tier.SSD
        await ask(agent, UnpinModel(model_id="a", tier=Tier.DRAM), Ack)
        for name in "bc":
            await prefetch(agent, name, digests[name], Tier.DRAM)
        assert (await resident(agent, "a")).dram_bytes < (await resident(agent, "a")).size_bytes


@pytest.mark.parametrize("tier", CACHES)
async def test_a_pinned_model_stays_on_the_ssd_when_others_need_room(home: Path, tier: Tier) -> None:
    digests = models(home, "abc")
    async with an_agent(a_config(home, ssd_bytes=20 * CHUNK_BYTES)) as agent:
        await ask(agent, PinModel(model_id="a", tier=tier), Ack)
        await prefetch(agent, "a", digests["a"], tier)
        for name in "bc":
            await prefetch(agent, name, digests[name], Tier.SSD)
        assert (await resident(agent, "a")).ssd_bytes > 0, "a copy in DRAM stands on it"
        assert not agent.on_ssd("b").exists()


async def test_a_pin_on_the_ssd_outlives_the_agent_and_one_in_dram_does_not(home: Path) -> None:
    digests = models(home, "abc")
    config = a_config(home, ssd_bytes=20 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        await prefetch(agent, "a", digests["a"], Tier.SSD, is_pinned=True)
        await ask(agent, PinModel(model_id="a", tier=Tier.DRAM), Ack)
        assert (await resident(agent, "a")).pinned == (Tier.SSD, Tier.DRAM)
    async with an_agent(config) as agent:
        assert (await resident(agent, "a")).pinned == (Tier.SSD,)
        for name in "bc":
            await prefetch(agent, name, digests[name], Tier.SSD)
        assert agent.on_ssd("a").exists()
        await ask(agent, UnpinModel(model_id="a", tier=Tier.SSD), Ack)
    async with an_agent(config) as agent:
        assert (await resident(agent, "a")).pinned == ()


async def test_when_everything_is_pinned_the_next_model_is_told_so(home: Path) -> None:
    digests = models(home, "ab")
    async with an_agent(a_config(home, ssd_bytes=12 * CHUNK_BYTES)) as agent:
        await prefetch(agent, "a", digests["a"], Tier.SSD, is_pinned=True)
        error = (await end_of(agent, await begin(agent, "b", digests["b"], Tier.SSD))).error
        assert error is not None
        assert "in use or pinned" in str(error_of(error))


# --- evict ---


async def test_an_idle_model_is_evicted_from_dram_and_from_the_ssd(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        await prefetch(agent, "m", digest, Tier.DRAM)
        await until_quiet(agent)
        await ask(agent, EvictModel(model_id="m", tier=Tier.DRAM), Ack)
        model = await resident(agent, "m")
        assert (model.tier, model.dram_bytes) == (Tier.SSD, 0)
        await prefetch(agent, "m", digest, Tier.DRAM)
        await until_quiet(agent)
        await ask(agent, EvictModel(model_id="m", tier=Tier.SSD), Ack)
        beat = await agent.heartbeat_with(lambda _: True)
        assert beat.resident == (), "what DRAM has stands on the SSD copy and goes with it"
        assert beat.ssd_used_bytes == 0
        assert beat.pool_free_bytes == beat.pool_size_bytes
        assert agent.ssd_entries() == []
        await ask(agent, EvictModel(model_id="m", tier=Tier.SSD), Ack)


@pytest.mark.parametrize(
    ("pinned", "evicted", "is_refused"),
    [
        (Tier.SSD, Tier.SSD, True),
        (Tier.DRAM, Tier.DRAM, True),
        (Tier.DRAM, Tier.SSD, True),
        (Tier.SSD, Tier.DRAM, False),
    ],
)
async def test_what_is_pinned_is_not_evicted_on_command_either(
    home: Path, pinned: Tier, evicted: Tier, is_refused: bool
) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        await prefetch(agent, "m", digest, Tier.DRAM)
        await until_quiet(agent)
        await ask(agent, PinModel(model_id="m", tier=pinned), Ack)
        before = await resident(agent, "m")
        if not is_refused:
            await ask(agent, EvictModel(model_id="m", tier=evicted), Ack)
            return
        error = await refusal(agent, EvictModel(model_id="m", tier=evicted))
        assert isinstance(error, Conflict)
        assert f"m is pinned in {pinned}; unpin it first" in str(error)
        assert await resident(agent, "m") == before
        await ask(agent, UnpinModel(model_id="m", tier=pinned), Ack)
        await ask(agent, EvictModel(model_id="m", tier=evicted), Ack)


@pytest.mark.parametrize("tier", CACHES)
async def test_what_an_instance_or_a_load_uses_is_not_evicted_on_command(home: Path, tier: Tier) -> None:
    digest = models(home, "m")["m"]
    async with GatedRepository(home / "repository") as gate, an_agent(a_config(home, repository_url=gate.url)) as agent:
        command = await agent.start_load("m", digest)
        await gate.until_waiting(4)
        for _ in range(2):
            error = await refusal(agent, EvictModel(model_id="m", tier=tier))
            assert isinstance(error, Conflict)
            assert "its loads and instances have ended" in str(error)
            gate.open_gate()
            await agent.end_of(command)
            await until_quiet(agent)
        await agent.peer.unload(command.instance_id)
        await agent.heartbeat_with(lambda beat: not beat.attached)
        await ask(agent, EvictModel(model_id="m", tier=tier), Ack)


async def test_a_read_from_the_ssd_keeps_the_copy_that_it_reads(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        await prefetch(agent, "m", digest, Tier.SSD)
        async with agent.service.tiers._room:  # the read has its turn, and waits for room
            command = await agent.start_load("m", digest)
            await agent.heartbeat_with(lambda beat: command.task_id in beat.running)
            assert isinstance(await refusal(agent, EvictModel(model_id="m", tier=Tier.SSD)), Conflict)
        await agent.end_of(command)
