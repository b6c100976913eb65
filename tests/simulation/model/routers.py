"""Owns the modelled router and its clients: the real cores of requests, progress, routes and workers, driven as the
service's shell drives them. Its clients check every token as they get it."""

from __future__ import annotations

from typing import NamedTuple

from whimbrel.chassis.heartbeat import HEARTBEAT_S, HEARTBEATS_MISSED_MAX
from whimbrel.wire.codec import error_of, error_reply, pack_tokens
from whimbrel.wire.errors import (
    InferenceLost,
    InstanceGone,
    InternalError,
    LoadFailed,
    QueueFull,
    Unavailable,
    WhimbrelError,
)
from whimbrel.wire.messages import (
    AbortInference,
    FinishReason,
    GetRoutes,
    InferenceFinished,
    InferenceStarted,
    InstanceActivity,
    Message,
    Moved,
    PlacementFailed,
    PlaceModel,
    ResendTokens,
    Route,
    RouteAdded,
    RouteRemoved,
    RouterHeartbeat,
    Sampling,
    StartInference,
    TokenEntry,
    TokenFrame,
    WorkerHeartbeat,
)

from services.router.core.progress import Progress, Verdict
from services.router.core.request_states import RequestState
from services.router.core.requests import LOSSES_MAX, Due, Limits, Request
from services.router.core.routes import RouteTable
from services.router.core.workers import WorkerWatch
from tests.simulation.model.answers import (
    CALL_S_MAX,
    MODEL_ID,
    PROMPT,
    RESEND_S_MAX,
    ROUTER,
    SCHEDULER,
    Call,
    PlaceAnswered,
    ResendAnswered,
    RoutesAnswered,
    Sent,
    StartAnswered,
    undisturbed,
)

LIMITS = Limits(cold_start_s=240.0, idle_s=60.0, unanswered_s=60.0, stalled_s=10.0)
ABORT_EVERY_S = 1.0


class Asked(NamedTuple):
    """A call that is not answered yet."""

    asked_s: float
    base_tokens: int = 0


class ModelStream:
    """One request; `expected` is what its client is to get."""

    def __init__(self, request_id: str, output_tokens: int, now: float) -> None:
        self.request = Request(request_id=request_id, model_id=MODEL_ID, limits=LIMITS, now=now)
        self.progress = Progress(epoch=0, now=now)
        self.expected = undisturbed(request_id, output_tokens)
        self.got = 0
        self.losses = 0
        self.is_accepted = False


