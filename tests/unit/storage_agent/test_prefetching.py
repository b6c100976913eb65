"""What operators command: prefetches, a list of what runs, and a measurement of the storage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import ckptio
import pytest
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import (
    Cancelled,
    InvalidRequest,
    LoadFailed,
    ModelTooLarge,
    QueueFull,
    Unavailable,
)
from whimbrel.wire.messages import (
    Ack,
    CancelLoad,
    EvictModel,
    GetLoads,
    GetLoadsReply,
    MeasureStorage,
    MeasureStorageReply,
    PinModel,
    PrefetchEnded,
    PrefetchModel,
    Tier,
    UnpinModel,
    WaitStage,
)

from tests.unit.storage_agent.gated_repository import GatedRepository
from tests.unit.storage_agent.harness import (
    CHUNK_BYTES,
    SERVER,
    a_config,
    an_agent,
    damage,
)
from tests.unit.storage_agent.operators import ask, begin, end_of, models, prefetch, refusal, resident, tiers_of

# --- prefetch ---


async def test_a_prefetch_to_the_ssd_takes_no_memory_and_the_next_load_reads_from_there(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        end = await prefetch(agent, "m", digest, Tier.SSD)
        assert (end.source_tier, tiers_of(end)) == (Tier.REMOTE, [Tier.REMOTE])
        model = await resident(agent, "m")
        assert (model.tier, model.dram_bytes, model.ssd_bytes) == (Tier.SSD, 0, model.size_bytes)
        assert end.reports[0].size_bytes == model.size_bytes
        ckptio.verify(agent.on_ssd("m"))
        assert (await agent.load("m", digest)).source_tier is Tier.SSD


async def test_a_prefetch_to_dram_makes_the_next_load_one_from_dram(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        assert tiers_of(await prefetch(agent, "m", digest, Tier.SSD)) == [Tier.REMOTE]
        assert tiers_of(await prefetch(agent, "m", digest, Tier.DRAM)) == [Tier.SSD]
        assert tiers_of(await prefetch(agent, "m", digest, Tier.DRAM)) == [], "it is there"
        assert (await agent.load("m", digest)).source_tier is Tier.DRAM


async def test_a_prefetch_to_dram_from_the_repository_fills_the_ssd_in_the_same_pass(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        assert tiers_of(await prefetch(agent, "m", digest, Tier.DRAM)) == [Tier.REMOTE]
        await agent.stored()
        ckptio.verify(agent.on_ssd("m"))


async def test_what_only_dram_has_is_stored_without_being_fetched_again(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        await prefetch(agent, "m", digest, Tier.DRAM)
        await agent.stored()
        (copy,) = agent.service.tiers.residency.ssd_copies("m")
        await agent.service.tiers.ssd.damaged(copy.key, next(copy.layout.chunks()))
        end = await prefetch(agent, "m", digest, Tier.SSD)
        assert end.reports == (), "nothing was read from anywhere"
        ckptio.verify(agent.on_ssd("m"))


async def test_a_prefetch_that_is_commanded_twice_is_one(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with GatedRepository(home / "repository") as gate, an_agent(a_config(home, repository_url=gate.url)) as agent:
        command = await begin(agent, "m", digest, Tier.SSD, task_id="task-1")
        await begin(agent, "m", digest, Tier.SSD, task_id="task-1")
        gate.open_gate()
        await end_of(agent, command)
        assert len([message for message in agent.heard if isinstance(message, PrefetchEnded)]) == 1
        assert len(gate.answered) == len(set(gate.answered))


@pytest.mark.parametrize("tier", [Tier.REMOTE, Tier.GPU])
async def test_a_tier_that_is_no_cache_is_refused(home: Path, tier: Tier) -> None:
    async with an_agent(a_config(home)) as agent:
        commands = [
            PrefetchModel(task_id="task-1", model_id="m", checkpoint_digest="d", tier=tier),
            PinModel(model_id="m", tier=tier),
            UnpinModel(model_id="m", tier=tier),
            EvictModel(model_id="m", tier=tier),
        ]
        for command in commands:
            error = await refusal(agent, command)
            assert isinstance(error, InvalidRequest)
            assert "use ssd or dram" in str(error)


async def test_a_prefetch_of_what_is_not_there_ends_with_the_reason(home: Path) -> None:
    digests = models(home, ["large"], size_bytes=10 * CHUNK_BYTES)
    async with an_agent(a_config(home, pool_bytes=4 * CHUNK_BYTES)) as agent:
        missing = (await end_of(agent, await begin(agent, "missing", "d", Tier.SSD))).error
        assert missing is not None
        assert isinstance(error_of(missing), LoadFailed)
        large = (await end_of(agent, await begin(agent, "large", digests["large"], Tier.DRAM))).error
        assert large is not None
        assert isinstance(error_of(large), ModelTooLarge)
        await prefetch(agent, "large", digests["large"], Tier.SSD)
        bad = await refusal(agent, PrefetchModel(task_id="t", model_id="../x", checkpoint_digest="d", tier=Tier.SSD))
        assert isinstance(bad, InvalidRequest)


async def test_too_many_prefetches_at_once_are_refused(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with GatedRepository(home / "repository") as gate, an_agent(a_config(home, repository_url=gate.url)) as agent:
        commands = [await begin(agent, "m", digest, Tier.SSD) for _ in range(64)]
        one_more = PrefetchModel(task_id="task-65", model_id="m", checkpoint_digest=digest, tier=Tier.SSD)
        assert isinstance(await refusal(agent, one_more), QueueFull)
        gate.open_gate()
        for command in commands:
            assert (await end_of(agent, command)).error is None
        assert len(gate.answered) == len(set(gate.answered)), "one fetch for all of them"


async def test_a_prefetch_joins_the_load_that_runs_and_a_load_the_prefetch(home: Path) -> None:
    """E5: single flight, whoever asks."""
    digests = models(home, "ab")
    async with GatedRepository(home / "repository") as gate, an_agent(a_config(home, repository_url=gate.url)) as agent:
        load = await agent.start_load("a", digests["a"])
        await gate.until_waiting(4)
        joined = await begin(agent, "a", digests["a"], Tier.SSD)
        gate.open_gate()
        await agent.end_of(load)
        assert (await end_of(agent, joined)).error is None
        ckptio.verify(agent.on_ssd("a"))
        first = await begin(agent, "b", digests["b"], Tier.SSD)
        assert (await agent.load("b", digests["b"])).source_tier is Tier.REMOTE
        assert (await end_of(agent, first)).error is None
        assert len(gate.answered) == len(set(gate.answered))


async def test_a_cancelled_prefetch_ends_so_and_keeps_what_it_has(home: Path) -> None:
    digest = models(home, "m", size_bytes=12 * CHUNK_BYTES)["m"]
    async with GatedRepository(home / "repository") as gate, an_agent(a_config(home, repository_url=gate.url)) as agent:
        command = await begin(agent, "m", digest, Tier.SSD)
        gate.open_gate(3)
        await gate.until_waiting(4)
        await ask(agent, CancelLoad(task_id=command.task_id), Ack)
        error = (await end_of(agent, command)).error
        assert error is not None
        assert isinstance(error_of(error), Cancelled)
        assert (await ask(agent, GetLoads(), GetLoadsReply)).loads == ()
        agent.check()
        gate.open_gate()
        again = await prefetch(agent, "m", digest, Tier.SSD)
        total = ckptio.read_manifest(agent.on_ssd("m")).padded_bytes
        assert again.reports[0].size_bytes == total - 3 * CHUNK_BYTES
        await ask(agent, CancelLoad(task_id=command.task_id), Ack)


async def test_a_prefetch_that_is_cancelled_before_it_did_anything_ends_so_too(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        prefetching = agent.service._parts.removals._prefetching
        command = PrefetchModel(task_id="task-1", model_id="m", checkpoint_digest=digest, tier=Tier.SSD)
        await prefetching.begin(command)
        prefetching.stop("m")
        error = (await end_of(agent, command)).error
        assert error is not None
        assert isinstance(error_of(error), Cancelled)
        assert prefetching.summaries() == ()


async def test_an_agent_that_stops_takes_no_prefetch(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        agent.service._parts.commands.is_draining = True
        command = PrefetchModel(task_id="task-1", model_id="m", checkpoint_digest=digest, tier=Tier.SSD)
        error = await refusal(agent, command)
        assert isinstance(error, Unavailable)
        assert "shutting down" in str(error)


# --- what runs ---


async def test_loads_and_prefetches_are_listed_with_what_is_left_of_them(home: Path) -> None:
    """E1: the rest of the running task is known on request."""
    digests = models(home, "abc", size_bytes=20 * CHUNK_BYTES)
    async with GatedRepository(home / "repository") as gate, an_agent(a_config(home, repository_url=gate.url)) as agent:
        assert (await ask(agent, GetLoads(), GetLoadsReply)).loads == ()
        load = await agent.start_load("a", digests["a"], size_bytes=20 * CHUNK_BYTES)
        await gate.until_waiting(4)
        waiting = await agent.start_load("b", digests["b"], size_bytes=20 * CHUNK_BYTES)
        queued = await begin(agent, "c", digests["c"], Tier.SSD)
        running, second, third = (await ask(agent, GetLoads(), GetLoadsReply)).loads
        assert (running.task_id, running.instance_id, running.model_id) == (load.task_id, load.instance_id, "a")
        assert (running.stage, running.source_tier) == (WaitStage.FETCHING, Tier.REMOTE)
        assert running.done_bytes == 0
        assert running.remaining_s == pytest.approx(
            running.total_bytes / agent.service.tiers.probe.bandwidth_bytes_per_s
        ), "nothing moved yet: a first guess by the speed of the disk"
        for summary, task_id in ((second, waiting.task_id), (third, queued.task_id)):
            assert (summary.task_id, summary.stage) == (task_id, WaitStage.QUEUED)
            assert (summary.running_s, summary.remaining_s) == (0.0, None)
        assert third.instance_id == ""
        assert second.total_bytes == 20 * CHUNK_BYTES
        gate.open_gate(10)
        await agent.heartbeat_with(lambda beat: any(m.dram_bytes == 10 * CHUNK_BYTES for m in beat.resident))
        (running, *_) = (await ask(agent, GetLoads(), GetLoadsReply)).loads
        assert running.done_bytes == 10 * CHUNK_BYTES
        left = (running.total_bytes - running.done_bytes) / running.done_bytes
        assert running.remaining_s == pytest.approx(left * running.running_s), "by its own speed"
        gate.open_gate()
        await agent.end_of(load)
        assert (await end_of(agent, queued)).error is None
        await agent.cancel(waiting)


# --- measuring ---


async def test_storage_is_measured_on_request_in_a_turn_of_its_own(home: Path) -> None:
    """E6: bandwidth is learned, never configured."""
    config = a_config(home, pool_bytes=20 * CHUNK_BYTES, probe_bytes=8 * CHUNK_BYTES)
    digests = models(home, "ab")
    async with an_agent(config) as agent:
        await prefetch(agent, "a", digests["a"], Tier.DRAM)
        await prefetch(agent, "b", digests["b"], Tier.DRAM)
        await agent.stored()
        async with agent.service._paths.turn(Tier.SSD):
            measuring = asyncio.create_task(ask(agent, MeasureStorage(), MeasureStorageReply))
            assert (await ask(agent, GetLoads(), GetLoadsReply)).loads == (), "nobody waits behind it"
            assert not measuring.done()
        reply = await measuring
        assert (reply.server_id, reply.ssd_directory) == (SERVER, str(config.ssd_dir))
        assert min(reply.ssd_direct_bytes_per_s, reply.ssd_buffered_bytes_per_s) > 0
        assert reply.pool_size_bytes == config.pool_bytes
        assert all(warning.endswith(".") for warning in reply.warnings)
        agent.check()
        ckptio.verify(agent.on_ssd("a"))
        assert (await agent.load("b", digests["b"])).source_tier in (Tier.DRAM, Tier.SSD)
        agent.check()


async def test_a_measurement_without_memory_says_so(home: Path) -> None:
    digest = models(home, "m")["m"]
    size_chunks = -(-ckptio.read_manifest(home / "repository" / "m").padded_bytes // CHUNK_BYTES)
    async with an_agent(a_config(home, pool_bytes=size_chunks * CHUNK_BYTES)) as agent:
        await agent.load("m", digest)
        error = await refusal(agent, MeasureStorage())
        assert isinstance(error, Unavailable)
        assert "every chunk of the pool is in use" in str(error)


async def test_a_message_that_is_not_for_agents_is_refused(home: Path) -> None:
    async with an_agent(a_config(home)) as agent:
        assert "is not for storage agents" in str(await refusal(agent, Ack()))


async def test_damage_on_the_ssd_is_found_by_a_prefetch_to_dram(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        await prefetch(agent, "m", digest, Tier.SSD)
        damage(agent.on_ssd("m") / "partition_0.bin", CHUNK_BYTES)
        end = await prefetch(agent, "m", digest, Tier.DRAM)
        assert {report.tier: report.size_bytes for report in end.reports}[Tier.REMOTE] == CHUNK_BYTES
        await agent.stored()
        ckptio.verify(agent.on_ssd("m"))
