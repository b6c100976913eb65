"""Loads, from the command to the worker's mapped bytes, over every tier and through every failure."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE
from functools import partial
from pathlib import Path

import ckptio
import pytest
from whimbrel.chassis.bus import Received
from whimbrel.chassis.heartbeat import BEAT_GAP_S_MIN, Heart
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import (
    Cancelled,
    Conflict,
    LoadFailed,
    ModelTooLarge,
    QueueFull,
    Unavailable,
)
from whimbrel.wire.messages import (
    Ack,
    ActivateInstance,
    AgentHeartbeat,
    AttachInstance,
    CancelLoad,
    DetachInstance,
    GetLoads,
    GetLoadsReply,
    LoadEnded,
    LoadFinished,
    LoadModel,
    LoadProgressed,
    SchedulerHeartbeat,
    Tier,
    WaitStage,
)

from tests.unit.storage_agent.gated_repository import GatedRepository
from tests.unit.storage_agent.harness import (
    CHUNK_BYTES,
    SERVER,
    Harness,
    a_config,
    an_agent,
    damage,
    publish,
    truncate,
)
from tests.unit.storage_agent.operators import ask


def tiers_of(finished: LoadFinished) -> list[Tier]:
    return [report.tier for report in finished.reports]


def dram(heartbeat: AgentHeartbeat) -> set[str]:
    return {model.model_id for model in heartbeat.resident if model.tier is Tier.DRAM}


def commands(harness: Harness) -> list[str]:
    return [type(message).__name__ for message in harness.peer.asked]


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


# --- damage ---


async def test_a_corrupt_ssd_copy_is_fetched_again_and_the_load_succeeds(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    digest = publish(config, "m", size_bytes=6 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        await agent.load("m", digest)
    damage(config.ssd_dir / "m" / "partition_0.bin", 2 * CHUNK_BYTES + 5)
    async with an_agent(config) as agent:
        end = await agent.load("m", digest)
        assert tiers_of(end) == [Tier.REMOTE, Tier.SSD]
        assert commands(agent) == ["AttachInstance", "ActivateInstance"], "the worker noticed nothing"
        await agent.stored()
        ckptio.verify(agent.on_ssd("m"))


@pytest.mark.parametrize("file", ["index.msgpack", "manifest.json"])
async def test_an_ssd_copy_with_a_damaged_small_file_is_fetched_again(home: Path, file: str) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        await agent.load("m", digest)
    damage(config.ssd_dir / "m" / file, 40)
    async with an_agent(config) as agent:
        assert (await agent.load("m", digest)).source_tier is Tier.REMOTE
        await agent.stored()
        ckptio.verify(agent.on_ssd("m"))


async def test_an_ssd_copy_that_somebody_deleted_is_fetched_again(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        end = await agent.load("m", digest)
        await agent.peer.unload(end.instance_id)
        await agent.heartbeat_with(lambda beat: beat.attached == ())
        (agent.on_ssd("m") / "manifest.json").unlink()
        assert (await agent.load("m", digest)).source_tier is Tier.REMOTE


async def test_a_corrupt_repository_is_refused_with_file_and_offset_and_the_next_load_works(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m", size_bytes=6 * CHUNK_BYTES)
    good = publish(config, "good")
    async with an_agent(config) as agent:
        path = agent.published("m") / "partition_0.bin"
        damage(path, 2 * CHUNK_BYTES + 5)
        error = await agent.failed_load("m", digest)
        assert isinstance(error, LoadFailed)
        assert str(path) in error.reason
        assert f"offset {2 * CHUNK_BYTES}" in error.reason
        assert "ActivateInstance" not in commands(agent), "it was never given to a worker"
        beat = await agent.heartbeat_with(lambda beat: not beat.tasks)
        assert [model.tier for model in beat.resident] == [Tier.REMOTE], "what was good of it is kept, and is no model"
        await agent.load("good", good)


@pytest.mark.parametrize(
    ("harm", "names"),
    [
        (lambda path: truncate(path / "partition_0.bin", 8192), "partition_0.bin: truncated at offset 8192"),
        (lambda path: (path / "partition_0.bin").unlink(), "partition_0.bin: missing"),
        (lambda path: damage(path / "index.msgpack", 100), "index.msgpack: the file does not match"),
        (lambda path: damage(path / "config.json", 3), "config.json: the file does not match"),
        (lambda path: damage(path / "manifest.json", 60), "manifest.json: "),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is not there; deploy the model again"),
    ],
    ids=["truncated", "missing", "index", "small file", "manifest", "no manifest"],
)
async def test_every_kind_of_damage_in_the_repository_names_its_file(home: Path, harm: object, names: str) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        harm(agent.published("m"))  # type: ignore[operator]
        error = await agent.failed_load("m", digest)
        assert isinstance(error, LoadFailed)
        assert names in error.reason


async def test_a_corrupt_ssd_copy_over_a_corrupt_repository_is_never_activated(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m", size_bytes=6 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        await agent.load("m", digest)
    for directory in (config.ssd_dir, home / "repository"):
        damage(directory / "m" / "partition_0.bin", 3 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        error = await agent.failed_load("m", digest)
        assert isinstance(error, LoadFailed)
        assert f"offset {3 * CHUNK_BYTES}" in error.reason
        assert commands(agent) == ["AttachInstance", "DetachInstance"]
        beat = await agent.heartbeat_with(lambda beat: beat.attached == ())
        assert [model.tier for model in beat.resident] == [Tier.REMOTE], (
            "all but one chunk is good, and that is no model"
        )
        assert beat.resident[0].dram_bytes == beat.resident[0].size_bytes - CHUNK_BYTES


async def test_other_content_on_the_ssd_is_replaced_by_what_was_asked_for(home: Path) -> None:
    config = a_config(home)
    old = publish(config, "m", seed=1)
    async with an_agent(config) as agent:
        end = await agent.load("m", old)
        new = publish(config, "m", seed=2)
        assert new != old
        assert (await agent.load("m", new)).source_tier is Tier.REMOTE
        await agent.peer.unload(end.instance_id)
        beat = await agent.heartbeat_with(lambda beat: end.instance_id not in beat.attached)
        assert [model.checkpoint_digest for model in beat.resident] == [new], "the old one left with its instance"
        error = await agent.failed_load("m", old)
        assert isinstance(error, LoadFailed)
        assert "deploy the model again" in error.reason


async def test_chunks_of_another_size_are_refused_and_not_misread(home: Path) -> None:
    config = a_config(home)
    digest = publish(a_config(home, chunk_size_bytes=2 * CHUNK_BYTES), "m")
    async with an_agent(config) as agent:
        error = await agent.failed_load("m", digest)
        assert isinstance(error, LoadFailed)
        assert "deploy it again" in error.reason


# --- workers that do not do their part, cancellation ---


async def test_a_worker_that_does_not_answer_ends_the_load_and_its_bytes_stay_as_a_cache(home: Path) -> None:
    config = a_config(home, attach_s_max=0.3)
    digest = publish(config, "m")
    async with an_agent(config) as agent:

        async def answer_only_detach(received: Received) -> None:
            if isinstance(received.message, DetachInstance):
                await agent.bus.reply(received.reply_to, Ack())

        await agent.bus.subscribe(agent.bus.subjects.all_to_worker(SERVER, 7), answer_only_detach)
        agent.peer.slot = 7
        error = await agent.failed_load("m", digest)
        assert isinstance(error, Unavailable)
        assert f"worker {SERVER}/7" in str(error)
        beat = await agent.heartbeat_with(lambda beat: beat.attached == ())
        assert dram(beat) == {"m"}
        agent.peer.slot = 0
        assert (await agent.load("m", digest)).source_tier is Tier.DRAM


async def test_a_load_waits_for_seconds_at_most_when_the_bus_has_lost_what_it_asked_its_worker(home: Path) -> None:
    config = a_config(home, attach_s_max=30.0)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        asked: list[str] = []

        async def lose_the_first(received: Received) -> None:
            asked.append(type(received.message).__name__)
            if len(asked) > 1:
                await agent.peer._on_command(received)

        await agent.bus.subscribe(agent.bus.subjects.all_to_worker(SERVER, 7), lose_the_first)
        agent.peer.slot = 7
        async with asyncio.timeout(5.0):
            await agent.load("m", digest)
        assert asked == ["AttachInstance", "AttachInstance", "ActivateInstance"]


async def test_a_worker_that_comes_back_in_time_is_attached(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        agent.peer.slot = 7
        command = await agent.start_load("m", digest)
        await agent.heartbeat_with(lambda beat: dram(beat) == {"m"})

        async def answer(received: Received) -> None:
            await agent.peer._on_command(received)

        late = agent.hub.bus(name="late worker")
        await late.subscribe(late.subjects.all_to_worker(SERVER, 7), answer)
        assert isinstance(await agent.end_of(command), LoadFinished)
        await late.drain()


async def test_a_worker_that_refuses_ends_the_load_with_its_reason(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        agent.peer.refusal = Conflict(reason="another instance is here")
        error = await agent.failed_load("m", digest)
        assert isinstance(error, Conflict)
        assert commands(agent)[-1] == "DetachInstance"
        agent.peer.refusal = None
        await agent.load("m", digest)


async def test_a_worker_that_still_maps_the_chunks_of_a_killed_agent_is_never_activated(home: Path) -> None:
    """It takes the second attach for a repetition; the chunks that it has were never filled."""
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        first = await agent.start_load("m", digest)
        await agent.end_of(first)
        agent.peer.attaches["inst-1"] = agent.peer.attaches[first.instance_id]
        end = await agent.end_of(await agent.start_load("m", digest, instance_id="inst-1"))
        assert isinstance(end, LoadEnded)
        assert isinstance(error_of(end.error), Unavailable)
        assert commands(agent)[2:] == ["AttachInstance", "DetachInstance"]
        await agent.load("m", digest, instance_id="inst-2")


async def test_a_waiting_load_is_cancelled_at_once_and_a_running_one_between_chunks(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        agent.peer.hold_attaches()
        running = await agent.start_load("m", digest)
        waiting = await agent.start_load("m", digest)
        await agent.heartbeat_with(lambda beat: dram(beat) == {"m"})
        for command in (waiting, running, running):
            await agent.cancel(command)
        for command in (waiting, running):
            end = await agent.end_of(command)
            assert isinstance(end, LoadEnded)
            assert isinstance(error_of(end.error), Cancelled)
        await agent.peer.answer_attaches()
        beat = await agent.heartbeat_with(lambda beat: beat.attached == () and beat.tasks == ())
        assert dram(beat) == {"m"}, "its bytes were in, so they stay"
        agent.check()
        await agent.load("m", digest)


async def test_a_load_that_is_cancelled_before_it_did_anything_is_cancelled(home: Path) -> None:
    digest = publish(a_config(home), "m")
    async with GatedRepository(home / "repository") as gate, an_agent(a_config(home, repository_url=gate.url)) as agent:
        for _ in range(5):
            command = await agent.start_load("m", digest)
            await agent.cancel(command)
            end = await agent.end_of(command)
            assert isinstance(end, LoadEnded)
            assert isinstance(error_of(end.error), Cancelled)
        assert not [model for model in (await agent.heartbeat_with(lambda _: True)).resident if model.tier is Tier.SSD]


async def test_a_load_that_is_cancelled_while_it_fetches_leaves_what_is_good_to_the_next(home: Path) -> None:
    digest = publish(a_config(home), "m", size_bytes=20 * CHUNK_BYTES)
    async with GatedRepository(home / "repository") as gate, an_agent(a_config(home, repository_url=gate.url)) as agent:
        command = await agent.start_load("m", digest)
        gate.open_gate(5)
        await agent.heartbeat_with(lambda beat: any(m.ssd_bytes == 5 * CHUNK_BYTES for m in beat.resident))
        await gate.until_waiting(4)
        await agent.cancel(command)
        end = await agent.end_of(command)
        assert isinstance(end, LoadEnded)
        assert isinstance(error_of(end.error), Cancelled)
        agent.check()
        beat = await agent.heartbeat_with(lambda beat: not beat.tasks)
        assert [(model.tier, model.ssd_bytes) for model in beat.resident] == [(Tier.REMOTE, 5 * CHUNK_BYTES)]
        gate.open_gate()
        finished = await agent.load("m", digest)
        (report,) = [report for report in finished.reports if report.tier is Tier.REMOTE]
        assert report.size_bytes == ckptio.read_manifest(agent.on_ssd("m")).padded_bytes - 5 * CHUNK_BYTES


async def test_a_slow_load_says_how_far_it_is(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        agent.peer.hold_attaches()
        command = await agent.start_load("m", digest)
        progress = await agent.until(
            LoadProgressed, lambda said: said.stage is WaitStage.FETCHING and said.done_bytes > 0
        )
        assert progress.task_id == command.task_id
        assert progress.done_bytes == progress.total_bytes > 0
        await agent.peer.answer_attaches()
        await agent.end_of(command)


async def test_a_full_queue_refuses_the_next_load(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        agent.peer.hold_attaches()
        for _ in range(64):
            await agent.start_load("m", digest)
        assert isinstance(await agent.failed_load("m", digest), QueueFull)
        for task_id in agent.service._heartbeat().tasks:
            await agent.send(CancelLoad(task_id=task_id))


async def test_a_command_of_a_scheduler_that_was_replaced_is_ignored(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        new = LoadModel(
            task_id="task-new", instance_id="inst-new", model_id="m", checkpoint_digest=digest, size_bytes=1,
            slots=(0,), scheduler_epoch=5,
        )  # fmt: skip
        await agent.send(new)
        await agent.end_of(new)
        await agent.start_load("m", digest, task_id="task-old")  # epoch 1
        assert (await ask(agent, GetLoads(), GetLoadsReply)).loads == (), "asked after it, answered after it"
        beat = await agent.heartbeat_with(lambda beat: beat.attached != ())
        assert (beat.tasks, beat.attached) == ((), ("inst-new",))


async def test_a_new_scheduler_hears_from_the_agent_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the next heartbeat, which here would not come at all."""
    monkeypatch.setattr("services.storage_agent.service.Heart", partial(Heart, interval_s=1000.0))
    async with an_agent(a_config(home)) as agent:
        await asyncio.sleep(2 * BEAT_GAP_S_MIN)  # whatever its start had to say is said
        agent.heard.clear()
        greeting = SchedulerHeartbeat(scheduler_id="s", epoch=7)
        await agent.bus.publish(agent.bus.subjects.heartbeat(greeting), greeting)
        await agent.until(AgentHeartbeat)


