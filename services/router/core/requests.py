"""Owns the life of one request: which state it is in, what may happen next, and what is due by now.

What is legal stands in `request_states.py`; the methods here are the effects. The machine reads no clock: `now` is
monotonic seconds, and what depends on time is asked for with `due`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum, auto

from whimbrel.wire.errors import (
    ColdStartTimeout,
    InferenceLost,
    InstanceGone,
    LoadFailed,
    ModelTooLarge,
    QueueFull,
    RequestTimeout,
    Unavailable,
    WhimbrelError,
)
from whimbrel.wire.messages import Route, Stages, Tier, WaitStage

from services.router.core.request_states import (
    NEEDS_ROUTE,
    TRANSITIONS,
    IllegalTransition,
    RequestEvent,
    RequestState,
)

# At so many unplanned losses a request ends: enough for servers that go away under a long one, few enough that a
# request which kills workers does not go on to kill all of them. A handover is planned and does not count.
LOSSES_MAX = 4
# A request that goes on elsewhere may take so many times `stalled_s` to its next token: all others are computed again.
START_STALLED_TIMES = 3.0
# A waiting request is not durable in the scheduler, so it is repeated; once a second keeps a restart invisible.
PLACE_EVERY_S = 1.0
# An instance that refused or did not answer is left alone this long: the scheduler learns of its end about then.
REFUSED_S = 1.0
# A stream that is silent this long asks for what it may have missed; the answer costs the worker next to nothing.
RESEND_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things may take, seconds, each with its own typed error; a stream that stands still for `stalled_s` is
    not ended but goes on elsewhere."""

    cold_start_s: float
    idle_s: float
    unanswered_s: float
    stalled_s: float


class Due(StrEnum):
    """What the clock asks the shell to do for a request."""

    PLACE = auto()
    RESEND = auto()
    FAIL_OVER = auto()


