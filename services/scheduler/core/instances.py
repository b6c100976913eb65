"""Owns the state machine of an instance: its states, what may happen in each, and the only writer of its state.

Rules. Everything that changes an instance's state is an `InstanceEvent`, and `TRANSITIONS` says which is legal when.
A pair that is missing there is a fault of ours and raises; late and duplicate news is filtered with `accepts` first.

Theory of operation. A slot is owned by an instance from LOADING until GONE, so a slot never has two owners. UNLOADING
asks the worker to unload an idle instance and can be refused, because a request may have arrived there in the
meantime; DRAINING lets running requests end and cannot be refused. GONE is where the durable record is forgotten.
"""

from __future__ import annotations

from enum import StrEnum
from math import inf
from typing import NamedTuple

import msgspec
from whimbrel.wire.messages import LoadFinished, WaitStage
from whimbrel.wire.records import InstanceRecord, InstanceState

from services.scheduler.core.estimates import PathSpeed
from services.scheduler.core.views import Occupant


class InstanceEvent(StrEnum):
    BECAME_READY = "became_ready"  # the worker can take requests
    LOAD_FAILED = "load_failed"  # the load ended badly, stalled, or is not wanted any more
    EVICTED = "evicted"  # idle, and the slot is needed or keep-alive ran out
    DRAINED = "drained"  # running requests may end, no new ones
    PREEMPTED = "preempted"  # running requests are stopped, and start again elsewhere
    UNLOAD_REFUSED = "unload_refused"  # it was not idle after all
    ENDED = "ended"  # the worker says that it is not there
    LOST = "lost"  # the worker or, while loading, the server is gone


TRANSITIONS: dict[InstanceState, dict[InstanceEvent, InstanceState]] = {
    InstanceState.LOADING: {
        InstanceEvent.BECAME_READY: InstanceState.READY,
        InstanceEvent.LOAD_FAILED: InstanceState.GONE,
        InstanceEvent.ENDED: InstanceState.GONE,
        InstanceEvent.LOST: InstanceState.GONE,
    },
    InstanceState.READY: {
        InstanceEvent.EVICTED: InstanceState.UNLOADING,
        InstanceEvent.DRAINED: InstanceState.DRAINING,
        InstanceEvent.PREEMPTED: InstanceState.DRAINING,
        InstanceEvent.ENDED: InstanceState.GONE,
        InstanceEvent.LOST: InstanceState.GONE,
    },
    InstanceState.DRAINING: {
        InstanceEvent.ENDED: InstanceState.GONE,
        InstanceEvent.LOST: InstanceState.GONE,
    },
    InstanceState.UNLOADING: {
        InstanceEvent.UNLOAD_REFUSED: InstanceState.READY,
        InstanceEvent.ENDED: InstanceState.GONE,
        InstanceEvent.LOST: InstanceState.GONE,
    },
    InstanceState.GONE: {},
}


class IllegalTransition(Exception):
    """We broke our own table: `event` means nothing to an instance in `state`."""

    def __init__(self, state: InstanceState, event: InstanceEvent) -> None:
        self.state = state
        self.event = event
        super().__init__(f"an instance that is {state} can't take {event}")


class Seen(NamedTuple):
    """What placement saw of an instance, and the speed that this was made from."""

    occupant: Occupant
    speed: PathSpeed


