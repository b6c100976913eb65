"""Owns the way of public events to JetStream: a bounded queue and one background publisher, so that no caller waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from whimbrel.chassis import telemetry
from whimbrel.chassis.inbox import Inbox
from whimbrel.wire.errors import QueueFull, Unavailable
from whimbrel.wire.events import PublicEvent, encode_event, event_type
from whimbrel.wire.ids import new_id
from whimbrel.wire.subjects import Subjects

log = structlog.get_logger()

# A few seconds of events at the highest rate a router has; more would only delay the news that events get lost.
EVENTS_QUEUED_MAX = 4096
# Enough to hide the round trip of the acknowledgement; small enough to repeat without harm, and for JetStream's own
# queue of 10,000 with as many publishers as there are.
EVENTS_IN_FLIGHT_MAX = 64
# JetStream answers in about a millisecond; after this long it is taken to be away.
ACKNOWLEDGE_S_MAX = 2.0
# JetStream may need some seconds after a restart before it answers; all tries together take less than half a minute.
DELIVERY_TRIES_MAX = 10
DELIVERY_GAP_S_MIN = 0.1
DELIVERY_GAP_S_MAX = 1.0
# What ops tooling may look back at. Whichever bound is reached first drops the oldest events.
STREAM_AGE_S_MAX = 7 * 24 * 3600.0
STREAM_BYTES_MAX = 256 * 1024 * 1024
# How long JetStream remembers event ids: longer than all tries of one event take.
DUPLICATE_WINDOW_S = 120.0

EVENTS_LOST = telemetry.counter(
    "whimbrel_bus_events_lost_total", "Public events dropped: queue full or JetStream away."
)

# What JetStream knows an event by, so that one that is sent again is there once.
MESSAGE_ID = "Nats-Msg-Id"

# Room for the event's id; NATS counts headers as payload, and ends a connection that sends too much.
HEADER_BYTES_MAX = 256

_TROUBLE = (nats.errors.Error, nats.js.errors.Error, TimeoutError, OSError)


async def ensure_stream(client: Client, subjects: Subjects) -> None:
    """Create or update the cluster's stream of public events; raises Unavailable when JetStream does not answer."""
    stream = StreamConfig(
        name=subjects.events_stream(),
        subjects=[subjects.all_events()],
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        max_age=STREAM_AGE_S_MAX,
        max_bytes=STREAM_BYTES_MAX,
        duplicate_window=DUPLICATE_WINDOW_S,
    )
    manager = client.jsm(timeout=ACKNOWLEDGE_S_MAX)
    try:
        try:
            await manager.add_stream(stream)
        except nats.js.errors.BadRequestError:  # it exists with other bounds, from another version of ours
            await manager.update_stream(stream)
    except _TROUBLE as cause:
        raise Unavailable(what=f"JetStream ({cause})") from cause


class EventPublisher:
    """Takes events at once, publishes them in order soon, and drops and counts what cannot be delivered."""

    def __init__(
        self,
        subjects: Subjects,
        *,
        source: str,
        client: Callable[[], Client],
        connected: Callable[[], Awaitable[object]],
    ) -> None:
        self._subjects = subjects
        self._source = source
        self._client = client
        self._connected = connected
        self._queue: Inbox[tuple[str, str, bytes]] = Inbox(EVENTS_QUEUED_MAX, name="events")
        self._has_stream = False

    def put(self, event: PublicEvent) -> None:
        event_id = new_id("evt")
        data = encode_event(event, event_id=event_id, source=self._source, time_s=time.time())
        subject = self._subjects.event(event.noun, event.subject_id(), event.verb)
        if len(data) + HEADER_BYTES_MAX > self._client().max_payload:
            EVENTS_LOST.inc()
            log.warning("event_too_large", event_type=event_type(event), size_bytes=len(data))
            return
        try:
            self._queue.put_nowait((subject, event_id, data))
        except (QueueFull, Unavailable) as cause:
            EVENTS_LOST.inc()
            log.debug("event_lost", event_type=event_type(event), reason=str(cause))

    async def run(self) -> None:
        """Publish until `close`, then until the queue is empty."""
        async for events in self._queue.batches(EVENTS_IN_FLIGHT_MAX):
            await self._deliver(events)

    def close(self) -> None:
        self._queue.close()

    async def _deliver(self, events: list[tuple[str, str, bytes]]) -> None:
        for tries in range(DELIVERY_TRIES_MAX):
            await self._connected()
            try:
                await self._publish(events)
                return
            except (*_TROUBLE, Unavailable) as cause:
                # All of them are sent again, in order; JetStream drops those it already has by their ids.
                reason = str(cause)
                self._has_stream = False
                log.debug("events_delayed", count=len(events), reason=reason)
            await asyncio.sleep(min(DELIVERY_GAP_S_MAX, DELIVERY_GAP_S_MIN * 2**tries))
        EVENTS_LOST.inc(len(events))
        log.warning("events_lost", count=len(events), reason=reason)

    async def _publish(self, events: list[tuple[str, str, bytes]]) -> None:
        """Returns when JetStream has them. It takes what one connection brings in order, so its acknowledgement of the
        last event says that it took all of them, as long as it was one connection; acknowledging each costs several
        times as much as the rest of a scheduler's event."""
        client = self._client()
        if not self._has_stream:
            await ensure_stream(client, self._subjects)
            self._has_stream = True
        connections = client.stats["reconnects"]
        *before, last = events
        for subject, event_id, data in before:
            await client.publish(subject, data, headers={MESSAGE_ID: event_id})
        subject, event_id, data = last
        stream = client.jetstream(timeout=ACKNOWLEDGE_S_MAX)
        await stream.publish(subject, data, stream=self._subjects.events_stream(), headers={MESSAGE_ID: event_id})
        if client is not self._client() or client.stats["reconnects"] != connections:
            raise Unavailable(what="NATS (the connection was another one at the end)")
