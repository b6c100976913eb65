"""Owns the controller's face: what goes in (events), what comes out (`Ready`), and whom a message is for."""

from __future__ import annotations

import msgspec
from whimbrel.wire.events import PublicEvent
from whimbrel.wire.messages import Message
from whimbrel.wire.records import Record

from services.scheduler.core.decisions import Decision


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """A message came from the bus; `reply_to` is where its sender waits for an answer, if it does."""

    message: Message
    reply_to: str | None = None


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed. Only time-outs depend on it: nothing on the path of a request waits for one. `was_away` says that we
    could not hear since the last one: nobody is to blame for silence."""

    was_away: bool = False


Event = Arrived | Tick


class ToAgent(msgspec.Struct, frozen=True, kw_only=True):
    server_id: str


class ToWorker(msgspec.Struct, frozen=True, kw_only=True):
    server_id: str
    slot: int


class ToRouter(msgspec.Struct, frozen=True, kw_only=True):
    router_id: str


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one request."""

    reply_to: str


Address = ToAgent | ToWorker | ToRouter | Reply


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    to: Address
    message: Message


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What the shell owes the world. Records must be durable before any message leaves (P1).

    `events` tell the public what happened; `decisions` are the placements of this step with their reasons, for
    logs and metrics.
    """

    records: tuple[Record, ...] = ()
    messages: tuple[Outgoing, ...] = ()
    events: tuple[PublicEvent, ...] = ()
    decisions: tuple[Decision, ...] = ()
