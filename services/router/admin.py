"""Owns the answers about models, jobs and the cluster: /v1/models and /admin, asked of the scheduler."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import ModelNotFound
from whimbrel.wire.messages import (
    CancelJob,
    CancelJobReply,
    DeleteModel,
    DeleteModelReply,
    DeployModelReply,
    ExplainModel,
    ExplainModelReply,
    GetCluster,
    GetClusterReply,
    GetJob,
    GetJobReply,
    GetMigrations,
    GetMigrationsReply,
    JobStage,
    JobStatus,
    Message,
    MigrateModelReply,
    ModelState,
    ModelSummary,
    ScaleModelReply,
)

from services.router.catalogue import Catalogue
from services.router.core.deployments import read_deployment
from services.router.core.fields import refuse
from services.router.core.moves import read_move
from services.router.core.openai import Json, model_body, model_list
from services.router.core.scalings import read_scale
from services.router.core.statuses import error_object
from services.router.dispatch import Dispatch
from services.router.replies import read_body

M = TypeVar("M", bound=Message)

# Each of these costs the scheduler at most one durable write.
ANSWER_S_MAX = 5.0


class Admin:
    """Endpoints that read and change what is deployed."""

    def __init__(self, dispatch: Dispatch, catalogue: Catalogue) -> None:
        self._dispatch = dispatch
        self._catalogue = catalogue

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", self.get_model, methods=["GET"]),
            Route("/admin/models", self.list_deployments, methods=["GET"]),
            Route("/admin/models", self.deploy, methods=["POST"]),
            Route("/admin/models/{model_id:path}", self.get_deployment, methods=["GET"]),
            Route("/admin/models/{model_id:path}", self.scale, methods=["PATCH"]),
            Route("/admin/models/{model_id:path}", self.delete, methods=["DELETE"]),
            Route("/admin/jobs/{job_id}", self.get_job, methods=["GET"]),
            Route("/admin/jobs/{job_id}", self.cancel_job, methods=["DELETE"]),
            Route("/admin/cluster", self.get_cluster, methods=["GET"]),
            Route("/admin/explain", self.explain, methods=["GET"]),
            Route("/admin/migrations", self.list_migrations, methods=["GET"]),
            Route("/admin/migrations", self.migrate, methods=["POST"]),
        ]

    async def list_models(self, _request: Request) -> Response:
        """Every model that can be asked, warm or cold, as OpenAI lists models."""
        ready = [_openai_model(summary) for summary in await self._catalogue.models() if _is_ready(summary)]
        return as_json(model_list(ready))

    async def get_model(self, request: Request) -> Response:
        summary = await self._find(request)
        if not _is_ready(summary):
            raise ModelNotFound(model_id=summary.model_id)
        return as_json(_openai_model(summary))

    async def list_deployments(self, _request: Request) -> Response:
        """Every model that the scheduler knows, also those being imported or deleted."""
        return as_json({"models": [_named(summary) for summary in await self._catalogue.models()]})

    async def get_deployment(self, request: Request) -> Response:
        return as_json(_named(await self._find(request)))

    async def deploy(self, request: Request) -> Response:
        """Idempotent: a model that is being imported answers with its running job."""
        message = read_deployment(await read_body(request.scope, request.receive))
        reply = await self._ask(message, DeployModelReply)
        self._catalogue.want()
        return as_json({"job_id": reply.job_id, "model": message.model_id, "state": str(reply.state)}, 202)

    async def scale(self, request: Request) -> Response:
        """Change what is given, and answer how the model is scaled from now on."""
        message = read_scale(request.path_params["model_id"], await read_body(request.scope, request.receive))
        reply = await self._ask(message, ScaleModelReply)
        self._catalogue.want()
        return as_json(_named(reply))

    async def delete(self, request: Request) -> Response:
        reply = await self._ask(DeleteModel(model_id=request.path_params["model_id"]), DeleteModelReply)
        self._catalogue.want()
        return as_json({"model": reply.model_id, "state": str(ModelState.DELETING)}, 202)

    async def get_job(self, request: Request) -> Response:
        job = (await self._ask(GetJob(job_id=request.path_params["job_id"]), GetJobReply)).job
        if job.stage is JobStage.FINISHED:
            # Whoever reads this may ask the model next.
            await self._catalogue.refresh()
            self._catalogue.want()
        return as_json(_job(job))

    async def cancel_job(self, request: Request) -> Response:
        """The job as it is now; it ends as failed with the code `cancelled` when its agent has stopped."""
        job = (await self._ask(CancelJob(job_id=request.path_params["job_id"]), CancelJobReply)).job
        self._catalogue.want()
        return as_json(_job(job), 202)

    async def get_cluster(self, _request: Request) -> Response:
        return as_json(untagged(await self._ask(GetCluster(), GetClusterReply)))

    async def explain(self, request: Request) -> Response:
        """Why the model is where it is, or waits: the last decision, and what would be decided now."""
        model_id = request.query_params.get("model", "")
        if not model_id:
            refuse("model", "is missing; ask /admin/explain?model=NAME")
        return as_json(_named(await self._ask(ExplainModel(model_id=model_id), ExplainModelReply)))

    async def list_migrations(self, _request: Request) -> Response:
        """Those on their way, then those that ended lately, the newest first."""
        reply = await self._ask(GetMigrations(), GetMigrationsReply)
        return as_json({"migrations": [_named(status) for status in reply.migrations]})

    async def migrate(self, request: Request) -> Response:
        """Move an instance with all its requests; answers at once, with the migration as it begins."""
        message = read_move(await read_body(request.scope, request.receive))
        return as_json(_named((await self._ask(message, MigrateModelReply)).migration), 202)

    async def _find(self, request: Request) -> ModelSummary:
        model_id = request.path_params["model_id"]
        for summary in await self._catalogue.models():
            if summary.model_id == model_id:
                return summary
        raise ModelNotFound(model_id=model_id[:128])

    async def _ask(self, message: Message, reply: type[M]) -> M:
        return await self._dispatch.ask_scheduler(message, reply, ANSWER_S_MAX)


def as_json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _is_ready(summary: ModelSummary) -> bool:
    return summary.state is ModelState.READY


def _openai_model(summary: ModelSummary) -> Json:
    more: Json = {
        "state": str(summary.state),
        "size_bytes": summary.size_bytes,
        "residency": {server_id: str(tier) for server_id, tier in summary.residency.items()},
        "instances": len(summary.instances),
    }
    return model_body(summary.model_id, int(summary.created_at_s), more)


def _named(struct: msgspec.Struct) -> Json:
    """What is about a model, under the names of this API."""
    fields = untagged(struct)
    return {"model": fields.pop("model_id"), **fields}


def _job(job: JobStatus) -> Json:
    fields = untagged(job)
    error = None if job.error is None else error_object(error_of(job.error)).body()["error"]
    return {"job_id": fields.pop("job_id"), "model": fields.pop("model_id"), **fields, "error": error}


def untagged(struct: msgspec.Struct) -> Json:
    """A message as JSON, without its tag."""
    fields: Json = msgspec.to_builtins(struct)
    fields.pop("type", None)
    return fields
