"""What the tests of buses share: both kinds of bus, handlers that listen and answer, and what any NATS client sees."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import nats
import nats.aio.msg
from whimbrel.chassis.bus import Bus, NatsBus, Received
from whimbrel.chassis.servers import NatsServer
from whimbrel.chassis.testing import InMemoryHub
from whimbrel.wire.messages import Ack, CancelLoad, DeleteModelReply

# Far longer than anything here takes, so that a hang fails clearly and a busy machine does not.
PATIENCE_S = 10.0
TIMEOUT_S = 5.0

Hub = InMemoryHub | NatsServer
MakeBus = Callable[[], Awaitable[Bus]]


async def connect(hub: Hub, at_end: AsyncExitStack, cluster: str) -> Bus:
    if isinstance(hub, InMemoryHub):
        bus: Bus = hub.bus(cluster)
    else:
        bus = await NatsBus.connect(hub.url, cluster=cluster, name="test/a")
    at_end.push_async_callback(bus.drain)
    return bus


async def raw_client(server: NatsServer, at_end: AsyncExitStack) -> nats.NATS:
    """Any NATS client of any language."""
    client = await nats.connect(server.url)
    at_end.push_async_callback(client.close)
    return client


async def publish_bytes(hub: Hub, at_end: AsyncExitStack, subject: str, data: bytes) -> None:
    """What a peer that speaks something else would send."""
    if isinstance(hub, InMemoryHub):
        hub.route(subject, data, None)
        return
    client = await raw_client(hub, at_end)
    await client.publish(subject, data)
    await client.flush()


async def request_bytes(hub: Hub, at_end: AsyncExitStack, subject: str, data: bytes) -> bytes:
    if isinstance(hub, InMemoryHub):
        answer = hub.answers["inbox"] = asyncio.get_running_loop().create_future()
        hub.route(subject, data, "inbox")
        return await asyncio.wait_for(answer, PATIENCE_S)
    return (await (await raw_client(hub, at_end)).request(subject, data, timeout=PATIENCE_S)).data


class Ear:
    """A handler that remembers what it got."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._changed = asyncio.Event()

    async def __call__(self, received: Received) -> None:
        assert isinstance(received.message, CancelLoad)
        self.heard.append(received.message.task_id)
        self._changed.set()

    async def until(self, count: int) -> list[str]:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.heard) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.heard


def answering(bus: Bus, answer: Callable[[Received], object]) -> Callable[[Received], Awaitable[None]]:
    """A handler that replies with what `answer` returns, and fails with what it raises."""

    async def handler(received: Received) -> None:
        reply = answer(received)
        assert isinstance(reply, Ack | DeleteModelReply)
        await bus.reply(received.reply_to, reply)

    return handler


def failing(error: BaseException) -> Callable[[Received], Awaitable[None]]:
    async def handler(_received: Received) -> None:
        raise error

    return handler


async def go_down(hub: Hub) -> None:
    if isinstance(hub, InMemoryHub):
        hub.go_down()
    else:
        await hub.kill()


async def come_back(hub: Hub) -> None:
    if isinstance(hub, InMemoryHub):
        hub.come_back()
    else:
        await hub.restart()


async def until_connected(bus: Bus, is_connected: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while bus.is_connected is not is_connected:  # noqa: ASYNC110  the bus tells only of its returns
            await asyncio.sleep(0.005)


async def listen(server: NatsServer, at_end: AsyncExitStack, bus: Bus) -> asyncio.Queue[nats.aio.msg.Msg]:
    """What any NATS client sees of a cluster's public events."""
    client, heard = await raw_client(server, at_end), asyncio.Queue()

    async def on_message(msg: nats.aio.msg.Msg) -> None:
        await heard.put(msg)

    await client.subscribe(bus.subjects.all_events(), cb=on_message)
    await client.flush()
    return heard
