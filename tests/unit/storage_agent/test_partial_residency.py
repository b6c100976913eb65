"""Models that are partly here: only what is missing moves, once, in its turn, whatever was cut off before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ckptio
import pytest
from whimbrel.chassis.testing import InMemoryHub
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import Cancelled
from whimbrel.wire.messages import LoadEnded, LoadFinished, LoadModel, Tier

from services.storage_agent.config import AgentConfig
from services.storage_agent.core.chunks import CheckpointKey
from tests.unit.storage_agent.gated_repository import GatedRepository
from tests.unit.storage_agent.harness import CHUNK_BYTES, Harness, Peer, a_config, an_agent, damage, publish
from tests.unit.storage_agent.mortal import Life


def moved(finished: LoadFinished) -> dict[Tier, int]:
    return {report.tier: report.size_bytes for report in finished.reports}


def size_of(agent: Harness, model_id: str) -> int:
    return ckptio.read_manifest(agent.on_ssd(model_id)).padded_bytes


async def load_and_unload(agent: Harness, model_id: str, digest: str) -> LoadFinished:
    end = await agent.load(model_id, digest)
    await agent.peer.unload(end.instance_id)
    await agent.heartbeat_with(lambda beat: not beat.attached)
    return end


@asynccontextmanager
async def slots(agent: Harness, count: int) -> AsyncIterator[list[Peer]]:
    """More workers, so that loads do not wait for each other's slot."""
    peers = [Peer(agent.hub.bus(name=f"worker {slot}"), slot) for slot in range(1, count)]
    for peer in peers:
        await peer.serve()
        await peer.beat()
    yield [agent.peer, *peers]
    for peer in peers:
        peer.close()
        await peer.bus.drain()


async def load_on(agent: Harness, peer: Peer, model_id: str, digest: str) -> LoadModel:
    before, agent.peer = agent.peer, peer
    try:
        return await agent.start_load(model_id, digest)
    finally:
        agent.peer = before


async def end_of(agent: Harness, command: LoadModel) -> LoadFinished:
    end = await agent.end_of(command)
    assert isinstance(end, LoadFinished), error_of(end.error)
    return end


def a_gated_config(home: Path, gate: GatedRepository, **changes: Any) -> AgentConfig:
    return a_config(home, repository_url=gate.url, **changes)


# --- only what is missing ---


async def test_a_load_after_an_eviction_reads_only_what_dram_lost(home: Path) -> None:
    """L2: eviction is per chunk; what is left of a model is used."""
    config = a_config(home, pool_bytes=30 * CHUNK_BYTES)
    digests = {name: publish(config, name, seed=n, size_bytes=11 * CHUNK_BYTES) for n, name in enumerate("abc")}
    async with an_agent(config) as agent:
        for name in "abc":
            await load_and_unload(agent, name, digests[name])
        (left,) = [m for m in agent.service.tiers.residency.resident() if m.model_id == "a"]
        assert 0 < left.dram_bytes < left.size_bytes, "the third took a part of the first"
        assert left.tier is Tier.SSD
        again = await agent.load("a", digests["a"])
        assert again.source_tier is Tier.SSD
        assert moved(again) == {Tier.SSD: left.size_bytes - left.dram_bytes}


async def test_a_load_after_the_agent_was_killed_fetches_only_what_is_missing(home: Path) -> None:
    """E4, L1: a fetch that was cut off goes on where it was, also in the next life."""
    async with GatedRepository(home / "repository") as gate:
        config = a_gated_config(home, gate)
        key = CheckpointKey(model_id="m", checkpoint_digest=publish(a_config(home), "m", size_bytes=20 * CHUNK_BYTES))
        life = Life(config, InMemoryHub())
        await life.start()
        life.service._parts.fillings.join(key, Tier.SSD, "test")
        gate.open_gate(9)
        await gate.until_waiting(4)
        copy = life.service.tiers.residency.ssd(key)
        assert copy is not None
        assert len(copy.missing) == copy.layout.chunk_count - 9, (
            "four are on their way, and none is on its way to the disk"
        )
        await life.kill()
        fetched = set(gate.answered)
        assert len(fetched) == 9
        gate.answered.clear()
        gate.open_gate()
        async with an_agent(config) as agent:
            finished = await agent.load("m", key.checkpoint_digest)
            assert moved(finished) == {
                Tier.SSD: 9 * CHUNK_BYTES,
                Tier.REMOTE: size_of(agent, "m") - 9 * CHUNK_BYTES,
            }
            assert fetched.isdisjoint(gate.answered)
            await agent.stored()
            ckptio.verify(agent.on_ssd("m"))


