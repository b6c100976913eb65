"""An agent that was killed and started again while an instance loads: what its next life lends is taken instead."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as Many

import pytest
from ckptio import Index
from whimbrel.wire.codec import unpack_tokens
from whimbrel.wire.errors import InstanceGone, LoadFailed, StaleEpoch
from whimbrel.wire.messages import (
    ActivateInstance,
    AttachInstance,
    AttachInstanceReply,
    WorkerState,
)

from services.gpu_worker.core.instance import State
from services.gpu_worker.engines.echo_engine import EchoCosts, EchoEngine
from services.gpu_worker.engines.engine import EngineError, Limits, PartitionMemory
from tests.unit.gpu_worker.builders import Lender, a_request
from tests.unit.gpu_worker.harness import ANSWER_S_MAX, Outside, SteppedEngine, a_worker, is_locked, long_request
from tests.unit.gpu_worker.tiny_models import TinyModel

STEPS = ("prepare", "bind", "activate")


class GatedEngine(EchoEngine):
    """The echo, except that each step of loading waits at its gate, and that it looks at the bytes in the end."""

    def __init__(self, closed: str = "") -> None:
        super().__init__(EchoCosts())
        self.gates = {name: threading.Event() for name in STEPS}
        self.entered = {name: threading.Semaphore(0) for name in STEPS}
        for name in STEPS:
            if name != closed:
                self.gates[name].set()
        self.memories: list[PartitionMemory] = []
        self.seen: list[bytes] = []
        self.failures: list[Exception] = []

    def open(self) -> None:
        for gate in self.gates.values():
            gate.set()

    async def until_in(self, name: str) -> None:
        assert await asyncio.to_thread(self.entered[name].acquire, timeout=ANSWER_S_MAX), f"{name} was not called"

    def prepare(self, model_config: bytes) -> Limits:
        self._pass("prepare")
        return super().prepare(model_config)

    def bind(self, index: Index, memories: Many[PartitionMemory]) -> None:
        self._pass("bind")
        super().bind(index, memories)
        self.memories = list(memories)

    def activate(self) -> None:
        self._pass("activate")
        with memoryview(self.memories[0]) as view:
            self.seen.append(bytes(view[:4]))

    def unload(self) -> None:
        super().unload()
        self.memories = []

    def _pass(self, name: str) -> None:
        self.entered[name].release()
        assert self.gates[name].wait(ANSWER_S_MAX), f"{name} was never allowed"
        if self.failures:
            raise self.failures.pop(0)


def mark(lender: Lender, attach: AttachInstance, text: bytes) -> None:
    """Let the first bytes of what was lent be `text`."""
    with memoryview(lender.pool.chunk(unpack_tokens(attach.partitions[0].chunks)[0])) as chunk:
        chunk[: len(text)] = text


async def bring_to(state: State, outside: Outside, engine: GatedEngine) -> AttachInstance:
    """Attached by the agent's first life."""
    await outside.tell(outside.prepare())
    first = outside.attach(agent_epoch=1)
    mark(outside.lender, first, b"OLD!")
    if state is State.ATTACHED:
        await engine.until_in("prepare")
    await outside.ask(first)
    match state:
        case State.BINDING:
            await engine.until_in("bind")
        case State.BOUND:
            await engine.until_in("bind")
        case State.ACTIVATING:
            await outside.ask(ActivateInstance(instance_id="inst-1"))
            await engine.until_in("activate")
    return first


GATES = {State.ATTACHED: "prepare", State.BINDING: "bind", State.BOUND: "", State.ACTIVATING: "activate"}


@pytest.mark.parametrize("state", GATES)
async def test_the_next_life_of_the_agent_replaces_what_a_loading_instance_holds(
    state: State, lender: Lender, model: TinyModel
) -> None:
    engine = GatedEngine(closed=GATES[state])
    async with a_worker(lender, model, engine) as outside:
        first = await bring_to(state, outside, engine)
        second = outside.attach(agent_epoch=2)
        mark(lender, second, b"NEW!")
        for _ in range(2):
            assert await outside.ask(second) == AttachInstanceReply()
        assert is_locked(second)
        engine.open()
        await outside.until(lambda: not is_locked(first) and outside.state_of("inst-1") is not None)
        # What the former life verified does not count.
        assert outside.state_of("inst-1") is WorkerState.LOADING
        assert outside.ready() == []
        await outside.ask(ActivateInstance(instance_id="inst-1"))
        await outside.until(lambda: outside.state_of("inst-1") is WorkerState.READY)
        assert engine.seen[-1] == b"NEW!"
        assert is_locked(second)
        assert await outside.answer(a_request()) == [5, 6, 7]
        assert outside.ready() == ["inst-1"]
        await outside.ask(outside.unload())
        await outside.until(lambda: not is_locked(second))


