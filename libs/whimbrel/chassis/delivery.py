"""Owns what happens to one received message: decode it, hand it over, and answer what goes wrong as a typed error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from whimbrel.chassis import telemetry
from whimbrel.wire import codec
from whimbrel.wire.errors import InternalError, ProtocolError, QueueFull, WhimbrelError
from whimbrel.wire.messages import ErrorReply, Message

log = structlog.get_logger()

PROTOCOL_ERRORS = telemetry.counter(
    "whimbrel_bus_protocol_errors_total", "Messages that could not be decoded and were dropped."
)
HANDLER_FAILURES = telemetry.counter(
    "whimbrel_bus_handler_failures_total", "Messages whose handler failed in a way nobody planned for."
)
REFUSALS = telemetry.counter(
    "whimbrel_bus_refusals_total", "One-way messages that their handler refused with an error.", ["code"]
)


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded message; `reply_to` is where an answer is awaited, None when none is."""

    subject: str
    message: Message
    reply_to: str | None


Handler = Callable[[Received], Awaitable[None]]
Reply = Callable[[str | None, Message], Awaitable[None]]


async def deliver(
    data: bytes, *, subject: str, reply_to: str | None, handler: Handler, reply: Reply, service: str
) -> None:
    """Give one message to its handler. Only a real cancellation of this task leaves this function as an exception."""
    try:
        message = codec.decode(data)
    except ProtocolError as error:
        PROTOCOL_ERRORS.inc()
        log.warning("message_not_understood", subject=subject, reason=error.reason, size_bytes=error.size_bytes)
        await _answer_error(reply, reply_to, error)
        return
    try:
        await handler(Received(subject, message, reply_to))
    except WhimbrelError as error:
        if reply_to is None:
            REFUSALS.labels(code=error.code).inc()
            # A full queue refuses thousands a second: counting them is enough, writing them all down makes it worse.
            write = log.debug if isinstance(error, QueueFull) else log.warning
            write("message_refused", subject=subject, code=error.code, reason=str(error))
        await _answer_error(reply, reply_to, error)
    except asyncio.CancelledError:
        if _is_being_cancelled():
            raise
        # Something that the handler awaited was cancelled, not we: the subscription has to live on.
        await _fail(reply, reply_to, subject, service)
    except Exception:
        await _fail(reply, reply_to, subject, service)


def reply_of(data: bytes) -> Message:
    """The message in a reply; an ErrorReply is raised as its class, anything undecodable as ProtocolError."""
    message = codec.decode(data)
    if isinstance(message, ErrorReply):
        raise codec.error_of(message)
    return message


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _fail(reply: Reply, reply_to: str | None, subject: str, service: str) -> None:
    HANDLER_FAILURES.inc()
    log.exception("handler_failed", subject=subject)
    await _answer_error(reply, reply_to, InternalError(service=service))


async def _answer_error(reply: Reply, reply_to: str | None, error: WhimbrelError) -> None:
    if reply_to is None:
        return
    try:
        await reply(reply_to, codec.error_reply(error))
    except WhimbrelError as cause:
        log.warning("reply_lost", code=error.code, reason=str(cause))
