"""Owns a service's connection to NATS: it reconnects for ever, and its subscriptions outlive every client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import structlog
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription

from whimbrel.chassis import telemetry
from whimbrel.wire.errors import Unavailable

log = structlog.get_logger()

# A burst of the largest messages that may wait for the socket before publishers are held up.
PENDING_BYTES_MAX = 64 * 1024 * 1024
# A prompt of a million tokens is 4 MB. NATS's default of 1 MiB works too, with shorter prompts; the log says so.
PAYLOAD_BYTES_WANTED = 8 * 1024 * 1024
# Of one subscription, when its handler is slower than its messages; then the newest are dropped and counted.
SUBSCRIPTION_MESSAGES_MAX = 65_536
SUBSCRIPTION_BYTES_MAX = 128 * 1024 * 1024
# Tries are cheap for a NATS server. A lost connection is tried again at once, so that a restart is hardly felt, then
# ever more slowly; at start, when NATS may come up together with us, at a fixed pace.
RECONNECT_S_MIN = 0.05
RECONNECT_S_MAX = 1.6
CONNECT_GAP_S = 0.25
CONNECT_S_MAX = 2
# While NATS is away, every try fails; the log hears of it this often.
TROUBLE_LOGGED_S = 5.0
# A connection that answers none of three pings in a row (about 6 s) is dead, whatever the kernel says.
PING_S = 2
PINGS_UNANSWERED_MAX = 2
FLUSH_S_MAX = 2.0
# Longer than a dead connection can go unnoticed; see `flush`.
FLUSH_FORGOTTEN_S = 30
# How long handlers may take to finish what had arrived before the connection ends.
DRAIN_S_MAX = 5.0

# How often the client is asked whether it has given up.
WATCH_S = 0.25

# nats-py swallows a cancellation here and there; it gives in to one of a few.
CANCEL_S = 0.1
CANCELS_MAX = 10

# What nats-py raises when the connection is not there. RuntimeError: that is how uvloop refuses a closed socket.
TROUBLE = (nats.errors.Error, OSError, RuntimeError)

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
        # nats-py's reader fails on the answer to a flush that was given up or cancelled, and the connection is deaf
        # from then on. So no flush is ever given up: it is left alone until its connection must be known to be dead.
        flushing = self.spawn(_flush(self.client))
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
        await _end(self.client)
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
        while True:
            client = Client()
            try:
                await self._connect_once(client)
                return client
            except TROUBLE as cause:
                await self._on_error(cause)
                await _end(client)
                await asyncio.sleep(CONNECT_GAP_S)

    async def _connect_once(self, client: Client) -> None:
        try:
            await client.connect(
                self._url,
                name=self._name,
                connect_timeout=CONNECT_S_MAX,
                reconnect_time_wait=CONNECT_GAP_S,  # type: ignore[arg-type]  # any number of seconds will do
                max_reconnect_attempts=-1,
                reconnect_to_server_handler=_choose_server,
                ping_interval=PING_S,
                max_outstanding_pings=PINGS_UNANSWERED_MAX,
                pending_size=PENDING_BYTES_MAX,
                flush_timeout=FLUSH_S_MAX,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnect,
                reconnected_cb=self._on_reconnect,
            )
        except asyncio.CancelledError:
            await _end(client)
            raise
        log.info("nats_connected", url=_without_secrets(self._url), max_payload_bytes=client.max_payload)
        if client.max_payload < PAYLOAD_BYTES_WANTED:
            log.warning(
                "nats_payload_limit_small", max_payload_bytes=client.max_payload, wanted_bytes=PAYLOAD_BYTES_WANTED
            )

    async def _watch(self) -> None:
        """Replace the client when it has given up: after an error from the server, or by a failure inside it."""
        while not self._is_ending:
            await asyncio.sleep(WATCH_S)
            if self._is_ending or not _has_given_up(self.client):
                continue
            log.warning("nats_replaced", url=_without_secrets(self._url), reason=str(self.client.last_error))
            self.connected.clear()
            await _end(self.client)
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
            log.warning("nats_trouble", url=_without_secrets(self._url), reason=str(error) or type(error).__name__)

    async def _on_disconnect(self) -> None:
        self.connected.clear()
        if not self._is_ending:
            log.warning("nats_disconnected", url=_without_secrets(self._url))

    async def _on_reconnect(self) -> None:
        RECONNECTS.inc()
        self.connected.set()
        log.info("nats_reconnected", url=_without_secrets(self._url))
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


def _choose_server(servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
    """The server that failed least, and how long to wait before trying it."""
    server = min(servers, key=lambda server: server.reconnects)
    return server, min(RECONNECT_S_MAX, RECONNECT_S_MIN * 2 ** min(server.reconnects, 10))


async def _flush(client: Client) -> bool:
    try:
        await client.flush(timeout=FLUSH_FORGOTTEN_S)
    except TROUBLE:
        return False
    return True


def _has_given_up(client: Client) -> bool:
    reconnecting = client._reconnection_task
    return client.is_closed or (not client.is_connected and (reconnecting is None or reconnecting.done()))


async def _end(client: Client) -> None:
    """Close a client in whatever state it is; one that has lost its connection would fail half-way by itself."""
    if not client.is_connected:
        client._pending_data_size = 0
    with contextlib.suppress(*TROUBLE):
        await client.close()
    # What a `close` that was cancelled half-way left open.
    for subscription in client._subs.values():
        subscription._stop_processing()
    if client._transport is not None:
        client._transport.close()
        with contextlib.suppress(*TROUBLE):
            await client._transport.wait_closed()


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port}"
