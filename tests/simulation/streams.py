"""Owns one simulated request: the real cores of the router (requests, progress), driven as in its `streams.py`,
and a client who checks what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whimbrel.wire.codec import error_of, pack_tokens
from whimbrel.wire.errors import (
    Conflict,
    InferenceLost,
    InstanceGone,
    InternalError,
    LoadFailed,
    ModelNotFound,
    QueueFull,
    Unavailable,
    WhimbrelError,
)
from whimbrel.wire.messages import (
    AbortInference,
    CancelPlacement,
    FinishReason,
    InferenceFinished,
    InferenceStarted,
    Moved,
    PlaceModel,
    PlaceModelReply,
    ResendTokens,
    Route,
    Sampling,
    Stages,
    StartInference,
    Tier,
    TokenEntry,
)

from services.router.core.progress import Progress, Verdict
from services.router.core.request_states import RequestState
from services.router.core.requests import LOSSES_MAX, Due, Limits, Request
from tests.simulation.inferences import token_of
from tests.simulation.peers import SCHEDULER

if TYPE_CHECKING:
    from tests.simulation.routers import SimRouter

PLACE_S_MAX, START_S_MAX, RESEND_S_MAX = 2.0, 2.0, 1.0
RESEND_GAP_S = 0.05
PROMPT = (1, 2, 3, 4, 5)
LIMITS = Limits(cold_start_s=240.0, idle_s=60.0, unanswered_s=60.0, stalled_s=10.0)


class SimStream:
    """One request and its client: `got` is what the client was given."""

    def __init__(self, router: SimRouter, request_id: str, model_id: str, output_tokens: int) -> None:
        self.router = router
        self.output_tokens = output_tokens
        self.request = Request(request_id=request_id, model_id=model_id, limits=LIMITS, now=router.now)
        self.progress = Progress(epoch=0, now=router.now)
        self.got: list[int] = []
        self.ended_s: float | None = None
        self.losses = 0
        self._is_accepted = self._is_placing = self._is_resending = False
        self._resent_at = 0.0

    @property
    def is_over(self) -> bool:
        return self.request.is_over

    @property
    def is_done(self) -> bool:
        return self.request.state is RequestState.FINISHED

    def wake(self) -> None:
        """The client reads; one that has begun to gets all, unless the model is deleted or is lost too often."""
        request, fresh = self.request, self.progress.tokens[len(self.got) :]
        for token in fresh:
            expected = token_of(request.request_id, len(self.got))
            assert token == expected, f"{request.request_id}: token {len(self.got)} is {token}, not {expected}"
            self.got.append(token)
        assert len(self.got) == self.progress.position, f"{request.request_id}: tokens were taken back"
        assert len(self.got) <= self.output_tokens, f"{request.request_id}: more tokens than asked for"
        if self.is_done:
            assert len(self.got) == self.output_tokens, f"{request.request_id}: ended without all of its tokens"
        if self.got and request.error is not None and not isinstance(request.error, ModelNotFound | Conflict):
            assert self.losses >= LOSSES_MAX, f"{request.request_id}: {request.error}"
        if request.is_over:
            self.router.remove(self)

    def advance(self) -> None:
        """A request without an instance is started on one, or one is asked for."""
        request = self.request
        if not request.is_waiting:
            return
        route = self.router.routes.choose(request.model_id, request.usable_at(self.router.now))
        if route is not None:
            self._start(route, 0)
        elif request.due(self.router.now) is Due.PLACE:
            self._place_soon()

    # What the rest of the router tells.

    def on_entry(self, entry: TokenEntry) -> Verdict:
        now, position = self.router.now, self.progress.position
        verdict = self.progress.accept(entry, now) if self.request.is_running else Verdict.DUPLICATE
        if verdict is Verdict.GAP:
            self._resend_soon()
        elif verdict is Verdict.ACCEPTED:
            self._mark_accepted()
            if self.progress.position > position:
                self.request.on_tokens(now)
            if self.progress.finish is not None:
                self._on_finish(self.progress.finish)
            self.wake()
        return verdict

    def on_route(self, stages: Stages | None) -> None:
        if self.request.is_waiting:
            self.request.on_placed(stages, self.router.now)
            self.advance()

    def on_not_placed(self, error: WhimbrelError) -> None:
        if self.request.is_waiting:
            self.losses += isinstance(error, LoadFailed | Unavailable)
            self._let_go()
            self.request.on_not_placed(error)
            self.wake()

    def on_failed(self, error: WhimbrelError) -> None:
        if not self.request.is_over:
            self._let_go()
            self.request.on_error(error)
            self.wake()

    def on_instance_lost(self, reason: str, *, avoided_s: float | None = None) -> None:
        if self.request.is_running:
            self.losses += 1
            self._leave_instance(is_aborted=True)
            self.request.on_lost(reason, self.progress.position, self.router.now, avoided_s=avoided_s)
            self.advance()
            self.wake()

    def on_doubt(self) -> None:
        if self.request.is_running:
            self._resend_soon()
        else:
            self.request.ask_again()
            self.advance()

    def on_tick(self) -> None:
        match self.request.due(self.router.now):
            case Due.PLACE:
                self.advance()
            case Due.RESEND:
                self._resend_soon()
            case Due.FAIL_OVER:
                self.on_instance_lost("its worker stands still", avoided_s=LIMITS.stalled_s)
            case WhimbrelError() as error:
                self.on_failed(error)

    def leave(self) -> None:
        """The client goes."""
        if not self.request.is_over:
            self._let_go()
            self.request.on_client_left()
            self.router.remove(self)

    # Waiting and starting.

    def _start(self, route: Route, base_tokens: int) -> None:
        router, request = self.router, self.request
        request.on_route(route, router.now)
        self._is_accepted = self._is_resending = False
        router.routes.acquire(route.instance_id)
        tokens = len(PROMPT) + self.progress.position
        self.progress.restart(request.epoch, tokens - base_tokens, router.now)
        router.spawn(self._ask_start(route, request.epoch, base_tokens))

    async def _ask_start(self, route: Route, epoch: int, base_tokens: int) -> None:
        router, request = self.router, self.request
        message = StartInference(
            request_id=request.request_id,
            epoch=epoch,
            router_id=router.router_id,
            router_epoch=router.epoch,
            instance_id=route.instance_id,
            model_id=request.model_id,
            tokens=pack_tokens([*PROMPT, *self.progress.tokens][base_tokens:]),
            prompt_tokens=len(PROMPT),
            output_tokens_max=self.output_tokens,
            stop_tokens=(),
            sampling=Sampling(temperature=0.0),
            base_tokens=base_tokens,
        )
        try:
            await router.network.request(router, ("worker", route.server_id, route.slot), message, START_S_MAX)
        except WhimbrelError as error:
            if not self._is_at(epoch) or not request.is_starting:
                return
            if isinstance(error, InferenceLost) and base_tokens:
                self.progress.start.prefill_tokens += base_tokens
                await self._ask_start(route, epoch, 0)
            else:
                self._on_start_failed(route, error)
        else:
            if self._is_at(epoch):
                self._mark_accepted()

    def _is_at(self, epoch: int) -> bool:
        return self.request.epoch == epoch and self.request.is_running

    def _on_start_failed(self, route: Route, error: WhimbrelError) -> None:
        is_useless = isinstance(error, InstanceGone | Unavailable)
        if is_useless:
            self.router.routes.remove(route.instance_id)
        is_switching = self.request.state is RequestState.SWITCHING
        if is_useless or (is_switching and isinstance(error, InferenceLost | QueueFull)):
            self._leave_instance(is_aborted=isinstance(error, Unavailable))
            self.request.on_refused(str(error), self.progress.position, self.router.now)
            self.advance()
            self.wake()
        else:
            self.on_failed(error)

    def _place_soon(self) -> None:
        if not self._is_placing:
            self._is_placing = True
            self.request.on_asked(self.router.now)
            self.router.spawn(self._place())

    async def _place(self) -> None:
        router, request, epoch = self.router, self.request, self.request.epoch
        message = PlaceModel(
            request_id=request.request_id,
            model_id=request.model_id,
            router_id=router.router_id,
            waited_s=router.now - request.waiting_since,
        )
        try:
            reply = await router.network.request(router, SCHEDULER, message, PLACE_S_MAX)
        except WhimbrelError as error:
            self._is_placing = False
            if isinstance(error, Unavailable):
                request.on_unanswered(error)
            elif request.epoch == epoch:
                self.on_not_placed(error)
            return
        self._is_placing = False
        assert isinstance(reply, PlaceModelReply)
        if not request.is_waiting or request.epoch != epoch:
            return
        if reply.route is None:
            request.on_waiting(reply.waiting_for, reply.remaining_s, router.now)
        else:
            request.on_placed(reply.stages, router.now)
            router.learn_route(reply.route, reply.stages or Stages(tier=Tier.GPU))

    # Running.

    def _on_finish(self, entry: TokenEntry) -> None:
        match entry.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self._leave_instance(is_aborted=False)
                self.request.on_ended()
            case FinishReason.FAILED:
                self.on_failed(error_of(entry.error) if entry.error else InternalError(service="gpu_worker"))
            case FinishReason.MOVED if entry.moved is not None:
                self._on_moved(entry.moved)
            case FinishReason.PREEMPTED:
                self._leave_instance(is_aborted=False)
                self.request.on_preempted(self.progress.position, self.router.now)
                self.advance()
                self.wake()
            case _:
                self.on_instance_lost("the worker ended the request")

    def _on_moved(self, moved: Moved) -> None:
        self._leave_instance(is_aborted=False)
        self.request.on_handed_over("migration", self.progress.position, self.router.now)
        self.router.expect_route(moved.route)
        known = len(PROMPT) + self.progress.position
        self._start(moved.route, min(moved.base_tokens, known - 1))

    def _resend_soon(self) -> None:
        now = self.router.now
        self.request.on_heard(now)
        if not self._is_resending and now - self._resent_at >= RESEND_GAP_S:
            self._is_resending = True
            self._resent_at = now
            assert self.request.route is not None
            self.router.spawn(self._resend(self.request.route, self.request.epoch))

    async def _resend(self, route: Route, epoch: int) -> None:
        router = self.router
        message = ResendTokens(request_id=self.request.request_id, epoch=epoch, position=self.progress.position)
        reason: str | None = None
        try:
            await router.network.request(router, ("worker", route.server_id, route.slot), message, RESEND_S_MAX)
        except Unavailable as error:
            reason = None if route.instance_id in router.routes else str(error)
        except WhimbrelError as error:
            reason = error.reason if isinstance(error, InferenceLost) else str(error)
        if self._is_at(epoch):
            self._is_resending = False
            if reason is not None:
                self.on_instance_lost(reason)

    # Leaving.

    def _mark_accepted(self) -> None:
        route = self.request.route
        if not self._is_accepted and route is not None:
            self._is_accepted = True
            self.router.tell_scheduler(
                InferenceStarted(
                    request_id=self.request.request_id,
                    router_id=self.router.router_id,
                    instance_id=route.instance_id,
                    model_id=self.request.model_id,
                    prompt_tokens=len(PROMPT),
                )
            )

    def _leave_instance(self, *, is_aborted: bool) -> None:
        router, request, route, start = self.router, self.request, self.request.route, self.progress.start
        assert route is not None
        assert request.is_running
        router.routes.release(route.instance_id)
        if is_aborted:
            abort = AbortInference(request_id=request.request_id, epoch=request.epoch)
            router.network.send(router, ("worker", route.server_id, route.slot), abort)
        if self._is_accepted:
            router.tell_scheduler(
                InferenceFinished(
                    request_id=request.request_id,
                    router_id=router.router_id,
                    instance_id=route.instance_id,
                    model_id=request.model_id,
                    prompt_tokens=len(PROMPT),
                    output_tokens=start.output_tokens,
                    duration_s=start.duration_s,
                    token_s=start.token_s,
                    prefill_s=start.prefill_s or None if start.prefill_tokens == len(PROMPT) else None,
                )
            )

    def _let_go(self) -> None:
        if self.request.is_running:
            self._leave_instance(is_aborted=True)
        else:
            cancel = CancelPlacement(request_id=self.request.request_id, model_id=self.request.model_id)
            self.router.tell_scheduler(cancel)
