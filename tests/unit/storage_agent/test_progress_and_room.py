"""What counts as progress, what is told of it, and whose turn and room it is while others wait."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckptio
import pytest
from ckptio import faults
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import Cancelled, Unavailable
from whimbrel.wire.messages import (
    Ack,
    CancelLoad,
    GetLoads,
    GetLoadsReply,
    LoadEnded,
    LoadFinished,
    MeasureStorage,
    Message,
    PinModel,
    Tier,
)

from services.storage_agent import filling
from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.filling import Filling
from services.storage_agent.lending import Lending
from services.storage_agent.ssd import PARTIAL_PREFIX, SsdDirectory, SsdWriter
from services.storage_agent.steps import Step
from tests.unit.storage_agent.gated_repository import GatedRepository
from tests.unit.storage_agent.hand_clock import STALL_S_MAX, HandClock
from tests.unit.storage_agent.harness import (
    CHUNK_BYTES,
    PATIENCE_S,
    Harness,
    Peer,
    a_config,
    an_agent,
    damage,
    publish,
)
from tests.unit.storage_agent.operators import (
    ask,
    begin,
    end_of,
    models,
    prefetch,
    refusal,
    tiers_of,
    until_quiet,
)


class Gate:
    """A blocking call of another thread that waits, when it has begun, until a test lets it go on."""

    def __init__(self) -> None:
        self._has_come = threading.Event()
        self._is_open = threading.Event()

    def wait(self) -> None:
        self._has_come.set()
        assert self._is_open.wait(PATIENCE_S)

    def open(self) -> None:
        self._is_open.set()

    async def until_waiting(self) -> None:
        assert await asyncio.to_thread(self._has_come.wait, PATIENCE_S)


def hold_up(patch: pytest.MonkeyPatch, owner: Any, name: str, *, is_after: bool = False, **changes: Any) -> Gate:
    """Calls of `owner.name` stop at a gate, before their work or after it; `changes` replace their named arguments."""
    gate, work = Gate(), getattr(owner, name)

    def held_up(*arguments: Any, **named: Any) -> Any:
        if not is_after:
            gate.wait()
        result = work(*arguments, **named | changes)
        if is_after:
            gate.wait()
        return result

    patch.setattr(owner, name, held_up)
    return gate


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.002)


async def leave_to_others(agent: Harness) -> None:
    """Every instance is gone, and nothing moves."""
    for instance_id in list(agent.peer.attaches):
        await agent.peer.unload(instance_id)
    agent.service.tiers.lending.sweep()
    await until_quiet(agent)


async def only_on_the_ssd(agent: Harness, model_id: str, digest: str) -> None:
    await prefetch(agent, model_id, digest, Tier.SSD)
    await until_quiet(agent)
    assert agent.service.tiers.residency.dram_copies(model_id) == ()


def filling_of(agent: Harness, model_id: str, digest: str) -> Filling:
    found = agent.service._parts.fillings.find(CheckpointKey(model_id=model_id, checkpoint_digest=digest))
    assert found is not None
    return found


def total_bytes(agent: Harness, model_id: str) -> int:
    return ckptio.read_manifest(agent.on_ssd(model_id)).padded_bytes


# --- storing is progress ---


def store_slowly(patch: pytest.MonkeyPatch) -> None:
    """Longer in all than a stall, and never so long for one chunk."""
    clock, work = HandClock(patch), SsdWriter.store

    def slowly(self: SsdWriter, chunk: Any, data: memoryview) -> None:
        clock.pass_by(0.2)
        time.sleep(0.2 * STALL_S_MAX)  # so that it is looked at meanwhile
        work(self, chunk, data)

    patch.setattr(SsdWriter, "store", slowly)


async def test_a_disk_that_stores_slowly_is_no_stall(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L4: whoever waits for the bytes does not wait for this, and it ends."""
    config = a_config(home, stall_s_max=STALL_S_MAX)
    digest = publish(config, "m", size_bytes=20 * CHUNK_BYTES)
    store_slowly(monkeypatch)
    async with an_agent(config) as agent:
        await agent.load("m", digest)
        work = filling_of(agent, "m", digest)
        await work.steps.until(Step.STORED)
        ckptio.verify(agent.on_ssd("m"))
        assert [copy.is_whole for copy in agent.service.tiers.residency.ssd_copies("m")] == [True]


