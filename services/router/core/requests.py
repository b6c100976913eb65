"""Owns the life of one request: which state it is in, what may happen next, and what is due by now.

The table below is the whole truth about legality; the methods are its effects. A request is WAITING while it has no
instance, STARTING once a worker was asked to run it, STREAMING from its first token on. Before the first token nothing
was promised to the client, so losing the instance leads back to WAITING; afterwards it ends the request. The machine
reads no clock: `now` is monotonic seconds, and what depends on time is asked for with `due`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum, auto

from whimbrel.wire.errors import ColdStartTimeout, InferenceLost, RequestTimeout, Unavailable, WhimbrelError
from whimbrel.wire.messages import Route, Stages, Tier, WaitStage


class RequestState(StrEnum):
    WAITING = auto()
    STARTING = auto()
    STREAMING = auto()
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class RequestEvent(StrEnum):
    """What can happen to a request, in the past tense of a log line."""

    ROUTE_CHOSEN = auto()
    START_REFUSED = auto()
    TOKENS_ARRIVED = auto()
    OUTPUT_ENDED = auto()
    INSTANCE_LOST = auto()
    ERROR_RAISED = auto()
    CLIENT_LEFT = auto()


_S, _E = RequestState, RequestEvent

TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    _S.WAITING: {
        _E.ROUTE_CHOSEN: _S.STARTING,
        _E.ERROR_RAISED: _S.FAILED,
        _E.CLIENT_LEFT: _S.CANCELLED,
    },
    _S.STARTING: {
        _E.START_REFUSED: _S.WAITING,
        _E.TOKENS_ARRIVED: _S.STREAMING,
        _E.OUTPUT_ENDED: _S.FINISHED,
        _E.INSTANCE_LOST: _S.WAITING,
        _E.ERROR_RAISED: _S.FAILED,
        _E.CLIENT_LEFT: _S.CANCELLED,
    },
    _S.STREAMING: {
        _E.TOKENS_ARRIVED: _S.STREAMING,
        _E.OUTPUT_ENDED: _S.FINISHED,
        _E.INSTANCE_LOST: _S.FAILED,
        _E.ERROR_RAISED: _S.FAILED,
        _E.CLIENT_LEFT: _S.CANCELLED,
    },
    _S.FINISHED: {},
    _S.FAILED: {},
    _S.CANCELLED: {},
}  # fmt: skip

# A request whose instance dies under it is started this often in all: enough for a server that goes away, few enough
# that a request which kills workers does not go on to kill all of them.
STARTS_LOST_MAX = 3
# A waiting request is not durable in the scheduler, so it is repeated; once a second keeps a restart invisible.
PLACE_EVERY_S = 1.0
# An instance that refused or did not answer is left alone this long: the scheduler learns of its end about then.
REFUSED_S = 1.0
# A stream that is silent this long asks for what it may have missed; the answer costs the worker next to nothing.
RESEND_AFTER_S = 1.0


class IllegalTransition(Exception):
    """The shell let an event through that cannot happen in this state: a programmer error."""

    def __init__(self, state: RequestState, event: RequestEvent) -> None:
        super().__init__(f"{event} cannot happen to a request that is {state}")
        self.state = state
        self.event = event


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things may take, seconds, each with its own typed error."""

    cold_start_s: float
    idle_s: float
    unanswered_s: float


class Due(StrEnum):
    """What the clock asks the shell to do for a request."""

    PLACE = auto()
    RESEND = auto()