@pytest.mark.parametrize("state", [State.BINDING, State.ACTIVATING])
async def test_a_failure_over_replaced_chunks_is_not_the_end(state: State, lender: Lender, model: TinyModel) -> None:
    """What went wrong with chunks that nobody fills any more says nothing about those that replaced them."""
    engine = GatedEngine(closed=GATES[state])
    async with a_worker(lender, model, engine) as outside:
        first = await bring_to(state, outside, engine)
        second = outside.attach(agent_epoch=2)
        await outside.ask(second)
        engine.failures = [EngineError("the old chunks are no good")]
        engine.open()
        await outside.until(lambda: not is_locked(first))
        await outside.ask(ActivateInstance(instance_id="inst-1"))
        await outside.until(lambda: outside.state_of("inst-1") is WorkerState.READY)
        assert engine.failures == [], "it met the failure"
        assert is_locked(second)
        assert await outside.answer(a_request()) == [5, 6, 7]


async def test_chunks_are_replaced_again_before_the_first_ones_are_bound(lender: Lender, model: TinyModel) -> None:
    engine = GatedEngine(closed="bind")
    async with a_worker(lender, model, engine) as outside:
        lives = [await bring_to(State.BINDING, outside, engine)]
        for epoch in (2, 3, 4):
            lives.append(outside.attach(agent_epoch=epoch))
            await outside.ask(lives[-1])
        mark(lender, lives[-1], b"4th!")
        engine.open()
        await outside.until(lambda: not any(is_locked(attach) for attach in lives[:-1]))
        await outside.ask(ActivateInstance(instance_id="inst-1"))
        await outside.until(lambda: outside.state_of("inst-1") is WorkerState.READY)
        assert engine.seen == [b"4th!"]


@pytest.mark.parametrize("state", GATES)
async def test_an_instance_that_ends_while_chunks_are_replaced_gives_all_of_them_back(
    state: State, lender: Lender, model: TinyModel
) -> None:
    engine = GatedEngine(closed=GATES[state])
    async with a_worker(lender, model, engine) as outside:
        first = await bring_to(state, outside, engine)
        second = outside.attach(agent_epoch=2)
        await outside.ask(second)
        unloading = asyncio.create_task(outside.ask(outside.unload()))
        engine.open()
        await unloading
        await outside.until(lambda: not is_locked(first) and not is_locked(second))
        await outside.load("inst-2")
        assert outside.ready() == ["inst-2"]


async def test_a_ready_instance_keeps_what_it_maps(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        first = await outside.load()
        second = outside.attach(agent_epoch=2)
        assert await outside.ask(second) == AttachInstanceReply()
        assert is_locked(first)
        assert not is_locked(second)
        assert await outside.answer(a_request()) == [5, 6, 7]


async def test_a_draining_instance_takes_no_chunks(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        await outside.ask(long_request())
        await outside.ask(outside.unload(drain=True))
        second = outside.attach(agent_epoch=2)
        with pytest.raises(InstanceGone):
            await outside.ask(second)
        assert not is_locked(second)
        engine.allow(100)


async def test_a_former_life_of_the_agent_cannot_take_the_instance_back(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        first, second = outside.attach(agent_epoch=1), outside.attach(agent_epoch=2)
        await outside.ask(second)
        with pytest.raises(StaleEpoch, match="epoch 1 is over"):
            await outside.ask(first)
        assert is_locked(second)
        assert not is_locked(first)


async def test_chunks_that_cannot_be_had_leave_those_that_are_there(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        first = outside.attach(agent_epoch=1)
        await outside.ask(first)
        second = outside.attach(agent_epoch=2)
        fields = {name: getattr(second, name) for name in second.__struct_fields__}
        with pytest.raises(LoadFailed, match="partitions were lent"):
            await outside.ask(AttachInstance(**fields | {"partitions": ()}))
        assert is_locked(first)
        assert not is_locked(second)
        await outside.ask(second)
        await outside.until(lambda: not is_locked(first))
