"""Owns the controller's face: what goes in (events), what comes out (`Ready`), and whom a message is for."""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.wire.events import PublicEvent
from whimbrel.wire.messages import Message
from whimbrel.wire.records import Record

from services.scheduler.core.decisions import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A message came from the bus; `reply_to` is where its sender waits for an answer, if it does."""

    message: Message
    reply_to: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. Only time-outs depend on it: nothing on the path of a request waits for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadRefused:
    """A worker answered an unload with a refusal: the instance took a request in the meantime."""

    instance_id: str


Event = Arrived | Tick | UnloadRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class ToAgent:
    server_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToWorker:
    server_id: str
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToRouter:
    router_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to one request."""

    reply_to: str


Address = ToAgent | ToWorker | ToRouter | Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    to: Address
    message: Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the shell owes the world. Records must be durable before any message leaves (P1).

    `events` tell the public what happened; `decisions` are the placements of this step with their reasons, for
    logs and metrics.
    """

    records: tuple[Record, ...] = ()
    messages: tuple[Outgoing, ...] = ()
    events: tuple[PublicEvent, ...] = ()
    decisions: tuple[Decision, ...] = ()
