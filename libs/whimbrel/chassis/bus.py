"""Owns the bus: what a service may do with messages, and how NATS does it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

import nats.errors
from nats.aio.msg import Msg

from whimbrel.chassis.config import ConfigError
from whimbrel.chassis.delivery import Handler, Received, deliver, reply_of
from whimbrel.chassis.event_publisher import EventPublisher, ensure_stream
from whimbrel.chassis.nats_client import TROUBLE
from whimbrel.chassis.nats_connection import Connection
from whimbrel.wire import codec
from whimbrel.wire.errors import PayloadTooLarge, Unavailable
from whimbrel.wire.events import PublicEvent
from whimbrel.wire.messages import Message
from whimbrel.wire.subjects import Subjects

__all__ = ["Bus", "Handler", "NatsBus", "Received", "Subscription"]

# Kept while NATS is away, then sent. Small: what is older than a moment is repeated by its sender anyway.
AWAY_BYTES_MAX = 1024 * 1024
# What a request to nobody should be repeated after; a service that restarts needs about this long.
RETRY_AFTER_S = 1
# How long events may take to leave at the end.
EVENTS_FLUSH_S_MAX = 2.0


class Subscription(Protocol):
    async def unsubscribe(self) -> None:
        """Stop at once; messages that had arrived but were not handled yet are dropped."""

    async def drain(self) -> None:
        """Take nothing new; returns when everything that had arrived was handled."""


class Bus(Protocol):
    """Messages of one cluster, typed on both ends."""

    @property
    def subjects(self) -> Subjects: ...

    @property
    def max_payload_bytes(self) -> int: ...

    @property
    def is_connected(self) -> bool: ...

    async def publish(self, subject: str, message: Message) -> None:
        """Send and forget. Raises PayloadTooLarge before anything is sent, Unavailable when NATS is away for long."""

    async def publish_all(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        """`publish` for several, in order; none is sent when one of them is too large."""

    async def request(self, subject: str, message: Message, timeout_s: float) -> Message:
        """The answer of whoever listens. Its ErrorReply is raised as its class; no answer in time is Unavailable."""
        ...

    async def reply(self, reply_to: str | None, message: Message) -> None:
        """Answer a request; nothing happens when no answer is awaited."""

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        """Await `handler` for each message, one at a time and in order. With `queue`, one of its members gets each."""
        ...

    async def publish_event(self, event: PublicEvent) -> None:
        """Tell ops tooling; never waits for it and never fails."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the connection came back; messages may have been lost before."""

    async def flush(self) -> None:
        """Returns when the server has everything that was published before; raises Unavailable otherwise."""

    async def drain(self) -> None:
        """The end of this bus: handle what has arrived, send what waits, disconnect. Bounded in time."""


class NatsBus:
    """The bus on a NATS server: connects and reconnects for ever."""

    @classmethod
    async def connect(cls, url: str, *, cluster: str, name: str) -> NatsBus:
        """Returns once connected, however long that takes; raises ConfigError for a URL that can never work.

        `name` says who speaks, such as `scheduler/a`; it is the connection's name and the source of public events.
        """
        if urlsplit(url).scheme not in ("nats", "tls") or not urlsplit(url).hostname:
            raise ConfigError("WB_NATS_URL", f"{url!r} is no NATS URL; write nats://host:port")
        connection = Connection(url, name=name)
        await connection.open()
        return cls(connection, cluster=cluster, name=name)

    def __init__(self, connection: Connection, *, cluster: str, name: str) -> None:
        self.subjects = Subjects(cluster)
        self._name = name
        self._connection = connection
        self._events = EventPublisher(
            self.subjects,
            source=f"/whimbrel/{cluster}/{name}",
            client=lambda: connection.client,
            connected=connection.until_connected,
        )
        self._publishing = connection.spawn(self._events.run(), name="event_publisher")

    @property
    def max_payload_bytes(self) -> int:
        return self._connection.client.max_payload

    @property
    def is_connected(self) -> bool:
        return self._connection.client.is_connected

    async def publish(self, subject: str, message: Message) -> None:
        await self._send(subject, self._encode(message))

    async def publish_all(self, outgoing: Sequence[tuple[str, Message]]) -> None:
        for subject, data in [(subject, self._encode(message)) for subject, message in outgoing]:
            await self._send(subject, data)

    async def reply(self, reply_to: str | None, message: Message) -> None:
        if reply_to is not None:
            await self._send(reply_to, self._encode(message))

    async def request(self, subject: str, message: Message, timeout_s: float) -> Message:
        data = self._encode(message)
        try:
            async with asyncio.timeout(timeout_s):
                # A request is not left in the buffer of a lost connection: its answer would come when nobody waits.
                await self._connection.until_connected()
                answer = await self._connection.client.request(subject, data, timeout=timeout_s)
        except nats.errors.NoRespondersError as cause:
            raise Unavailable(
                what=f"{self.subjects.peer(subject)} (nobody listens)", retry_after_s=RETRY_AFTER_S
            ) from cause
        except (TimeoutError, *TROUBLE) as cause:
            what = f"{self.subjects.peer(subject)} (no answer in {timeout_s:g} s)"
            raise Unavailable(what=what, retry_after_s=RETRY_AFTER_S) from cause
        return reply_of(answer.data)

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        async def on_message(msg: Msg) -> None:
            await deliver(
                msg.data,
                subject=msg.subject,
                reply_to=msg.reply or None,
                handler=handler,
                reply=self.reply,
                service=self._name,
            )

        return await self._connection.subscribe(subject, queue, on_message)

    async def publish_event(self, event: PublicEvent) -> None:
        self._events.put(event)

    async def ensure_events_stream(self) -> None:
        """Create the stream of public events if it is missing; raises Unavailable when JetStream does not answer."""
        await ensure_stream(self._connection.client, self.subjects)

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._connection.reconnected.append(callback)

    async def flush(self) -> None:
        await self._connection.flush()

    async def drain(self) -> None:
        await self._connection.drain()
        self._events.close()
        if self.is_connected:
            await asyncio.wait({self._publishing}, timeout=EVENTS_FLUSH_S_MAX)
        await self._connection.close()

    def _encode(self, message: Message) -> bytes:
        data = codec.encode(message)
        if len(data) > self.max_payload_bytes:
            raise PayloadTooLarge(size_bytes=len(data), limit_bytes=self.max_payload_bytes)
        return data

    async def _send(self, subject: str, data: bytes) -> None:
        client = self._connection.client
        if not client.is_connected and client.pending_data_size + len(data) > AWAY_BYTES_MAX:
            raise Unavailable(what="NATS", retry_after_s=RETRY_AFTER_S)
        try:
            await client.publish(subject, data)
        except TROUBLE as cause:
            raise Unavailable(what="NATS", retry_after_s=RETRY_AFTER_S) from cause