async def test_a_prefetch_that_only_stores_is_no_stall(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = models(home, "m", size_bytes=20 * CHUNK_BYTES)["m"]
    store_slowly(monkeypatch)
    async with an_agent(a_config(home, stall_s_max=STALL_S_MAX)) as agent:
        await prefetch(agent, "m", digest, Tier.DRAM)
        await until_quiet(agent)
        (copy,) = agent.service.tiers.residency.ssd_copies("m")
        for chunk in copy.layout.chunks():
            await agent.service.tiers.ssd.damaged(copy.key, chunk)
        end = await prefetch(agent, "m", digest, Tier.SSD)
        assert end.reports == (), "DRAM had it all"
        ckptio.verify(agent.on_ssd("m"))


# --- a full disk, and a bus that is away ---


def fill_the_disk(config: Any) -> None:
    """The file that a measurement writes finds no space, once."""
    config.ssd_dir.mkdir(exist_ok=True)
    (config.ssd_dir / f"{PARTIAL_PREFIX}probe").symlink_to("/dev/full")


async def test_a_measurement_on_a_full_disk_says_so_and_the_agent_lives_on(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        fill_the_disk(agent.config)
        error = await refusal(agent, MeasureStorage())
        assert isinstance(error, Unavailable)
        assert os.strerror(errno.ENOSPC) in str(error)
        await agent.load("m", digest)


async def test_an_agent_whose_disk_is_full_starts(home: Path) -> None:
    digest = models(home, "m")["m"]
    config = a_config(home)
    fill_the_disk(config)
    async with an_agent(config) as agent:
        assert agent.service.tiers.probe.bandwidth_bytes_per_s == 0.0, "nothing was measured"
        await agent.load("m", digest)


async def test_a_measurement_whose_answer_is_lost_leaves_the_agent_alive(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        is_lost = asyncio.Event()

        async def away(reply_to: str | None, message: Message) -> None:
            is_lost.set()
            raise Unavailable(what="NATS")

        with monkeypatch.context() as patch:
            patch.setattr(agent.service._parts.bus, "reply", away)
            await agent.send(MeasureStorage())
            await asyncio.wait_for(is_lost.wait(), PATIENCE_S)
        await agent.load("m", digest)
        assert agent.service.readiness() is None


# --- one victim at a time ---


@pytest.mark.parametrize("reason", ["pin", "load"])
async def test_what_is_wanted_while_another_victim_leaves_stays(
    home: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """L2: room is made by one removal at a time, and looked for anew after each."""
    digests = models(home, "ab", size_bytes=8 * CHUNK_BYTES)
    large = publish(a_config(home), "large", seed=7, size_bytes=20 * CHUNK_BYTES)
    async with an_agent(a_config(home, ssd_bytes=32 * CHUNK_BYTES)) as agent:
        for name in "ab":
            await prefetch(agent, name, digests[name], Tier.DRAM)
            await until_quiet(agent)
        gate = hold_up(monkeypatch, SsdDirectory, "remove")
        command = await begin(agent, "large", large, Tier.SSD)
        await gate.until_waiting()
        if reason == "pin":
            await ask(agent, PinModel(model_id="b", tier=Tier.DRAM), Ack)
        else:
            await agent.load("b", digests["b"])
        gate.open()
        error = (await end_of(agent, command)).error
        assert error is not None
        assert "in use or pinned" in str(error_of(error))
        assert not agent.on_ssd("a").exists()
        ckptio.verify(agent.on_ssd("b"))
        (copy,) = agent.service.tiers.residency.dram_copies("b")
        assert copy.is_whole
        assert not copy.is_doomed


# --- cancelled at an awkward moment ---


async def test_a_load_that_is_cancelled_while_its_directory_is_made_leaves_none(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        gate = hold_up(monkeypatch, SsdDirectory, "begin", is_after=True)
        command = await agent.start_load("m", digest)
        await gate.until_waiting()
        await agent.cancel(command)
        end = await agent.end_of(command)
        assert isinstance(end, LoadEnded)
        assert isinstance(error_of(end.error), Cancelled)
        gate.open()
        await until_quiet(agent)
        assert agent.service.tiers.residency.ssd_used_bytes() == 0
        assert agent.ssd_entries() == []
        await agent.load("m", digest)


async def test_a_load_that_is_cancelled_while_its_files_are_opened_leaves_none_open(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        with monkeypatch.context() as patch:
            gate = hold_up(patch, SsdWriter, "__init__", is_after=True)
            command = await agent.start_load("m", digest)
            await gate.until_waiting()
            assert open_files_in(agent.on_ssd("m"))
            await agent.cancel(command)
            await agent.end_of(command)
            gate.open()
            await until_quiet(agent)
        assert open_files_in(agent.on_ssd("m")) == []
        await agent.load("m", digest)


def open_files_in(directory: Path) -> list[str]:
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:  # that of the listing
            continue
    return [link for link in links if link.startswith(f"{directory}/")]


async def test_a_load_whose_filling_finds_everything_there_ends(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read before it was cancelled too late to stop."""
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        await only_on_the_ssd(agent, "m", digest)
        with monkeypatch.context() as patch:
            gate = hold_up(patch, agent.service._parts.reads._reader, "run", cancel=None)
            first = await agent.start_load("m", digest)
            await gate.until_waiting()
            await agent.cancel(first)
            await agent.end_of(first)
            again = await agent.start_load("m", digest)
            await agent.heartbeat_with(lambda beat: again.task_id in beat.tasks)
            gate.open()
            end = await agent.end_of(again)
            assert isinstance(end, LoadFinished)
            assert end.reports == (), "nothing had to move"
        await agent.heartbeat_with(lambda beat: beat.tasks == ())


# --- turns ---


async def test_a_task_that_waits_for_its_second_turn_does_not_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs is watched for progress, and nothing moves while others have their turn."""
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        await only_on_the_ssd(agent, "m", digest)
        damage(agent.on_ssd("m") / "partition_0.bin", CHUNK_BYTES)
        loop = agent.service._parts.loop
        async with agent.service._paths.turn(Tier.REMOTE):
            gate = hold_up(monkeypatch, agent.service._parts.reads._reader, "run")
            command = await agent.start_load("m", digest)
            await gate.until_waiting()
            assert loop.running_ids() == (command.task_id,)
            gate.open()
            work = filling_of(agent, "m", digest)
            await until(lambda: work.is_waiting and work.done_bytes > 0)
            beat = agent.service._heartbeat()
            assert (beat.tasks, beat.running) == ((command.task_id,), ())
        end = await agent.end_of(command)
        assert isinstance(end, LoadFinished)
        assert {report.tier: report.size_bytes for report in end.reports}[Tier.REMOTE] == CHUNK_BYTES


async def test_a_load_that_fits_goes_ahead_of_one_that_waits_for_room(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filling, "ROOM_SOON_S", 0.05)
    digests = models(home, ["stays", "waits"], size_bytes=14 * CHUNK_BYTES)
    small = publish(a_config(home), "small", seed=7)
    async with an_agent(a_config(home, pool_bytes=24 * CHUNK_BYTES)) as agent:
        await only_on_the_ssd(agent, "waits", digests["waits"])
        stays = await agent.load("stays", digests["stays"])
        waits = await begin(agent, "waits", digests["waits"], Tier.DRAM)
        work = filling_of(agent, "waits", digests["waits"])
        await until(lambda: work.steps.has(Step.STARTED) and work.is_waiting)
        await prefetch(agent, "small", small, Tier.DRAM)
        assert not work.steps.has(Step.PLACED)
        await agent.peer.unload(stays.instance_id)
        assert (await end_of(agent, waits)).error is None


async def test_a_model_that_pins_keep_out_is_refused_at_once_and_hears_whose_they_are(home: Path) -> None:
    digests = models(home, "abc", size_bytes=8 * CHUNK_BYTES)
    async with an_agent(a_config(home, pool_bytes=24 * CHUNK_BYTES)) as agent:
        for name in "ab":
            await prefetch(agent, name, digests[name], Tier.DRAM, is_pinned=True)
        error = await agent.failed_load("c", digests["c"])
        assert isinstance(error, Unavailable)
        assert "it is pinned by a, b; unpin one of them" in str(error)


# --- what an error of the SSD says about the copy ---


async def test_a_server_without_descriptors_keeps_its_copy(home: Path) -> None:
    """It is the server's trouble: the copy is as good as before."""
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        await only_on_the_ssd(agent, "m", digest)
        shutil.rmtree(agent.published("m"))
        with faults.injected(read_error=errno.EMFILE, read_error_offset=CHUNK_BYTES):
            error = await agent.failed_load("m", digest)
        assert isinstance(error, Unavailable)
        assert os.strerror(errno.EMFILE) in str(error)
        assert (await agent.load("m", digest)).source_tier is Tier.SSD


async def test_a_chunk_that_the_disk_cannot_read_is_fetched_again_alone(home: Path) -> None:
    digest = models(home, "m")["m"]
    async with an_agent(a_config(home)) as agent:
        await only_on_the_ssd(agent, "m", digest)
        with faults.injected(read_error=errno.EIO, read_error_offset=2 * CHUNK_BYTES):
            finished = await agent.load("m", digest)
        moved = {report.tier: report.size_bytes for report in finished.reports}
        assert moved == {Tier.SSD: total_bytes(agent, "m") - CHUNK_BYTES, Tier.REMOTE: CHUNK_BYTES}
        await agent.stored()
        ckptio.verify(agent.on_ssd("m"))


# --- instances that are gone ---


def test_an_instance_that_is_gone_is_neither_copied_nor_shared(tmp_path: Path) -> None:
    lending = Lending(tmp_path / "pool", hold=lambda *_: None, let_go=lambda *_: None, on_change=lambda: None)
    with pytest.raises(Unavailable, match="whose worker is gone"):
        lending.copied("inst-1")
    with pytest.raises(Unavailable, match="whose worker is gone"):
        lending.sharing("inst-1")


# --- what is told ---


async def test_only_what_has_to_move_counts_as_done_and_in_all(home: Path) -> None:
    """E1, E2: what was there already would make the rest look nearly done."""
    digest = models(home, "m", size_bytes=12 * CHUNK_BYTES)["m"]
    async with GatedRepository(home / "repository") as gate, an_agent(a_config(home, repository_url=gate.url)) as agent:
        first = await begin(agent, "m", digest, Tier.DRAM)
        gate.open_gate(5)
        await agent.heartbeat_with(lambda beat: any(m.dram_bytes == 5 * CHUNK_BYTES for m in beat.resident))
        await gate.until_waiting(4)
        await ask(agent, CancelLoad(task_id=first.task_id), Ack)
        await end_of(agent, first)
        await until_quiet(agent)
        command = await agent.start_load("m", digest)
        await until(lambda: filling_has_room(agent, "m"))
        (told,) = (await ask(agent, GetLoads(), GetLoadsReply)).loads
        left_bytes = total_bytes(agent, "m") - 5 * CHUNK_BYTES
        assert (told.task_id, told.done_bytes, told.total_bytes) == (command.task_id, 0, left_bytes)
        gate.open_gate()
        end = await agent.end_of(command)
        assert isinstance(end, LoadFinished)
        assert sum(report.size_bytes for report in end.reports) == left_bytes


def filling_has_room(agent: Harness, model_id: str) -> bool:
    running = agent.service._parts.fillings._running
    return any(work.steps.has(Step.PLACED) for key, (work, _) in running.items() if key.model_id == model_id)


async def test_a_load_that_joins_late_reports_what_crossed_since_and_tells_the_same_rest(home: Path) -> None:
    """L10, E1"""
    digest = models(home, "m", size_bytes=12 * CHUNK_BYTES)["m"]
    async with GatedRepository(home / "repository") as gate, an_agent(a_config(home, repository_url=gate.url)) as agent:
        late_peer = Peer(agent.hub.bus(name="second worker"), 1)
        await late_peer.serve()
        await late_peer.beat()
        first = await agent.start_load("m", digest)
        gate.open_gate(8)
        await agent.heartbeat_with(lambda beat: any(m.dram_bytes == 8 * CHUNK_BYTES for m in beat.resident))
        joined_s = time.monotonic()
        late = await agent.start_load("m", digest, slot=1)
        await agent.heartbeat_with(lambda beat: late.task_id in beat.running)
        one, other = (await ask(agent, GetLoads(), GetLoadsReply)).loads
        assert (one.task_id, other.task_id) == (first.task_id, late.task_id)
        assert (one.done_bytes, one.total_bytes) == (other.done_bytes, other.total_bytes)
        assert one.done_bytes == 8 * CHUNK_BYTES
        assert other.running_s >= one.running_s, "since the bytes began to move, and told a moment later"
        left = (other.total_bytes - other.done_bytes) / other.done_bytes
        for told in (one, other):
            assert told.remaining_s == pytest.approx(left * told.running_s)
        gate.open_gate()
        end = await agent.end_of(late)
        assert isinstance(end, LoadFinished)
        assert tiers_of(end) == [Tier.REMOTE]
        assert end.reports[0].size_bytes == total_bytes(agent, "m") - 8 * CHUNK_BYTES
        assert end.reports[0].seconds <= time.monotonic() - joined_s, "what went by before is not its time"
        assert isinstance(await agent.end_of(first), LoadFinished)
        late_peer.close()
        await late_peer.bus.drain()
