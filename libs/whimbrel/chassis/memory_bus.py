"""Owns the in-memory twin of the NATS bus, held to the same contract by the same tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from whimbrel.chassis.bus import AWAY_BYTES_MAX, Subscription
from whimbrel.chassis.delivery import Handler, deliver, reply_of
from whimbrel.chassis.nats_connection import DRAIN_S_MAX, SUBSCRIPTION_MESSAGES_MAX
from whimbrel.wire import codec
from whimbrel.wire.errors import PayloadTooLarge, Unavailable
from whimbrel.wire.events import PublicEvent, decode_event, encode_event
from whimbrel.wire.messages import Message
from whimbrel.wire.subjects import Subjects

# What deploy/nats sets.
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
# Of what was said lately, for assertions.
REMEMBERED_MAX = 10_000


def matches(pattern: str, subject: str) -> bool:
    """Whether a NATS subscription to `pattern` gets `subject`: `*` is one token, a last `>` is one or more."""
    patterns, tokens = pattern.split("."), subject.split(".")
    if patterns[-1] == ">":
        return len(tokens) >= len(patterns) and all(p in ("*", t) for p, t in zip(patterns[:-1], tokens, strict=False))
    return len(tokens) == len(patterns) and all(p in ("*", t) for p, t in zip(patterns, tokens, strict=True))


_inboxes = itertools.count()


class InMemoryHub:
    """Stands for the NATS server: buses made by one hub hear each other.

    `events` are the public events published so far; `go_down` and `come_back` are a restart of the server.
    """

    def __init__(self, *, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.max_payload_bytes = max_payload_bytes
        self.is_up = True
        self.events: deque[PublicEvent] = deque(maxlen=REMEMBERED_MAX)
        self.answers: dict[str, asyncio.Future[bytes]] = {}
        self._buses: list[InMemoryBus] = []
        self._subscriptions: list[InMemorySubscription] = []
        self._turns: dict[tuple[str, str], int] = {}

    def bus(self, cluster: str = "wb", name: str = "test") -> InMemoryBus:
        bus = InMemoryBus(self, cluster=cluster, name=name)
        self._buses.append(bus)
        return bus

    def go_down(self) -> None:
        self.is_up = False
        for bus in self._buses:
            bus.went_away()

    def come_back(self) -> None:
        self.is_up = True
        for bus in list(self._buses):
            bus.came_back()

    def add(self, subscription: InMemorySubscription) -> None:
        self._subscriptions.append(subscription)

    def remove(self, subscription: InMemorySubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def remove_bus(self, bus: InMemoryBus) -> None:
        if bus in self._buses:
            self._buses.remove(bus)

    def route(self, subject: str, data: bytes, reply_to: str | None) -> bool:
        """Give a message to every subscriber, and to one of each queue group; says whether anybody got it."""
        if subject in self.answers:
            answer = self.answers[subject]
            if not answer.done():
                answer.set_result(data)
            return True
        listening = [each for each in self._subscriptions if matches(each.pattern, subject)]
        groups: dict[tuple[str, str], list[InMemorySubscription]] = {}
        for subscription in listening:
            if subscription.queue:
                groups.setdefault((subscription.pattern, subscription.queue), []).append(subscription)
            else:
                subscription.put(subject, data, reply_to)
        for group, members in groups.items():
            turn = self._turns[group] = self._turns.get(group, -1) + 1
            members[turn % len(members)].put(subject, data, reply_to)
        return bool(listening)


class InMemorySubscription:
    """One handler, one message at a time, in order."""

    def __init__(self, bus: InMemoryBus, pattern: str, queue: str, handler: Handler) -> None:
        self.pattern = pattern
        self.queue = queue
        self._bus = bus
        self._handler = handler
        self._arrived: asyncio.Queue[tuple[str, bytes, str | None]] = asyncio.Queue(SUBSCRIPTION_MESSAGES_MAX)
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"subscription {pattern}")

    def put(self, subject: str, data: bytes, reply_to: str | None) -> None:
        with contextlib.suppress(asyncio.QueueFull):  # a slow consumer loses the newest, as with NATS
            self._arrived.put_nowait((subject, data, reply_to))

    async def unsubscribe(self) -> None:
        self._bus.forget(self)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def drain(self) -> None:
        self._bus.forget(self)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S_MAX):
                await self._arrived.join()
        await self.unsubscribe()

    async def _run(self) -> None:
        while True:
            subject, data, reply_to = await self._arrived.get()
            try:
                await deliver(
                    data,
                    subject=subject,
                    reply_to=reply_to,
                    handler=self._handler,
                    reply=self._bus.reply,
                    service=self._bus.name,
                )
            finally:
                self._arrived.task_done()


class InMemoryBus:
    """A bus of a hub; messages are encoded and decoded as on the wire."""

    def __init__(self, hub: InMemoryHub, *, cluster: str, name: str) -> None:
        self.subjects = Subjects(cluster)
        self.name = name
        self._hub = hub
        self._subscriptions: list[InMemorySubscription] = []
        self._callbacks: list[Callable[[], None]] = []
        self._held: list[tuple[str, bytes]] = []
        self._held_bytes = 0
        self._up = asyncio.Event()
        self._is_drained = False
        if hub.is_up:
            self._up.set()

    @property
    def max_payload_bytes(self) -> int:
        return self._hub.max_payload_bytes

    @property
    def is_connected(self) -> bool:
        return self._hub.is_up and not self._is_drained

    async def publish(self, subject: str, message: Message) -> None:
        self._send(subject, self._encode(message))

    async def publish_all(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        for subject, data in [(subject, self._encode(message)) for subject, message in outgoing]:
            self._send(subject, data)

    async def reply(self, reply_to: str | None, message: Message) -> None:
        if reply_to is not None:
            self._send(reply_to, self._encode(message))

    async def request(self, subject: str, message: Message, timeout_s: float) -> Message:
        data = self._encode(message)
        inbox = f"_INBOX.{next(_inboxes)}"
        answer = self._hub.answers[inbox] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
                if not self._hub.route(subject, data, inbox):
                    raise Unavailable(what=f"{self.subjects.peer(subject)} (nobody listens)")
                return reply_of(await answer)
        except TimeoutError as cause:
            raise Unavailable(what=f"{self.subjects.peer(subject)} (no answer in {timeout_s:g} s)") from cause
        finally:
            del self._hub.answers[inbox]

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        subscription = InMemorySubscription(self, subject, queue, handler)
        self._subscriptions.append(subscription)
        self._hub.add(subscription)
        return subscription

    async def publish_event(self, event: PublicEvent) -> None:
        data = encode_event(
            event, event_id="evt-0", source=f"/whimbrel/{self.subjects.cluster}/{self.name}", time_s=0.0
        )
        if self.is_connected:
            self._hub.events.append(decode_event(data)[1])

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    async def flush(self) -> None:
        if not self.is_connected:
            raise Unavailable(what="NATS")

    async def drain(self) -> None:
        await asyncio.gather(*(subscription.drain() for subscription in list(self._subscriptions)))
        self._is_drained = True
        self._up.clear()
        self._hub.remove_bus(self)

    def forget(self, subscription: InMemorySubscription) -> None:
        self._hub.remove(subscription)
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def went_away(self) -> None:
        self._up.clear()

    def came_back(self) -> None:
        self._up.set()
        held, self._held, self._held_bytes = self._held, [], 0
        for subject, data in held:
            self._hub.route(subject, data, None)
        for callback in self._callbacks:
            callback()

    def _encode(self, message: Message) -> bytes:
        data = codec.encode(message)
        if len(data) > self.max_payload_bytes:
            raise PayloadTooLarge(size_bytes=len(data), limit_bytes=self.max_payload_bytes)
        return data

    def _send(self, subject: str, data: bytes) -> None:
        if self.is_connected:
            self._hub.route(subject, data, None)
        elif self._is_drained or self._held_bytes + len(data) > AWAY_BYTES_MAX:
            raise Unavailable(what="NATS")
        else:
            self._held.append((subject, data))
            self._held_bytes += len(data)
