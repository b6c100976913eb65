"""Owns one term of a leader: events from the bus, one step of the controller, records to the store, then messages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog
from whimbrel.chassis.bus import Bus, Received, Subscription
from whimbrel.chassis.inbox import Inbox
from whimbrel.chassis.store import Store
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import PayloadTooLarge, Unavailable
from whimbrel.wire.subjects import SCHEDULER_QUEUE

from services.scheduler import metrics, recovery
from services.scheduler.core.controller import Controller
from services.scheduler.core.ready import (
    Arrived,
    Event,
    Outgoing,
    Ready,
    Reply,
    Tick,
    ToAgent,
    ToRouter,
    ToWorker,
)
from services.scheduler.leader import Lease

log = structlog.get_logger()

# Ten seconds of a busy cluster (1,000 heartbeats and a few thousand requests a second); a few MB.
INBOX_EVENTS_MAX = 50_000
# One append makes a whole batch durable; a step of so many events takes a few ms, so nobody waits long for the first.
EVENTS_PER_STEP_MAX = 256
# Time-outs are at least a second; a quarter of one is precise enough for them.
TICK_S = 0.25
# Services whose heartbeats the scheduler hears.
HEARD = ("agent", "worker", "router")


class Term:
    """From the moment the state is loaded until the lease is lost or `drain` ends it; then it is of no more use."""

    def __init__(
        self, controller: Controller, *, bus: Bus, store: Store, lease: Lease, on_away: Callable[[bool], None]
    ) -> None:
        self.controller = controller
        self._bus = bus
        self._store = store
        self._lease = lease
        self._on_away = on_away
        self._inbox: Inbox[Event] = Inbox(INBOX_EVENTS_MAX, name="the scheduler's inbox")
        self._subscriptions: list[Subscription] = []
        self._commands: Subscription | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        # Ticks say nothing that a later one does not say as well: one at a time, also while steps wait for the store.
        self._is_tick_waiting = False

    async def run(self, heart: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Returns after `drain`. Raises an ExceptionGroup with StaleEpoch as soon as our steps don't count any more.

        `heart` beats from when we listen: the first heartbeat of a new epoch asks everybody to say what they have.
        """
        try:
            async with asyncio.TaskGroup() as self._group:
                for service in HEARD:
                    subject = self._bus.subjects.all_heartbeats(service)
                    self._subscriptions.append(await self._bus.subscribe(subject, self._on_message))
                await self._listen()
                self._spawn(self._listen_while_leading(), name="listening")
                self._spawn(self._tick(), name="ticks")
                self._spawn(heart(), name="heartbeat")
                await self._step()
                for task in self._tasks:
                    task.cancel()
        finally:
            # Whoever asks from now on is told at once to ask again; the next leader answers.
            self._inbox.close()
            await self._deafen()

    async def drain(self) -> None:
        """Take nothing new and end once everything that had arrived is decided and said."""
        for subscription in self._all_subscriptions():
            await subscription.drain()
        self._inbox.close()

    async def _listen(self) -> None:
        subject = self._bus.subjects.all_to_scheduler()
        self._commands = await self._bus.subscribe(subject, self._on_message, queue=SCHEDULER_QUEUE)

    async def _listen_while_leading(self) -> None:
        """While it is not sure that we lead we take no commands: another leader may be there to answer them."""
        while True:
            await self._lease.until_lapsed()
            commands, self._commands = self._commands, None
            if commands is not None:
                await commands.unsubscribe()
            await self._lease.until_held()
            await self._listen()

    async def _deafen(self) -> None:
        for subscription in self._all_subscriptions():
            with contextlib.suppress(Unavailable):
                await subscription.unsubscribe()

    def _all_subscriptions(self) -> list[Subscription]:
        return [*self._subscriptions, *([] if self._commands is None else [self._commands])]

    async def _on_message(self, received: Received) -> None:
        """Raises QueueFull, which is the answer, when steps don't keep up."""
        self._inbox.put_nowait(Arrived(message=received.message, reply_to=received.reply_to))

    async def _step(self) -> None:
        """The one place where records are made durable before messages are sent (P1)."""
        async for events in self._inbox.batches(EVENTS_PER_STEP_MAX):
            started_s = time.monotonic()
            self._is_tick_waiting = False
            ready = self.controller.step(events, now=started_s, wall_s=time.time())
            metrics.observe(ready, step_s=time.monotonic() - started_s, events=len(events))
            await recovery.append(self._store, ready.records, on_away=self._on_away)
            # A step without records is fenced by nothing but the clock.
            await self._lease.until_held()
            await self._say(ready)

    async def _say(self, ready: Ready) -> None:
        for outgoing in ready.messages:
            await self._publish(outgoing)
        for event in ready.events:
            log.info(f"{event.noun}_{event.verb}", **msgspec.structs.asdict(event))
            await self._bus.publish_event(event)

    async def _publish(self, outgoing: Outgoing) -> None:
        """A message that can't be sent is no disaster: whoever misses it repeats, or is told again."""
        message = outgoing.message
        try:
            match outgoing.to:
                case Reply(reply_to=reply_to):
                    await self._bus.reply(reply_to, message)
                case ToAgent(server_id=server_id):
                    await self._bus.publish(self._bus.subjects.to_agent(server_id, message), message)
                case ToWorker(server_id=server_id, slot=slot):
                    await self._bus.publish(self._bus.subjects.to_worker(server_id, slot, message), message)
                case ToRouter(router_id=router_id):
                    await self._bus.publish(self._bus.subjects.to_router(router_id, message), message)
        except PayloadTooLarge as error:
            metrics.UNHEARD.inc()
            log.error("message_too_large", to=str(outgoing.to), type=type(message).__name__, reason=str(error))
            if isinstance(outgoing.to, Reply):
                await self._publish(Outgoing(to=outgoing.to, message=error_reply(error)))
        except Unavailable as error:
            metrics.UNHEARD.inc()
            log.warning("message_not_sent", to=str(outgoing.to), type=type(message).__name__, reason=str(error))

    async def _tick(self) -> None:
        """While NATS is away no time passes: nobody is lost because we can't hear. Afterwards everybody has the full
        time again."""
        was_away = False
        while True:
            await asyncio.sleep(TICK_S)
            metrics.observe_cluster(self.controller.cluster)
            was_away = was_away or not self._bus.is_connected
            if not self._is_tick_waiting and self._bus.is_connected:
                self._is_tick_waiting = True
                await self._put(Tick(was_away=was_away))
                was_away = False

    async def _put(self, event: Event) -> None:
        """Once the inbox is closed we are going, and the next life finds out by itself."""
        with contextlib.suppress(Unavailable):
            await self._inbox.put(event)

    def _spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        assert self._group is not None
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
