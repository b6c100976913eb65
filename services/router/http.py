"""Owns the HTTP server: the list of paths, how errors leave it, and uvicorn inside the life of the service."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from whimbrel.chassis import telemetry
from whimbrel.chassis.config import ConfigError
from whimbrel.wire.errors import InternalError, WhimbrelError

from services.router.admin import Admin, as_json
from services.router.catalogue import Catalogue
from services.router.core.requests import Limits
from services.router.core.statuses import ErrorObject, error_object, error_type, retry_after_s, status_of
from services.router.dispatch import Dispatch
from services.router.inference import Inference
from services.router.openapi import DOCUMENT
from services.router.replies import ClientLeft
from services.router.servers import Servers

log = structlog.get_logger()

# Longer than the 60 s that proxies keep idle connections, so that they close first and never lose a request to a race.
KEEP_ALIVE_S = 75
# Connections that wait to be accepted while the loop is busy.
BACKLOG = 1024

_CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(
    dispatch: Dispatch, catalogue: Catalogue, limits: Limits, readiness: Callable[[], str | None]
) -> Starlette:
    """The ASGI application; every answer that is an error has OpenAI's error object."""

    async def ready(_request: Request) -> Response:
        reason = readiness()
        return PlainTextResponse("ready\n" if reason is None else f"{reason}\n", 200 if reason is None else 503)

    routes = [
        Route("/v1/chat/completions", Inference(dispatch, catalogue, limits, is_chat=True), methods=["POST"]),
        Route("/v1/completions", Inference(dispatch, catalogue, limits, is_chat=False), methods=["POST"]),
        *Admin(dispatch, catalogue).routes(),
        *Servers(dispatch, catalogue).routes(),
        Route("/healthz", _health),
        Route("/readyz", ready),
        Route("/metrics", _metrics),
        Route("/openapi.json", _openapi),
    ]
    handlers = {WhimbrelError: _on_error, HTTPException: _on_http, ClientLeft: _on_left, Exception: _on_failure}
    return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]


async def _on_error(_request: Request, error: WhimbrelError) -> Response:
    seconds = retry_after_s(error)
    headers = None if seconds is None else {"retry-after": str(seconds)}
    return as_json(error_object(error).body(), status_of(error), headers)


async def _on_http(request: Request, error: HTTPException) -> Response:
    message = {
        404: f"there is nothing at {request.url.path}; see /openapi.json",
        405: f"{request.method} is not possible at {request.url.path}; see /openapi.json",
    }.get(error.status_code, error.detail)
    code = _CODES.get(error.status_code, "invalid_request")
    body = ErrorObject(message=message, type=error_type(error.status_code), param=None, code=code).body()
    return as_json(body, error.status_code, dict(error.headers or {}))


async def _on_left(_request: Request, _error: ClientLeft) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _on_failure(request: Request, error: Exception) -> Response:
    log.error("request_broken", path=request.url.path, exc_info=error)
    return as_json(error_object(InternalError(service="router")).body(), 500)


async def _health(_request: Request) -> Response:
    return PlainTextResponse("alive\n")


async def _metrics(_request: Request) -> Response:
    return Response(telemetry.render(), headers={"content-type": telemetry.CONTENT_TYPE})


async def _openapi(_request: Request) -> Response:
    return as_json(DOCUMENT)


class HttpServer:
    """uvicorn on a port that is bound before it starts, without signals of its own."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        """Raises ConfigError when the address cannot be had; port 0 takes a free one."""
        try:
            self._listener = socket.create_server((host, port), backlog=BACKLOG, reuse_port=False)
        except OSError as cause:
            raise ConfigError("WB_HTTP_PORT", f"cannot listen on {host}:{port}: {cause.strerror}") from cause
        self.host, self.port = self._listener.getsockname()[:2]
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=BACKLOG,
            )
        )

    async def run(self) -> None:
        """Serves until `stop`."""
        await self._server.serve(sockets=[self._listener])

    async def wait_started(self) -> None:
        await self._server.is_listening.wait()

    def stop(self) -> None:
        """Accept nothing more; `run` returns when every request has its answer."""
        self._server.should_exit = True

    def close(self) -> None:
        """End at once, also when `run` was cancelled; requests that still run are cut."""
        self._server.force_exit = True
        # The loop has to forget the socket before its number is used for another one.
        for server in getattr(self._server, "servers", ()):
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._listener.close()


class _Server(uvicorn.Server):
    """Leaves signals to the service, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
