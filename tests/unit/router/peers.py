"""A scheduler and a worker for router tests: small, scripted, speaking the real messages over a real bus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from whimbrel.chassis.bus import Bus, Received
from whimbrel.wire.codec import error_reply, pack_tokens, unpack_tokens
from whimbrel.wire.errors import (
    InferenceLost,
    InstanceGone,
    JobNotFound,
    ModelNotFound,
    ServerNotFound,
    WhimbrelError,
)
from whimbrel.wire.messages import (
    AbortInference,
    Ack,
    CancelJob,
    CancelJobReply,
    CordonServer,
    CordonServerReply,
    DecisionSummary,
    DeleteModel,
    DeleteModelReply,
    DeployModel,
    DeployModelReply,
    ErrorReply,
    ExplainModel,
    ExplainModelReply,
    FinishReason,
    GetCluster,
    GetClusterReply,
    GetJob,
    GetJobReply,
    GetModels,
    GetModelsReply,
    GetRoutes,
    GetRoutesReply,
    JobStatus,
    Message,
    ModelState,
    ModelSummary,
    Moved,
    PlacementFailed,
    PlaceModel,
    PlaceModelReply,
    ResendTokens,
    Route,
    RouteAdded,
    RouteRemoved,
    RouteState,
    ScaleModel,
    ScaleModelReply,
    Scaling,
    SchedulerHeartbeat,
    ServerSummary,
    Stages,
    StartInference,
    Tier,
    TokenEntry,
    TokenFrame,
    UncordonServer,
    WaitStage,
    WorkerHeartbeat,
    WorkerState,
)

M = TypeVar("M", bound=Message)

# Some of what is awaited here is another process that starts.
PATIENCE_S = 30.0

LOADED = Stages(tier=Tier.SSD, queue_s=0.01, fetch_s=0.02, load_s=0.03, bind_s=0.004)


def a_model(model_id: str, *, state: ModelState = ModelState.READY, digest: str = "d1") -> ModelSummary:
    return ModelSummary(
        model_id=model_id,
        state=state,
        checkpoint_digest=digest,
        size_bytes=1000,
        parameter_count=500,
        architecture="LlamaForCausalLM",
        source="/somewhere",
        created_at_s=1_700_000_000.0,
        keep_alive_s=60.0,
        residency={"server-0": Tier.SSD},
        job_id="job-1",
    )


def a_route(model_id: str, instance_id: str = "instance-1", *, slot: int = 0) -> Route:
    return Route(instance_id=instance_id, model_id=model_id, server_id="server-0", slot=slot, state=RouteState.READY)


def an_explanation(model_id: str) -> ExplainModelReply:
    return ExplainModelReply(
        model_id=model_id,
        sentence=f"{model_id} has no instance.",
        waiting_requests=0,
        instances=(),
        last=None,
        now=DecisionSummary(outcome="deferred", policy="migration", age_s=0.0),
    )


def a_server(server_id: str, *, is_cordoned: bool = False, is_draining: bool = False) -> ServerSummary:
    return ServerSummary(
        is_cordoned=is_cordoned,
        is_draining=is_draining,
        server_id=server_id,
        is_alive=True,
        last_seen_s=0.1,
        slots=(),
        resident=(),
        tasks=(),
        pool_size_bytes=0,
        pool_free_bytes=0,
        ssd_size_bytes=0,
        ssd_used_bytes=0,
    )


class Heard:
    """What a peer received, and a way to wait for more of it."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._changed = asyncio.Condition()

    async def note(self, message: Message) -> None:
        self._messages.append(message)
        async with self._changed:
            self._changed.notify_all()

    def clear(self) -> None:
        self._messages.clear()

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self._messages if isinstance(message, kind)]

    async def wait(self, kind: type[M], count: int = 1) -> list[M]:
        """The messages of that kind, once there are `count`."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: len(self.all(kind)) >= count)
        return self.all(kind)


@dataclass
class FakeScheduler:
    """Answers what routers ask. Without routes a PlaceModel waits; `place` decides otherwise when set.

    `taken_out` maps cordoned servers to whether they drain, `held` servers to the instances that are there.
    """

    bus: Bus
    router_id: str = "router-0"
    epoch: int = 1
    models: dict[str, ModelSummary] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)
    jobs: dict[str, JobStatus] = field(default_factory=dict)
    servers: tuple[str, ...] = ()
    taken_out: dict[str, bool] = field(default_factory=dict)
    held: dict[str, tuple[str, ...]] = field(default_factory=dict)
    explanations: dict[str, ExplainModelReply] = field(default_factory=dict)
    place: Callable[[PlaceModel], PlaceModelReply | WhimbrelError] | None = None
    errors: dict[type[Message], WhimbrelError] = field(default_factory=dict)
    is_mute: bool = False
    heard: Heard = field(default_factory=Heard)

    async def start(self) -> None:
        await self.bus.subscribe(self.bus.subjects.all_to_scheduler(), self._on_message)

    async def beat(self) -> None:
        message = SchedulerHeartbeat(scheduler_id="s", epoch=self.epoch)
        await self.bus.publish(self.bus.subjects.heartbeat(message), message)

    async def add_route(self, route: Route, stages: Stages = LOADED) -> None:
        """The instance is ready: routers are told."""
        self.routes[route.model_id] = route
        await self.to_router(RouteAdded(route=route, stages=stages))

    async def drain_route(self, route: Route) -> None:
        self.routes.pop(route.model_id, None)
        draining = Route(
            instance_id=route.instance_id,
            model_id=route.model_id,
            server_id=route.server_id,
            slot=route.slot,
            state=RouteState.DRAINING,
        )
        await self.to_router(RouteAdded(route=draining, stages=LOADED))

    async def remove_route(self, route: Route) -> None:
        self.routes.pop(route.model_id, None)
        await self.to_router(RouteRemoved(instance_id=route.instance_id, model_id=route.model_id, reason="test"))

    async def fail_placement(self, model_id: str, request_ids: list[str], error: WhimbrelError) -> None:
        await self.to_router(
            PlacementFailed(model_id=model_id, request_ids=tuple(request_ids), error=error_reply(error))
        )

    async def to_router(self, message: Message) -> None:
        await self.bus.publish(self.bus.subjects.to_router(self.router_id, message), message)

    async def _on_message(self, received: Received) -> None:
        await self.heard.note(received.message)
        if not self.is_mute:
            await self.bus.reply(received.reply_to, self._answer(received.message))

    def _answer(self, message: Message) -> Message:
        if type(message) in self.errors:
            raise self.errors[type(message)]
        match message:
            case PlaceModel():
                return self._place(message)
            case GetModels():
                return GetModelsReply(models=tuple(self.models.values()))
            case GetRoutes():
                added = tuple(RouteAdded(route=route, stages=LOADED) for route in self.routes.values())
                return GetRoutesReply(routes=added)
            case DeployModel():
                return DeployModelReply(job_id="job-1", state=ModelState.IMPORTING)
            case DeleteModel():
                return DeleteModelReply(model_id=message.model_id)
            case GetJob():
                if message.job_id not in self.jobs:
                    raise JobNotFound(job_id=message.job_id)
                return GetJobReply(job=self.jobs[message.job_id])
            case CancelJob():
                if message.job_id not in self.jobs:
                    raise JobNotFound(job_id=message.job_id)
                return CancelJobReply(job=self.jobs[message.job_id])
            case GetCluster():
                return GetClusterReply(
                    scheduler_epoch=self.epoch,
                    servers=tuple(self._server(server_id) for server_id in self.servers),
                    routers=(self.router_id,),
                    waiting_requests=0,
                )
            case CordonServer():
                self.taken_out[message.server_id] = message.drain or self.taken_out.get(message.server_id, False)
                return self._taken_out(message.server_id)
            case UncordonServer():
                self.taken_out.pop(message.server_id, None)
                return self._taken_out(message.server_id)
            case ScaleModel():
                return self._scale(message)
            case ExplainModel():
                if message.model_id not in self.models:
                    raise ModelNotFound(model_id=message.model_id)
                return self.explanations.get(message.model_id) or an_explanation(message.model_id)
        return Ack()

    def _server(self, server_id: str) -> ServerSummary:
        is_cordoned = server_id in self.taken_out
        return a_server(server_id, is_cordoned=is_cordoned, is_draining=self.taken_out.get(server_id, False))

    def _taken_out(self, server_id: str) -> CordonServerReply:
        if server_id not in self.servers:
            raise ServerNotFound(server_id=server_id, known=", ".join(self.servers))
        return CordonServerReply(
            server_id=server_id,
            is_cordoned=server_id in self.taken_out,
            is_draining=self.taken_out.get(server_id, False),
            instances=self.held.get(server_id, ()),
        )

    def _scale(self, message: ScaleModel) -> ScaleModelReply:
        known = self.models[message.model_id].scaling
        return ScaleModelReply(
            model_id=message.model_id,
            scaling=Scaling(
                min_instances=known.min_instances if message.min_instances is None else message.min_instances,
                max_instances=message.max_instances or known.max_instances,
                target_concurrency=message.target_concurrency or known.target_concurrency,
            ),
            keep_alive_s=60.0 if message.keep_alive_s is None else message.keep_alive_s,
            desired_instances=2,
        )

    def _place(self, message: PlaceModel) -> PlaceModelReply:
        if self.place is not None:
            answer = self.place(message)
            if isinstance(answer, WhimbrelError):
                raise answer
            return answer
        route = self.routes.get(message.model_id)
        if route is not None:
            return PlaceModelReply(route=route, stages=LOADED)
        return PlaceModelReply(waiting_for=WaitStage.LOADING, remaining_s=1.5)


@dataclass
class FakeAgent:
    """A storage agent that answers an operator with what it is given for a kind of message, else with Ack."""

    bus: Bus
    server_id: str = "server-0"
    answers: dict[type[Message], Message | WhimbrelError] = field(default_factory=dict)
    heard: Heard = field(default_factory=Heard)

    async def start(self) -> None:
        await self.bus.subscribe(self.bus.subjects.all_to_agent(self.server_id), self._on_message)

    async def _on_message(self, received: Received) -> None:
        await self.heard.note(received.message)
        answer = self.answers.get(type(received.message), Ack())
        if isinstance(answer, WhimbrelError):
            raise answer
        await self.bus.reply(received.reply_to, answer)


@dataclass
class FakeWorker:
    """Runs requests by a script: `output` gives the tokens, sent `tokens_per_frame` at a time.

    `mangle` may drop, double or reorder the frames of a request. `is_held` makes it accept and say nothing until
    `release`; `frames_before_hold` are said by each start all the same. `resumed` counts the tokens of requests that
    it has computed for a migration.
    """

    bus: Bus
    output: Callable[[StartInference], list[int]]
    slot: int = 0
    epoch: int = 1
    instance_id: str | None = "instance-1"
    tokens_per_frame: int = 1
    finish_reason: FinishReason = FinishReason.STOP
    error: ErrorReply | None = None
    mangle: Callable[[list[TokenFrame]], list[TokenFrame]] = list
    refusal: WhimbrelError | None = None
    takes_any_instance: bool = False
    forgets_requests: bool = False
    is_mute: bool = False
    is_held: bool = False
    frames_before_hold: int | None = None
    resumed: dict[str, int] = field(default_factory=dict)
    heard: Heard = field(default_factory=Heard)
    requests: dict[str, StartInference] = field(default_factory=dict)

    async def start(self) -> None:
        await self.bus.subscribe(self.bus.subjects.all_to_worker("server-0", self.slot), self._on_message)

    async def beat(self) -> None:
        message = WorkerHeartbeat(
            server_id="server-0",
            slot=self.slot,
            epoch=self.epoch,
            device="cpu",
            state=WorkerState.READY if self.instance_id else WorkerState.EMPTY,
            instance_id=self.instance_id,
            model_id=None,
            active_requests=0,
        )
        await self.bus.publish(self.bus.subjects.heartbeat(message), message)

    async def release(self) -> None:
        """Say everything that was held back."""
        self.is_held = False
        for request in list(self.requests.values()):
            await self.say(request, position_of(request))

    async def say(self, request: StartInference, position: int, *, count: int | None = None) -> None:
        """Publish the output of `request` from `position` on."""
        frames = self.frames(request, position)
        for frame in self.mangle(frames)[:count]:
            await self.bus.publish(self.bus.subjects.tokens(request.router_id), frame)

    def frames(self, request: StartInference, position: int) -> list[TokenFrame]:
        tokens = self.output(request)
        frames = []
        steps = range(position, max(len(tokens), position + 1), self.tokens_per_frame)
        for start in steps:
            piece = tokens[start : start + self.tokens_per_frame]
            is_last = start + self.tokens_per_frame >= len(tokens)
            entry = TokenEntry(
                request_id=request.request_id,
                epoch=request.epoch,
                position=start,
                tokens=pack_tokens(piece),
                finish_reason=self.finish_reason if is_last else None,
                error=self.error if is_last else None,
                queue_s=0.001 if start == position_of(request) else None,
                prefill_s=0.002 if start == position_of(request) else None,
            )
            frames.append(TokenFrame(server_id="server-0", slot=self.slot, entries=(entry,)))
        return frames

    async def hand_over(self, request_id: str, position: int, moved: Moved | None, *, tokens: int = 0) -> None:
        """Say that a request goes on elsewhere after `position`; the entry has the last `tokens` before it again."""
        request = self.requests[request_id]
        entry = TokenEntry(
            request_id=request_id,
            epoch=request.epoch,
            position=position - tokens,
            tokens=pack_tokens(self.output(request)[position - tokens : position]),
            finish_reason=FinishReason.MOVED,
            moved=moved,
        )
        await self.send(request, entry)

    async def send(self, request: StartInference, entry: TokenEntry) -> None:
        frame = TokenFrame(server_id="server-0", slot=self.slot, entries=(entry,))
        await self.bus.publish(self.bus.subjects.tokens(request.router_id), frame)

    async def _on_message(self, received: Received) -> None:
        message = received.message
        await self.heard.note(message)
        match message:
            case StartInference():
                await self._on_start(message, received.reply_to)
            case ResendTokens():
                request = self.requests.get(message.request_id)
                if request is None or self.forgets_requests:
                    raise InferenceLost(reason="its worker does not know it", output_tokens=message.position)
                await self.bus.reply(received.reply_to, Ack())
                if not self.is_held and self.frames_before_hold is None:
                    await self.say(request, message.position)
            case AbortInference():
                request = self.requests.get(message.request_id)
                if request is not None and request.epoch <= message.epoch:
                    del self.requests[message.request_id]

    async def _on_start(self, message: StartInference, reply_to: str | None) -> None:
        if self.refusal is not None:
            raise self.refusal
        if message.instance_id != self.instance_id and not self.takes_any_instance:
            raise InstanceGone(instance_id=message.instance_id)
        if message.base_tokens > self.resumed.get(message.request_id, 0):
            raise InferenceLost(reason="its tokens are not here", output_tokens=0)
        self.requests[message.request_id] = message
        await self.bus.reply(reply_to, Ack())
        if self.frames_before_hold is not None:
            await self.say(message, position_of(message), count=self.frames_before_hold)
        elif not self.is_held:
            await self.say(message, position_of(message))


def prompt_of(message: StartInference) -> list[int]:
    return unpack_tokens(message.tokens)


def position_of(message: StartInference) -> int:
    """Of the first token that this start is to give."""
    return message.base_tokens + len(unpack_tokens(message.tokens)) - message.prompt_tokens
