"""Owns the router's life: what is started in which order, when it is ready, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any

import structlog
from whimbrel.chassis.bus import Bus, NatsBus
from whimbrel.chassis.heartbeat import Heart
from whimbrel.chassis.service import DRAIN_S_MAX
from whimbrel.wire.errors import Unavailable

from services.router.catalogue import Catalogue
from services.router.config import RouterConfig
from services.router.core.requests import Limits
from services.router.dispatch import Dispatch
from services.router.http import HttpServer, make_app
from services.router.tokenizers import Tokenizers

log = structlog.get_logger()

# A scheduler beats every second; so long a silence means that nothing new can be placed.
SCHEDULER_SILENT_S_MAX = 5.0
# What is left of the chassis's patience goes to telling clients of requests that did not end in time.
FAREWELL_S = 2.0
# How long a router that starts loads tokenizers before it calls itself ready: some twenty models.
PRELOAD_S_MAX = 10.0


class RouterService:
    """The service; give it a bus to run it without NATS."""

    name = "router"

    def __init__(self, config: RouterConfig, bus: Bus | None = None) -> None:
        self.config = config
        self.epoch = time.time_ns()
        self._bus = bus
        self._group: asyncio.TaskGroup | None = None
        self._dispatch: Dispatch | None = None
        self._server: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._tokenizers: Tokenizers | None = None
        self._is_warm = False

    @property
    def url(self) -> str:
        """Where the HTTP API is, once started."""
        assert self._server is not None
        return f"http://{self._server.host}:{self._server.port}"

    async def start(self, group: asyncio.TaskGroup) -> None:
        config = self.config
        self._group = group
        if self._bus is None:
            name = f"router/{config.router_id}"
            self._bus = await NatsBus.connect(config.nats_url, cluster=config.cluster, name=name)
        bus = self._bus
        self._tokenizers = Tokenizers(config.repository_url, config.cache_dir, self._spawn)
        catalogue = Catalogue(bus, self._tokenizers)
        dispatch = self._dispatch = Dispatch(bus, config, self.epoch, self._spawn)
        heart = Heart(bus, dispatch.heartbeat)
        bus.on_reconnect(dispatch.on_reconnect)
        bus.on_reconnect(catalogue.want)
        dispatch.on_new_scheduler.extend((heart.beat, catalogue.want))
        await bus.subscribe(bus.subjects.all_to_router(config.router_id), dispatch.on_command)
        await bus.subscribe(bus.subjects.tokens(config.router_id), dispatch.on_frame)
        await bus.subscribe(bus.subjects.all_heartbeats("worker"), dispatch.on_worker_heartbeat)
        await bus.subscribe(bus.subjects.all_heartbeats("scheduler"), dispatch.on_scheduler_heartbeat)
        self._spawn(self._warm_up(self._tokenizers, catalogue))
        for loop in (heart.run(), dispatch.notes.run(), dispatch.run_clock(), catalogue.run()):
            self._spawn(loop)
        await self._serve(make_app(dispatch, catalogue, self._limits(), self.readiness))

    async def drain(self) -> None:
        """Accept nothing more and let requests end; those that do not end in time are told so."""
        assert self._server is not None
        assert self._serving is not None
        assert self._dispatch is not None
        self._server.stop()
        await asyncio.wait({self._serving}, timeout=DRAIN_S_MAX - FAREWELL_S)
        if not self._serving.done():
            self._dispatch.fail_all(Unavailable(what="this router (it is stopping)"))
            await asyncio.wait({self._serving}, timeout=FAREWELL_S)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._tokenizers is not None:
            self._tokenizers.close()
        if self._bus is not None:
            await self._bus.drain()

    def readiness(self) -> str | None:
        """Warm models may be served even when this says why the router as a whole is not ready."""
        if self._bus is None or self._dispatch is None:
            return "the router is starting"
        if not self._bus.is_connected:
            return "NATS is not connected"
        if not self._is_warm:
            return "tokenizers are being loaded"
        silent_s = self._dispatch.scheduler_silent_s()
        if silent_s is None:
            return "no scheduler was heard yet"
        if silent_s > SCHEDULER_SILENT_S_MAX:
            return f"no scheduler was heard for {silent_s:.0f} s"
        oldest_wait_s = self._dispatch.oldest_wait_s()
        if oldest_wait_s > self.config.oldest_wait_s_max:
            return f"a request has waited {oldest_wait_s:.0f} s for an instance"
        return None

    async def _serve(self, app: Any) -> None:
        self._server = HttpServer(app, self.config.http_host, self.config.http_port)
        self._serving = self._spawn(self._server.run())
        await self._server.wait_started()
        log.warning(
            "auth_is_off", reason="this version has no API keys: whoever reaches the port may use and change all"
        )
        log.info("http_listening", url=self.url, router_id=self.config.router_id)

    async def _warm_up(self, tokenizers: Tokenizers, catalogue: Catalogue) -> None:
        """The first requests should not wait for tokenizers; with very many models, only so long."""
        await tokenizers.warm_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PRELOAD_S_MAX):
                await catalogue.is_preloaded.wait()
        self._is_warm = True

    def _limits(self) -> Limits:
        return Limits(
            cold_start_s=self.config.cold_start_s_max,
            idle_s=self.config.idle_s_max,
            unanswered_s=self.config.unanswered_s_max,
            stalled_s=self.config.stalled_s_max,
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the service's group; when the group is ending, it is cancelled at its first wait."""
        assert self._group is not None
        return self._group.create_task(work)
