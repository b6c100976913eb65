"""What only the bus on a real NATS server can suffer: restarts, frozen servers, lost clients, full streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from whimbrel.chassis import nats_client, nats_connection
from whimbrel.chassis.bus import NatsBus, Received
from whimbrel.chassis.config import ConfigError
from whimbrel.chassis.event_publisher import EVENTS_LOST, EVENTS_QUEUED_MAX
from whimbrel.chassis.heartbeat import HEARTBEAT_S, HEARTBEATS_MISSED_MAX
from whimbrel.chassis.nats_connection import SLOW_CONSUMER_DROPS
from whimbrel.chassis.servers import NatsServer
from whimbrel.wire.errors import PayloadTooLarge, Unavailable
from whimbrel.wire.events import ModelDeleted, decode_event
from whimbrel.wire.messages import CancelLoad

from tests.contract.buses import PATIENCE_S, Ear, connect, raw_client, until_connected


async def test_the_stream_can_be_ensured_again_and_by_anybody(
    nats_server: NatsServer, at_end: AsyncExitStack, cluster: str
) -> None:
    bus = await connect(nats_server, at_end, cluster)
    client = await raw_client(nats_server, at_end)
    await client.jetstream().add_stream(name=bus.subjects.events_stream(), subjects=[bus.subjects.all_events()])

    await bus.ensure_events_stream()
    await bus.ensure_events_stream()

    config = (await client.jetstream().stream_info(bus.subjects.events_stream())).config
    assert config.max_bytes == 256 * 1024 * 1024


async def test_public_events_told_while_nats_is_away_are_published_once_when_it_is_back(
    own_nats_server: NatsServer, at_end: AsyncExitStack
) -> None:
    bus = await connect(own_nats_server, at_end, "wb")
    client = await raw_client(own_nats_server, at_end)
    await bus.ensure_events_stream()
    await bus.publish_event(ModelDeleted(model_id="before"))
    async with asyncio.timeout(PATIENCE_S):
        while not (await client.jsm().stream_info(bus.subjects.events_stream())).state.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await own_nats_server.kill()
    await until_connected(bus, False)
    for n in range(100):
        await bus.publish_event(ModelDeleted(model_id=f"m{n}"))
    await own_nats_server.restart()
    await until_connected(bus, True)
    await bus.publish_event(ModelDeleted(model_id="last"))

    client = await raw_client(own_nats_server, at_end)
    reading = await client.jetstream().subscribe(bus.subjects.events_of("model"), ordered_consumer=True)
    read = [decode_event((await reading.next_msg(PATIENCE_S)).data)[1].model_id for _ in range(102)]
    await bus.drain()

    assert read == ["before", *(f"m{n}" for n in range(100)), "last"]


async def test_public_events_beyond_the_queue_are_dropped_and_counted(
    own_nats_server: NatsServer, at_end: AsyncExitStack
) -> None:
    bus = await connect(own_nats_server, at_end, "wb")
    await own_nats_server.kill()
    await until_connected(bus, False)
    lost_before = EVENTS_LOST._value.get()

    for n in range(EVENTS_QUEUED_MAX + 200):
        await bus.publish_event(ModelDeleted(model_id=f"m{n}"))

    assert EVENTS_LOST._value.get() == lost_before + 200


async def test_connect_waits_for_a_server_that_comes_up_later(
    own_nats_server: NatsServer, at_end: AsyncExitStack
) -> None:
    await own_nats_server.kill()
    connecting = asyncio.create_task(NatsBus.connect(own_nats_server.url, cluster="wb", name="test/a"))
    await asyncio.sleep(0.05)
    assert not connecting.done()

    await own_nats_server.restart()

    bus = await asyncio.wait_for(connecting, PATIENCE_S)
    at_end.push_async_callback(bus.drain)
    assert bus.is_connected


async def test_connect_can_be_cancelled_while_it_waits(own_nats_server: NatsServer, at_end: AsyncExitStack) -> None:
    await own_nats_server.kill()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(NatsBus.connect(own_nats_server.url, cluster="wb", name="test/a"), 0.05)


@pytest.mark.parametrize("url", ["", "127.0.0.1:4222", "http://127.0.0.1:4222", "nats://"])
async def test_a_url_that_can_never_work_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="WB_NATS_URL"):
        await NatsBus.connect(url, cluster="wb", name="test/a")


async def test_a_client_that_the_server_threw_out_is_replaced(
    own_nats_server: NatsServer, at_end: AsyncExitStack
) -> None:
    """The server lowers its limit and ends a connection that sends more; nats-py never reconnects after that."""
    bus, ear, returned = await connect(own_nats_server, at_end, "wb"), Ear(), asyncio.Event()
    bus.on_reconnect(returned.set)
    await bus.subscribe("news", ear)
    own_nats_server.max_payload_bytes = 1000
    own_nats_server.configure()
    os.kill(own_nats_server.pid, signal.SIGHUP)

    async with asyncio.timeout(PATIENCE_S):
        while not returned.is_set():  # until the server has read its configuration, it takes them
            with contextlib.suppress(Unavailable, PayloadTooLarge):
                await bus.publish("elsewhere", CancelLoad(task_id="x" * 2000))
            await asyncio.sleep(0.01)

    assert bus.max_payload_bytes == 1000
    await bus.publish("news", CancelLoad(task_id="1"))
    assert await ear.until(1) == ["1"]


async def freeze(server: NatsServer, at_end: AsyncExitStack) -> None:
    """As in a partition, the connection is there and nothing comes."""
    os.kill(server.pid, signal.SIGSTOP)
    at_end.callback(os.kill, server.pid, signal.SIGCONT)
    async with asyncio.timeout(PATIENCE_S):
        while any(_state(thread) != "T" for thread in Path(f"/proc/{server.pid}/task").iterdir()):  # noqa: ASYNC110  the kernel tells nobody
            await asyncio.sleep(0.001)


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]


async def test_a_flush_that_was_given_up_does_not_make_the_bus_deaf(
    own_nats_server: NatsServer, at_end: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_connection, "FLUSH_S_MAX", 0.05)
    bus, ear = await connect(own_nats_server, at_end, "wb"), Ear()
    await bus.subscribe("news", ear)
    await freeze(own_nats_server, at_end)
    with pytest.raises(Unavailable):
        await bus.flush()
    os.kill(own_nats_server.pid, signal.SIGCONT)

    await bus.publish("news", CancelLoad(task_id="1"))

    assert await ear.until(1) == ["1"]


def test_a_dead_connection_is_noticed_before_anybody_has_missed_three_heartbeats() -> None:
    """Else everybody would take everybody for lost."""
    noticed_s = nats_client.PING_S * (nats_client.PINGS_UNANSWERED_MAX + 1)
    assert HEARTBEAT_S + noticed_s < HEARTBEATS_MISSED_MAX * HEARTBEAT_S


async def test_a_connection_to_a_server_that_froze_is_given_up_and_made_again(
    own_nats_server: NatsServer, at_end: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_client, "PING_S", 0.2)  # three without an answer are longer than a busy machine is away
    bus, ear, returned = await connect(own_nats_server, at_end, "wb"), Ear(), asyncio.Event()
    bus.on_reconnect(returned.set)
    await bus.subscribe("news", ear)

    await freeze(own_nats_server, at_end)
    await until_connected(bus, False)
    os.kill(own_nats_server.pid, signal.SIGCONT)

    await asyncio.wait_for(returned.wait(), PATIENCE_S)
    await bus.publish("news", CancelLoad(task_id="1"))
    assert await ear.until(1) == ["1"]


async def test_a_frozen_server_does_not_hold_up_the_end(
    own_nats_server: NatsServer, at_end: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, bound in [
        (nats_connection, "FLUSH_S_MAX"),
        (nats_connection, "DRAIN_S_MAX"),
        (nats_client, "CONNECT_S_MAX"),
    ]:
        monkeypatch.setattr(module, bound, 0.05)
    bus = await connect(own_nats_server, at_end, "wb")
    await bus.subscribe("news", Ear())
    await freeze(own_nats_server, at_end)

    await asyncio.wait_for(bus.drain(), PATIENCE_S)

    connecting = [asyncio.create_task(connect(own_nats_server, at_end, "wb")) for _ in range(20)]
    for n, task in enumerate(connecting):  # at every moment of an attempt
        await asyncio.sleep(0.003 * n)
        task.cancel()
    done, _ = await asyncio.wait(connecting, timeout=PATIENCE_S)
    assert sum(task.cancelled() for task in done) == 20


async def test_messages_beyond_the_bound_of_a_subscription_are_dropped_and_counted(
    own_nats_server: NatsServer, at_end: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_connection, "SUBSCRIPTION_MESSAGES_MAX", 10)
    bus, heard, release = await connect(own_nats_server, at_end, "wb"), [], asyncio.Event()
    dropped_before = SLOW_CONSUMER_DROPS._value.get()

    async def slow(received: Received) -> None:
        await release.wait()
        heard.append(received.message.task_id)

    subscription = await bus.subscribe("news", slow)
    with capture_logs() as logs:
        await bus.publish("news", CancelLoad(task_id="0"))
        await bus.flush()
        await bus.publish_all([("news", CancelLoad(task_id=str(n))) for n in range(1, 100)])
        await bus.flush()
    release.set()
    await subscription.drain()

    assert heard == [str(n) for n in range(11)]
    assert SLOW_CONSUMER_DROPS._value.get() == dropped_before + 89
    assert [entry["event"] for entry in logs] == ["nats_trouble"]
