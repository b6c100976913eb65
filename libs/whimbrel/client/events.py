"""Owns the subscriber to public events: replay from a time, then follow, as typed values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase

import nats
from nats.js.api import ConsumerConfig, DeliverPolicy

from whimbrel.wire.errors import ProtocolError
from whimbrel.wire.events import CloudEvent, PublicEvent, decode_event
from whimbrel.wire.subjects import Subjects

# Without `follow` the iteration ends when the stream has been silent this long after the last stored event.
REPLAY_SILENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class Received:
    """One event with its envelope and its place in the stream (resume with `start_sequence + 1`)."""

    sequence: int
    envelope: CloudEvent
    event: PublicEvent


async def events(
    nats_url: str,
    *,
    cluster: str = "wb",
    types: str = "*",
    since: timedelta | None = None,
    start_sequence: int | None = None,
    follow: bool = True,
) -> AsyncIterator[Received]:
    """Public events in order.

    `types` is a glob over event types (`load.*`). Starts at `start_sequence`, or `since` ago, or with what comes next;
    without `follow` it ends after what is stored. Events that this version does not know are passed over.
    """
    connection = await nats.connect(nats_url, max_reconnect_attempts=-1, name="whimbrel-events")
    try:
        subjects = Subjects(cluster)
        config = _consumer(since, start_sequence, follow)
        subscription = await connection.jetstream().subscribe(
            subjects.all_events(), stream=subjects.events_stream(), ordered_consumer=True, config=config
        )
        while True:
            try:
                message = await subscription.next_msg(timeout=None if follow else REPLAY_SILENCE_S)
            except TimeoutError:
                return
            try:
                envelope, event = decode_event(message.data)
            except ProtocolError:
                continue
            if fnmatchcase(envelope.type, types):
                yield Received(message.metadata.sequence.stream, envelope, event)
    finally:
        await connection.close()


def _consumer(since: timedelta | None, start_sequence: int | None, follow: bool) -> ConsumerConfig:
    if start_sequence is not None:
        return ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=start_sequence)
    if since is not None:
        start = datetime.now(UTC) - since
        return ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=start)
    return ConsumerConfig(deliver_policy=DeliverPolicy.NEW if follow else DeliverPolicy.ALL)
