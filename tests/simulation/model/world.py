"""Owns the state of the whole cluster and what can happen in it: every delivery, every step of an engine, every tick,
and every fault.

Messages of one sender to one receiver come in their order; a fault takes one out of it. Time stands still while there
is anything else to do, and then passes by a second: timers are long beside what messages and steps take. What a fault
has delayed may come at any time later on, and does come before `late_ticks_max` more of these seconds have passed.

Not modelled: heartbeats that are lost, late or between seconds; a leader that goes on as one after another one was
elected; engines that hang; skeletons and transfers of a load, which takes one step; agents and routers that die.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.messages import CancelLoad, LoadModel, MigrateModel, PlaceModel, ResendTokens, StartInference

from services.scheduler.core.migration import GAP_TOKENS_MIN
from tests.simulation.model.answers import (
    OPERATOR,
    ROUTER,
    SCHEDULER,
    SERVERS,
    Call,
    PlaceAnswered,
    ResendAnswered,
    StartAnswered,
)
from tests.simulation.model.local import Done, Messages, States
from tests.simulation.model.routers import ModelRouter
from tests.simulation.model.schedulers import SOURCE_ID, ModelScheduler, first_records
from tests.simulation.model.workers import ModelWorker

TICK_S = 1.0
#: By then every time-out has passed, and every request and migration has ended.
HORIZON_S = 60.0
#: After the end, what was lost is still repaired: heartbeats, and promises that time out.
REPAIR_TICKS = 6

Channel = tuple[str, str]
#: Messages in flight, each channel's in their order.
Flight = tuple[tuple[Channel, tuple[int, ...]], ...]


class State(NamedTuple):
    """Of the whole cluster: the numbers of its processes' states and of what is in flight, messages that were delayed,
    how many faults may still happen, for how long delayed messages have been waited for, the time, and how many detours
    may still be made."""

    a: int
    b: int
    router: int
    scheduler: int
    flight: int = 0
    late: tuple[tuple[str, int], ...] = ()
    faults: int = 0
    late_ticks: int = 0
    now: float = 0.0
    detours: int = 0


class Move(NamedTuple):
    """Something that can happen, and what then is; or why that must not be."""

    what: str
    args: tuple[Any, ...]
    state: State
    failure: str | None = None


class Bounds(NamedTuple):
    """What is explored: `tokens` are the output tokens of each request. With `detours`, so many messages overtake those
    of other channels, which come in a fixed order otherwise; None: in every order. An engine is as fast or slow as it
    likes, always. `gap_tokens_min` takes the place of the scheduler's own; with `seconds_per_token` of a prefill it
    decides how often rounds are made.
    """

    tokens: tuple[int, ...] = (2, 3)
    faults: int = 1
    detours: int | None = None
    late_ticks_max: int = 5
    gap_tokens_min: int = GAP_TOKENS_MIN
    seconds_per_token: float = 0.001


_HEAR = {"a": ModelWorker.hear, "b": ModelWorker.hear, ROUTER: ModelRouter.hear, SCHEDULER: ModelScheduler.hear}
_FIELDS = {"a": 0, "b": 1, ROUTER: 2, SCHEDULER: 3}
_FLIGHT = State._fields.index("flight")


class World:
    """`moves` of a state are all that can happen in it. The same bounds lead to the same states, always."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.messages = Messages()
        self.states = States(self.messages)
        self._flights: list[Flight] = [()]
        self._flight_numbers: dict[Flight, int] = {(): 0}

    def first(self) -> State:
        """Both requests run on server a, or wait there, and an operator wants the instance on server b."""
        processes = (
            ModelWorker("a", SOURCE_ID),
            ModelWorker("b", None),
            ModelRouter(),
            ModelScheduler(first_records(seconds_per_token=self.bounds.seconds_per_token)),
        )
        state = State(*(self.states.number(process) for process in processes))
        state = self._must(self._tick(state))
        state = self._must(self._drained(state))
        for number, tokens in enumerate(self.bounds.tokens):
            done = self.states.after(state.router, ModelRouter.request, f"q{number}", tokens, state.now)
            state = self._must(self._drained(self._must(self._taken(state, ROUTER, done))))
        move = Call(message=MigrateModel(what=SOURCE_ID, server_id="b"), reply_to=OPERATOR)
        sent = Done(state.router, ((SCHEDULER, self.messages.number(move)),))
        state = self._must(self._taken(state, OPERATOR, sent))
        return state._replace(faults=self.bounds.faults, detours=self.bounds.detours or 0)

    def moves(self, state: State) -> Iterator[Move]:
        is_quiet, detours = True, state.detours
        is_bound = self.bounds.detours is not None
        for number, (channel, flying) in enumerate(self._flights[state.flight]):
            is_quiet = False
            if number and is_bound:
                if not state.detours:
                    break
                if number == 1:
                    state = state._replace(detours=state.detours - 1)
            taken = self._without(state, channel)
            yield self._move("deliver", (*channel, flying[0]), self._delivered(taken, channel[1], flying[0]))
            if state.faults:
                yield from self._message_faults(state._replace(faults=state.faults - 1), channel, flying[0])
        state = state._replace(detours=detours)
        for each in dict.fromkeys(state.late):
            rest = list(state.late)
            rest.remove(each)
            taken = state._replace(late=tuple(rest), late_ticks=state.late_ticks if rest else 0)
            yield self._move("deliver late", each, self._delivered(taken, *each))
        for server_id in SERVERS:
            if self._fact(state, server_id, _may_step):
                is_quiet = False
                yield self._move("step", (server_id,), self._act(state, server_id, ModelWorker.step, state.now))
        if state.faults:
            yield from self._process_faults(state._replace(faults=state.faults - 1))
        if is_quiet and not self.is_over(state) and (not state.late or state.late_ticks < self.bounds.late_ticks_max):
            if state.now > HORIZON_S:
                yield Move("wait for ever", (), state, "time went on, and not everything has ended")
            else:
                yield self._move("tick", (), self._tick(state))

    def is_over(self, state: State) -> bool:
        """Whether nothing is left that could happen but faults."""
        return (
            not state.flight
            and not state.late
            and not any(self._fact(state, server_id, _may_step) for server_id in SERVERS)
            and self._fact(state, ROUTER, _is_over)
            and self._fact(state, SCHEDULER, _is_over)
            and all(self._fact(state, server_id, _is_alive) for server_id in SERVERS)
        )

    def broken(self, state: State) -> str | None:
        """Which invariant does not hold of the cluster as a whole; those of its processes are theirs."""
        runs: dict[tuple[str, int], str] = {}
        for server_id in SERVERS:
            for start in self._fact(state, server_id, _running):
                if start in runs:
                    return f"start {start[1]} of {start[0]} runs on {runs[start]} and on {server_id}"
                runs[start] = server_id
        return None

    def broken_at_the_end(self, state: State) -> str | None:
        """The same of a state that `is_over`, once what was lost has been repaired."""
        for _ in range(REPAIR_TICKS):
            for following in (self._tick, self._drained):
                state, failure = following(state)
                if failure is not None:
                    return failure
        try:
            self._fact(state, ROUTER, ModelRouter.check_end)
            self._fact(state, SCHEDULER, ModelScheduler.check_end)
            serving = self._fact(state, SCHEDULER, _serving)
            for server_id in SERVERS:
                self._fact(state, server_id, _check_end, serving.get(server_id))
        except AssertionError as failure:
            return str(failure)
        return None

    def told(self, what: str, args: tuple[Any, ...]) -> str:
        """As people read it."""
        words = [str(self.messages[each]) if isinstance(each, int) else str(each) for each in args]
        return " ".join([f"{what}:" if words else what, *words])

    # Faults.

    def _message_faults(self, state: State, channel: Channel, number: int) -> Iterator[Move]:
        args = (*channel, number)
        rest = self._without(state, channel)
        late = tuple(sorted((*state.late, (channel[1], number))))
        yield Move("lose", args, rest)
        yield Move("delay", args, rest._replace(late=late))
        yield self._move("deliver, and again", args, self._delivered(rest._replace(late=late), channel[1], number))
        if channel[1] == SCHEDULER and self._fact(state, SCHEDULER, _is_alive):
            taken = self._heard(rest, SCHEDULER, ModelScheduler.hear_and_die, number)
            yield self._move("deliver, leader dies before it speaks", args, taken)

    def _process_faults(self, state: State) -> Iterator[Move]:
        for server_id in SERVERS:
            if self._fact(state, server_id, _is_alive):
                yield self._move("kill", (server_id,), self._act(state, server_id, ModelWorker.kill, state.now))
            if self._fact(state, server_id, _is_resuming):
                yield self._move("fail", (server_id,), self._act(state, server_id, ModelWorker.fail, state.now))
        if self._fact(state, SCHEDULER, _is_alive):
            yield self._move("kill", (SCHEDULER,), self._act(state, SCHEDULER, ModelScheduler.kill, state.now))

    # What happens.

    def _delivered(self, state: State, to: str, number: int) -> tuple[State, str | None]:
        """A message that nobody is there for is lost, and a call is answered so by the bus."""
        message = self.messages[number]
        is_for_agent = isinstance(message, LoadModel | CancelLoad)
        if is_for_agent or self._fact(state, to, _is_alive):
            return self._heard(state, to, _HEAR[to], number)
        answer = _unanswered(message)
        if answer is None:
            return state, None
        return self._taken(state, to, Done(state[_FIELDS[to]], ((ROUTER, self.messages.number(answer)),)))

    def _tick(self, state: State) -> tuple[State, str | None]:
        """A second passes. Everybody hears everybody's heartbeats; dead workers and leaders come back."""
        now = state.now + TICK_S
        state = state._replace(now=now, late_ticks=state.late_ticks + 1 if state.late else 0)
        state, failure = self._act(state, SCHEDULER, ModelScheduler.take_over, now)
        epoch = self._fact(state, SCHEDULER, _epoch)
        for server_id in SERVERS:
            if failure is None:
                state, failure = self._act(state, server_id, ModelWorker.tick, now, epoch)
        beats = tuple(self._fact(state, server_id, ModelWorker.heartbeat) for server_id in SERVERS)
        agents = tuple(self._fact(state, server_id, ModelWorker.agent_heartbeat) for server_id in SERVERS)
        if failure is None:
            state, failure = self._act(state, ROUTER, ModelRouter.tick, now, epoch, beats)
        if failure is None:
            heartbeats = (*agents, *beats, self._fact(state, ROUTER, ModelRouter.heartbeat, now))
            state, failure = self._act(state, SCHEDULER, ModelScheduler.tick, now, heartbeats)
        return state, failure

    def _drained(self, state: State) -> tuple[State, str | None]:
        """Everything in flight is delivered; engines stand still."""
        failure = None
        while state.flight and failure is None:
            channel, flying = self._flights[state.flight][0]
            state, failure = self._delivered(self._without(state, channel), channel[1], flying[0])
        return state, failure

    def _act(self, state: State, name: str, act: Any, *args: Any) -> tuple[State, str | None]:
        return self._taken(state, name, self.states.after(state[_FIELDS[name]], act, *args))

    def _heard(self, state: State, name: str, act: Any, number: int) -> tuple[State, str | None]:
        return self._taken(state, name, self.states.after_hearing(state[_FIELDS[name]], act, number, state.now))

    def _taken(self, state: State, name: str, done: Done) -> tuple[State, str | None]:
        if done.failure is not None:
            return state, done.failure
        flight = state.flight
        if done.sent:
            flying = dict(self._flights[flight])
            for to, number in done.sent:
                flying[name, to] = (*flying.get((name, to), ()), number)
            flight = self._flight(flying)
        fields = list(state)
        fields[_FLIGHT] = flight
        if name in _FIELDS:
            fields[_FIELDS[name]] = done.state
        return State(*fields), None

    def _without(self, state: State, channel: Channel) -> State:
        flying = dict(self._flights[state.flight])
        rest = flying.pop(channel)[1:]
        if rest:
            flying[channel] = rest
        fields = list(state)
        fields[_FLIGHT] = self._flight(flying)
        return State(*fields)

    def _flight(self, flying: dict[Channel, tuple[int, ...]]) -> int:
        """Its number."""
        flight = tuple(sorted(flying.items()))
        number = self._flight_numbers.setdefault(flight, len(self._flights))
        if number == len(self._flights):
            self._flights.append(flight)
        return number

    def _fact(self, state: State, name: str, read: Any, *args: Any) -> Any:
        return self.states.fact(state[_FIELDS[name]], read, *args)

    @staticmethod
    def _move(what: str, args: tuple[Any, ...], taken: tuple[State, str | None]) -> Move:
        return Move(what, args, *taken)

    @staticmethod
    def _must(taken: tuple[State, str | None]) -> State:
        state, failure = taken
        assert failure is None, failure
        return state


