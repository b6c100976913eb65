"""Owns the simulated schedulers: the real controller under a leader's lease, with crashes and pauses at every boundary
between deciding, making durable, and speaking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum, auto

from whimbrel.chassis.heartbeat import HEARTBEAT_S
from whimbrel.chassis.memory_store import InMemoryStore
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import StaleEpoch, Unavailable, WhimbrelError
from whimbrel.wire.messages import (
    ErrorReply,
    Message,
    SchedulerHeartbeat,
)
from whimbrel.wire.records import Record

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
)
from services.scheduler.core.settings import Settings
from tests.simulation.network import Call, Listener, Network
from tests.simulation.peers import SCHEDULER
from tests.simulation.store import Records, at_once

LEASE_S, RENEW_S, POLL_S = 2.0, 0.5, 0.25
TICK_S = 0.25
STORE_RETRY_S = 0.05
EVENTS_PER_STEP_MAX = 256


class Boundary(StrEnum):
    """Where a step can be cut off."""

    BEFORE_APPEND = auto()
    AFTER_APPEND = auto()
    WHILE_SPEAKING = auto()


class SimScheduler(Listener):
    """A process that leads while it has the lease, and waits for it otherwise. `check` is called after every step that
    became durable, before it is spoken."""

    def __init__(
        self,
        network: Network,
        number: int,
        *,
        records: Records,
        settings: Settings,
        new_id: Callable[[str], str],
        check: Callable[[SimScheduler, Ready], None],
    ) -> None:
        super().__init__(network.clock, ("scheduler", number))
        self.network = network
        self.records = records
        self.settings = settings
        self.check = check
        self.controller: Controller | None = None
        self.epoch = 0
        self.steps = 0
        #: The next step with records is cut off there: the process dies, or is stopped for `pause_s` and goes on.
        self.boundary: Boundary | None = None
        self.pause_s = 0.0
        self._paused_until_s = 0.0
        self._new_id = new_id
        self._store = InMemoryStore(records.data)
        self._inbox: list[Event] = []
        self._is_busy = False
        self._is_tick_waiting = False
        self._calls: dict[str, Call] = {}
        self._call_ids = 0
        network.join(self)
        self.every(POLL_S, self._seek)
        self.every(RENEW_S, self._renew)
        self.every(HEARTBEAT_S, self._beat)
        self.every(TICK_S, self._tick)

    def kill(self) -> None:
        self.is_alive = False
        self.controller = None
        self.network.leave(self)

    async def read(self) -> list[Record]:
        """What the store holds now."""
        return await self._store.load()

    @property
    def is_leading(self) -> bool:
        """By its own lights."""
        return self.controller is not None

    @property
    def is_paused(self) -> bool:
        return self._paused_until_s > self.clock.now

    # The lease.

    def _seek(self) -> None:
        if self.is_leading or self.is_paused:
            return
        try:
            claim = at_once(self._store.acquire(str(self.name), LEASE_S))
            if not claim.epoch:
                return
            known = at_once(self._store.load())
        except Unavailable:
            return
        self.epoch = claim.epoch
        self._inbox.clear()
        self._is_busy = self._is_tick_waiting = False
        self.controller = Controller(
            records=known, settings=self.settings, epoch=self.epoch, now=self.clock.now, new_id=self._new_id
        )
        assert self.controller.cluster.durable() == self.records.mirror, "records replay to the same state"
        self._beat()

    def _renew(self) -> None:
        if not self.is_leading or self.is_paused:
            return
        try:
            at_once(self._store.renew(str(self.name), LEASE_S))
        except StaleEpoch:
            self._step_down()
        except Unavailable:
            return  # as long as the store is away nobody can take the lease

    def _step_down(self) -> None:
        self.controller = None
        self._inbox.clear()

    def _beat(self) -> None:
        if self.is_leading and not self.is_paused:
            beat = SchedulerHeartbeat(scheduler_id=str(self.name), epoch=self.epoch)
            self.network.broadcast(self, ("agent", "worker", "router"), beat)

    # Events.

    def hear(self, message: Message, call: Call | None) -> None:
        if not self.is_leading:
            return
        reply_to = None
        if call is not None:
            self._call_ids += 1
            reply_to = str(self._call_ids)
            self._calls[reply_to] = call
        self._put(Arrived(message=message, reply_to=reply_to))

    def _tick(self) -> None:
        if self.is_leading and not self._is_tick_waiting:
            self._is_tick_waiting = True
            self._put(Tick())

    def _put(self, event: Event) -> None:
        self._inbox.append(event)
        if not self._is_busy and not self.is_paused:
            self._run()

    def _run(self) -> None:
        """Steps until the inbox is empty, or one of them has to wait."""
        while self._inbox and self.controller is not None and not self._is_busy and self.is_alive:
            events = self._inbox[:EVENTS_PER_STEP_MAX]
            del self._inbox[:EVENTS_PER_STEP_MAX]
            self._is_tick_waiting = False
            self.steps += 1
            now = self.clock.now
            ready = self.controller.step(events, now=now, wall_s=now + 1.7e9)
            self._is_busy = True
            if not (ready.records and self._is_cut_off(Boundary.BEFORE_APPEND, lambda: self._append(ready))):  # noqa: B023
                self._append(ready)

    def _is_cut_off(self, here: Boundary, go_on: Callable[[], None]) -> bool:
        """Whether the process dies or is stopped here."""
        if self.boundary is not here:
            return False
        self.boundary = None
        if not self.pause_s:
            self.kill()
            return True
        self._paused_until_s = self.clock.now + self.pause_s
        self.clock.after(self.pause_s, self, go_on)
        return True

    def _append(self, ready: Ready) -> None:
        if ready.records:
            try:
                self.records.append(self._store, ready.records)
            except Unavailable:
                self.clock.after(STORE_RETRY_S, self, lambda: self._append(ready))
                return
            except StaleEpoch:
                self._step_down()
                return
        if self.epoch == self.records.data.epoch:
            self.check(self, ready)
        if not (ready.records and self._is_cut_off(Boundary.AFTER_APPEND, lambda: self._speak(ready.messages))):
            self._speak(ready.messages)

    def _speak(self, messages: Sequence[Outgoing]) -> None:
        for spoken, outgoing in enumerate(messages):
            if spoken and self._is_cut_off(Boundary.WHILE_SPEAKING, lambda: self._speak(messages[spoken:])):  # noqa: B023
                return
            self._say(outgoing)
        self._is_busy = False
        if self._inbox:
            self.clock.after(0.0, self, self._run)

    def _say(self, outgoing: Outgoing) -> None:
        message = outgoing.message
        match outgoing.to:
            case Reply(reply_to=reply_to):
                call = self._calls.pop(reply_to, None)
                if call is not None:
                    call.answer(self, _as_answer(message))
            case ToWorker(server_id=server_id, slot=slot):
                self.network.send(self, ("worker", server_id, slot), message)
            case ToAgent(server_id=server_id):
                self.network.send(self, ("agent", server_id), message)
            case ToRouter(router_id=router_id):
                self.network.send(self, ("router", router_id), message)


def _as_answer(message: Message) -> Message | WhimbrelError:
    return error_of(message) if isinstance(message, ErrorReply) else message


class ToLeader(Listener):
    """The queue group of commands: each reaches one of those that listen, a former leader among them."""

    def __init__(self, network: Network, leading: Callable[[], list[SimScheduler]]) -> None:
        super().__init__(network.clock, SCHEDULER)
        self._network = network
        self._leading = leading
        network.join(self)

    def hear(self, message: Message, call: Call | None) -> None:
        listening = [scheduler for scheduler in self._leading() if scheduler.cut_until_s <= self.clock.now]
        if listening:
            self.clock.random.choice(listening).hear(message, call)
        elif call is not None:
            call.answer(self, Unavailable(what="the scheduler (nobody leads)"))
