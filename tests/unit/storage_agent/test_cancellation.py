"""Cancellations at the moments at which a load could get lost."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from whimbrel.chassis.bus import Received
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import Cancelled, Conflict
from whimbrel.wire.messages import DetachInstance, LoadEnded, LoadModel

from services.storage_agent.threads import Threads
from tests.unit.storage_agent.harness import PATIENCE_S, SERVER, a_config, an_agent, publish


async def test_a_load_that_is_cancelled_while_it_ends_ends_as_it_would_have(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        is_detaching = asyncio.Event()

        async def refuse(received: Received) -> None:
            if not isinstance(received.message, DetachInstance):
                raise Conflict(reason="no")
            is_detaching.set()  # and no answer: the agent waits for it

        worker = agent.hub.bus(name="bad worker")
        await worker.subscribe(worker.subjects.all_to_worker(SERVER, 7), refuse)
        agent.peer.slot = 7
        await agent.peer.beat()
        command = await agent.start_load("m", digest)
        await is_detaching.wait()
        await agent.cancel(command)
        end = await agent.end_of(command)
        assert isinstance(end, LoadEnded)
        assert isinstance(error_of(end.error), Conflict)
        await agent.heartbeat_with(lambda beat: beat.tasks == ())
        await worker.drain()


async def test_a_load_that_is_stopped_before_its_first_step_says_so(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        command = LoadModel(
            task_id="task-1", instance_id="inst-1", model_id="m", checkpoint_digest=digest, size_bytes=1, slots=(0,),
            scheduler_epoch=1,
        )  # fmt: skip
        loop = agent.service._parts.loop
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            group.create_task(loop.load(command))
            group.create_task(loop.stop("m"))
        end = await agent.end_of(command)
        assert isinstance(end, LoadEnded)
        assert isinstance(error_of(end.error), Cancelled)
        assert loop.task_ids() == ()


async def test_a_caller_that_is_cancelled_twice_still_waits_for_its_thread() -> None:
    """The thread may still write into chunks of the pool."""
    threads, may_end, has_ended = Threads(1, "test"), threading.Event(), []

    def work() -> None:
        assert may_end.wait(PATIENCE_S)
        has_ended.append(True)

    waiting = asyncio.create_task(threads.run(work))
    for _ in range(3):
        await asyncio.sleep(0.01)
        waiting.cancel()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    may_end.set()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert has_ended
    threads.close()
