"""Owns one step of the controller: the state it works on, the time it happens at, and what it gathers to say."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import ProtocolError
from whimbrel.wire.events import PublicEvent
from whimbrel.wire.messages import ErrorReply, Message
from whimbrel.wire.records import Forget, Record

from services.scheduler.core.cluster import Cluster
from services.scheduler.core.decisions import Decision
from services.scheduler.core.models import Model
from services.scheduler.core.ready import Address, Outgoing, Ready, Reply, ToRouter
from services.scheduler.core.settings import Settings


def sentence(error: ErrorReply) -> str:
    """What the error says to people; its code when the peer that sent it got the fields wrong."""
    try:
        return str(error_of(error))
    except ProtocolError:
        return error.code


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a route that is answered at the end of the step, when it is known what came of it."""

    request_id: str
    model_id: str
    reply_to: str | None


class Step(msgspec.Struct, kw_only=True, eq=False):
    """`now` is monotonic, `wall_s` wall-clock time; `epoch` and `scheduler_id` say whose life; `new_id` makes ids."""

    now: float
    wall_s: float
    epoch: int
    scheduler_id: str
    cluster: Cluster
    settings: Settings
    new_id: Callable[[str], str]
    questions: list[Question] = msgspec.field(default_factory=list)
    #: Models to place though nothing was released: somebody new waits for them.
    wanted: dict[str, None] = msgspec.field(default_factory=dict)
    #: Requests that will get no instance, and why.
    failed: dict[str, ErrorReply] = msgspec.field(default_factory=dict)
    _records: list[Record] = msgspec.field(default_factory=list)
    _messages: list[Outgoing] = msgspec.field(default_factory=list)
    _events: list[PublicEvent] = msgspec.field(default_factory=list)
    _decisions: list[Decision] = msgspec.field(default_factory=list)

    def save(self, record: Record) -> None:
        """Make it durable before anything of this step is said."""
        self._records.append(record)

    def change_model(self, model: Model, **changes: object) -> None:
        """Some fields of its record."""
        model.record = msgspec.structs.replace(model.record, **changes)
        self.save(model.record)

    def forget(self, record: Record) -> None:
        self.save(Forget(forgotten_table=record.table, forgotten_key=record.key()))

    def send(self, to: Address, message: Message) -> None:
        self._messages.append(Outgoing(to=to, message=message))

    def send_routers(self, message: Message) -> None:
        """To every router that lives."""
        for router_id in self.cluster.routers:
            self.send(ToRouter(router_id=router_id), message)

    def answer(self, reply_to: str | None, message: Message) -> None:
        """Nothing when nobody waits for an answer."""
        if reply_to is not None:
            self.send(Reply(reply_to=reply_to), message)

    def tell(self, event: PublicEvent) -> None:
        self._events.append(event)

    def decide(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def ready(self) -> Ready:
        return Ready(
            records=tuple(self._records),
            messages=tuple(self._messages),
            events=tuple(self._events),
            decisions=tuple(self._decisions),
        )
