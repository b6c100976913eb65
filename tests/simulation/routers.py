"""Owns the simulated router: the real cores of the service (routes, workers), driven as in `dispatch.py`."""

from __future__ import annotations

from whimbrel.chassis.heartbeat import HEARTBEAT_S, HEARTBEATS_MISSED_MAX
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import Cancelled, Unavailable, WhimbrelError
from whimbrel.wire.messages import (
    AbortInference,
    GetRoutes,
    GetRoutesReply,
    InstanceActivity,
    Message,
    PlacementFailed,
    Route,
    RouteAdded,
    RouteRemoved,
    RouterHeartbeat,
    SchedulerHeartbeat,
    Stages,
    TokenFrame,
    WorkerHeartbeat,
)

from services.router.core.progress import Verdict
from services.router.core.routes import RouteTable
from services.router.core.workers import WorkerWatch
from tests.simulation.network import Call, Network
from tests.simulation.peers import SCHEDULER, Peer
from tests.simulation.streams import PROMPT, SimStream

TICK_S = 0.25
GET_ROUTES_S_MAX = 2.0
ABORT_EVERY_S = 1.0


class SimRouter(Peer):
    """`streams` are those that are not over."""

    heard_by = ("scheduler", "worker")

    def __init__(self, network: Network, router_id: str, *, epoch: int) -> None:
        self.router_id = router_id
        self.routes = RouteTable()
        self.workers = WorkerWatch(HEARTBEAT_S * HEARTBEATS_MISSED_MAX)
        self.streams: dict[str, SimStream] = {}
        self._strays: dict[str, float] = {}
        self._are_routes_wanted = True
        self._is_asking_routes = False
        super().__init__(network, ("router", router_id), epoch)
        self.every(TICK_S, self._tick)
        self.beat()

    def kill(self) -> None:
        """Its clients are cut off."""
        self.is_alive = False
        self.network.leave(self)
        for stream in self.streams.values():
            stream.request.on_error(Cancelled(what="the router died"))

    def request(self, request_id: str, model_id: str, output_tokens: int) -> SimStream:
        """A client comes."""
        stream = self.streams[request_id] = SimStream(self, request_id, model_id, output_tokens)
        stream.advance()
        return stream

    def remove(self, stream: SimStream) -> None:
        if self.streams.pop(stream.request.request_id, None) is not None:
            stream.ended_s = self.now

    def heartbeat(self) -> RouterHeartbeat:
        waiting = self._waiting()
        parts = (
            InstanceActivity(
                instance_id=stream.request.route.instance_id,
                requests=1,
                prompt_tokens=len(PROMPT),
                running_s=stream.progress.decoding_s(self.now),
            )
            for stream in self.streams.values()
            if stream.request.is_running and stream.request.route is not None
        )
        return RouterHeartbeat(
            router_id=self.router_id,
            epoch=self.epoch,
            active=self.routes.activity(parts),
            waiting_requests=len(waiting),
            oldest_wait_s=max((self.now - stream.request.waiting_since for stream in waiting), default=0.0),
        )

    def learn_route(self, route: Route, stages: Stages) -> None:
        self.routes.add(route)
        self.workers.expect((route.server_id, route.slot), self.now)
        for stream in self._waiting():
            if stream.request.model_id == route.model_id:
                stream.on_route(stages)

    def expect_route(self, route: Route) -> None:
        self.routes.expect(route)
        self.workers.expect((route.server_id, route.slot), self.now)

    def hear(self, message: Message, call: Call | None) -> None:
        match message:
            case TokenFrame():
                self._on_frame(message)
            case WorkerHeartbeat():
                self._on_worker(message)
            case SchedulerHeartbeat():
                self._on_scheduler(message)
            case RouteAdded(route=route, stages=stages):
                self.learn_route(route, stages)
            case RouteRemoved(instance_id=instance_id):
                self._forget_route(instance_id)
            case PlacementFailed(request_ids=request_ids, error=error):
                for stream in [self.streams[k] for k in request_ids if k in self.streams]:
                    stream.on_not_placed(error_of(error))
            case _:
                raise AssertionError(f"{message} is not for a router")

    def _on_frame(self, frame: TokenFrame) -> None:
        for entry in frame.entries:
            stream = self.streams.get(entry.request_id)
            if stream is not None and stream.on_entry(entry) is not Verdict.OLD_EPOCH:
                continue
            if entry.finish_reason is None and self.now - self._strays.get(entry.request_id, 0.0) >= ABORT_EVERY_S:
                self._strays[entry.request_id] = self.now
                abort = AbortInference(request_id=entry.request_id, epoch=entry.epoch)
                self.network.send(self, ("worker", frame.server_id, frame.slot), abort)

    def _on_worker(self, heartbeat: WorkerHeartbeat) -> None:
        if self.workers.on_heartbeat(heartbeat, self.now):
            self._on_worker_lost((heartbeat.server_id, heartbeat.slot), "its worker was restarted")
        for route in self.routes.on_worker(heartbeat.server_id, heartbeat.slot):
            if route.instance_id != heartbeat.instance_id:
                self._forget_route(route.instance_id)

    def _on_scheduler(self, heartbeat: SchedulerHeartbeat) -> None:
        if heartbeat.epoch > self.scheduler_epoch:
            self.scheduler_epoch = heartbeat.epoch
            self._are_routes_wanted = True
            for stream in self._waiting():
                stream.on_doubt()
            self.beat()

    def _forget_route(self, instance_id: str) -> None:
        self.routes.remove(instance_id)
        for stream in list(self.streams.values()):
            if stream.request.route is not None and stream.request.route.instance_id == instance_id:
                stream.on_doubt()

    def _on_worker_lost(self, worker: tuple[str, int], reason: str) -> None:
        for gone in self.routes.on_worker(*worker):
            self.routes.remove(gone.instance_id)
        for stream in list(self.streams.values()):
            route = stream.request.route
            if route is not None and (route.server_id, route.slot) == worker:
                stream.on_instance_lost(reason)

    def _tick(self) -> None:
        if self.cut_until_s > self.now:
            self.workers.forgive(self.now)
            for stream in self.streams.values():
                stream.request.forgive(self.now)
        for worker in self.workers.take_lost(self.now):
            self._on_worker_lost(worker, "its worker is silent")
        for stream in list(self.streams.values()):
            stream.on_tick()
        if self._are_routes_wanted and not self._is_asking_routes:
            self._is_asking_routes = True
            self.spawn(self._get_routes())

    async def _get_routes(self) -> None:
        try:
            reply = await self.network.request(self, SCHEDULER, GetRoutes(router_id=self.router_id), GET_ROUTES_S_MAX)
        except WhimbrelError as error:
            self._are_routes_wanted = isinstance(error, Unavailable)
        else:
            assert isinstance(reply, GetRoutesReply)
            self._are_routes_wanted = False
            for added in reply.routes:
                self.learn_route(added.route, added.stages)
        self._is_asking_routes = False

    def _waiting(self) -> list[SimStream]:
        return [stream for stream in self.streams.values() if stream.request.is_waiting]
