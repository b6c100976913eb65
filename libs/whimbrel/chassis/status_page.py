"""Owns /metrics, /healthz and /readyz: what Prometheus and an orchestrator see of a service."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from whimbrel.chassis import telemetry
from whimbrel.chassis.config import ConfigError

# A scrape takes milliseconds; a scraper that hangs does not hold up the end of the service.
CLOSE_S_MAX = 1


class StatusPage:
    """Alive as soon as it listens, ready when the service has started, does not drain, and says so itself."""

    def __init__(self, readiness: Callable[[], str | None]) -> None:
        self.has_started = False
        self.is_draining = False
        self._readiness = readiness
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def listen(self, host: str, port: int) -> None:
        """Serve on that address; raises ConfigError when it cannot be had."""
        try:
            listener = socket.create_server((host, port), reuse_port=False)
        except OSError as cause:
            raise ConfigError("WB_METRICS_PORT", f"cannot listen on {host}:{port}: {cause.strerror}") from cause
        routes = [Route("/metrics", _metrics), Route("/healthz", _health), Route("/readyz", self._ready)]
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSE_S_MAX,
        )
        self._server = _Server(config)
        self._serving = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[listener]), name="status_page"
        )

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=2 * CLOSE_S_MAX)

    async def _ready(self, _request: Request) -> Response:
        reason = self._why_not_ready()
        return PlainTextResponse("ready\n" if reason is None else f"{reason}\n", 200 if reason is None else 503)

    def _why_not_ready(self) -> str | None:
        if not self.has_started:
            return "the service is starting"
        if self.is_draining:
            return "the service is stopping"
        return self._readiness()


async def _metrics(_request: Request) -> Response:
    return Response(telemetry.render(), headers={"content-type": telemetry.CONTENT_TYPE})


async def _health(_request: Request) -> Response:
    return PlainTextResponse("alive\n")


class _Server(uvicorn.Server):
    """Leaves signals to the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