class Request:
    """The state of one request; `error` says why it failed, `epoch` counts its starts."""

    def __init__(self, *, request_id: str, model_id: str, limits: Limits, now: float) -> None:
        self.request_id = request_id
        self.model_id = model_id
        self.limits = limits
        self.state = RequestState.WAITING
        self.created_at = now
        self.route: Route | None = None
        self.stages = Stages(tier=Tier.GPU)
        self.epoch = 0
        self.error: WhimbrelError | None = None
        self.waiting_for: WaitStage | None = None
        self.remaining_s: float | None = None
        self.is_cold = False
        self._starts_lost = 0
        self._refused: dict[str, float] = {}
        self._asked_at: float | None = None
        self._unanswered: Unavailable | None = None
        self._answered_at = now
        self._heard_at = now
        self._token_at = now

    @property
    def is_over(self) -> bool:
        return not TRANSITIONS[self.state]

    @property
    def is_running(self) -> bool:
        """Whether a worker was asked to run it and has not ended."""
        return self.state in (RequestState.STARTING, RequestState.STREAMING)

    # Placement.

    def usable_at(self, now: float) -> Callable[[str], bool]:
        """Whether an instance may be tried: it did not refuse this request a moment ago."""
        return lambda instance_id: now >= self._refused.get(instance_id, now)

    def on_asked(self, now: float) -> None:
        """PlaceModel is being sent."""
        self._asked_at = now

    def on_unanswered(self, error: Unavailable) -> None:
        """No answer, or one that says to come again: why, should that go on for too long."""
        self._unanswered = error

    def on_waiting(self, stage: WaitStage | None, remaining_s: float | None, now: float) -> None:
        """The scheduler answered that something has to happen first."""
        self._answered_at = now
        self.waiting_for, self.remaining_s = stage, remaining_s
        self.is_cold = True

    def on_placed(self, stages: Stages | None, now: float) -> None:
        """The scheduler named a route; `stages` are this request's own only if it waited for them."""
        self._answered_at = now
        if self.is_cold and stages is not None:
            self.stages = stages

    def ask_again(self) -> None:
        """Something changed (a new scheduler, a new connection): the next look at the clock places again."""
        self._asked_at = None

    # Running.

    def on_route(self, route: Route, now: float) -> None:
        self._enter(RequestEvent.ROUTE_CHOSEN)
        self.route = route
        self.epoch += 1
        self._heard_at = now

    def on_refused(self, now: float) -> None:
        """The worker did not take the request; another instance, or this one a little later, may."""
        self._back_to_waiting(RequestEvent.START_REFUSED, now)

    def on_heard(self, now: float) -> None:
        """The worker gave a sign of this request, or was just asked for one."""
        self._heard_at = now

    def on_tokens(self, now: float) -> None:
        self._enter(RequestEvent.TOKENS_ARRIVED)
        self._heard_at = self._token_at = now

    def on_ended(self) -> None:
        """The last token was accepted, or a stop string was found."""
        self._enter(RequestEvent.OUTPUT_ENDED)

    def on_lost(self, reason: str, output_tokens: int, now: float) -> None:
        """The instance is gone: wait for another one while no token came, fail otherwise."""
        error = InferenceLost(reason=reason, output_tokens=output_tokens)
        if self.state is RequestState.STARTING and self._starts_lost + 1 >= STARTS_LOST_MAX:
            self.on_error(error)
        elif self.state is RequestState.STARTING:
            self._starts_lost += 1
            self._back_to_waiting(RequestEvent.INSTANCE_LOST, now)
        else:
            self._enter(RequestEvent.INSTANCE_LOST)
            self.error = error

    def on_error(self, error: WhimbrelError) -> None:
        self._enter(RequestEvent.ERROR_RAISED)
        self.error = error

    def on_client_left(self) -> None:
        self._enter(RequestEvent.CLIENT_LEFT)

    # Time.

    def due(self, now: float) -> Due | WhimbrelError | None:
        """What is to be done now: place or ask for a resend, or the error of the limit that has passed."""
        match self.state:
            case RequestState.WAITING:
                return self._waiting_error(now) or self._place_due(now)
            case RequestState.STARTING if now - self.created_at >= self.limits.cold_start_s:
                return self._cold_start_timeout("first token", now)
            case RequestState.STREAMING if now - self._token_at >= self.limits.idle_s:
                return RequestTimeout(waited_s=now - self._token_at)
            case RequestState.STARTING | RequestState.STREAMING if now - self._heard_at >= RESEND_AFTER_S:
                return Due.RESEND
        return None

    def _waiting_error(self, now: float) -> WhimbrelError | None:
        if now - self.created_at >= self.limits.cold_start_s:
            return self._cold_start_timeout(str(self.waiting_for or "placement"), now)
        if now - self._answered_at >= self.limits.unanswered_s:
            return self._unanswered or Unavailable(what="the scheduler")
        return None

    def _place_due(self, now: float) -> Due | None:
        if self._asked_at is None or now - self._asked_at >= PLACE_EVERY_S:
            return Due.PLACE
        return None

    def _cold_start_timeout(self, stage: str, now: float) -> ColdStartTimeout:
        return ColdStartTimeout(model_id=self.model_id, waited_s=now - self.created_at, stage=stage)

    def _back_to_waiting(self, event: RequestEvent, now: float) -> None:
        self._enter(event)
        assert self.route is not None
        self._refused[self.route.instance_id] = now + REFUSED_S
        self.route = None
        self.stages = Stages(tier=Tier.GPU)
        self.waiting_for, self.remaining_s = None, None
        self._asked_at = None
        self._answered_at = now

    def _enter(self, event: RequestEvent) -> None:
        """The only writer of the state."""
        row = TRANSITIONS[self.state]
        if event not in row:
            raise IllegalTransition(self.state, event)
        self.state = row[event]
