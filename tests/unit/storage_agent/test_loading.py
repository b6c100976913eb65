"""Loads, from the command to the worker's mapped bytes, over every tier and through every failure."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import ckptio
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import (
    ModelTooLarge,
    Unavailable,
)
from whimbrel.wire.messages import (
    LoadEnded,
    LoadFinished,
    Tier,
)

from tests.unit.storage_agent.harness import (
    CHUNK_BYTES,
    a_config,
    an_agent,
    publish,
    truncate,
)
from tests.unit.storage_agent.load_stories import commands, dram, tiers_of


async def test_a_load_goes_from_the_repository_to_the_worker_and_next_time_from_dram(tmp_path: Path) -> None:
    """L1, L10: remote → SSD → DRAM, and every load reports the path it took and what that cost."""
    config = a_config(tmp_path)
    digest = publish(config, "org/model", size_bytes=10 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        first = await agent.load("org/model", digest)
        assert first.source_tier is Tier.REMOTE
        assert tiers_of(first) == [Tier.REMOTE], "what was fetched went to DRAM in the same pass"
        total_bytes = ckptio.read_manifest(agent.on_ssd("org/model")).padded_bytes
        assert all(report.size_bytes == total_bytes and report.seconds > 0 for report in first.reports)
        assert commands(agent) == ["AttachInstance", "ActivateInstance"]

        heartbeat = await agent.heartbeat_with(lambda beat: beat.attached == (first.instance_id,))
        assert [model.tier for model in heartbeat.resident] == [Tier.DRAM], "each model once, fastest tier"
        assert (
            heartbeat.pool_free_bytes == config.pool_bytes - agent.service.tiers.residency.used_chunks() * CHUNK_BYTES
        )

        again = await agent.load("org/model", digest)
        assert again.source_tier is Tier.DRAM
        assert tiers_of(again) == [Tier.DRAM]


async def test_a_restarted_agent_finds_its_ssd_copies_and_removes_what_is_not_whole(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    digest = publish(config, "m", size_bytes=4 * CHUNK_BYTES)
    torn = publish(config, "torn")
    async with an_agent(config) as agent:
        await agent.load("m", digest)
        await agent.load("torn", torn)
    truncate(config.ssd_dir / "torn" / "partition_0.bin", 4096)
    partial = config.ssd_dir / ".partial-x"
    partial.mkdir()
    (config.ssd_dir / "not-ours").mkdir()
    async with an_agent(config) as agent:
        beat = await agent.heartbeat_with(lambda _: True)
        assert [(model.model_id, model.tier) for model in beat.resident] == [("m", Tier.SSD)]
        assert beat.ssd_used_bytes > beat.resident[0].size_bytes == beat.resident[0].ssd_bytes > 0
        assert beat.probe_bandwidth_bytes_per_s > 0
        assert beat.attached == beat.tasks == beat.jobs == ()
        assert not partial.exists()
        assert not (config.ssd_dir / "torn").exists()
        assert (config.ssd_dir / "not-ours").exists()
        assert (await agent.load("m", digest)).source_tier is Tier.SSD


async def test_an_ssd_that_others_use_too_is_read_no_faster_than_is_allowed(home: Path) -> None:
    """E6: the limit is what the agent says of its speed, so that estimates are right from the first load on."""
    size_bytes, bytes_per_s = 20 * CHUNK_BYTES, 4_000_000.0
    config = a_config(home, ssd_bytes_per_s_max=bytes_per_s)
    digest = publish(config, "m", size_bytes=size_bytes)
    async with an_agent(config) as agent:
        await agent.load("m", digest)
        beat = await agent.stored()
        assert beat.probe_bandwidth_bytes_per_s <= bytes_per_s
    async with an_agent(config) as agent:
        end = await agent.load("m", digest)
        assert end.source_tier is Tier.SSD
        (report,) = [report for report in end.reports if report.tier is Tier.SSD]
        assert report.seconds >= 0.9 * size_bytes / bytes_per_s


async def test_reading_begins_while_the_worker_is_still_being_asked_to_attach(home: Path) -> None:
    """L6: the model manager loads while the inference process initialises; sync before the first inference."""
    config = a_config(home)
    digest = publish(config, "m", size_bytes=4 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        agent.peer.hold_attaches()
        command = await agent.start_load("m", digest)
        await agent.heartbeat_with(lambda beat: dram(beat) == {"m"})
        assert commands(agent) == ["AttachInstance"], "every byte is in, and the instance is not active yet"
        await agent.peer.answer_attaches()
        assert isinstance(await agent.end_of(command), LoadFinished)


async def test_two_loads_run_one_after_the_other(home: Path) -> None:
    """E4, E5: one loading task at a time, in order; the second one's q is the first one's time."""
    config = a_config(home)
    digests = {name: publish(config, name, size_bytes=2 * CHUNK_BYTES) for name in ("first", "second")}
    async with an_agent(config) as agent:
        agent.peer.hold_attaches()
        first = await agent.start_load("first", digests["first"])
        second = await agent.start_load("second", digests["second"])
        beat = await agent.heartbeat_with(lambda beat: dram(beat) == {"first"})
        assert beat.tasks == (first.task_id, second.task_id)
        assert not agent.on_ssd("second").exists(), "nothing of the second begins before the first has ended"
        await agent.peer.answer_attaches()
        ends = [await agent.end_of(first), await agent.end_of(second)]
        assert all(isinstance(end, LoadFinished) for end in ends)
        assert agent.heard.index(ends[0]) < agent.heard.index(ends[1])
        assert ends[1].queue_s > ends[0].queue_s
        await agent.heartbeat_with(lambda beat: beat.tasks == ())


async def test_a_repeated_command_is_one_load_and_its_end_is_said_again(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        agent.peer.hold_attaches()
        command = await agent.start_load("m", digest)
        await agent.send(command)
        await agent.peer.answer_attaches()
        first = await agent.end_of(command)
        agent.heard.clear()
        await agent.send(command)
        assert await agent.end_of(command) == first
        assert commands(agent) == ["AttachInstance", "ActivateInstance"]


async def test_a_finished_load_whose_worker_was_lost_is_run_again_when_asked_again(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        command = await agent.start_load("m", digest)
        await agent.end_of(command)
        await agent.peer.unload(command.instance_id)
        await agent.heartbeat_with(lambda beat: beat.attached == ())
        agent.heard.clear()
        await agent.send(command)
        again = await agent.end_of(command)
        assert isinstance(again, LoadFinished)
        assert again.source_tier is Tier.DRAM


# --- eviction and leases ---


async def test_the_least_recently_used_model_makes_room_but_never_one_in_use(home: Path) -> None:
    """L2: eviction is ours; a model that an instance maps stays."""
    config = a_config(home, pool_bytes=24 * CHUNK_BYTES)
    digests = {name: publish(config, name, seed=n, size_bytes=6 * CHUNK_BYTES) for n, name in enumerate("abcd")}
    async with an_agent(config) as agent:
        used = await agent.load("a", digests["a"])
        for name in "bc":
            end = await agent.load(name, digests[name])
            await agent.peer.unload(end.instance_id)
        await agent.heartbeat_with(lambda beat: beat.attached == (used.instance_id,))
        await agent.load("d", digests["d"])
        beat = await agent.heartbeat_with(lambda beat: "d" in dram(beat))
        assert "a" in dram(beat), "an instance maps it, however long ago it was loaded"
        assert "b" not in dram(beat), "the least recently used one"
        assert ("b", Tier.SSD) in {(model.model_id, model.tier) for model in beat.resident}
        agent.check()


async def test_a_load_waits_for_the_chunks_of_an_instance_that_is_being_unloaded(home: Path) -> None:
    config = a_config(home, pool_bytes=12 * CHUNK_BYTES)
    digests = {name: publish(config, name, seed=n, size_bytes=6 * CHUNK_BYTES) for n, name in enumerate("ab")}
    async with an_agent(config) as agent:
        first = await agent.load("a", digests["a"])
        second = await agent.start_load("b", digests["b"])
        await agent.heartbeat_with(lambda beat: any(model.model_id == "b" for model in beat.resident))
        assert "b" not in {
            model.model_id for model in agent.service.tiers.residency.resident() if model.tier is Tier.DRAM
        }
        await agent.peer.unload(first.instance_id)
        assert isinstance(await agent.end_of(second), LoadFinished)


async def test_a_model_that_can_never_fit_is_refused_at_once_with_need_and_capacity(home: Path) -> None:
    config = a_config(home, pool_bytes=4 * CHUNK_BYTES)
    digest = publish(config, "m", size_bytes=10 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        error = await agent.failed_load("m", digest)
        assert isinstance(error, ModelTooLarge)
        assert error.capacity_bytes == 4 * CHUNK_BYTES
        assert error.need_bytes > 10 * CHUNK_BYTES
        assert agent.peer.asked == []
        agent.on_ssd("m").rename(home / "elsewhere")
        large = await agent.start_load("m", digest, size_bytes=10 * CHUNK_BYTES)
        end = await agent.end_of(large)
        assert isinstance(end, LoadEnded)
        assert isinstance(error_of(end.error), ModelTooLarge)
        assert not agent.on_ssd("m").exists(), "with its size in the command, nothing is fetched for it"


async def test_the_ssd_budget_is_kept_by_evicting_unused_copies_with_their_chunks(home: Path) -> None:
    config = a_config(home, ssd_bytes=22 * CHUNK_BYTES)
    digests = {name: publish(config, name, seed=n, size_bytes=5 * CHUNK_BYTES) for n, name in enumerate("abc")}
    async with an_agent(config) as agent:
        for name in "ab":
            end = await agent.load(name, digests[name])
            await agent.peer.unload(end.instance_id)
        await agent.heartbeat_with(lambda beat: beat.attached == ())
        await agent.load("c", digests["c"])
        beat = await agent.heartbeat_with(lambda beat: "c" in dram(beat))
        assert beat.ssd_used_bytes <= config.ssd_bytes
        assert dram(beat) == {"b", "c"}
        assert not agent.on_ssd("a").exists()


async def test_an_ssd_copy_that_an_instance_needs_is_not_evicted_for_another_model(home: Path) -> None:
    config = a_config(home, ssd_bytes=12 * CHUNK_BYTES)
    digests = {name: publish(config, name, seed=n, size_bytes=5 * CHUNK_BYTES) for n, name in enumerate("ab")}
    async with an_agent(config) as agent:
        first = await agent.load("a", digests["a"])
        error = await agent.failed_load("b", digests["b"])
        assert isinstance(error, Unavailable)
        assert "are in use or pinned" in str(error)
        await agent.peer.unload(first.instance_id)
        await agent.load("b", digests["b"])


async def test_a_model_larger_than_the_ssd_budget_is_refused(home: Path) -> None:
    config = a_config(home, ssd_bytes=3 * CHUNK_BYTES)
    digest = publish(config, "m", size_bytes=10 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        error = await agent.failed_load("m", digest)
        assert isinstance(error, ModelTooLarge)
        assert error.capacity_bytes == config.ssd_bytes
        assert agent.ssd_entries() == [], "nothing half is left"


async def test_the_lease_of_a_worker_that_is_killed_ends_with_its_process(home: Path) -> None:
    """A worker holds a flock while it maps; the kernel drops it with the process, whatever happened to it."""
    config = a_config(home)
    digest = publish(config, "m")
    holder = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1])\n"
        "fcntl.flock(file, fcntl.LOCK_SH)\n"
        "print('locked', flush=True)\n"
        "time.sleep(60)\n"
    )
    async with an_agent(config) as agent:
        end = await agent.load("m", digest)
        lease = agent.peer.attaches[end.instance_id].lease_path
        process = await asyncio.create_subprocess_exec(sys.executable, "-Sc", holder, lease, stdout=PIPE)
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"locked\n"
            await agent.peer.unload(end.instance_id)
            await agent.heartbeat_with(lambda beat: beat.attached == (end.instance_id,))
            process.kill()
            beat = await agent.heartbeat_with(lambda beat: beat.attached == ())
            assert not Path(lease).exists()
            assert dram(beat) == {"m"}, "the bytes stay for the next load"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def test_what_a_worker_maps_stays_valid_when_the_agent_starts_again(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m", size_bytes=4 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        end = await agent.load("m", digest)
        mapping = agent.peer.mappings.pop(end.instance_id)[0]
        with memoryview(mapping) as view:
            before = bytes(view)
    async with an_agent(config) as agent:
        await agent.load("m", digest)
        with memoryview(mapping) as view:
            assert bytes(view) == before
    mapping.close()