def _unanswered(message: Any) -> Any:
    """What the bus says to a caller when nobody listens; None to whoever does not wait."""
    if not isinstance(message, Call):
        return None
    error = error_reply(Unavailable(what="whoever it was for"))
    match message.message:
        case StartInference(request_id=request_id, epoch=epoch, base_tokens=base_tokens):
            return StartAnswered(request_id=request_id, epoch=epoch, base_tokens=base_tokens, error=error)
        case ResendTokens(request_id=request_id, epoch=epoch):
            return ResendAnswered(request_id=request_id, epoch=epoch, error=error)
        case PlaceModel(request_id=request_id):
            return PlaceAnswered(request_id=request_id, epoch=int(message.reply_to.partition("/")[2]), error=error)
    return None


# What is read of single processes.


def _may_step(process: Any) -> bool:
    return bool(process.may_step)


def _is_resuming(process: Any) -> bool:
    return bool(process.is_resuming)


def _is_alive(process: Any) -> bool:
    return bool(getattr(process, "is_alive", True))


def _is_over(process: Any) -> bool:
    return bool(process.is_over)


def _running(process: Any) -> list[tuple[str, int]]:
    return list(process.running())


def _epoch(process: Any) -> int:
    return int(process.epoch)


def _serving(process: ModelScheduler) -> dict[str, str]:
    """The instance on each server, as the scheduler has it."""
    assert process.controller is not None
    instances = process.controller.cluster.instances.values()
    return {instance.record.server_id: instance.instance_id for instance in instances}


def _check_end(process: ModelWorker, instance_id: str | None) -> None:
    """A worker serves what the scheduler takes it for, and has nothing else."""
    assert process.instance_id == instance_id, f"{process.server_id} has {process.instance_id}, not {instance_id}"
    assert not process.running(), f"{process.server_id} still runs {process.running()}"
    if instance_id is not None:
        process.check_serving(instance_id)
