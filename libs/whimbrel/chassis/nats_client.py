"""Owns how one NATS client of nats-py is opened, flushed and ended, whatever state it got itself into."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import structlog
from nats.aio.client import Client, Server

log = structlog.get_logger()

# A burst of the largest messages that may wait for the socket before publishers are held up.
PENDING_BYTES_MAX = 64 * 1024 * 1024
# A prompt of a million tokens is 4 MB. NATS's default of 1 MiB works too, with shorter prompts; the log says so.
PAYLOAD_BYTES_WANTED = 8 * 1024 * 1024
# Tries are cheap for a NATS server. A lost connection is tried again at once, so that a restart is hardly felt, then
# ever more slowly; at start, when NATS may come up together with us, at a fixed pace.
RECONNECT_S_MIN = 0.05
RECONNECT_S_MAX = 1.6
CONNECT_GAP_S = 0.25
CONNECT_S_MAX = 2
# A connection that answers none of three pings in a row is dead, whatever the kernel says. That is noticed within
# 1.5 s, before anybody has missed three heartbeats of anybody: who can't hear takes nobody for lost.
PING_S = 0.5
PINGS_UNANSWERED_MAX = 2
# Longer than a dead connection can go unnoticed; see `flush`.
FLUSH_FORGOTTEN_S = 30
# How long a publisher is held up by a full buffer before the trouble is told.
FULL_BUFFER_S_MAX = 2.0

# What nats-py raises when the connection is not there. RuntimeError: that is how uvloop refuses a closed socket.
TROUBLE = (nats.errors.Error, OSError, RuntimeError)

ErrorCallback = Callable[[Exception], Awaitable[None]]
StateCallback = Callable[[], Awaitable[None]]


async def open_client(
    url: str, *, name: str, on_error: ErrorCallback, on_disconnect: StateCallback, on_reconnect: StateCallback
) -> Client:
    """A connected client, however long that takes; it reconnects by itself until it meets an error from the server.

    `on_error` hears of every failed try, too.
    """
    while True:
        client = Client()
        try:
            await client.connect(
                url,
                name=name,
                connect_timeout=CONNECT_S_MAX,
                reconnect_time_wait=CONNECT_GAP_S,  # type: ignore[arg-type]  # any number of seconds will do
                max_reconnect_attempts=-1,
                reconnect_to_server_handler=_choose_server,
                ping_interval=PING_S,  # type: ignore[arg-type]  # any number of seconds will do
                max_outstanding_pings=PINGS_UNANSWERED_MAX,
                pending_size=PENDING_BYTES_MAX,
                flush_timeout=FULL_BUFFER_S_MAX,
                error_cb=on_error,
                disconnected_cb=on_disconnect,
                reconnected_cb=on_reconnect,
            )
            break
        except TROUBLE as cause:
            await on_error(cause)
            await end_client(client)
            await asyncio.sleep(CONNECT_GAP_S)
        except asyncio.CancelledError:
            await end_client(client)
            raise
    log.info("nats_connected", url=without_secrets(url), max_payload_bytes=client.max_payload)
    if client.max_payload < PAYLOAD_BYTES_WANTED:
        log.warning("nats_payload_limit_small", limit_bytes=client.max_payload, wanted_bytes=PAYLOAD_BYTES_WANTED)
    return client


async def flush_client(client: Client) -> bool:
    """Whether the server has everything published before. Never give this up and never cancel it.

    nats-py's reader fails on the answer to a flush that nobody waits for, and the connection is deaf from then on.
    """
    try:
        await client.flush(timeout=FLUSH_FORGOTTEN_S)
    except TROUBLE:
        return False
    return True


def has_given_up(client: Client) -> bool:
    """Whether the client will never be connected again: the server threw it out, or it failed inside."""
    reconnecting = client._reconnection_task
    return client.is_closed or (not client.is_connected and (reconnecting is None or reconnecting.done()))


async def end_client(client: Client) -> None:
    """Close a client in whatever state it is; one that has lost its connection would fail half-way by itself."""
    if not client.is_connected:
        client._pending_data_size = 0
    with contextlib.suppress(*TROUBLE):
        await client.close()
    # What a `close` that was cancelled half-way left open.
    for subscription in client._subs.values():
        subscription._stop_processing()
    if client._transport is not None:
        client._transport.close()  # type: ignore[no-untyped-call]
        with contextlib.suppress(*TROUBLE):
            await client._transport.wait_closed()  # type: ignore[no-untyped-call]


def without_secrets(url: str) -> str:
    """The URL as it may stand in a log."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port}"


def _choose_server(servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
    """The server that failed least, and how long to wait before trying it."""
    server = min(servers, key=lambda server: server.reconnects)
    return server, min(RECONNECT_S_MAX, RECONNECT_S_MIN * 2 ** min(server.reconnects, 10))
