"""Owns the simulated network: it loses, delays, doubles, reorders and cuts off, by the rules of the bus: a command to
the scheduler reaches one that listens, a heartbeat all, and a request without an answer times out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from whimbrel.wire.errors import Unavailable, WhimbrelError
from whimbrel.wire.messages import Message

from tests.simulation.clock import Clock, Process, Promise

Answer = Message | WhimbrelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Shares of the messages. One that is late is overtaken by those sent after it."""

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    late_s_max: float = 0.6


NO_FAULTS = Faults()

#: One way, seconds: the fastest and what may be added.
DELAY_S = 0.0005
JITTER_S = 0.0015


class Call:
    """Somebody waits for an answer, if `reply_to` is known here."""

    __slots__ = ("_network", "asker", "promise")

    def __init__(self, network: Network, asker: Process) -> None:
        self._network = network
        self.asker = asker
        self.promise: Promise[Message] = Promise(network.clock)

    def answer(self, sender: Process, answer: Answer) -> None:
        """Goes back through the network."""
        self._network.carry(sender, self.asker, lambda: self.take(answer))

    def take(self, answer: Answer) -> None:
        if isinstance(answer, WhimbrelError):
            self.promise.fail(answer)
        else:
            self.promise.keep(answer)


class Listener(Process):
    """A process that hears messages; `call` is there when the sender waits for an answer."""

    def hear(self, message: Message, call: Call | None) -> None:
        raise AssertionError("every listener hears in its own way")


class Network:
    """`listeners` by name; a new life of a process takes the place of the old one."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.faults = NO_FAULTS
        self.listeners: dict[tuple[str | int, ...], Listener] = {}
        self.carried = 0

    def join(self, process: Listener) -> None:
        self.listeners[process.name] = process

    def leave(self, process: Listener) -> None:
        if self.listeners.get(process.name) is process:
            del self.listeners[process.name]

    def send(self, sender: Process, to: tuple[str | int, ...], message: Message, call: Call | None = None) -> None:
        """To whoever has this name when it arrives."""
        listener = self.listeners.get(to)
        if listener is not None:
            self.carry(sender, listener, lambda: listener.hear(message, call))

    def request(
        self, sender: Process, to: tuple[str | int, ...], message: Message, timeout_s: float
    ) -> Promise[Message]:
        """The reply, or its error; Unavailable when there is nobody, or no answer in time."""
        call = Call(self, sender)
        if to in self.listeners:
            self.send(sender, to, message, call)
            silence = Unavailable(what=f"{to} (no answer)")
            self.clock.after(timeout_s, sender, lambda: call.promise.fail(silence))
        else:
            nobody = Unavailable(what=f"{to} (nobody is there)")
            self.clock.after(DELAY_S, sender, lambda: call.promise.fail(nobody))
        return call.promise

    def broadcast(self, sender: Process, kinds: tuple[str, ...], message: Message) -> None:
        """A heartbeat: to every listener of these kinds."""
        for listener in list(self.listeners.values()):
            if listener.name[0] in kinds:
                self.carry(sender, listener, lambda listener=listener: listener.hear(message, None))  # type: ignore[misc]

    def carry(self, sender: Process, listener: Process, deliver: Callable[[], None]) -> None:
        """Perhaps late, perhaps twice, perhaps not at all; else in the order in which this sender said it."""
        self.carried += 1
        clock, faults = self.clock, self.faults
        if sender.cut_until_s > clock.now or listener.cut_until_s > clock.now:
            return
        draw = clock.random.random
        arrives_s = max(clock.now + DELAY_S + JITTER_S * draw(), sender.heard_s.get(listener.name, 0.0))
        if faults is not NO_FAULTS:
            chance = draw()
            if chance < faults.lost:
                return
            if draw() < faults.doubled:
                clock.after(arrives_s - clock.now + faults.late_s_max * draw() * draw(), listener, deliver)
            if chance < faults.lost + faults.late:
                clock.after(arrives_s - clock.now + faults.late_s_max * draw(), listener, deliver)
                return
        sender.heard_s[listener.name] = arrives_s
        clock.after(arrives_s - clock.now, listener, deliver)
