"""Owns a service's connection to NATS: it reconnects for ever, and its subscriptions outlive every client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription

from whimbrel.chassis import telemetry
from whimbrel.chassis.nats_client import TROUBLE, end_client, flush_client, has_given_up, open_client, without_secrets
from whimbrel.wire.errors import Unavailable

log = structlog.get_logger()

# Of one subscription, when its handler is slower than its messages; then the newest are dropped and counted.
SUBSCRIPTION_MESSAGES_MAX = 65_536
SUBSCRIPTION_BYTES_MAX = 128 * 1024 * 1024
# While NATS is away, every try fails; the log hears of it this often.
TROUBLE_LOGGED_S = 5.0
# A server answers a flush in less than a millisecond; one that does not in this time is away.
FLUSH_S_MAX = 2.0
# How long handlers may take to finish what had arrived before the connection ends.
DRAIN_S_MAX = 5.0
# How often the client is asked whether it has given up.
WATCH_S = 0.25
# nats-py swallows a cancellation here and there; it gives in to one of a few.
CANCEL_S = 0.1
CANCELS_MAX = 10

SLOW_CONSUMER_DROPS = telemetry.counter(
    "whimbrel_bus_slow_consumer_drops_total", "Messages dropped because a handler was too slow."
)
RECONNECTS = telemetry.counter("whimbrel_bus_reconnects_total", "Times that the connection to NATS came back.")


class Connection:
    """A NATS client that is replaced when it ends for good. Callbacks of `reconnected` run after each return."""

    def __init__(self, url: str, *, name: str) -> None:
        self.client = Client()
        self.connected = asyncio.Event()
        self.reconnected: list[Callable[[], None]] = []
        self._url = url
        self._name = name
        self._subscriptions: list[ConnectionSubscription] = []
        self._background: set[asyncio.Task[Any]] = set()
        self._is_ending = False
        self._trouble_logged_at = -TROUBLE_LOGGED_S

    async def open(self) -> None:
        """Returns once connected, however long that takes."""
        self.client = await self._connect()
        self.connected.set()
        self.spawn(self._watch(), name="nats_watch")

    async def until_connected(self) -> None:
        # The client knows of a loss a moment before it says so.
        while not self.client.is_connected:
            self.connected.clear()
            await self.connected.wait()

    async def subscribe(
        self, subject: str, queue: str, callback: Callable[[Msg], Awaitable[None]]
    ) -> ConnectionSubscription:
        """Await `callback` for each message in order. When it returns, no message published from now on is missed."""
        subscription = ConnectionSubscription(self, subject, queue, callback)
        self._subscriptions.append(subscription)
        # While away, the reconnection or the next client subscribes.
        with contextlib.suppress(Unavailable):
            await subscription.attach(self.client)
            await self.flush()
        return subscription

    async def flush(self) -> None:
        """Returns when the server has everything published before; raises Unavailable otherwise."""
        if not self.client.is_connected:
            raise Unavailable(what="NATS")
        # Left alone, not cancelled, when it takes too long.
        flushing = self.spawn(flush_client(self.client))
        done, _ = await asyncio.wait({flushing}, timeout=FLUSH_S_MAX)
        if not done or not flushing.result():
            raise Unavailable(what="NATS")

    async def drain(self) -> None:
        """Take no message any more; returns when those that had arrived were handled, or after DRAIN_S_MAX."""
        self._is_ending = True
        await asyncio.gather(*(subscription.drain() for subscription in list(self._subscriptions)))

    async def close(self) -> None:
        """Send what waits and disconnect. Harmless when repeated."""
        self._is_ending = True
        with contextlib.suppress(Unavailable):
            await self.flush()
        self.connected.clear()
        await end_client(self.client)
        background = set(self._background)
        for _ in range(CANCELS_MAX):
            for task in background:
                task.cancel()
            if background:
                _, background = await asyncio.wait(background, timeout=CANCEL_S)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        """A task that lives at most as long as this connection."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._on_task_end)
        return task

    def forget(self, subscription: ConnectionSubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    async def _connect(self) -> Client:
        return await open_client(
            self._url,
            name=self._name,
            on_error=self._on_error,
            on_disconnect=self._on_disconnect,
            on_reconnect=self._on_reconnect,
        )

    async def _watch(self) -> None:
        """Replace the client when it has given up: after an error from the server, or by a failure inside it."""
        while not self._is_ending:
            await asyncio.sleep(WATCH_S)
            if self._is_ending or not has_given_up(self.client):
                continue
            log.warning("nats_replaced", url=without_secrets(self._url), reason=str(self.client.last_error))
            self.connected.clear()
            await end_client(self.client)
            self.client = await self._connect()
            for subscription in list(self._subscriptions):
                await subscription.attach(self.client)
            await self._on_reconnect()

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("bus_task_failed", task=task.get_name(), exc_info=task.exception())

    async def _on_error(self, error: Exception) -> None:
        # The client swallows some cancellations and would go on trying to connect for ever; here they are raised again.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        if isinstance(error, nats.errors.SlowConsumerError):
            SLOW_CONSUMER_DROPS.inc()
        now = time.monotonic()
        if now - self._trouble_logged_at >= TROUBLE_LOGGED_S:
            self._trouble_logged_at = now
            log.warning("nats_trouble", url=without_secrets(self._url), reason=str(error) or type(error).__name__)

    async def _on_disconnect(self) -> None:
        self.connected.clear()
        if not self._is_ending:
            log.warning("nats_disconnected", url=without_secrets(self._url))

    async def _on_reconnect(self) -> None:
        RECONNECTS.inc()
        self.connected.set()
        log.info("nats_reconnected", url=without_secrets(self._url))
        for callback in self.reconnected:
            callback()


class ConnectionSubscription:
    """A subscription of whatever client the connection has."""

    def __init__(
        self, connection: Connection, subject: str, queue: str, callback: Callable[[Msg], Awaitable[None]]
    ) -> None:
        self._connection = connection
        self._subject = subject
        self._queue = queue
        self._callback = callback
        self._client: Client | None = None
        self._attached: ClientSubscription | None = None

    async def attach(self, client: Client) -> None:
        if self._client is client:
            return
        self._client = client
        with contextlib.suppress(*TROUBLE):  # the client or its successor subscribes when it is connected
            self._attached = await client.subscribe(
                self._subject,
                queue=self._queue,
                cb=self._callback,
                pending_msgs_limit=SUBSCRIPTION_MESSAGES_MAX,
                pending_bytes_limit=SUBSCRIPTION_BYTES_MAX,
            )

    async def unsubscribe(self) -> None:
        """Stop at once; messages that had arrived but were not handled yet are dropped."""
        self._connection.forget(self)
        attached, self._attached = self._attached, None
        if attached is not None:
            with contextlib.suppress(*TROUBLE):
                await attached.unsubscribe()

    async def drain(self) -> None:
        """Take nothing new; returns when everything that had arrived was handled, or after DRAIN_S_MAX."""
        if self._attached is None or not self._connection.client.is_connected:
            await self.unsubscribe()
            return
        self._connection.forget(self)
        attached, self._attached = self._attached, None
        draining = self._connection.spawn(attached.drain())  # type: ignore[no-untyped-call]
        done, _ = await asyncio.wait({draining}, timeout=DRAIN_S_MAX)
        if not done or draining.exception() is not None:
            log.warning("subscription_not_drained", subject=self._subject, waited_s=DRAIN_S_MAX)
