"""Owns the router's side of the bus: the running streams, the route table, and who is told when something changes."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog
from whimbrel.chassis.bus import Bus, Received
from whimbrel.chassis.heartbeat import HEARTBEAT_S, HEARTBEATS_MISSED_MAX
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import InternalError, QueueFull, Unavailable, WhimbrelError
from whimbrel.wire.messages import (
    AbortInference,
    GetRoutes,
    GetRoutesReply,
    Message,
    PlacementFailed,
    Route,
    RouteAdded,
    RouteRemoved,
    RouterHeartbeat,
    SchedulerHeartbeat,
    Stages,
    TokenEntry,
    TokenFrame,
    WorkerHeartbeat,
)

from services.router import accounts, metrics
from services.router.config import RouterConfig
from services.router.core.progress import Verdict
from services.router.core.requests import Switch
from services.router.core.routes import RouteTable
from services.router.core.workers import WorkerWatch
from services.router.notes import Notes
from services.router.specification import Speaker
from services.router.streams import Stream

log = structlog.get_logger()

M = TypeVar("M", bound=Message)
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

# How finely limits and repeats are timed; a hundred streams cost about a millisecond a tick.
TICK_S = 0.25
# A tick that comes this late was kept from running, and so was the reading of heartbeats.
STALLED_S = 1.0
GET_ROUTES_S_MAX = 2.0
# Ended requests whose abort may have been lost; a worker that goes on is told again, at most once a second each.
STRAYS_MAX = 1024
ABORT_EVERY_S = 1.0


class Dispatch:
    """Everything that is the same for all requests. Belongs to the event loop's thread; nothing here blocks."""

    def __init__(self, bus: Bus, config: RouterConfig, epoch: int, spawn: Spawn) -> None:
        self.speaker = Speaker(router_id=config.router_id, epoch=epoch)
        self.routes = RouteTable()
        self.notes = Notes(bus)
        self.spawn = spawn
        self.on_new_scheduler: list[Callable[[], None]] = []
        self.scheduler_epoch = 0
        self.scheduler_heard_at: float | None = None
        self._bus = bus
        self._config = config
        self._streams: dict[str, Stream] = {}
        self._admitted = 0
        self._workers = WorkerWatch(HEARTBEAT_S * HEARTBEATS_MISSED_MAX)
        self._strays: OrderedDict[str, float] = OrderedDict()
        self._are_routes_wanted = True
        self._is_asking_routes = False

    # What streams use.

    @contextmanager
    def admitted(self, requests: int = 1) -> Iterator[None]:
        """Counts requests from the first byte to the end: all of them, or raises QueueFull when those are too many."""
        if self._admitted + requests > self._config.requests_max:
            raise QueueFull(queue="the router", limit=self._config.requests_max)
        self._admitted += requests
        try:
            yield
        finally:
            self._admitted -= requests

    def add(self, stream: Stream) -> None:
        assert stream.request.request_id not in self._streams
        self._streams[stream.request.request_id] = stream

    async def remove(self, streams: Collection[Stream]) -> None:
        """The streams are over: forget them all at once, and tell the world how they ended."""
        for stream in streams:
            del self._streams[stream.request.request_id]
        now = time.monotonic()
        for stream in streams:
            await accounts.settle(stream, self._bus, self.speaker.router_id, now)

    def tell_switched(self, stream: Stream, switch: Switch, server_id: str) -> None:
        """The stream goes on at another instance."""
        event = accounts.note_switched(stream, switch, server_id, self.speaker.router_id)
        self.spawn(self._bus.publish_event(event))

    async def ask_scheduler(self, message: Message, reply: type[M], timeout_s: float) -> M:
        """The scheduler's reply; raises its error, or Unavailable."""
        answer = await self._bus.request(self._bus.subjects.to_scheduler(message), message, timeout_s)
        if not isinstance(answer, reply):
            raise InternalError(service="scheduler")
        return answer

    async def ask_agent(self, server_id: str, message: Message, reply: type[M], timeout_s: float) -> M:
        """The reply of a server's storage agent; raises its error, or Unavailable."""
        answer = await self._bus.request(self._bus.subjects.to_agent(server_id, message), message, timeout_s)
        if not isinstance(answer, reply):
            raise InternalError(service=f"storage agent {server_id}")
        return answer

    async def ask_worker(self, route: Route, message: Message, timeout_s: float) -> None:
        """Returns when the worker said yes; raises its error, or Unavailable."""
        subject = self._bus.subjects.to_worker(route.server_id, route.slot, message)
        await self._bus.request(subject, message, timeout_s)

    def learn_route(self, route: Route, stages: Stages) -> None:
        """A route, or its new state; whoever waits for the model starts at once."""
        now = time.monotonic()
        self.routes.add(route)
        self._workers.expect((route.server_id, route.slot), now)
        for stream in self._waiting(route.model_id):
            stream.on_route(stages, now)

    def expect_route(self, route: Route, now: float) -> None:
        """A request of ours goes on there, so that the loss of it must reach us; the scheduler will tell of it."""
        self.routes.expect(route)
        self._workers.expect((route.server_id, route.slot), now)

    # What the bus says.

    async def on_command(self, received: Received) -> None:
        match received.message:
            case RouteAdded(route=route, stages=stages):
                self.learn_route(route, stages)
            case RouteRemoved() as removed:
                self._on_route_removed(removed)
            case PlacementFailed() as failed:
                self._on_placement_failed(failed)
            case other:
                log.warning("message_unexpected", subject=received.subject, type=type(other).__name__)

    async def on_frame(self, received: Received) -> None:
        frame = received.message
        if not isinstance(frame, TokenFrame):
            log.warning("message_unexpected", subject=received.subject, type=type(frame).__name__)
            return
        now = time.monotonic()
        for entry in frame.entries:
            stream = self._streams.get(entry.request_id)
            is_wanted = stream is not None and stream.on_entry(entry, now) is not Verdict.OLD_EPOCH
            if not is_wanted and entry.finish_reason is None:
                self._on_stray(frame, entry, now)

    async def on_worker_heartbeat(self, received: Received) -> None:
        heartbeat = received.message
        if not isinstance(heartbeat, WorkerHeartbeat):
            return
        now = time.monotonic()
        if self._workers.on_heartbeat(heartbeat, now):
            self._on_worker_lost((heartbeat.server_id, heartbeat.slot), "its worker was restarted", now)
        for route in self.routes.on_worker(heartbeat.server_id, heartbeat.slot):
            if route.instance_id != heartbeat.instance_id:
                self._forget_route(route.instance_id, now)

    async def on_scheduler_heartbeat(self, received: Received) -> None:
        heartbeat = received.message
        if not isinstance(heartbeat, SchedulerHeartbeat) or heartbeat.epoch < self.scheduler_epoch:
            return
        now = time.monotonic()
        self.scheduler_heard_at = now
        if heartbeat.epoch > self.scheduler_epoch:
            self.scheduler_epoch = heartbeat.epoch
            self._are_routes_wanted = True
            for stream in self._waiting():
                stream.on_doubt(now)
            for callback in self.on_new_scheduler:
                callback()

    def on_reconnect(self) -> None:
        """The bus was away: whatever was said meanwhile is lost."""
        now = time.monotonic()
        self._forgive(now)
        self._are_routes_wanted = True
        for stream in self._streams.values():
            stream.on_doubt(now)

    # Loops.

    async def run_clock(self) -> None:
        """Limits, repeats, lost workers: everything that time does."""
        while True:
            ticked_at = time.monotonic()
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            if now - ticked_at >= STALLED_S or not self._bus.is_connected:
                self._forgive(now)
            for worker in self._workers.take_lost(now):
                self._on_worker_lost(worker, "its worker is silent", now)
            for stream in list(self._streams.values()):
                stream.on_tick(now)
            if self._are_routes_wanted and not self._is_asking_routes:
                self._is_asking_routes = True
                self.spawn(self._get_routes())
            self._observe()

    # What is asked about all of it.

    def heartbeat(self) -> RouterHeartbeat:
        running = ((stream, stream.request.route) for stream in self._streams.values() if stream.request.is_running)
        parts = (s.specification.activity(route, s.progress, time.monotonic()) for s, route in running if route)
        return RouterHeartbeat(
            router_id=self.speaker.router_id,
            epoch=self.speaker.epoch,
            active=self.routes.activity(parts),
            waiting_requests=len(self._waiting()),
            oldest_wait_s=self.oldest_wait_s(),
        )

    def oldest_wait_s(self) -> float:
        """How long the oldest request without an instance has needed one; 0 when there is none."""
        now = time.monotonic()
        return max((now - stream.request.waiting_since for stream in self._waiting()), default=0.0)

    def scheduler_silent_s(self) -> float | None:
        """How long nothing was heard of the scheduler; None when nothing ever was."""
        return None if self.scheduler_heard_at is None else time.monotonic() - self.scheduler_heard_at

    def fail_all(self, error: WhimbrelError) -> None:
        """End every request with a typed error."""
        for stream in list(self._streams.values()):
            stream.on_failed(error)

    # Details.

    def _waiting(self, model_id: str | None = None) -> list[Stream]:
        return [
            stream
            for stream in self._streams.values()
            if stream.request.is_waiting and model_id in (None, stream.request.model_id)
        ]

    def _on_route_removed(self, removed: RouteRemoved) -> None:
        log.info("route_removed", instance_id=removed.instance_id, model_id=removed.model_id, reason=removed.reason)
        self._forget_route(removed.instance_id, time.monotonic())

    def _forget_route(self, instance_id: str, now: float) -> None:
        """No new request goes there; those that run there ask the worker whether that is true."""
        self.routes.remove(instance_id)
        for stream in self._streams.values():
            if stream.request.route is not None and stream.request.route.instance_id == instance_id:
                stream.on_doubt(now)

    def _on_worker_lost(self, worker: tuple[str, int], reason: str, now: float) -> None:
        log.warning("worker_lost", server_id=worker[0], slot=worker[1], reason=reason)
        for gone in self.routes.on_worker(*worker):
            self.routes.remove(gone.instance_id)
        for stream in self._streams.values():
            route = stream.request.route
            if route is not None and (route.server_id, route.slot) == worker:
                stream.on_instance_lost(reason, now)

    def _on_placement_failed(self, failed: PlacementFailed) -> None:
        error = error_of(failed.error)
        for request_id in failed.request_ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.on_not_placed(error)

    def _on_stray(self, frame: TokenFrame, entry: TokenEntry, now: float) -> None:
        """Tokens that nobody waits for: the worker did not hear the abort."""
        if now - self._strays.get(entry.request_id, float("-inf")) < ABORT_EVERY_S:
            return
        self._strays[entry.request_id] = now
        self._strays.move_to_end(entry.request_id)
        while len(self._strays) > STRAYS_MAX:
            self._strays.popitem(last=False)
        abort = AbortInference(request_id=entry.request_id, epoch=entry.epoch)
        self.notes.tell_worker((frame.server_id, frame.slot), abort)

    def _forgive(self, now: float) -> None:
        """What nobody could say meanwhile is held against nobody."""
        self._workers.forgive(now)
        for stream in self._streams.values():
            stream.request.forgive(now)

    async def _get_routes(self) -> None:
        message = GetRoutes(router_id=self.speaker.router_id)
        try:
            reply = await self.ask_scheduler(message, GetRoutesReply, GET_ROUTES_S_MAX)
        except Unavailable as error:
            log.debug("routes_unanswered", reason=str(error))
        except WhimbrelError as error:
            log.warning("routes_refused", code=error.code, reason=str(error))
            self._are_routes_wanted = False
        else:
            # Only learned, never unlearned: a route that is no more refuses its next request, and is forgotten then.
            self._are_routes_wanted = False
            for added in reply.routes:
                self.learn_route(added.route, added.stages)
        finally:
            self._is_asking_routes = False

    def _observe(self) -> None:
        metrics.WAITING.set(len(self._waiting()))
        metrics.RUNNING.set(sum(stream.request.is_running for stream in self._streams.values()))
        metrics.ROUTES.set(len(self.routes))
