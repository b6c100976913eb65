"""A model that is deployed again with other content while a load of the former one is under way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import ckptio
from whimbrel.chassis.bus import Received
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import Conflict
from whimbrel.wire.messages import AttachInstance, LoadEnded, LoadFinished

from services.gpu_worker.chunks import LentChunks
from tests.unit.storage_agent.harness import CHUNK_BYTES, PATIENCE_S, Peer, a_config, an_agent, publish


class SlowPeer(Peer):
    """Looks at what it was lent as a worker does, but takes its time when told so."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.was_asked = asyncio.Event()
        self.may_look = asyncio.Event()
        self.may_look.set()

    async def _on_command(self, received: Received) -> None:
        if isinstance(received.message, AttachInstance):
            self.was_asked.set()
            await self.may_look.wait()
            LentChunks.take(received.message).close()
        await super()._on_command(received)


async def test_a_load_whose_content_was_replaced_ends_with_a_conflict(home: Path) -> None:
    """The chunks are of the former content, and the index that the worker would read is of the new one."""
    config = a_config(home)
    former = publish(config, "m", seed=1)
    async with an_agent(config) as agent:
        peers = [SlowPeer(agent.hub.bus(name=f"worker {slot}"), slot) for slot in (1, 2)]
        for peer in peers:
            await peer.serve()
            await peer.beat()
        slow = peers[0]
        slow.may_look.clear()
        command = await agent.start_load("m", former, slot=1)
        await asyncio.wait_for(slow.was_asked.wait(), PATIENCE_S)
        await agent.stored()
        newer = publish(config, "m", seed=2)
        await agent.load("m", newer, slot=2)
        slow.may_look.set()
        end = await agent.end_of(command)
        assert isinstance(end, LoadEnded)
        error = error_of(end.error)
        assert isinstance(error, Conflict)
        assert "holds another content of m" in str(error)
        assert slow.attaches == {}
        agent.check()
        for peer in peers:
            peer.close()
            await peer.bus.drain()


async def test_a_load_that_comes_while_its_model_is_being_removed_keeps_what_it_makes(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m", size_bytes=3 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        first = await agent.load("m", digest)
        await agent.peer.unload(first.instance_id)
        await agent.heartbeat_with(lambda beat: beat.attached == ())
        await agent.stored()
        tiers = agent.service.tiers
        async with tiers.ssd._turn("m"):  # the removal has decided, and has not touched the disk yet
            removing = asyncio.create_task(tiers.remove_model("m", from_repository=False))
            await asyncio.sleep(0)
            assert not tiers.residency.ssd_copies("m"), "the account goes at once"
            command = await agent.start_load("m", digest)
            await agent.heartbeat_with(lambda beat: command.task_id in beat.running)
        await removing
        assert isinstance(await agent.end_of(command), LoadFinished)
        await agent.stored()
        ckptio.verify(agent.on_ssd("m"))