class SwitchKind(StrEnum):
    MIGRATION = auto()
    PREEMPTION = auto()
    FAILOVER = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Why a request goes on elsewhere, since when, and how many tokens the client had been promised by then."""

    kind: SwitchKind
    reason: str
    began_at: float
    output_tokens: int


def is_instance_useless(error: WhimbrelError) -> bool:
    """Whether an instance that answers a start like this is gone or silent, for this request and for any other."""
    return isinstance(error, InstanceGone | Unavailable)


class Request:
    """The state of one request; `error` says why it failed, `epoch` counts its starts.

    `server_id` and `stages` are those of the start that gave the first token. `switch` is there from the beginning of a
    switch to the next token, and stays when the request ends before that. With `may_fail_over` False, a request that
    has begun ends with its instance.
    """

    def __init__(
        self, *, request_id: str, model_id: str, limits: Limits, now: float, may_fail_over: bool = True
    ) -> None:
        self.request_id = request_id
        self.model_id = model_id
        self.limits = limits
        self.may_fail_over = may_fail_over
        self.state = RequestState.WAITING
        self.created_at = now
        self.route: Route | None = None
        self.server_id = ""
        self.stages = Stages(tier=Tier.GPU)
        self.epoch = 0
        self.error: WhimbrelError | None = None
        self.switch: Switch | None = None
        self.waiting_for: WaitStage | None = None
        self.remaining_s: float | None = None
        self.is_cold = False
        self._losses = 0
        self._refused: dict[str, float] = {}
        self._asked_at: float | None = None
        self._unanswered: Unavailable | None = None
        self._answered_at = now
        self._heard_at = now
        self._token_at = now
        self._started_at = now
        self._forgiven_at = now
        self._busy_at = now

    @property
    def is_over(self) -> bool:
        return not TRANSITIONS[self.state]

    @property
    def is_running(self) -> bool:
        """Whether a worker was asked to run it and has not ended."""
        return not self.is_over and self.route is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it needs an instance: it has not begun, or can't go on."""
        return not self.is_over and self.route is None

    @property
    def is_starting(self) -> bool:
        """Whether a worker was asked to run it and has said nothing of it yet."""
        return self.is_running and self.state is not RequestState.STREAMING

    @property
    def waiting_since(self) -> float:
        """When it began to need an instance: not the arrival of one that ran meanwhile."""
        return self.created_at if self.switch is None else self.switch.began_at

    @property
    def stalled_s(self) -> float:
        """How long its next token may take; where it goes on elsewhere, all others are computed again first."""
        return self.limits.stalled_s * (START_STALLED_TIMES if self.state is RequestState.SWITCHING else 1.0)

    def may_try_after(self, error: WhimbrelError) -> bool:
        """Whether a worker's answer to its start leaves it to be tried elsewhere: one that is gone or silent does, any
        other answer is the request's. But one that has begun does not end because a worker is busy."""
        is_switching = self.state is RequestState.SWITCHING
        return is_instance_useless(error) or (is_switching and isinstance(error, InferenceLost | QueueFull))

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
        self.is_cold = self.is_cold or self.state is RequestState.WAITING

    def on_placed(self, stages: Stages | None, now: float) -> None:
        """The scheduler named a route; `stages` are this request's own only if it waited for them."""
        self._answered_at = now
        if self.is_cold and stages is not None and self.state is RequestState.WAITING:
            self.stages = stages

    def on_not_placed(self, error: WhimbrelError) -> None:
        """There will be no instance. A request that has begun asks again where that may help: a queue is not full for
        ever, the server that is large enough may come back, and a load that failed is one more loss."""
        if isinstance(error, LoadFailed | Unavailable):
            self._losses += 1
        is_passing = isinstance(error, LoadFailed | Unavailable | QueueFull | ModelTooLarge)
        if self.state is not RequestState.SWITCHING or not is_passing or self._losses >= LOSSES_MAX:
            self.on_error(error)

    def ask_again(self) -> None:
        """Something changed (a new scheduler, a new connection): the next look at the clock places again."""
        self._asked_at = None

    # Running.

    def on_route(self, route: Route, now: float) -> None:
        self._enter(RequestEvent.ROUTE_CHOSEN)
        self._started_at = now
        self.route = route
        self.epoch += 1
        self._heard_at = now

    def on_refused(self, reason: str, output_tokens: int, now: float) -> None:
        """The worker did not take the request; another instance, or this one a little later, may."""
        if self._may_try_on(output_tokens):
            self._leave_route(RequestEvent.START_REFUSED, reason, output_tokens, now, now + REFUSED_S)
        else:
            self.on_error(InferenceLost(reason=reason, output_tokens=output_tokens))

    def on_heard(self, now: float) -> None:
        """The worker gave a sign of this request, or was just asked for one."""
        self._heard_at = now

    def on_tokens(self, now: float) -> None:
        self._enter(RequestEvent.TOKENS_ARRIVED)
        self._heard_at = self._token_at = now
        self.switch = None
        self._note_server()

    def on_ended(self) -> None:
        """The last token was accepted, or a stop string was found."""
        self._enter(RequestEvent.OUTPUT_ENDED)
        self._note_server()

    def on_lost(self, reason: str, output_tokens: int, now: float, *, avoided_s: float | None = None) -> None:
        """The instance is gone, or of no use: go on elsewhere, unless that has happened too often or is not wanted."""
        self._losses += 1
        if self._losses >= LOSSES_MAX:
            reason = f"{reason}, the last of {self._losses} that were lost under it"
        if self._losses < LOSSES_MAX and self._may_try_on(output_tokens):
            until = now + (REFUSED_S if avoided_s is None else avoided_s)
            self._leave_route(RequestEvent.INSTANCE_LOST, reason, output_tokens, now, until)
        else:
            self.on_error(InferenceLost(reason=reason, output_tokens=output_tokens))

    def on_preempted(self, output_tokens: int, now: float) -> None:
        """The instance had to go for another model: start again elsewhere. That is nobody's fault, so it counts for
        nothing."""
        reason = "its instance had to go for another model"
        if self._may_try_on(output_tokens):
            until = now + REFUSED_S
            self._leave_route(RequestEvent.INSTANCE_LOST, reason, output_tokens, now, until, kind=SwitchKind.PREEMPTION)
        else:
            self.on_error(InferenceLost(reason=reason, output_tokens=output_tokens))

    def on_handed_over(self, reason: str, output_tokens: int, now: float) -> None:
        """The instance has stopped it, so that it goes on elsewhere (G8); a route is to follow."""
        self._enter(RequestEvent.HANDED_OVER)
        self.route = None
        if self.switch is None:
            self.switch = Switch(kind=SwitchKind.MIGRATION, reason=reason, began_at=now, output_tokens=output_tokens)

    def on_error(self, error: WhimbrelError) -> None:
        self._enter(RequestEvent.ERROR_RAISED)
        self.error = error

    def on_client_left(self) -> None:
        self._enter(RequestEvent.CLIENT_LEFT)

    # Time.

    def forgive(self, now: float) -> None:
        """We were the ones who could not hear: no worker stands still because of that."""
        self._forgiven_at = now

    def on_busy(self, now: float) -> None:
        """Its worker has no token yet but computes: this one's prompt, or others' answers. It is neither cold nor
        stalled."""
        self._busy_at = now

    def due(self, now: float) -> Due | WhimbrelError | None:
        """What is to be done now: place, ask for a resend or fail over, or the error of the limit that has passed."""
        match self.state:
            case RequestState.WAITING:
                return self._waiting_error(now) or self._place_due(now)
            case RequestState.STARTING if now - max(self.created_at, self._busy_at) >= self.limits.cold_start_s:
                return self._cold_start_timeout("first token", now)
            case RequestState.STREAMING if now - self._token_at >= self.limits.idle_s:
                return RequestTimeout(waited_s=now - self._token_at)
            case RequestState.STREAMING if self.may_fail_over and self._is_stalled(now, self._token_at):
                return Due.FAIL_OVER
            case RequestState.SWITCHING if now - max(self.waiting_since, self._busy_at) >= self.limits.cold_start_s:
                return self._switch_error(now)
            case RequestState.SWITCHING if (
                self.is_running and self.may_fail_over and self._is_stalled(now, max(self._started_at, self._busy_at))
            ):
                return Due.FAIL_OVER
        if self.is_waiting:
            return self._place_due(now)
        if self.is_running and now - self._heard_at >= RESEND_AFTER_S:
            return Due.RESEND
        return None

    def _waiting_error(self, now: float) -> WhimbrelError | None:
        if now - max(self.created_at, self._busy_at) >= self.limits.cold_start_s:
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

    def _is_stalled(self, now: float, since: float) -> bool:
        return now - max(since, self._forgiven_at) >= self.stalled_s

    def _switch_error(self, now: float) -> InferenceLost:
        """Nobody went on with it in time, although the scheduler may have been silent for some of that."""
        assert self.switch is not None
        stage = "first token" if self.route is not None else str(self.waiting_for or "placement")
        reason = (
            f"{self.switch.reason}, and nobody could go on with it for {now - self.switch.began_at:.0f} s; "
            f"stage: {stage}; free a slot, or raise WB_COLD_START_S_MAX"
        )
        return InferenceLost(reason=reason, output_tokens=self.switch.output_tokens)

    # Details.

    def _may_try_on(self, output_tokens: int) -> bool:
        """While the client was promised nothing, it can't tell one instance from another."""
        return self.may_fail_over or output_tokens == 0

    def _leave_route(
        self,
        event: RequestEvent,
        reason: str,
        output_tokens: int,
        now: float,
        refused_until: float,
        kind: SwitchKind = SwitchKind.FAILOVER,
    ) -> None:
        self._enter(event)
        assert self.route is not None
        self._refused[self.route.instance_id] = refused_until
        self.route = None
        self.waiting_for, self.remaining_s = None, None
        self._asked_at = None
        self._answered_at = now
        if self.state is RequestState.WAITING:
            self.stages = Stages(tier=Tier.GPU)
        elif self.switch is None or self.switch.kind is SwitchKind.MIGRATION:
            self.switch = Switch(
                kind=kind,
                reason=reason,
                began_at=now if self.switch is None else self.switch.began_at,
                output_tokens=output_tokens,
            )

    def _note_server(self) -> None:
        if not self.server_id and self.route is not None:
            self.server_id = self.route.server_id

    def _enter(self, event: RequestEvent) -> None:
        """The only writer of the state."""
        row = TRANSITIONS[self.state]
        has_route = self.route is not None
        if event not in row or NEEDS_ROUTE.get(event, has_route) is not has_route:
            raise IllegalTransition(self.state, event, has_route=has_route)
        self.state = row[event]
