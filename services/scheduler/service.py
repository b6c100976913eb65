"""Owns the scheduler's loop: events from the bus, one step of the controller, records to the store, then messages."""

from __future__ import annotations

import asyncio
import contextlib
import time

import structlog
from whimbrel.chassis.bus import Bus, NatsBus, Received, Subscription
from whimbrel.chassis.heartbeat import Heart
from whimbrel.chassis.inbox import Inbox
from whimbrel.chassis.store import RedisStore, Store
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Conflict, PayloadTooLarge, Unavailable, WhimbrelError
from whimbrel.wire.events import SchedulerStarted
from whimbrel.wire.ids import new_id
from whimbrel.wire.messages import SchedulerHeartbeat, UnloadInstance
from whimbrel.wire.subjects import SCHEDULER_QUEUE

from services.scheduler import metrics, recovery
from services.scheduler.config import SchedulerConfig
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
    UnloadRefused,
)

log = structlog.get_logger()

# Ten seconds of a busy cluster (1,000 heartbeats and a few thousand requests a second); a few MB.
INBOX_EVENTS_MAX = 50_000
# One append makes a whole batch durable; a step of so many events takes a few ms, so nobody waits long for the first.
EVENTS_PER_STEP_MAX = 256
# Time-outs are at least a second; a quarter of one is precise enough for them.
TICK_S = 0.25
# A worker unloads an idle instance in milliseconds, or says no; without an answer it is asked again by reconciliation.
UNLOAD_ANSWER_S_MAX = 5.0
# Services whose heartbeats the scheduler hears.
HEARD = ("agent", "worker", "router")


