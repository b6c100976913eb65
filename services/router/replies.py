"""Owns the raw HTTP side of inference: a bounded body in, one answer or one stream out, and the client's leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send
from whimbrel.wire.errors import InvalidRequest, PayloadTooLarge, WhimbrelError

from services.router.core.statuses import error_object, retry_after_s, status_of
from services.router.outputs import Begun

# A million tokens of text fit; what is larger is no prompt.
BODY_BYTES_MAX = 4 * 1024 * 1024
# A client on a slow line has this long for its body; one that dribbles bytes for ever does not hold a place.
BODY_S_MAX = 30.0
# A client that reads nothing for this long is as good as gone.
SEND_S_MAX = 60.0


class ClientLeft(Exception):
    """Nobody is there to answer."""


async def read_body(scope: Scope, receive: Receive) -> object:
    """The decoded JSON; raises PayloadTooLarge, InvalidRequest, or ClientLeft when the client goes away meanwhile."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            _check_size(int(value))
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S_MAX):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                data += message.get("body", b"")
                _check_size(len(data))
                if not message.get("more_body", False):
                    return decode_json(bytes(data))
    except TimeoutError:
        raise InvalidRequest(field="body", reason=f"did not arrive within {BODY_S_MAX:g} s") from None


def decode_json(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise InvalidRequest(field="body", reason=f"is no JSON that can be read: {cause}") from cause


async def unless_disconnected(
    receive: Receive,
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    work: Coroutine[Any, Any, None],
) -> None:
    """Await `work`, and cancel it when the client goes away; raises ClientLeft then."""
    try:
        async with asyncio.timeout(None) as patience:
            watch = spawn(_watch(receive, patience))
            try:
                await work
            finally:
                watch.cancel()
    except TimeoutError:
        if not patience.expired():
            raise
        raise ClientLeft from None


async def _watch(receive: Receive, patience: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    patience.reschedule(asyncio.get_running_loop().time())


class Reply:
    """The answer to one request. What is told before the first byte becomes headers."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self._send = send
        self._headers = {"x-request-id": request_id}
        self._has_started = False

    def tell(self, begun: Begun) -> None:
        """How the request began."""
        self._headers["server-timing"] = begun.times.header()
        self._headers["x-whimbrel-tier"] = str(begun.times.tier)
        self._headers["x-whimbrel-server"] = begun.server_id

    async def send_json(self, status: int, body: object) -> None:
        """The whole answer."""
        data = msgspec.json.encode(body)
        self._headers |= {"content-type": "application/json", "content-length": str(len(data))}
        await self._start(status)
        await self._put({"type": "http.response.body", "body": data})

    async def send_events(self, data: bytes, *, is_last: bool = False) -> None:
        """A part of a stream of server-sent events."""
        if not self._has_started:
            self._headers |= {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
            await self._start(200)
        await self._put({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def fail(self, error: WhimbrelError) -> None:
        """The error as an answer of its own, or, when a stream has begun, as the stream's last event."""
        body = error_object(error).body()
        if self._has_started:
            await self.send_events(b"data: " + msgspec.json.encode(body) + b"\n\n", is_last=True)
            return
        seconds = retry_after_s(error)
        if seconds is not None:
            self._headers["retry-after"] = str(seconds)
        await self.send_json(status_of(error), body)

    async def _start(self, status: int) -> None:
        self._has_started = True
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def _put(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_S_MAX):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientLeft from None


def _check_size(size_bytes: int) -> None:
    if size_bytes > BODY_BYTES_MAX:
        raise PayloadTooLarge(size_bytes=size_bytes, limit_bytes=BODY_BYTES_MAX)
