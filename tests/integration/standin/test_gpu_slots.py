"""A server of eight GPU slots: copies to all of them at once, reads of the SSD one after another."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import ckptio
import pytest
from whimbrel.chassis.testing import InMemoryHub
from whimbrel.wire.codec import error_of
from whimbrel.wire.messages import EvictModel, LoadEnded, LoadFinished, LoadModel, Tier

from services.storage_agent.checkpoints import checkpoint_digest
from tests.support.checkpoints import make_checkpoint
from tests.support.gpu_memory import GpuMemory
from tests.support.gpu_peer import GpuPeer
from tests.unit.storage_agent.harness import CHUNK_BYTES, SERVER, Harness, a_config, an_agent, publish

GPUS = 8
CHUNKS = 24
MODELS = [f"m{number}" for number in range(GPUS)]


@asynccontextmanager
async def a_gpu_server(home: Path) -> AsyncIterator[tuple[Harness, list[GpuPeer], dict[str, str]]]:
    """Eight slots, and a model for each, all of which the pool can hold."""
    config = a_config(home, pool_bytes=(CHUNKS + 8) * GPUS * CHUNK_BYTES)
    digests = {name: publish(config, name, seed=n, size_bytes=CHUNKS * CHUNK_BYTES) for n, name in enumerate(MODELS)}
    hub = InMemoryHub()
    with GpuMemory() as memory:
        peers = [GpuPeer(hub.bus(name=f"gpu {slot}"), memory, home / "repository", slot) for slot in range(GPUS)]
        for peer in peers:
            await peer.serve()
        try:
            async with an_agent(config, hub, peer=peers[0]) as agent:
                yield agent, peers, digests
                await unload_all(agent, peers)
        finally:
            for peer in peers[1:]:
                peer.close()
                await peer.bus.drain()


async def load_all(agent: Harness, digests: dict[str, str]) -> list[LoadFinished]:
    """All models at once, each onto its own GPU; how each ended, in the order of the commands."""
    commands = [await agent.start_load(name, digests[name], slot=slot) for slot, name in enumerate(MODELS)]
    return [await finished(agent, command) for command in commands]


async def finished(agent: Harness, command: LoadModel) -> LoadFinished:
    end = await agent.end_of(command)
    assert isinstance(end, LoadFinished), end
    return end


async def unload_all(agent: Harness, peers: list[GpuPeer]) -> None:
    for peer in peers:
        for instance_id in list(peer.attaches):
            await peer.unload(instance_id)
    await agent.heartbeat_with(lambda beat: beat.attached == ())


async def test_eight_models_go_from_dram_to_eight_gpus_at_once(home: Path) -> None:
    """L5: one copier per GPU; what DRAM has waits for no other load."""
    async with a_gpu_server(home) as (agent, peers, digests):
        await load_all(agent, digests)
        await unload_all(agent, peers)
        started_s = time.perf_counter()
        ends = await load_all(agent, digests)
        wall_s = time.perf_counter() - started_s
        assert {end.source_tier for end in ends} == {Tier.DRAM}
        copies_s = [report.seconds for end in ends for report in end.reports]
        print(f"eight loads took {wall_s:.3f} s, their copies {sum(copies_s):.3f} s in all")
        assert len(copies_s) == GPUS
        assert wall_s < 0.5 * sum(copies_s), "they ran one after another"
        beat = await agent.heartbeat_with(lambda beat: len(beat.attached) == GPUS)
        assert {model.tier for model in beat.resident} == {Tier.DRAM}
        assert not [c for c in agent.service.tiers.residency.dram_copies() if c.is_held], (
            "the GPUs have their own bytes"
        )


async def test_reads_of_the_ssd_stay_in_turn_while_copies_overlap(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E4, E5: one load at a time reads the SSD, in the order of the commands."""
    async with a_gpu_server(home) as (agent, peers, digests):
        await load_all(agent, digests)
        await unload_all(agent, peers)
        await agent.stored()
        for name in MODELS:
            evict = EvictModel(model_id=name, tier=Tier.DRAM)
            await agent.bus.request(agent.bus.subjects.to_agent(SERVER, evict), evict, 5.0)
        reads = agent.service._parts.reads
        order: list[str] = []
        under_way = 0

        async def watched(checkpoint, *rest, read=reads.read):  # type: ignore[no-untyped-def]
            nonlocal under_way
            order.append(checkpoint.key.model_id)
            under_way += 1
            assert under_way == 1, "two loads read the SSD at once"
            try:
                await read(checkpoint, *rest)
                await asyncio.sleep(0.02)  # the reads of small models are over too soon to meet each other
            finally:
                under_way -= 1

        monkeypatch.setattr(reads, "read", watched)
        ends = await load_all(agent, digests)
        assert order == MODELS
        assert {end.source_tier for end in ends} == {Tier.SSD}
        assert [end.queue_s for end in ends] == sorted(end.queue_s for end in ends)


async def test_each_partition_of_a_model_goes_to_the_gpu_of_its_slot(home: Path) -> None:
    """L5, E2: one slot per partition, in parallel; the wrong number of slots is refused by name."""
    async with a_gpu_server(home) as (agent, peers, _):
        source = make_checkpoint(home / "source", seed=9, padding_bytes=3 * CHUNKS * CHUNK_BYTES)
        manifest = ckptio.convert(
            source,
            home / "repository" / "parted",
            chunk_size_bytes=CHUNK_BYTES,
            partition_of=lambda name: zlib.crc32(name.encode()) % 3,
        )
        assert len(manifest.partitions) == 3
        digest = checkpoint_digest(manifest)
        end = await finished(agent, await agent.start_load("parted", digest, slots=(4, 2, 7)))
        attach = peers[4].attaches[end.instance_id]
        assert [part.device for part in attach.partitions] == ["cuda:4", "cuda:2", "cuda:7"]
        await unload_all(agent, peers)
        refused = await agent.end_of(await agent.start_load("parted", digest, slots=(4, 2)))
        assert isinstance(refused, LoadEnded)
        assert "3 partitions, and 2 slots" in str(error_of(refused.error))
        one = await finished(agent, await agent.start_load("parted", digest, slots=(5,)))
        assert {part.device for part in peers[5].attaches[one.instance_id].partitions} == {"cuda:5"}
