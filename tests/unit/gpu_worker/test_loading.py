"""The slot over the bus: how instances come, what they hold, and how they go."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from functools import partial
from pathlib import Path

import msgspec
import pytest
from ckptio.manifest import INDEX_FILE
from whimbrel.chassis.heartbeat import BEAT_GAP_S_MIN, Heart
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import Cancelled, Conflict, InstanceGone, LoadFailed, ProtocolError, StaleEpoch
from whimbrel.wire.messages import (
    Ack,
    ActivateInstance,
    AttachInstanceReply,
    DetachInstance,
    FinishReason,
    GetCluster,
    InstanceBecameReady,
    InstanceEnded,
    SchedulerHeartbeat,
    TokenFrame,
    UnloadRefused,
    WorkerHeartbeat,
    WorkerState,
)

from services.gpu_worker.engines.echo_engine import EchoCosts, EchoEngine
from tests.unit.gpu_worker.builders import Lender, a_request
from tests.unit.gpu_worker.harness import SteppedEngine, a_worker, is_locked, long_request
from tests.unit.gpu_worker.tiny_models import TinyModel


async def test_an_instance_becomes_ready_and_says_what_loading_did_not_hide(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model, EchoEngine(EchoCosts(load_s=0.02))) as outside:
        await outside.load()
        await outside.until(lambda: bool(outside.ready()))
        (ready,) = outside.all(InstanceBecameReady)
        assert (ready.server_id, ready.slot, ready.model_id) == ("server-1", 3, "m")
        assert ready.worker_epoch == outside.beat.epoch
        assert ready.bind_s >= 0.02
        assert ready.skeleton_s < 5.0
        assert (outside.beat.instance_id, outside.beat.model_id) == ("inst-1", "m")


@pytest.mark.parametrize(
    "order", ["prepare attach activate", "attach prepare activate", "attach activate prepare", "attach activate"]
)
async def test_commands_may_come_in_any_order_and_twice(order: str, lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        attach = outside.attach()
        messages = {"prepare": outside.prepare(), "attach": attach, "activate": ActivateInstance(instance_id="inst-1")}
        for name in [name for name in order.split() for _ in range(2)]:
            assert await outside.ask(messages[name]) == (AttachInstanceReply() if name == "attach" else Ack())
        await outside.until(lambda: outside.state_of("inst-1") is WorkerState.READY)
        for message in messages.values():
            await outside.ask(message)
        assert outside.ready() == ["inst-1"]
        assert is_locked(attach)


async def test_activation_of_what_was_attached_to_an_earlier_life_is_refused(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        with pytest.raises(InstanceGone):
            await outside.ask(ActivateInstance(instance_id="inst-1"))
        await outside.ask(outside.prepare())
        with pytest.raises(InstanceGone):
            await outside.ask(ActivateInstance(instance_id="inst-1"))


async def test_the_lease_is_held_exactly_as_long_as_chunks_are_mapped(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        attach = outside.attach()
        assert not is_locked(attach)
        await outside.ask(attach)
        assert is_locked(attach)
        await outside.ask(ActivateInstance(instance_id="inst-1"))
        await outside.until(lambda: outside.state_of("inst-1") is WorkerState.READY)
        assert isinstance(await outside.ask(outside.unload()), Ack)
        await outside.until(lambda: outside.beat.state is WorkerState.EMPTY and not is_locked(attach))
        assert outside.all(InstanceEnded)[0].error is None
        assert (outside.beat.instance_id, outside.beat.model_id) == (None, None)


async def test_instances_take_turns_on_the_slot(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        for number in range(5):
            instance_id = f"inst-{number}"
            await outside.load(instance_id)
            assert await outside.answer(a_request(f"req-{number}", instance_id=instance_id)) == [5, 6, 7]
            await outside.ask(outside.unload(instance_id))
        await outside.until(lambda: outside.has_ended("inst-4"))
        assert outside.ready() == [f"inst-{number}" for number in range(5)]


async def test_the_next_instance_may_be_prepared_while_the_last_one_leaves(lender: Lender, model: TinyModel) -> None:
    """A swap: the command overtakes nothing, and need not be repeated."""
    async with a_worker(lender, model) as outside:
        await outside.load("inst-1")
        attach = outside.attach("inst-2")
        await outside.tell(outside.unload("inst-1"))
        await outside.tell(outside.prepare("inst-2"))
        await outside.tell(attach)
        assert isinstance(await outside.ask(ActivateInstance(instance_id="inst-2")), Ack)
        await outside.until(lambda: outside.state_of("inst-2") is WorkerState.READY)


async def test_a_slot_has_one_owner(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        await outside.load("inst-1")
        with pytest.raises(Conflict, match="'inst-1' is on this slot"):
            await outside.ask(outside.prepare("inst-2"))
        attach = outside.attach("inst-2")
        with pytest.raises(Conflict):
            await outside.ask(attach)
        assert not is_locked(attach)
        assert outside.beat.instance_id == "inst-1"


async def test_a_late_command_does_not_bring_an_instance_back(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        attach = await outside.load()
        await outside.ask(outside.unload())
        for message in (outside.prepare(), attach, ActivateInstance(instance_id="inst-1")):
            with pytest.raises(InstanceGone):
                await outside.ask(message)
        assert isinstance(await outside.ask(outside.unload()), Ack)
        # Unloaded before it came: whatever is on the way comes too late.
        await outside.ask(outside.unload("inst-2"))
        with pytest.raises(InstanceGone):
            await outside.ask(outside.prepare("inst-2"))


async def test_a_loading_instance_can_be_unloaded_and_detached(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        await outside.ask(outside.prepare("inst-1"))
        await outside.ask(outside.unload("inst-1"))
        attach = outside.attach("inst-2")
        await outside.ask(attach)
        await outside.ask(DetachInstance(instance_id="inst-2"))
        await outside.until(lambda: outside.has_ended("inst-2") and not is_locked(attach))
        assert outside.ready() == []


async def test_a_lease_that_the_agent_took_back_is_not_used(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        attach = outside.attach()
        Path(attach.lease_path).unlink()
        with pytest.raises(Cancelled, match=r"whose lease .* is gone"):
            await outside.ask(attach)
        await outside.load("inst-2")


async def test_a_lease_that_goes_while_it_is_being_locked_is_noticed(lender: Lender, model: TinyModel) -> None:
    """The agent unlinks under its exclusive lock; whoever waited for that lock holds a file without a name."""
    import fcntl

    async with a_worker(lender, model) as outside:
        attach = outside.attach()
        lease = os.open(attach.lease_path, os.O_RDWR)
        fcntl.flock(lease, fcntl.LOCK_EX)
        asking = asyncio.ensure_future(outside.ask(attach))
        await asyncio.to_thread(_wait_for_waiter, attach.lease_path)
        Path(attach.lease_path).unlink()
        os.close(lease)
        with pytest.raises(Cancelled):
            await asking


def _wait_for_waiter(path: str) -> None:
    """Returns when somebody waits for the lock of `path`."""
    inode = f":{os.stat(path).st_ino} "
    for _ in range(4000):
        if any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()):
            return
        time.sleep(0.005)
    raise AssertionError(f"nobody waits for {path}")


@pytest.mark.parametrize("what", ["index", "config", "chunks", "partitions"])
async def test_a_load_that_makes_no_sense_is_refused_and_the_next_one_works(
    what: str, lender: Lender, model: TinyModel, tmp_path: Path
) -> None:
    async with a_worker(lender, model) as outside:
        attach = outside.attach()
        broken = tmp_path / "broken"
        shutil.copytree(model.checkpoint, broken)
        match what:
            case "index":
                (broken / INDEX_FILE).write_bytes(b"not an index")
            case "config":
                (broken / "config.json").unlink()
        partition = attach.partitions[0]
        changes = {
            "chunks": (partition.__class__(size_bytes=partition.size_bytes, chunks=partition.chunks[:-4]),),
            "partitions": (),
        }
        bad = attach.__class__(
            **{name: getattr(attach, name) for name in attach.__struct_fields__}
            | {"checkpoint_path": str(broken), "partitions": changes.get(what, attach.partitions)}
        )
        with pytest.raises(LoadFailed, match={"index": INDEX_FILE, "config": "config.json"}.get(what, "m")):
            await outside.ask(bad)
        assert not is_locked(bad)
        assert outside.beat.state is WorkerState.EMPTY
        await outside.load("inst-2")


async def test_a_model_that_cannot_be_built_ends_with_its_error(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        await outside.ask(outside.prepare(model_config=b"{}"))
        await outside.until(outside.has_ended)
        (ended,) = outside.all(InstanceEnded)
        assert ended.error is not None
        error = error_of(ended.error)
        assert isinstance(error, LoadFailed)
        assert "does not describe a model" in str(error)
        await outside.load("inst-2")


async def test_a_busy_instance_is_not_unloaded(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        await outside.ask(long_request())
        await outside.tell(outside.unload())
        await outside.until(lambda: bool(outside.all(UnloadRefused)))
        engine.allow(100)
        await outside.until(outside.is_finished)
        assert outside.tokens() == list(range(1, 21))


async def test_a_preempted_instance_stops_what_runs_and_goes(lender: Lender, model: TinyModel) -> None:
    """C8: for comparison; what has run and what waited is told to start again elsewhere."""
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        attach = await outside.load()
        await outside.ask(long_request("req-1"))
        await outside.ask(long_request("req-2"))
        engine.allow(3)
        await outside.until(lambda: len(outside.tokens("req-1")) >= 2)
        unload = msgspec.structs.replace(outside.unload(drain=True), preempt=True)
        await outside.tell(unload)
        engine.allow(100)
        await outside.until(lambda: outside.has_ended() and not is_locked(attach))
        ends = {e.request_id: e.finish_reason for f in outside.all(TokenFrame) for e in f.entries if e.finish_reason}
        assert ends == {"req-1": FinishReason.PREEMPTED, "req-2": FinishReason.PREEMPTED}
        assert len(outside.tokens("req-1")) < 20


async def test_a_draining_instance_ends_its_requests_takes_no_more_and_goes(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        attach = await outside.load()
        await outside.ask(long_request("req-1"))
        await outside.ask(long_request("req-2"))
        assert isinstance(await outside.ask(outside.unload(drain=True)), Ack)
        await outside.until(lambda: outside.state_of("inst-1") is WorkerState.DRAINING)
        with pytest.raises(InstanceGone):
            await outside.ask(long_request("req-3"))
        assert isinstance(await outside.ask(long_request("req-2")), Ack)
        with pytest.raises(Conflict):
            await outside.ask(outside.prepare("inst-2"))
        engine.allow(100)
        await outside.until(lambda: outside.has_ended() and not is_locked(attach))
        assert outside.tokens("req-1") == outside.tokens("req-2") == list(range(1, 21))


async def test_a_scheduler_that_has_a_successor_is_not_obeyed(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        await outside.ask(outside.prepare(scheduler_epoch=7))
        with pytest.raises(StaleEpoch, match="epoch 6 is over; the current one is 7"):
            await outside.ask(outside.unload(epoch=6))
        assert isinstance(await outside.ask(outside.unload(epoch=7)), Ack)


async def test_a_new_scheduler_hears_a_heartbeat_at_once(
    lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting for the next one, which here would not come at all."""
    monkeypatch.setattr("services.gpu_worker.service.Heart", partial(Heart, interval_s=1000.0))
    async with a_worker(lender, model) as outside:
        await asyncio.sleep(2 * BEAT_GAP_S_MIN)  # whatever its start had to say is said
        before = len(outside.all(WorkerHeartbeat))
        beat = SchedulerHeartbeat(scheduler_id="s", epoch=9)
        await outside.bus.publish(outside.bus.subjects.heartbeat(beat), beat)
        await outside.until(lambda: len(outside.all(WorkerHeartbeat)) > before)
        assert outside.beat.state is WorkerState.EMPTY


async def test_what_is_no_command_to_a_worker_is_refused(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        with pytest.raises(ProtocolError, match="GetCluster is no command"):
            await outside.ask(GetCluster())


async def test_a_worker_that_stops_lets_its_requests_end_and_says_goodbye(lender: Lender, model: TinyModel) -> None:
    engine, stop = SteppedEngine(), asyncio.Event()
    async with a_worker(lender, model, engine, stop=stop) as outside:
        attach = await outside.load()
        await outside.ask(long_request())
        stop.set()
        await outside.until(lambda: outside.state_of("inst-1") is WorkerState.DRAINING)
        for refused in (long_request("req-2"), outside.prepare("inst-2")):
            with pytest.raises((InstanceGone, Exception), match="stopping"):
                await outside.ask(refused)
        engine.allow(100)
        await outside.until(outside.has_ended)
        assert outside.tokens() == list(range(1, 21))
    assert not is_locked(attach)


async def test_a_worker_that_stops_while_it_loads_lets_go(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        attach = outside.attach()
        await outside.ask(attach)
    assert outside.has_ended()
    assert not is_locked(attach)
