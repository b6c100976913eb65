"""Loads whose workers do not do their part, that are cancelled, or whose agent stops."""

from __future__ import annotations

import asyncio
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
    a_config,
    an_agent,
    publish,
)
from tests.unit.storage_agent.load_stories import commands, dram
from tests.unit.storage_agent.operators import ask


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
        beat = await agent.until(AgentHeartbeat)
        assert (beat.server_id, beat.base_version) == (agent.service.config.server_id, None), "with all it has"


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