class ModelRouter:
    """`calls` are those that wait for an answer, by what they ask and for whom."""

    def __init__(self) -> None:
        self.epoch = 1
        self.routes = RouteTable()
        self.workers = WorkerWatch(HEARTBEAT_S * HEARTBEATS_MISSED_MAX)
        self.streams: dict[str, ModelStream] = {}
        self.calls: dict[tuple[str, str, int], Asked] = {}
        self.out: list[Sent] = []
        self._strays: dict[str, float] = {}
        self._scheduler_epoch = 1
        self._are_routes_wanted = False

    # What the model checker does.

    def request(self, request_id: str, output_tokens: int, now: float) -> None:
        """A client comes."""
        stream = self.streams[request_id] = ModelStream(request_id, output_tokens, now)
        self._advance(stream, now)

    def hear(self, message: Message | Call, now: float) -> None:
        match message:
            case TokenFrame():
                self._on_frame(message, now)
            case StartAnswered():
                if self._is_answered("start", message.request_id, message.epoch):
                    self._on_start_answered(message, now)
            case ResendAnswered():
                if self._is_answered("resend", message.request_id, message.epoch):
                    self._on_resend_answered(message, now)
            case PlaceAnswered():
                if self._is_answered("place", message.request_id, message.epoch):
                    self._on_place_answered(message, now)
            case RoutesAnswered(reply=reply):
                self._are_routes_wanted = False
                for added in reply.routes:
                    self._learn_route(added, now)
            case RouteAdded():
                self._learn_route(message, now)
            case RouteRemoved(instance_id=instance_id):
                self._forget_route(instance_id, now)
            case PlacementFailed(request_ids=request_ids, error=error):
                for stream in [self.streams[k] for k in request_ids]:
                    self._on_not_placed(stream, error_of(error), now)
            case _:
                raise AssertionError(f"{message} is not for a router")

    def tick(self, now: float, scheduler_epoch: int, heartbeats: tuple[WorkerHeartbeat, ...]) -> None:
        for heartbeat in heartbeats:
            self._on_worker(heartbeat, now)
        if scheduler_epoch > self._scheduler_epoch:
            self._scheduler_epoch = scheduler_epoch
            self._are_routes_wanted = True
            for stream in self._live():
                if stream.request.is_waiting:
                    self._on_doubt(stream, now)
        for key, asked in list(self.calls.items()):
            if now - asked.asked_s >= (RESEND_S_MAX if key[0] == "resend" else CALL_S_MAX):
                self._time_out(key, asked, now)
        for worker in self.workers.take_lost(now):
            self._on_worker_lost(worker, "its worker is silent", now)
        for stream in self._live():
            self._on_tick(stream, now)
        if self._are_routes_wanted:
            self._call(SCHEDULER, GetRoutes(router_id=ROUTER), "routes")

    def heartbeat(self, now: float) -> RouterHeartbeat:
        waiting = [stream for stream in self._live() if stream.request.is_waiting]
        parts = (
            InstanceActivity(instance_id=stream.request.route.instance_id, requests=1, prompt_tokens=len(PROMPT))
            for stream in self._live()
            if stream.request.route is not None
        )
        return RouterHeartbeat(
            router_id=ROUTER,
            epoch=self.epoch,
            active=self.routes.activity(parts),
            waiting_requests=len(waiting),
            oldest_wait_s=0.0,
        )

    def check(self) -> None:
        """Clients check for themselves."""

    @property
    def is_over(self) -> bool:
        return all(stream.request.is_over for stream in self.streams.values())

    def check_end(self) -> None:
        """Nobody is left with less than everything."""
        for stream in self.streams.values():
            state = stream.request.state
            assert state is RequestState.FINISHED, f"{stream.request.request_id}: {state}, {stream.request.error}"
            assert stream.progress.tokens == stream.expected, f"{stream.request.request_id}: not all of its tokens"

    # Tokens.

    def _on_frame(self, frame: TokenFrame, now: float) -> None:
        for entry in frame.entries:
            stream = self.streams[entry.request_id]
            if not stream.request.is_over and self._on_entry(stream, entry, now) is not Verdict.OLD_EPOCH:
                continue
            if entry.finish_reason is None and now - self._strays.get(entry.request_id, -1.0) >= ABORT_EVERY_S:
                self._strays[entry.request_id] = now
                abort = AbortInference(request_id=entry.request_id, epoch=entry.epoch)
                self.out.append((frame.server_id, abort))

    def _on_entry(self, stream: ModelStream, entry: TokenEntry, now: float) -> Verdict:
        request, progress = stream.request, stream.progress
        position, epoch = progress.position, request.epoch
        verdict = progress.accept(entry, now) if request.is_running else Verdict.DUPLICATE
        if verdict is Verdict.ACCEPTED:
            assert entry.epoch == epoch, f"{request.request_id}: epoch {entry.epoch} was accepted in epoch {epoch}"
            self._mark_accepted(stream)
            if progress.position > position:
                request.on_tokens(now)
            self._give(stream)
            if progress.finish is not None:
                self._on_finish(stream, progress.finish, now)
        elif verdict is Verdict.GAP:
            self._resend_soon(stream, now)
        return verdict

    def _give(self, stream: ModelStream) -> None:
        """The client reads: every token once, in order, and the right one."""
        request_id, tokens = stream.request.request_id, stream.progress.tokens
        assert len(tokens) >= stream.got, f"{request_id}: tokens were taken back"
        assert tokens == stream.expected[: len(tokens)], f"{request_id}: got {tokens}, not {stream.expected}"
        stream.got = len(tokens)

    def _on_finish(self, stream: ModelStream, entry: TokenEntry, now: float) -> None:
        request, position = stream.request, stream.progress.position
        match entry.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                self._leave_instance(stream, is_aborted=False)
                request.on_ended()
            case FinishReason.FAILED:
                error = error_of(entry.error) if entry.error else InternalError(service="gpu_worker")
                self._leave_instance(stream, is_aborted=True)
                request.on_error(error)
            case FinishReason.MOVED if entry.moved is not None:
                self._on_moved(stream, entry.moved, now)
            case FinishReason.PREEMPTED:
                self._leave_instance(stream, is_aborted=False)
                request.on_preempted(position, now)
                self._advance(stream, now)
            case _:
                self._on_instance_lost(stream, "the worker ended the request", now)

    def _on_moved(self, stream: ModelStream, moved: Moved, now: float) -> None:
        self._leave_instance(stream, is_aborted=False)
        stream.request.on_handed_over("migration", stream.progress.position, now)
        self.routes.expect(moved.route)
        self.workers.expect((moved.route.server_id, moved.route.slot), now)
        known = len(PROMPT) + stream.progress.position
        self._start(stream, moved.route, min(moved.base_tokens, known - 1), now)

    # Waiting and starting.

    def _advance(self, stream: ModelStream, now: float) -> None:
        request = stream.request
        if not request.is_waiting:
            return
        route = self.routes.choose(MODEL_ID, request.usable_at(now))
        if route is not None:
            self._start(stream, route, 0, now)
        elif request.due(now) is Due.PLACE and not self._is_asked("place", stream):
            request.on_asked(now)
            place = PlaceModel(
                request_id=request.request_id, model_id=MODEL_ID, router_id=ROUTER, waited_s=now - request.waiting_since
            )
            self._ask(SCHEDULER, place, "place", stream, now)

    def _start(self, stream: ModelStream, route: Route, base_tokens: int, now: float) -> None:
        request, progress = stream.request, stream.progress
        request.on_route(route, now)
        stream.is_accepted = False
        self.routes.acquire(route.instance_id)
        progress.restart(request.epoch, len(PROMPT) + progress.position - base_tokens, now)
        self._ask_start(stream, route, base_tokens, now)

    def _ask_start(self, stream: ModelStream, route: Route, base_tokens: int, now: float) -> None:
        request = stream.request
        message = StartInference(
            request_id=request.request_id,
            epoch=request.epoch,
            router_id=ROUTER,
            router_epoch=self.epoch,
            instance_id=route.instance_id,
            model_id=MODEL_ID,
            tokens=pack_tokens([*PROMPT, *stream.progress.tokens][base_tokens:]),
            prompt_tokens=len(PROMPT),
            output_tokens_max=len(stream.expected),
            stop_tokens=(),
            sampling=Sampling(temperature=0.0),
            base_tokens=base_tokens,
        )
        self._ask(route.server_id, message, "start", stream, now, base_tokens)

    def _on_start_answered(self, answer: StartAnswered, now: float) -> None:
        stream = self.streams[answer.request_id]
        request = stream.request
        if request.epoch != answer.epoch or not request.is_running:
            return
        if answer.error is None:
            self._mark_accepted(stream)
            return
        if not request.is_starting:
            return
        error, route = error_of(answer.error), request.route
        assert route is not None
        if isinstance(error, InferenceLost) and answer.base_tokens:
            self._ask_start(stream, route, 0, now)
            return
        is_useless = isinstance(error, InstanceGone | Unavailable)
        if is_useless:
            self.routes.remove(route.instance_id)
        is_switching = request.state is RequestState.SWITCHING
        if is_useless or (is_switching and isinstance(error, InferenceLost | QueueFull)):
            self._leave_instance(stream, is_aborted=isinstance(error, Unavailable))
            request.on_refused(str(error), stream.progress.position, now)
            self._advance(stream, now)
        else:
            self._leave_instance(stream, is_aborted=True)
            request.on_error(error)

    def _on_place_answered(self, answer: PlaceAnswered, now: float) -> None:
        stream = self.streams[answer.request_id]
        request = stream.request
        if answer.error is not None:
            error = error_of(answer.error)
            if isinstance(error, Unavailable):
                request.on_unanswered(error)
            elif request.epoch == answer.epoch:
                self._on_not_placed(stream, error, now)
            return
        reply = answer.reply
        assert reply is not None
        if not request.is_waiting or request.epoch != answer.epoch:
            return
        if reply.route is None:
            request.on_waiting(reply.waiting_for, reply.remaining_s, now)
        else:
            request.on_placed(reply.stages, now)
            assert reply.stages is not None
            self._learn_route(RouteAdded(route=reply.route, stages=reply.stages), now)

    def _on_not_placed(self, stream: ModelStream, error: WhimbrelError, now: float) -> None:
        if stream.request.is_waiting:
            stream.losses += isinstance(error, LoadFailed | Unavailable)
            stream.request.on_not_placed(error)

    # Routes and workers.

    def _learn_route(self, added: RouteAdded, now: float) -> None:
        self.routes.add(added.route)
        self.workers.expect((added.route.server_id, added.route.slot), now)
        for stream in self._live():
            if stream.request.is_waiting:
                stream.request.on_placed(added.stages, now)
                self._advance(stream, now)

    def _forget_route(self, instance_id: str, now: float) -> None:
        self.routes.remove(instance_id)
        for stream in self._live():
            if stream.request.route is not None and stream.request.route.instance_id == instance_id:
                self._on_doubt(stream, now)

    def _on_worker(self, heartbeat: WorkerHeartbeat, now: float) -> None:
        if self.workers.on_heartbeat(heartbeat, now):
            self._on_worker_lost((heartbeat.server_id, heartbeat.slot), "its worker was restarted", now)
        for route in self.routes.on_worker(heartbeat.server_id, heartbeat.slot):
            if route.instance_id != heartbeat.instance_id:
                self._forget_route(route.instance_id, now)

    def _on_worker_lost(self, worker: tuple[str, int], reason: str, now: float) -> None:
        for gone in self.routes.on_worker(*worker):
            self.routes.remove(gone.instance_id)
        for stream in self._live():
            route = stream.request.route
            if route is not None and (route.server_id, route.slot) == worker:
                self._on_instance_lost(stream, reason, now)

    def _on_doubt(self, stream: ModelStream, now: float) -> None:
        if stream.request.is_running:
            self._resend_soon(stream, now)
        else:
            stream.request.ask_again()
            self._advance(stream, now)

    def _on_tick(self, stream: ModelStream, now: float) -> None:
        match stream.request.due(now):
            case Due.PLACE:
                self._advance(stream, now)
            case Due.RESEND:
                self._resend_soon(stream, now)
            case Due.FAIL_OVER:
                self._on_instance_lost(stream, "its worker stands still", now, avoided_s=LIMITS.stalled_s)
            case WhimbrelError() as error:
                if stream.request.is_running:
                    self._leave_instance(stream, is_aborted=True)
                stream.request.on_error(error)

    def _on_instance_lost(
        self, stream: ModelStream, reason: str, now: float, *, avoided_s: float | None = None
    ) -> None:
        if not stream.request.is_running:
            return
        stream.losses += 1
        assert stream.losses < LOSSES_MAX, f"{stream.request.request_id}: lost too often: {reason}"
        self._leave_instance(stream, is_aborted=True)
        stream.request.on_lost(reason, stream.progress.position, now, avoided_s=avoided_s)
        self._advance(stream, now)

    def _resend_soon(self, stream: ModelStream, now: float) -> None:
        request = stream.request
        request.on_heard(now)
        if not self._is_asked("resend", stream):
            assert request.route is not None
            message = ResendTokens(
                request_id=request.request_id, epoch=request.epoch, position=stream.progress.position
            )
            self._ask(request.route.server_id, message, "resend", stream, now)

    def _on_resend_answered(self, answer: ResendAnswered, now: float) -> None:
        stream = self.streams[answer.request_id]
        request = stream.request
        if request.epoch != answer.epoch or not request.is_running or answer.error is None:
            return
        error = error_of(answer.error)
        assert request.route is not None
        if not isinstance(error, Unavailable) or request.route.instance_id not in self.routes:
            self._on_instance_lost(stream, str(error), now)

    # Leaving.

    def _mark_accepted(self, stream: ModelStream) -> None:
        route = stream.request.route
        if not stream.is_accepted and route is not None:
            stream.is_accepted = True
            self._tell(
                InferenceStarted(
                    request_id=stream.request.request_id,
                    router_id=ROUTER,
                    instance_id=route.instance_id,
                    model_id=MODEL_ID,
                    prompt_tokens=len(PROMPT),
                )
            )

    def _leave_instance(self, stream: ModelStream, *, is_aborted: bool) -> None:
        """What times there are is not told, so that the scheduler learns nothing that differs from path to path."""
        request, route = stream.request, stream.request.route
        assert route is not None
        self.routes.release(route.instance_id)
        if is_aborted:
            self.out.append((route.server_id, AbortInference(request_id=request.request_id, epoch=request.epoch)))
        if stream.is_accepted:
            self._tell(
                InferenceFinished(
                    request_id=request.request_id,
                    router_id=ROUTER,
                    instance_id=route.instance_id,
                    model_id=MODEL_ID,
                    prompt_tokens=len(PROMPT),
                    output_tokens=stream.progress.start.output_tokens,
                    duration_s=0.0,
                    token_s=0.0,
                )
            )

    # Calls.

    def _ask(self, to: str, message: Message, what: str, stream: ModelStream, now: float, base_tokens: int = 0) -> None:
        request = stream.request
        self.calls[what, request.request_id, request.epoch] = Asked(now, base_tokens)
        self._call(to, message, f"{request.request_id}/{request.epoch}")

    def _is_asked(self, what: str, stream: ModelStream) -> bool:
        return (what, stream.request.request_id, stream.request.epoch) in self.calls

    def _is_answered(self, what: str, request_id: str, epoch: int) -> bool:
        """Whether the answer is waited for; it comes once."""
        return self.calls.pop((what, request_id, epoch), None) is not None

    def _time_out(self, key: tuple[str, str, int], asked: Asked, now: float) -> None:
        what, request_id, epoch = key
        error = error_reply(Unavailable(what="an answer"))
        match what:
            case "start":
                answer: Message = StartAnswered(
                    request_id=request_id, epoch=epoch, base_tokens=asked.base_tokens, error=error
                )
            case "resend":
                answer = ResendAnswered(request_id=request_id, epoch=epoch, error=error)
            case _:
                answer = PlaceAnswered(request_id=request_id, epoch=epoch, error=error)
        self.hear(answer, now)

    def _call(self, to: str, message: Message, reply_to: str) -> None:
        self.out.append((to, Call(message=message, reply_to=reply_to)))

    def _tell(self, message: Message) -> None:
        self.out.append((SCHEDULER, message))

    def _live(self) -> list[ModelStream]:
        return [stream for stream in self.streams.values() if not stream.request.is_over]
