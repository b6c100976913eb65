"""Owns one request's life in the shell: it places, starts, follows and leaves, and has what the client is to see.

`Stream.next()` is for the client's task, and a client may read slowly. What happens elsewhere (frames, routes, the
clock) calls the `on_…` methods: they change the state and let be said what follows at once, and wake that task.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import (
    InferenceLost,
    InternalError,
    ProtocolError,
    Unavailable,
    WhimbrelError,
)
from whimbrel.wire.messages import (
    AbortInference,
    CancelPlacement,
    FinishReason,
    Moved,
    PlaceModelReply,
    ResendTokens,
    Route,
    Stages,
    Tier,
    TokenEntry,
)

from services.router import metrics
from services.router.core.progress import Progress, Verdict
from services.router.core.requests import Due, Limits, Request, Switch, SwitchKind, is_instance_useless
from services.router.outputs import Item, Output
from services.router.specification import Specification

if TYPE_CHECKING:
    from services.router.dispatch import Dispatch

log = structlog.get_logger()

# A scheduler decides within milliseconds; without an answer in this time it is asked again.
PLACE_S_MAX = 2.0
# A worker answers at once whether it takes a request, even while it computes.
START_S_MAX = 2.0
RESEND_S_MAX = 1.0
# Repairs follow each other at this distance at least: what the first one brings back is on its way.
RESEND_GAP_S = 0.05


class Stream:
    """One request, from its acceptance to its end; `wake` is set when there may be something new to see."""

    def __init__(self, specification: Specification, dispatch: Dispatch, limits: Limits, wake: asyncio.Event) -> None:
        self.specification = specification
        self.request = Request(
            request_id=specification.request_id,
            model_id=specification.model_id,
            limits=limits,
            now=specification.arrived_at,
            may_fail_over=specification.may_fail_over,
        )
        self.progress = Progress(epoch=0, now=specification.arrived_at, top_logprobs=specification.top_logprobs)
        text = specification.text
        # A completion continues its prompt in the middle of a text; an assistant's turn begins a new one.
        decoder = text.decoder([] if specification.is_chat else specification.tokens)
        self.output = Output(
            decoder,
            specification.stops,
            text.settings.stop_tokens,
            arrived_at=specification.arrived_at,
            has_logprobs=specification.top_logprobs is not None,
        )
        self._dispatch = dispatch
        self._wake = wake
        self._is_accepted = False
        self._is_placing = False
        self._is_resending = False
        self._resent_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the client has been given all of it."""
        return self.output.finish_reason is not None

    def enter(self) -> None:
        """The request is accepted: from now on it hears what is told, until `leave` and its removal."""
        self._dispatch.add(self)
        self._advance(time.monotonic())

    def next(self) -> Item | None:
        """What the client is to see now; None while there is nothing new. Raises the typed error that ended it."""
        item = self.output.next(self.request, self.progress, time.monotonic())
        if self.output.is_stopped:
            self._end_early()
        if item is None and self.request.error is not None:
            raise self.request.error
        return item

    def leave(self) -> None:
        """Nobody wants it any more; nothing happens when it is over."""
        if not self.request.is_over:
            self._let_go()
            self.request.on_client_left()

    # What the rest of the router tells.

    def on_entry(self, entry: TokenEntry, now: float) -> Verdict:
        """Tokens arrived, or the same ones again."""
        position = self.progress.position
        verdict = self.progress.accept(entry, now) if self.request.is_running else Verdict.DUPLICATE
        metrics.ENTRIES.labels(verdict).inc()
        if verdict is Verdict.GAP:
            self._resend_soon(now)
        elif verdict is Verdict.BUSY:
            self.request.on_busy(now)
        elif verdict is Verdict.ACCEPTED:
            self._mark_accepted()
            if self.progress.position > position:
                self._on_tokens(now)
            if self.progress.finish is not None:
                self._on_finish(self.progress.finish, now)
            self._wake.set()
        return verdict

    def on_route(self, stages: Stages | None, now: float) -> None:
        """An instance of the model can be used."""
        if self.request.is_waiting:
            self.request.on_placed(stages, now)
            self._advance(now)

    def on_not_placed(self, error: WhimbrelError) -> None:
        """There will be no instance."""
        if self.request.is_waiting:
            log.info("placement_failed", request_id=self.request.request_id, code=error.code, reason=str(error))
            self._let_go()
            self.request.on_not_placed(error)
            self._wake.set()

    def on_failed(self, error: WhimbrelError) -> None:
        """The request cannot go on; nothing happens when it is over already."""
        if self.request.is_over:
            return
        self._let_go()
        self.request.on_error(error)
        self._wake.set()

    def on_instance_lost(self, reason: str, now: float, *, avoided_s: float | None = None) -> None:
        """Whatever ran the request is gone, or of no use."""
        if not self.request.is_running:
            return
        metrics.STARTS_LOST.inc()
        log.info("inference_lost", request_id=self.request.request_id, reason=reason, tokens=self.progress.position)
        self._leave_instance(is_aborted=True)
        switch = self.request.switch
        self.request.on_lost(reason, self.progress.position, now, avoided_s=avoided_s)
        self._try_on(switch, now)

    def on_doubt(self, now: float) -> None:
        """The instance is said to be gone, or messages may have been lost: ask those who know."""
        if self.request.is_running:
            self._resend_soon(now)
        else:
            self.request.ask_again()
            self._advance(now)

    def on_tick(self, now: float) -> None:
        """Time has passed."""
        match self.request.due(now):
            case Due.PLACE:
                self._advance(now)
            case Due.RESEND:
                self._resend_soon(now)
            case Due.FAIL_OVER:
                stalled_s = self.request.stalled_s
                # It gets as long to come round as it took to be noticed.
                self.on_instance_lost(f"its worker sent no token for {stalled_s:g} s", now, avoided_s=stalled_s)
            case WhimbrelError() as error:
                self.on_failed(error)
        if self.output.is_sign_due(now):
            self._wake.set()

    # Waiting and starting.

    def _advance(self, now: float) -> None:
        """While the request has no instance: start it on one, or see that one is being asked for."""
        if not self.request.is_waiting:
            return
        route = self._dispatch.routes.choose(self.request.model_id, self.request.usable_at(now))
        if route is not None:
            self._start(route, 0, now)
        elif self.request.due(now) is Due.PLACE:
            self._place_soon(now)

    def _start(self, route: Route, base_tokens: int, now: float) -> None:
        """Go on at an instance that has computed so many of the request's tokens already."""
        self.request.on_route(route, now)
        epoch = self.request.epoch
        self._is_accepted = self._is_resending = False
        self._dispatch.routes.acquire(route.instance_id)
        if epoch == 1 and not self.request.is_cold:
            metrics.OVERHEAD.observe(now - self.specification.arrived_at)
        tokens = len(self.specification.tokens) + self.progress.position
        self.progress.restart(epoch, tokens - base_tokens, now)
        self._dispatch.spawn(self._ask_start(route, epoch, base_tokens))

    async def _ask_start(self, route: Route, epoch: int, base_tokens: int) -> None:
        if not self._is_at(epoch):
            return
        output = self.progress.tokens
        message = self.specification.start(self._dispatch.speaker, route, epoch, output, base_tokens)
        try:
            await self._dispatch.ask_worker(route, message, START_S_MAX)
        except WhimbrelError as error:
            if not self._is_at(epoch) or not self.request.is_starting:
                return
            if isinstance(error, InferenceLost) and base_tokens:
                log.info("tokens_not_resumed", request_id=self.request.request_id, reason=str(error))
                self.progress.start.prefill_tokens += base_tokens
                await self._ask_start(route, epoch, 0)
            else:
                self._on_start_failed(route, error)
        else:
            if self._is_at(epoch):
                self._mark_accepted()

    def _is_at(self, epoch: int) -> bool:
        """Whether that start is still the one that counts."""
        return self.request.epoch == epoch and self.request.is_running

    def _on_start_failed(self, route: Route, error: WhimbrelError) -> None:
        log.info("start_refused", request_id=self.request.request_id, code=error.code, reason=str(error))
        if is_instance_useless(error):
            self._dispatch.routes.remove(route.instance_id)
        if not self.request.may_try_after(error):
            self.on_failed(error)
            return
        now = time.monotonic()
        self._leave_instance(is_aborted=isinstance(error, Unavailable))
        switch = self.request.switch
        self.request.on_refused(str(error), self.progress.position, now)
        self._try_on(switch, now)

    def _try_on(self, switch: Switch | None, now: float) -> None:
        """Elsewhere, after the instance was lost or refused; `switch` was going on before that."""
        if switch is not None and switch.kind is SwitchKind.MIGRATION and not self.request.is_over:
            metrics.SWITCHES.labels(switch.kind, "failed_over").inc()
        self._advance(now)
        self._wake.set()

    def _place_soon(self, now: float) -> None:
        if not self._is_placing:
            self._is_placing = True
            self.request.on_asked(now)
            self._dispatch.spawn(self._place())

    async def _place(self) -> None:
        request, epoch = self.request, self.request.epoch
        message = self.specification.place(self._dispatch.speaker, request, time.monotonic())
        try:
            if not request.is_waiting:
                return
            reply = await self._dispatch.ask_scheduler(message, PlaceModelReply, PLACE_S_MAX)
            if request.is_waiting and request.epoch == epoch:
                self._on_placed(reply, time.monotonic())
        except Unavailable as error:
            log.info("placement_unanswered", request_id=request.request_id, reason=str(error))
            request.on_unanswered(error)
        except WhimbrelError as error:
            if request.epoch == epoch:
                self.on_not_placed(error)
        finally:
            self._is_placing = False

    def _on_placed(self, reply: PlaceModelReply, now: float) -> None:
        if reply.route is None:
            self.request.on_waiting(reply.waiting_for, reply.remaining_s, now)
        else:
            self.request.on_placed(reply.stages, now)
            self._dispatch.learn_route(reply.route, reply.stages or Stages(tier=Tier.GPU))

    # Running.

    def _on_tokens(self, now: float) -> None:
        switch = self.request.switch
        self.request.on_tokens(now)
        if switch is not None:
            assert self.request.route is not None
            self._dispatch.tell_switched(self, switch, self.request.route.server_id)

    def _on_finish(self, entry: TokenEntry, now: float) -> None:
        match entry.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self._leave_instance(is_aborted=False)
                self.request.on_ended()
            case FinishReason.FAILED:
                self.on_failed(_error_of(entry))
            case FinishReason.MOVED if entry.moved is not None:
                self._on_moved(entry.moved, now)
            case FinishReason.PREEMPTED:
                self._on_preempted(now)
            case _:
                self.on_instance_lost("the worker ended the request", now)

    def _on_moved(self, moved: Moved, now: float) -> None:
        """G8, G10: it goes on at the destination, which has computed most of its tokens."""
        source, route = self.request.route, moved.route
        assert source is not None
        log.info("inference_moved", request_id=self.request.request_id, instance_id=route.instance_id)
        self._leave_instance(is_aborted=False)
        reason = f"from {source.server_id}/{source.slot} to {route.server_id}/{route.slot}"
        self.request.on_handed_over(reason, self.progress.position, now)
        self._dispatch.expect_route(route, now)
        # A start has a token at least to begin with: what the destination knows of them anyway, it does not mind.
        known = len(self.specification.tokens) + self.progress.position
        self._start(route, min(moved.base_tokens, known - 1), now)

    def _on_preempted(self, now: float) -> None:
        log.info("inference_preempted", request_id=self.request.request_id, tokens=self.progress.position)
        self._leave_instance(is_aborted=False)
        switch = self.request.switch
        self.request.on_preempted(self.progress.position, now)
        self._try_on(switch, now)

    def _resend_soon(self, now: float) -> None:
        self.request.on_heard(now)
        if not self._is_resending and now - self._resent_at >= RESEND_GAP_S:
            self._is_resending = True
            self._resent_at = now
            metrics.RESENDS.inc()
            assert self.request.route is not None
            self._dispatch.spawn(self._resend(self.request.route, self.request.epoch))

    async def _resend(self, route: Route, epoch: int) -> None:
        """Ask for everything from the next position on; an answer that there is nothing means that it is lost."""
        if not self._is_at(epoch):
            return
        message = ResendTokens(request_id=self.request.request_id, epoch=epoch, position=self.progress.position)
        reason: str | None = None
        try:
            await self._dispatch.ask_worker(route, message, RESEND_S_MAX)
        except Unavailable as error:
            # Silence of a worker whose route stands is for the heartbeats to judge; without a route it is the end.
            reason = None if route.instance_id in self._dispatch.routes else str(error)
        except WhimbrelError as error:
            reason = error.reason if isinstance(error, InferenceLost) else str(error)
        if self._is_at(epoch):
            self._is_resending = False
            if reason is not None:
                self.on_instance_lost(reason, time.monotonic())

    # Leaving.

    def _end_early(self) -> None:
        """A stop string was found here; nobody else knows of it."""
        if not self.request.is_over:
            self._let_go()
            self.request.on_ended()

    def _mark_accepted(self) -> None:
        if not self._is_accepted and self.request.route is not None:
            self._is_accepted = True
            self._dispatch.notes.tell_scheduler(self.specification.started(self._dispatch.speaker, self.request.route))

    def _leave_instance(self, *, is_aborted: bool) -> None:
        """Say good-bye to worker and scheduler; called while the request still knows its route."""
        route = self.request.route
        assert route is not None
        assert self.request.is_running
        self._dispatch.routes.release(route.instance_id)
        if is_aborted:
            abort = AbortInference(request_id=self.request.request_id, epoch=self.request.epoch)
            self._dispatch.notes.tell_worker((route.server_id, route.slot), abort)
        if self._is_accepted:
            self._dispatch.notes.tell_scheduler(
                self.specification.finished(self._dispatch.speaker, route, self.progress)
            )

    def _let_go(self) -> None:
        """Nobody is to work for this request any more."""
        if self.request.is_running:
            self._leave_instance(is_aborted=True)
        else:
            cancel = CancelPlacement(request_id=self.request.request_id, model_id=self.request.model_id)
            self._dispatch.notes.tell_scheduler(cancel)


def _error_of(entry: TokenEntry) -> WhimbrelError:
    """Why the worker failed; an error that cannot be understood must end the request all the same."""
    if entry.error is None:
        return InternalError(service="gpu_worker")
    try:
        return error_of(entry.error)
    except ProtocolError as broken:
        return broken
