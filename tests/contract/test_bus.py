"""The contract of the bus, held by the NATS one and by its in-memory twin alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import pytest
from structlog.testing import capture_logs
from whimbrel.chassis.bus import Received
from whimbrel.chassis.delivery import REFUSALS
from whimbrel.chassis.testing import InMemoryHub
from whimbrel.wire import codec
from whimbrel.wire.errors import (
    ContextLengthExceeded,
    InternalError,
    ModelNotFound,
    PayloadTooLarge,
    ProtocolError,
    QueueFull,
    Unavailable,
)
from whimbrel.wire.events import ModelDeleted, decode_event
from whimbrel.wire.messages import Ack, CancelLoad, DeleteModel, DeleteModelReply

from tests.contract.buses import (
    PATIENCE_S,
    TIMEOUT_S,
    Ear,
    Hub,
    MakeBus,
    answering,
    come_back,
    connect,
    failing,
    go_down,
    listen,
    publish_bytes,
    raw_client,
    request_bytes,
    until_connected,
)


@pytest.fixture(params=["memory", "nats"])
def hub(request: pytest.FixtureRequest) -> Hub:
    return InMemoryHub() if request.param == "memory" else request.getfixturevalue("nats_server")


@pytest.fixture
def make_bus(hub: Hub, at_end: AsyncExitStack, cluster: str) -> MakeBus:
    return partial(connect, hub, at_end, cluster)


# --- publish and subscribe ---


async def test_messages_arrive_whole_and_in_order(make_bus: MakeBus) -> None:
    here, there, ear = await make_bus(), await make_bus(), Ear()
    await here.subscribe("orders.*", ear)

    await there.publish("orders.x", CancelLoad(task_id="0"))
    await there.publish_all([("orders.x", CancelLoad(task_id=str(n))) for n in range(1, 1000)])

    assert await ear.until(1000) == [str(n) for n in range(1000)]


async def test_a_handler_gets_one_message_at_a_time(make_bus: MakeBus) -> None:
    bus, order, done = await make_bus(), [], asyncio.Event()

    async def slow_then_fast(received: Received) -> None:
        order.append(f"begin {received.message.task_id}")
        for _ in range(10 if received.message.task_id == "a" else 0):
            await asyncio.sleep(0)
        order.append(f"end {received.message.task_id}")
        if received.message.task_id == "b":
            done.set()

    await bus.subscribe("work", slow_then_fast)
    await bus.publish_all([("work", CancelLoad(task_id="a")), ("work", CancelLoad(task_id="b"))])

    await asyncio.wait_for(done.wait(), PATIENCE_S)
    assert order == ["begin a", "end a", "begin b", "end b"]


async def test_a_slow_handler_holds_up_no_other_subscription(make_bus: MakeBus) -> None:
    bus, ear, release = await make_bus(), Ear(), asyncio.Event()

    async def stuck(_received: Received) -> None:
        await release.wait()

    await bus.subscribe("slow", stuck)
    await bus.subscribe("fast", ear)
    await bus.publish_all([("slow", CancelLoad(task_id="s")), ("fast", CancelLoad(task_id="f"))])

    assert await ear.until(1) == ["f"]
    release.set()


async def test_every_plain_subscriber_hears_a_message_and_one_member_of_a_queue_group_does(make_bus: MakeBus) -> None:
    buses = [await make_bus() for _ in range(3)]
    plain, shared, shared_by = [Ear(), Ear()], Ear(), [0, 0, 0]

    def member(n: int) -> Callable[[Received], Awaitable[None]]:
        async def handler(received: Received) -> None:
            shared_by[n] += 1
            await shared(received)

        return handler

    for ear, bus in zip(plain, buses, strict=False):
        await bus.subscribe("jobs", ear)
    for n, bus in enumerate(buses):
        await bus.subscribe("jobs", member(n), queue="workers")

    await buses[0].publish_all([("jobs", CancelLoad(task_id=str(n))) for n in range(60)])

    for ear in plain:
        assert await ear.until(60) == [str(n) for n in range(60)]
    assert sorted(int(task_id) for task_id in await shared.until(60)) == list(range(60))
    assert all(shared_by)


async def test_subjects_match_as_nats_matches_them(make_bus: MakeBus) -> None:
    bus = await make_bus()
    ears = {pattern: Ear() for pattern in ("a.b", "a.*", "a.>", ">", "*.b.c")}
    for pattern, ear in ears.items():
        await bus.subscribe(pattern, ear)

    for subject in ("a.b", "a.b.c", "a.x", "end"):
        await bus.publish(subject, CancelLoad(task_id=subject))

    await ears[">"].until(4)
    assert {pattern: ear.heard for pattern, ear in ears.items()} == {
        "a.b": ["a.b"],
        "a.*": ["a.b", "a.x"],
        "a.>": ["a.b", "a.b.c", "a.x"],
        ">": ["a.b", "a.b.c", "a.x", "end"],
        "*.b.c": ["a.b.c"],
    }


async def test_nothing_is_heard_after_unsubscribe(make_bus: MakeBus) -> None:
    bus, left, stayed = await make_bus(), Ear(), Ear()
    subscription = await bus.subscribe("news", left)
    await bus.subscribe("news", stayed)
    await bus.publish("news", CancelLoad(task_id="1"))
    await left.until(1)

    await subscription.unsubscribe()
    await bus.publish("news", CancelLoad(task_id="2"))

    await stayed.until(2)
    assert left.heard == ["1"]


# --- request and reply ---


async def test_a_request_is_answered_by_whoever_listens(make_bus: MakeBus) -> None:
    here, there = await make_bus(), await make_bus()
    await there.subscribe("ask.*", answering(there, lambda got: DeleteModelReply(model_id=got.message.model_id)))

    answers = [await here.request("ask.x", DeleteModel(model_id=f"m{n}"), TIMEOUT_S) for n in range(3)]

    assert answers == [DeleteModelReply(model_id=f"m{n}") for n in range(3)]


async def test_concurrent_requests_get_each_their_own_answer(make_bus: MakeBus) -> None:
    bus = await make_bus()
    await bus.subscribe("ask", answering(bus, lambda got: DeleteModelReply(model_id=got.message.model_id)))

    answers = await asyncio.gather(*(bus.request("ask", DeleteModel(model_id=f"m{n}"), TIMEOUT_S) for n in range(200)))

    assert answers == [DeleteModelReply(model_id=f"m{n}") for n in range(200)]


@pytest.mark.parametrize(
    "error",
    [
        ModelNotFound(model_id="ghost"),
        QueueFull(queue="waiting requests", limit=8, retry_after_s=3),
        ContextLengthExceeded(context_tokens=10, prompt_tokens=9, output_tokens=2),
    ],
    ids=lambda error: error.code,
)
async def test_an_error_of_a_handler_is_raised_to_the_requester_as_its_class(
    make_bus: MakeBus, error: ModelNotFound
) -> None:
    here, there = await make_bus(), await make_bus()
    await there.subscribe("ask", failing(error))

    with pytest.raises(type(error)) as raised:
        await here.request("ask", Ack(), TIMEOUT_S)

    assert raised.value.fields() == error.fields()


@pytest.mark.parametrize(
    "failure", [ZeroDivisionError("oops"), asyncio.CancelledError()], ids=["exception", "cancelled"]
)
async def test_a_handler_that_breaks_is_answered_as_internal_error_and_goes_on(
    make_bus: MakeBus, failure: BaseException
) -> None:
    bus, calls = await make_bus(), []

    async def breaks_once(received: Received) -> None:
        calls.append(received)
        if len(calls) == 1:
            raise failure
        await bus.reply(received.reply_to, Ack())

    await bus.subscribe("ask", breaks_once)

    with capture_logs() as logs, pytest.raises(InternalError):
        await bus.request("ask", Ack(), TIMEOUT_S)

    assert [entry["subject"] for entry in logs if entry["event"] == "handler_failed" and entry["exc_info"]] == ["ask"]
    assert await bus.request("ask", Ack(), TIMEOUT_S) == Ack()


async def test_a_one_way_message_that_is_refused_is_counted_and_the_next_one_arrives(make_bus: MakeBus) -> None:
    bus, ear = await make_bus(), Ear()

    async def refuses_one(received: Received) -> None:
        if received.message == CancelLoad(task_id="bad"):
            raise ModelNotFound(model_id="ghost")
        await ear(received)

    await bus.subscribe("news", refuses_one)
    refused_before = REFUSALS.labels(code="model_not_found")._value.get()
    await bus.publish_all([("news", CancelLoad(task_id="bad")), ("news", CancelLoad(task_id="good"))])

    assert await ear.until(1) == ["good"]
    assert REFUSALS.labels(code="model_not_found")._value.get() == refused_before + 1


async def test_a_request_that_nobody_listens_to_is_unavailable_at_once(make_bus: MakeBus) -> None:
    bus = await make_bus()
    subject = bus.subjects.to_scheduler(DeleteModel(model_id="m"))

    with pytest.raises(Unavailable, match=r"scheduler\.delete_model \(nobody listens\)"):
        await asyncio.wait_for(bus.request(subject, DeleteModel(model_id="m"), timeout_s=60), PATIENCE_S)


async def test_a_request_without_an_answer_in_time_is_unavailable(make_bus: MakeBus) -> None:
    bus, ear = await make_bus(), Ear()
    await bus.subscribe("ask", ear)

    with pytest.raises(Unavailable, match=r"no answer in 0\.05 s"):
        await bus.request("ask", CancelLoad(task_id="t"), timeout_s=0.05)

    assert await ear.until(1) == ["t"]


async def test_reply_to_nobody_is_nothing(make_bus: MakeBus) -> None:
    bus, ear = await make_bus(), Ear()
    await bus.subscribe(f"{bus.subjects.cluster}.>", ear)
    await bus.reply(None, Ack())
    await bus.publish(f"{bus.subjects.cluster}.news", CancelLoad(task_id="t"))
    assert await ear.until(1) == ["t"], "and nothing before it"


# --- broken and too large messages ---


@pytest.mark.parametrize("data", [b"", b"\xc1 rubbish", codec.encode(Ack())[:-1]], ids=["empty", "rubbish", "cut"])
async def test_a_message_that_cannot_be_decoded_is_dropped_and_the_next_one_arrives(
    make_bus: MakeBus, hub: Hub, at_end: AsyncExitStack, data: bytes
) -> None:
    bus, ear = await make_bus(), Ear()
    subject = f"{bus.subjects.cluster}.news"
    await bus.subscribe(subject, ear)

    with capture_logs() as logs:
        await publish_bytes(hub, at_end, subject, data)
        await bus.publish(subject, CancelLoad(task_id="good"))
        assert await ear.until(1) == ["good"]
        await asyncio.sleep(0)

    assert [entry["event"] for entry in logs if entry.get("subject") == subject] == ["message_not_understood"]


async def test_a_request_that_cannot_be_decoded_is_answered_with_a_protocol_error(
    make_bus: MakeBus, hub: Hub, at_end: AsyncExitStack
) -> None:
    bus = await make_bus()
    subject = f"{bus.subjects.cluster}.ask"
    await bus.subscribe(subject, Ear())

    answer = codec.decode(await request_bytes(hub, at_end, subject, b"\xc1"))

    assert isinstance(codec.error_of(answer), ProtocolError)


async def test_a_message_over_the_limit_is_refused_before_anything_is_sent(make_bus: MakeBus) -> None:
    bus, ear = await make_bus(), Ear()
    await bus.subscribe("news", ear)
    huge = CancelLoad(task_id="x" * bus.max_payload_bytes)

    with pytest.raises(PayloadTooLarge) as raised:
        await bus.publish_all([("news", CancelLoad(task_id="small")), ("news", huge)])
    with pytest.raises(PayloadTooLarge):
        await bus.request("news", huge, TIMEOUT_S)

    assert raised.value.limit_bytes == bus.max_payload_bytes == 8 * 1024 * 1024
    await bus.publish("news", CancelLoad(task_id="after"))
    assert await ear.until(1) == ["after"]


async def test_a_reply_over_the_limit_reaches_the_requester_as_payload_too_large(make_bus: MakeBus) -> None:
    bus = await make_bus()
    await bus.subscribe("ask", answering(bus, lambda _: DeleteModelReply(model_id="x" * bus.max_payload_bytes)))

    with pytest.raises(PayloadTooLarge):
        await bus.request("ask", Ack(), TIMEOUT_S)


async def test_the_largest_message_arrives(make_bus: MakeBus) -> None:
    bus, ear = await make_bus(), Ear()
    await bus.subscribe("news", ear)
    room = bus.max_payload_bytes - len(codec.encode(CancelLoad(task_id="x" * 70_000))) + 70_000

    await bus.publish("news", CancelLoad(task_id="x" * room))

    assert [len(task_id) for task_id in await ear.until(1)] == [room]


# --- ending ---


async def test_drain_handles_what_had_arrived_and_takes_nothing_more(make_bus: MakeBus) -> None:
    here, there = await make_bus(), await make_bus()
    handled, first, release = [], asyncio.Event(), asyncio.Event()

    async def slow(received: Received) -> None:
        first.set()
        await release.wait()
        await here.request("other", Ack(), TIMEOUT_S)  # what is being handled may still speak
        handled.append(received.message.task_id)

    await here.subscribe("work", slow)
    await there.subscribe("other", answering(there, lambda _: Ack()))
    await there.publish_all([("work", CancelLoad(task_id=str(n))) for n in range(5)])
    await there.flush()
    await asyncio.wait_for(first.wait(), PATIENCE_S)

    draining = asyncio.create_task(here.drain())
    await there.flush()
    release.set()
    await asyncio.wait_for(draining, PATIENCE_S)

    assert handled == ["0", "1", "2", "3", "4"]
    assert not here.is_connected
    with pytest.raises(Unavailable):
        await there.request("work", CancelLoad(task_id="late"), timeout_s=1)
    with pytest.raises(Unavailable):
        await here.publish("work", Ack())


async def test_a_drained_subscription_has_handled_what_had_arrived(make_bus: MakeBus) -> None:
    bus, ear = await make_bus(), Ear()
    subscription = await bus.subscribe("news", ear)
    await bus.publish_all([("news", CancelLoad(task_id=str(n))) for n in range(100)])

    await subscription.drain()

    assert ear.heard == [str(n) for n in range(100)]
    assert bus.is_connected


async def test_draining_twice_is_harmless(make_bus: MakeBus) -> None:
    bus = await make_bus()
    await bus.drain()
    await bus.drain()
    assert not bus.is_connected


# --- away and back ---


@pytest.fixture(params=["memory", "nats"])
def mortal_hub(request: pytest.FixtureRequest) -> Hub:
    return InMemoryHub() if request.param == "memory" else request.getfixturevalue("own_nats_server")


async def test_a_bus_survives_the_loss_and_the_return_of_its_server(mortal_hub: Hub, at_end: AsyncExitStack) -> None:
    """F7: the server is killed; what is said meanwhile arrives when it is back, requests wait for it."""
    bus, ear, returned = await connect(mortal_hub, at_end, "wb"), Ear(), asyncio.Event()
    asked: list[Received] = []
    bus.on_reconnect(returned.set)
    await bus.subscribe("news", ear)
    await bus.subscribe("ask", answering(bus, lambda received: asked.append(received) or Ack()))
    assert await bus.request("ask", Ack(), TIMEOUT_S) == Ack()

    await go_down(mortal_hub)
    await until_connected(bus, False)
    await bus.publish("news", CancelLoad(task_id="meanwhile"))
    with pytest.raises(Unavailable):
        await bus.request("ask", Ack(), timeout_s=0.05)
    with pytest.raises(Unavailable):
        await bus.flush()
    patient = asyncio.create_task(bus.request("ask", Ack(), timeout_s=PATIENCE_S))
    await come_back(mortal_hub)

    await asyncio.wait_for(returned.wait(), PATIENCE_S)
    assert await patient == Ack()
    await bus.publish("news", CancelLoad(task_id="after"))
    assert await ear.until(2) == ["meanwhile", "after"]
    assert len(asked) == 2  # not the request that was given up meanwhile


async def test_what_is_said_while_away_is_bounded(mortal_hub: Hub, at_end: AsyncExitStack) -> None:
    bus = await connect(mortal_hub, at_end, "wb")
    await go_down(mortal_hub)
    await until_connected(bus, False)
    message = CancelLoad(task_id="x" * 100_000)

    with pytest.raises(Unavailable):
        await bus.publish_all([("news", message)] * 20)


async def test_a_subscription_made_while_away_hears_when_the_server_is_back(
    mortal_hub: Hub, at_end: AsyncExitStack
) -> None:
    bus, ear = await connect(mortal_hub, at_end, "wb"), Ear()
    await go_down(mortal_hub)
    await until_connected(bus, False)
    await bus.subscribe("news", ear)

    await come_back(mortal_hub)
    await until_connected(bus, True)
    await bus.publish("news", CancelLoad(task_id="1"))

    assert await ear.until(1) == ["1"]


# --- public events ---


async def test_a_public_event_is_told_without_waiting(make_bus: MakeBus, hub: Hub, at_end: AsyncExitStack) -> None:
    bus, event = await make_bus(), ModelDeleted(model_id="org/model.v1")
    if isinstance(hub, InMemoryHub):
        await bus.publish_event(event)
        assert list(hub.events) == [event]
        return
    heard = await listen(hub, at_end, bus)

    await bus.publish_event(event)

    msg = await asyncio.wait_for(heard.get(), PATIENCE_S)
    envelope, told = decode_event(msg.data)
    assert told == event
    assert msg.subject == f"{bus.subjects.cluster}.evt.model.org=2Fmodel=2Ev1.deleted"
    assert msg.headers == {"Nats-Msg-Id": envelope.id, "Nats-Expected-Stream": bus.subjects.events_stream()}
    assert envelope.source == f"/whimbrel/{bus.subjects.cluster}/test/a"


async def test_public_events_are_kept_in_order_by_a_bounded_stream(
    make_bus: MakeBus, hub: Hub, at_end: AsyncExitStack
) -> None:
    bus, events = await make_bus(), [ModelDeleted(model_id=f"m{n}") for n in range(300)]
    for event in events:
        await bus.publish_event(event)
    if isinstance(hub, InMemoryHub):
        assert list(hub.events) == events
        return
    await bus.drain()  # an ending bus still delivers what it was told

    client = await raw_client(hub, at_end)
    stream = client.jetstream()
    reading = await stream.subscribe(bus.subjects.all_events(), ordered_consumer=True)
    read = [decode_event((await reading.next_msg(PATIENCE_S)).data)[1] for _ in events]
    config = (await stream.stream_info(bus.subjects.events_stream())).config

    assert read == events
    assert (config.max_age, config.max_bytes, config.discard) == (7 * 24 * 3600, 256 * 1024 * 1024, "old")