async def test_an_agent_that_stops_lets_the_running_load_end_and_gives_the_others_back(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        agent.peer.hold_attaches()
        running = await agent.start_load("m", digest)
        waiting = await agent.start_load("m", digest)
        await agent.heartbeat_with(lambda beat: dram(beat) == {"m"})
        draining = asyncio.create_task(agent.service.drain())
        end = await agent.end_of(waiting)
        assert isinstance(end, LoadEnded)
        assert isinstance(error_of(end.error), Unavailable)
        assert not draining.done()
        late = await agent.end_of(await agent.start_load("m", digest))
        assert isinstance(late, LoadEnded)
        assert "shutting down" in str(error_of(late.error))
        await agent.peer.answer_attaches()
        assert isinstance(await agent.end_of(running), LoadFinished)
        await draining


async def test_an_agent_that_stops_says_so_and_waits_until_nothing_runs_on_its_server(home: Path) -> None:
    async with an_agent(a_config(home)) as agent:
        assert not (await agent.until(AgentHeartbeat)).is_stopping
        agent.peer.active_requests = 1
        await agent.peer.beat()
        draining = asyncio.create_task(agent.service.drain())
        await agent.until(AgentHeartbeat, lambda beat: beat.is_stopping)
        assert not draining.done(), "there is time to move the request elsewhere"
        agent.peer.active_requests = 0
        await agent.peer.beat()
        async with asyncio.timeout(5):
            await draining


async def test_chunks_of_an_instance_are_given_as_one_list_per_partition(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m", size_bytes=5 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        await agent.load("m", digest)
        attach, activate = agent.peer.asked
        assert isinstance(attach, AttachInstance)
        assert isinstance(activate, ActivateInstance)
        assert attach.checkpoint_path == str(agent.on_ssd("m"))
        assert attach.pool_path == str(config.pool_path)
        (part,) = attach.partitions
        assert part.size_bytes == (agent.on_ssd("m") / "partition_0.bin").stat().st_size
        assert len(part.chunks) == 4 * -(-part.size_bytes // CHUNK_BYTES)


async def test_a_bad_command_is_refused_and_the_next_good_one_works(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        await agent.start_load("../../etc", digest)
        await agent.start_load("m", digest, instance_id="../../tmp/x")
        await agent.send(DetachInstance(instance_id="inst-1"))
        await agent.load("m", digest)
        assert [type(message) for message in agent.heard if not isinstance(message, AgentHeartbeat)] == [LoadFinished]