class SchedulerService:
    """The shell around `Controller`. Give it a bus and a store to rehearse it without servers."""

    name = "scheduler"

    def __init__(self, config: SchedulerConfig, *, bus: Bus | None = None, store: Store | None = None) -> None:
        self._config = config
        self._bus = bus
        self._store = store
        self._inbox: Inbox[Event] = Inbox(INBOX_EVENTS_MAX, name="the scheduler's inbox")
        self._subscriptions: list[Subscription] = []
        self._controller: Controller | None = None
        self._group: asyncio.TaskGroup | None = None
        self._ended = asyncio.Event()
        self._is_store_away = False
        # Ticks say nothing that a later one does not say as well: one at a time, also while steps wait for the store.
        self._is_tick_waiting = False

    async def start(self, group: asyncio.TaskGroup) -> None:
        config = self._config
        self._group = group
        if self._store is None:
            self._store = await RedisStore.connect(config.redis_url, cluster=config.cluster)
        recovered = await recovery.take_over(self._store)
        if self._bus is None:
            name = f"scheduler/{config.scheduler_id}"
            self._bus = await NatsBus.connect(config.nats_url, cluster=config.cluster, name=name)
        self._controller = Controller(
            records=recovered.records,
            settings=config.settings(),
            epoch=recovered.epoch,
            now=time.monotonic(),
            new_id=new_id,
        )
        heartbeat = SchedulerHeartbeat(scheduler_id=config.scheduler_id, epoch=recovered.epoch)
        await self._subscribe(self._bus)
        group.create_task(self._run(self._controller, self._bus, self._store), name="steps")
        group.create_task(self._tick(), name="ticks")
        # The first heartbeat asks everybody to say what they have, so it goes out when we listen.
        group.create_task(Heart(self._bus, lambda: heartbeat).run(), name="heartbeat")
        event = SchedulerStarted(scheduler_id=config.scheduler_id, epoch=recovered.epoch)
        await self._bus.publish_event(event)
        log.info("scheduler_started", scheduler_id=config.scheduler_id, epoch=recovered.epoch)

    async def drain(self) -> None:
        for subscription in self._subscriptions:
            await subscription.drain()
        self._inbox.close()
        await self._ended.wait()

    async def close(self) -> None:
        self._inbox.close()
        if self._bus is not None:
            await self._bus.drain()
        if self._store is not None:
            await self._store.close()

    def readiness(self) -> str | None:
        if self._controller is None or self._bus is None:
            return "the state is not loaded yet"
        if self._is_store_away:
            return "the store is away"
        if not self._bus.is_connected:
            return "NATS is away"
        waits = (model.oldest_wait_s for model in self._controller.cluster.models.values() if model.waiters)
        oldest_wait_s = time.monotonic() - min(waits, default=time.monotonic())
        if oldest_wait_s > self._config.wait_s_max:
            return f"a request has waited for {oldest_wait_s:.0f} s"
        return None

    async def _subscribe(self, bus: Bus) -> None:
        commands = await bus.subscribe(bus.subjects.all_to_scheduler(), self._on_message, queue=SCHEDULER_QUEUE)
        self._subscriptions.append(commands)
        for service in HEARD:
            self._subscriptions.append(await bus.subscribe(bus.subjects.all_heartbeats(service), self._on_message))

    async def _on_message(self, received: Received) -> None:
        """Raises QueueFull, which is the answer, when steps don't keep up."""
        self._inbox.put_nowait(Arrived(message=received.message, reply_to=received.reply_to))

    async def _run(self, controller: Controller, bus: Bus, store: Store) -> None:
        """The one place where records are made durable before messages are sent (P1)."""
        try:
            async for events in self._inbox.batches(EVENTS_PER_STEP_MAX):
                started_s = time.monotonic()
                self._is_tick_waiting = False
                ready = controller.step(events, now=started_s, wall_s=time.time())
                metrics.observe(ready, step_s=time.monotonic() - started_s, events=len(events))
                await recovery.append(store, ready.records, on_away=self._on_store_away)
                await self._say(bus, ready)
        finally:
            self._ended.set()

    async def _say(self, bus: Bus, ready: Ready) -> None:
        for outgoing in ready.messages:
            if isinstance(outgoing.message, UnloadInstance) and isinstance(outgoing.to, ToWorker):
                assert self._group is not None
                self._group.create_task(self._unload(bus, outgoing.to, outgoing.message), name="unload")
            else:
                await self._publish(bus, outgoing)
        for event in ready.events:
            log.info(f"{event.noun}_{event.verb}", **{name: getattr(event, name) for name in event.__struct_fields__})
            await bus.publish_event(event)

    async def _publish(self, bus: Bus, outgoing: Outgoing) -> None:
        """A message that can't be sent is no disaster: whoever misses it repeats, or is told again."""
        message = outgoing.message
        try:
            match outgoing.to:
                case Reply(reply_to=reply_to):
                    await bus.reply(reply_to, message)
                case ToAgent(server_id=server_id):
                    await bus.publish(bus.subjects.to_agent(server_id, message), message)
                case ToWorker(server_id=server_id, slot=slot):
                    await bus.publish(bus.subjects.to_worker(server_id, slot, message), message)
                case ToRouter(router_id=router_id):
                    await bus.publish(bus.subjects.to_router(router_id, message), message)
        except PayloadTooLarge as error:
            metrics.UNHEARD.inc()
            log.error("message_too_large", to=str(outgoing.to), type=type(message).__name__, reason=str(error))
            if isinstance(outgoing.to, Reply):
                await self._publish(bus, Outgoing(to=outgoing.to, message=error_reply(error)))
        except Unavailable as error:
            metrics.UNHEARD.inc()
            log.warning("message_not_sent", to=str(outgoing.to), type=type(message).__name__, reason=str(error))

    async def _unload(self, bus: Bus, to: ToWorker, unload: UnloadInstance) -> None:
        """A refusal is an event; everything else is told by the worker's events and heartbeats."""
        try:
            subject = bus.subjects.to_worker(to.server_id, to.slot, unload)
            await bus.request(subject, unload, timeout_s=UNLOAD_ANSWER_S_MAX)
        except Conflict:
            await self._put(UnloadRefused(instance_id=unload.instance_id))
        except WhimbrelError as error:
            log.info("unload_not_answered", instance_id=unload.instance_id, code=error.code, reason=str(error))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            assert self._controller is not None
            metrics.observe_cluster(self._controller.cluster)
            if not self._is_tick_waiting:
                self._is_tick_waiting = True
                await self._put(Tick())

    async def _put(self, event: Event) -> None:
        """Once the inbox is closed we are going, and the next life finds out by itself."""
        with contextlib.suppress(Unavailable):
            await self._inbox.put(event)

    def _on_store_away(self, is_away: bool) -> None:
        self._is_store_away = is_away
