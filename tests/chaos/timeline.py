"""What is said of a migration: live, to strike in time, and afterwards, to tell in which state the harm came."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta

import nats
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from whimbrel.client import events
from whimbrel.client.admin import MIGRATION_ENDS
from whimbrel.wire.events import CloudEvent, PublicEvent, decode_event
from whimbrel.wire.subjects import Subjects

STATE_OF = {
    "migration.started": "preparing",
    "migration.resuming": "resuming",
    "migration.handed_over": "handover",
    "migration.finished": "finished",
    "migration.abandoned": "abandoned",
    "migration.requeued": "requeued",
}
# An event is made some milliseconds after its state is decided: the record is made durable before.
NEAR_S = 0.005
LOOK_BACK = timedelta(minutes=2)


@dataclass
class Timeline:
    """The states of one migration, each with the wall-clock time of its event, and the cause of its end."""

    entered: dict[str, float] = field(default_factory=dict)
    cause: str = ""

    def note(self, envelope: CloudEvent, event: PublicEvent) -> None:
        if envelope.type in STATE_OF:
            self.entered.setdefault(STATE_OF[envelope.type], envelope.time.timestamp())
            self.cause = getattr(event, "cause", self.cause)

    @property
    def end(self) -> str:
        return next((state for state in MIGRATION_ENDS if state in self.entered), "")

    def state_at(self, time_s: float) -> str:
        """The state in which a harm at this time came; two, when one had just been or was about to be left."""
        before = ""
        for state, entered_s in sorted(self.entered.items(), key=lambda entry: entry[1]):
            if entered_s > time_s:
                return f"{before} or {state}" if before and entered_s - time_s <= NEAR_S else before
            before = state
        return before


async def _not_told(error: Exception) -> None:
    """That NATS goes away is what this is about."""


class Watch:
    """Hears the events of migrations as they are published."""

    def __init__(self, nats_url: str, cluster: str) -> None:
        self._url = nats_url
        self._cluster = cluster
        self._timelines: dict[str, Timeline] = {}
        self._changed = asyncio.Condition()
        self._client: NatsClient | None = None

    async def start(self) -> None:
        self._client = await nats.connect(
            self._url,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            error_cb=_not_told,
            name="chaos",
        )
        await self._client.subscribe(Subjects(self._cluster).events_of("migration"), cb=self._hear)

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()

    def of(self, migration_id: str) -> Timeline:
        return self._timelines.setdefault(migration_id, Timeline())

    async def until(self, migration_id: str, state: str, seconds: float) -> None:
        """Returns when it has entered this state, or has ended; raises TimeoutError."""
        wanted = {state, *MIGRATION_ENDS}
        async with asyncio.timeout(seconds), self._changed:
            await self._changed.wait_for(lambda: wanted & self.of(migration_id).entered.keys())

    async def read_back(self, migration_id: str) -> None:
        """What the stream holds: events may have passed while we were not connected."""
        async for received in events(self._url, cluster=self._cluster, since=LOOK_BACK, follow=False):
            if getattr(received.event, "migration_id", None) == migration_id:
                self.of(migration_id).note(received.envelope, received.event)

    async def _hear(self, message: Msg) -> None:
        envelope, event = decode_event(message.data)
        async with self._changed:
            self.of(getattr(event, "migration_id", "")).note(envelope, event)
            self._changed.notify_all()