async def test_one_bad_chunk_on_the_ssd_is_fetched_again_alone_and_repaired_there(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m", size_bytes=12 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        await agent.load("m", digest)
        await agent.stored()
    damage(config.ssd_dir / "m" / "partition_0.bin", 5 * CHUNK_BYTES + 1)
    async with an_agent(config) as agent:
        repaired = await agent.load("m", digest)
        whole = size_of(agent, "m")
        assert moved(repaired) == {Tier.REMOTE: CHUNK_BYTES, Tier.SSD: whole - CHUNK_BYTES}
        await agent.stored()
        ckptio.verify(agent.on_ssd("m"))
    async with an_agent(config) as agent:
        assert moved(await agent.load("m", digest)) == {Tier.SSD: whole}, "the disk has it again"


async def test_bad_chunks_in_several_places_are_all_repaired_in_one_load(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m", size_bytes=12 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        await agent.load("m", digest)
        await agent.stored()
    for chunk in (0, 3, 4, 9):
        damage(config.ssd_dir / "m" / "partition_0.bin", chunk * CHUNK_BYTES)
    async with an_agent(config) as agent:
        repaired = await agent.load("m", digest)
        assert moved(repaired)[Tier.REMOTE] == 4 * CHUNK_BYTES
        await agent.stored()
        ckptio.verify(agent.on_ssd("m"))


# --- one filling for all who wait ---


async def test_two_loads_of_one_model_cause_one_fetch(home: Path) -> None:
    """E5: single flight."""
    digest = publish(a_config(home), "m", size_bytes=6 * CHUNK_BYTES)
    async with (
        GatedRepository(home / "repository") as gate,
        an_agent(a_gated_config(home, gate)) as agent,
        slots(agent, 2) as peers,
    ):
        commands = [await load_on(agent, peer, "m", digest) for peer in peers]
        await agent.heartbeat_with(lambda beat: beat.running == tuple(command.task_id for command in commands))
        gate.open_gate()
        ends = [await end_of(agent, command) for command in commands]
        assert [end.source_tier for end in ends] == [Tier.REMOTE] * 2
        assert len(gate.answered) == len(set(gate.answered)) == -(-size_of(agent, "m") // CHUNK_BYTES)


@pytest.mark.parametrize("leaver", [0, 1], ids=["the first", "the second"])
async def test_one_of_two_who_wait_may_leave_without_harm_to_the_other(home: Path, leaver: int) -> None:
    digest = publish(a_config(home), "m", size_bytes=6 * CHUNK_BYTES)
    async with (
        GatedRepository(home / "repository") as gate,
        an_agent(a_gated_config(home, gate)) as agent,
        slots(agent, 2) as peers,
    ):
        commands = [await load_on(agent, peer, "m", digest) for peer in peers]
        await gate.until_waiting(4)
        await agent.cancel(commands[leaver])
        end = await agent.end_of(commands[leaver])
        assert isinstance(end, LoadEnded)
        assert isinstance(error_of(end.error), Cancelled)
        agent.check()
        gate.open_gate()
        await end_of(agent, commands[1 - leaver])
        assert len(gate.answered) == len(set(gate.answered)), "nothing was fetched twice"


async def test_when_the_last_who_waits_leaves_the_fetch_stops_and_the_next_goes_on_with_it(home: Path) -> None:
    digest = publish(a_config(home), "m", size_bytes=20 * CHUNK_BYTES)
    async with (
        GatedRepository(home / "repository") as gate,
        an_agent(a_gated_config(home, gate)) as agent,
        slots(agent, 2) as peers,
    ):
        commands = [await load_on(agent, peer, "m", digest) for peer in peers]
        gate.open_gate(5)
        await agent.heartbeat_with(lambda beat: any(m.dram_bytes == 5 * CHUNK_BYTES for m in beat.resident))
        await gate.until_waiting(4)
        for command in commands:
            await agent.cancel(command)
        for command in commands:
            assert isinstance(await agent.end_of(command), LoadEnded)
        agent.check()
        gate.open_gate()
        finished = await agent.load("m", digest)
        assert moved(finished)[Tier.REMOTE] == size_of(agent, "m") - 5 * CHUNK_BYTES


# --- turns ---


async def test_what_dram_has_waits_for_no_slower_path(home: Path) -> None:
    """E4: loads are sequential per path; the path from DRAM is its own."""
    digests = {name: publish(a_config(home), name, seed=n) for n, name in enumerate(("here", "disk", "far"))}
    async with (
        GatedRepository(home / "repository") as gate,
        an_agent(a_gated_config(home, gate)) as agent,
        slots(agent, 4) as peers,
    ):
        gate.open_gate(2 * -(-(1 << 20) // CHUNK_BYTES))
        for name in ("here", "disk"):
            await load_and_unload(agent, name, digests[name])
            await agent.stored()
        gate._allowed = asyncio.Semaphore(0)
        agent.service.tiers._free(
            agent.service.tiers.residency.drop(
                agent.service.tiers.residency.find(
                    CheckpointKey(model_id="disk", checkpoint_digest=digests["disk"])
                ).copy_id  # type: ignore[union-attr]
            )
        )
        async with agent.service._paths.turn(Tier.SSD):
            far = await load_on(agent, peers[1], "far", digests["far"])
            disk = await load_on(agent, peers[2], "disk", digests["disk"])
            await gate.until_waiting(1)
            here = await end_of(agent, await load_on(agent, peers[0], "here", digests["here"]))
            assert here.source_tier is Tier.DRAM
            assert agent.service._heartbeat().tasks == (far.task_id, disk.task_id)
        assert (await end_of(agent, disk)).source_tier is Tier.SSD, "which does not wait for the network either"
        gate.open_gate()
        await end_of(agent, far)


async def test_loads_over_one_path_run_in_the_order_they_came(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E4, E5: one load at a time per path, first in first out."""
    config = a_config(home, pool_bytes=200 * CHUNK_BYTES)
    names = [f"m{n}" for n in range(5)]
    digests = {name: publish(config, name, seed=n) for n, name in enumerate(names)}
    async with an_agent(config) as agent:
        for name in names:
            await load_and_unload(agent, name, digests[name])
        await agent.stored()
    async with an_agent(config) as agent, slots(agent, 5) as peers:
        read, order, under_way = agent.service._parts.reads.read, [], set()

        async def watched(checkpoint: Any, *rest: Any) -> None:
            name = checkpoint.key.model_id
            order.append(name)
            under_way.add(name)
            await asyncio.sleep(0)  # long enough for another one that does not wait
            assert under_way == {name}, "each waits for those before it"
            await read(checkpoint, *rest)
            under_way.remove(name)

        monkeypatch.setattr(agent.service._parts.reads, "read", watched)
        async with agent.service._paths.turn(Tier.SSD):
            commands = [
                await load_on(agent, peer, name, digests[name]) for peer, name in zip(peers, names, strict=True)
            ]
            beat = await agent.heartbeat_with(lambda beat: len(beat.tasks) == len(names))
            assert beat.running == ()
        ends = [await end_of(agent, command) for command in commands]
        assert [end.source_tier for end in ends] == [Tier.SSD] * 5
        assert order == names
        assert all(end.queue_s > 0 for end in ends)