class Running(msgspec.Struct):
    """The requests of one router on one instance: those it named, and how many more it counted.

    News and counts cross: a count may include a request whose start is told a moment later, so a name takes the place
    of an unnamed one. `prompt_tokens` and `running_s` are the sums over all of them, as of `said_s` (M2, M3).
    """

    names: set[str] = msgspec.field(default_factory=set)
    unnamed: int = 0
    prompt_tokens: int = 0
    running_s: float = 0.0
    said_s: float = 0.0

    @property
    def count(self) -> int:
        return len(self.names) + self.unnamed

    def start(self, request_id: str, prompt_tokens: int, now: float) -> None:
        if request_id not in self.names:
            if not self.unnamed:
                self._age(now)
                self.prompt_tokens += prompt_tokens
            self.names.add(request_id)
            self.unnamed = max(0, self.unnamed - 1)

    def finish(self, request_id: str, now: float) -> None:
        count = self.count
        if count:
            # Which part of the sums was its own is not known; the next heartbeat corrects that.
            self._age(now)
            self.prompt_tokens -= self.prompt_tokens // count
            self.running_s -= self.running_s / count
        if request_id in self.names:
            self.names.remove(request_id)
        else:
            self.unnamed = max(0, self.unnamed - 1)

    def correct(self, count: int, prompt_tokens: int = 0, running_s: float = 0.0, *, now: float = 0.0) -> None:
        """The router's own count is the truth. With fewer than we have names, it isn't known which of them ended."""
        if count < len(self.names):
            self.names.clear()
        self.unnamed = count - len(self.names)
        self.prompt_tokens, self.running_s, self.said_s = prompt_tokens, running_s, now

    def _age(self, now: float) -> None:
        """The sums as they are now."""
        self.running_s += self.count * max(0.0, now - self.said_s)
        self.said_s = now


class Instance(msgspec.Struct, kw_only=True, eq=False):
    """An instance: its durable record, and what is known of it besides. Times are monotonic seconds.

    `is_rebuilt` says that its times count from our own start, not from its placement; `first_wait_s` is how long the
    oldest request waited for the placement. `active` has the running requests per router; `promised` maps requests that
    were given a route, and have not reached the worker yet, to the time when they are not expected any more.
    """

    record: InstanceRecord
    size_bytes: int
    placed_s: float
    is_rebuilt: bool = False
    first_wait_s: float = 0.0
    # While it loads.
    commanded_s: float = -inf
    prepared_s: float = -inf
    progress_s: float = 0.0
    stage: WaitStage = WaitStage.QUEUED
    load: LoadFinished | None = None
    is_prepared: bool = False
    detached_s: float | None = None
    ready_heard_s: float | None = None
    is_reported: bool = False
    bind_s: float = 0.0
    # Once it is ready.
    ready_s: float = 0.0
    idle_since_s: float = 0.0
    held_until_s: float | None = None
    #: It came back soon after it had to go for another model, so it is kept until then, whoever waits (no thrash).
    kept_until_s: float | None = None
    unload_sent_s: float = -inf
    #: The migrations that it is the source and the destination of. A source that is closed takes no new request; a
    #: destination takes none before everything has moved to it.
    leaving: str | None = None
    arriving: str | None = None
    is_closed: bool = False
    #: It was just moved or loaded, or moving it was tried and given up: it is neither moved nor stopped until then.
    stays_until_s: float | None = None
    moves_failed: int = 0
    #: What placement saw of it, with what that was made from.
    occupant: Seen | None = None
    active: dict[str, Running] = msgspec.field(default_factory=dict)
    promised: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def instance_id(self) -> str:
        return self.record.instance_id

    @property
    def state(self) -> InstanceState:
        return self.record.state

    @property
    def requests(self) -> int:
        """Running ones, as routers count them."""
        return sum(running.count for running in self.active.values())

    @property
    def demand(self) -> int:
        """Requests that run on it or are on their way to it."""
        return (self.requests if self.active else 0) + len(self.promised)

    @property
    def is_open(self) -> bool:
        """Whether new requests can be given to it."""
        return self.record.state is InstanceState.READY and not self.is_closed and self.arriving is None

    @property
    def is_migrating(self) -> bool:
        return self.leaving is not None or self.arriving is not None

    def accepts(self, event: InstanceEvent) -> bool:
        """Whether the event is news in this state."""
        return event in TRANSITIONS[self.state]

    def enter(self, event: InstanceEvent) -> None:
        """The only writer of the state; raises IllegalTransition."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            raise IllegalTransition(self.state, event)
        self.record = msgspec.structs.replace(self.record, state=state)
