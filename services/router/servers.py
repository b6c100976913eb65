"""Owns what an operator asks of one server: fill and empty its tiers, show its queue, measure its disk, take it out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from whimbrel.wire.errors import Conflict, ModelNotFound, ServerNotFound, Unavailable
from whimbrel.wire.ids import new_id
from whimbrel.wire.messages import (
    Ack,
    CordonServer,
    CordonServerReply,
    EvictModel,
    GetCluster,
    GetClusterReply,
    GetLoads,
    GetLoadsReply,
    MeasureStorage,
    MeasureStorageReply,
    Message,
    ModelState,
    ModelSummary,
    PinModel,
    PrefetchModel,
    Tier,
    UncordonServer,
    UnpinModel,
)

from services.router.admin import ANSWER_S_MAX, as_json, untagged
from services.router.catalogue import Catalogue
from services.router.core.residency import read_residency
from services.router.dispatch import Dispatch
from services.router.replies import read_body

# A measurement reads some hundred MB, and waits for the load that runs.
MEASURE_S_MAX = 120.0
SERVERS_NAMED_MAX = 20

Command = Callable[[ModelSummary, Tier, bool], Message]


def _prefetch(model: ModelSummary, tier: Tier, is_pinned: bool) -> Message:
    return PrefetchModel(
        task_id=new_id("task"),
        model_id=model.model_id,
        checkpoint_digest=model.checkpoint_digest,
        tier=tier,
        is_pinned=is_pinned,
    )


COMMANDS: dict[str, Command] = {
    "prefetch": _prefetch,
    "pin": lambda model, tier, _: PinModel(model_id=model.model_id, tier=tier),
    "unpin": lambda model, tier, _: UnpinModel(model_id=model.model_id, tier=tier),
    "evict": lambda model, tier, _: EvictModel(model_id=model.model_id, tier=tier),
}


# Whether a server takes part is the scheduler's business, whether its agent lives or not.
ORDERS: dict[str, Callable[[str], Message]] = {
    "cordon": lambda server_id: CordonServer(server_id=server_id),
    "drain": lambda server_id: CordonServer(server_id=server_id, drain=True),
    "uncordon": lambda server_id: UncordonServer(server_id=server_id),
}


class Servers:
    """Endpoints under /admin/servers; each is one request to the agent of that server, or to the scheduler."""

    def __init__(self, dispatch: Dispatch, catalogue: Catalogue) -> None:
        self._dispatch = dispatch
        self._catalogue = catalogue

    def routes(self) -> list[Route]:
        server = "/admin/servers/{server_id}"
        return [
            Route(f"{server}/loads", self.get_loads, methods=["GET"]),
            Route(f"{server}/measure", self.measure, methods=["POST"]),
            *(Route(f"{server}/{order}", partial(self._order, order), methods=["POST"]) for order in ORDERS),
            *(
                Route(f"{server}/models/{{model_id:path}}/{verb}", self._command(verb), methods=["POST"])
                for verb in COMMANDS
            ),
        ]

    async def get_loads(self, request: Request) -> Response:
        server_id = await self._server(request)
        reply = await self._dispatch.ask_agent(server_id, GetLoads(), GetLoadsReply, ANSWER_S_MAX)
        return as_json({"server": server_id, **untagged(reply)})

    async def measure(self, request: Request) -> Response:
        server_id = await self._server(request)
        reply = await self._dispatch.ask_agent(server_id, MeasureStorage(), MeasureStorageReply, MEASURE_S_MAX)
        fields = untagged(reply)
        return as_json({"server": fields.pop("server_id"), **fields})

    async def _order(self, order: str, request: Request) -> Response:
        """Idempotent. Answers the server as it is now, with the instances that are still there."""
        message = ORDERS[order](request.path_params["server_id"])
        reply = await self._dispatch.ask_scheduler(message, CordonServerReply, ANSWER_S_MAX)
        fields = untagged(reply)
        return as_json({"server": fields.pop("server_id"), **fields})

    def _command(self, verb: str) -> Callable[[Request], Awaitable[Response]]:
        return partial(self._send, verb)

    async def _send(self, verb: str, request: Request) -> Response:
        tier, is_pinned = read_residency(await read_body(request.scope, request.receive), may_pin=verb == "prefetch")
        server_id = await self._server(request)
        message = COMMANDS[verb](await self._model(request), tier, is_pinned)
        await self._dispatch.ask_agent(server_id, message, Ack, ANSWER_S_MAX)
        self._catalogue.want()
        body: dict[str, object] = {"server": server_id, "model": request.path_params["model_id"], "tier": str(tier)}
        if isinstance(message, PrefetchModel):
            body |= {"task_id": message.task_id, "pin": is_pinned}
        return as_json(body, 202)

    async def _server(self, request: Request) -> str:
        """The server of the path; raises ServerNotFound when the scheduler has not heard of it."""
        server_id: str = request.path_params["server_id"]
        reply = await self._dispatch.ask_scheduler(GetCluster(), GetClusterReply, ANSWER_S_MAX)
        known = {server.server_id: server for server in reply.servers}
        if server_id in known and not known[server_id].is_alive:
            raise Unavailable(
                what=f"server {server_id} (it is lost; last heard {known[server_id].last_seen_s:.0f} s ago)"
            )
        if server_id not in known:
            raise ServerNotFound(
                server_id=server_id[:64], known=", ".join(list(known)[:SERVERS_NAMED_MAX]) or "none yet"
            )
        return server_id

    async def _model(self, request: Request) -> ModelSummary:
        model_id: str = request.path_params["model_id"]
        for summary in await self._catalogue.models():
            if summary.model_id == model_id:
                if not summary.checkpoint_digest or summary.state is ModelState.DELETING:
                    raise Conflict(reason=f"model {model_id!r} is {summary.state}; it has no checkpoint to move")
                return summary
        raise ModelNotFound(model_id=model_id[:128])
