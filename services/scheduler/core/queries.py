"""Owns the answers to questions: models, jobs, routes, the cluster. Nothing here changes anything."""

from __future__ import annotations

from whimbrel.wire.errors import JobNotFound
from whimbrel.wire.messages import (
    GetCluster,
    GetClusterReply,
    GetJob,
    GetJobReply,
    GetModels,
    GetModelsReply,
    GetRoutes,
    GetRoutesReply,
    ModelSummary,
    ServerSummary,
    SlotSummary,
    Tier,
    WorkerState,
)
from whimbrel.wire.records import InstanceState

from services.scheduler.core import accuracy, commands, operations, restore
from services.scheduler.core.models import Model
from services.scheduler.core.servers import Server, Slot
from services.scheduler.core.step import Step


def on_get_models(step: Step, message: GetModels, reply_to: str | None) -> None:
    restore.check_searched(step)
    models = sorted(step.cluster.models.values(), key=lambda model: model.model_id)
    step.answer(reply_to, GetModelsReply(models=tuple(_summarise(step, model) for model in models)))


def on_get_job(step: Step, message: GetJob, reply_to: str | None) -> None:
    job = step.cluster.jobs.get(message.job_id)
    if job is None:
        raise JobNotFound(job_id=message.job_id)
    step.answer(reply_to, GetJobReply(job=job.status()))


def on_get_routes(step: Step, message: GetRoutes, reply_to: str | None) -> None:
    """A router starts, or resynchronises: it hears of routes from now on."""
    step.cluster.hear_router(message.router_id, now=step.now)
    routes = tuple(
        commands.route_added(instance)
        for instance in step.cluster.instances.values()
        if instance.state in (InstanceState.READY, InstanceState.DRAINING) and instance.arriving is None
    )
    step.answer(reply_to, GetRoutesReply(routes=routes))


def on_get_cluster(step: Step, message: GetCluster, reply_to: str | None) -> None:
    cluster = step.cluster
    reply = GetClusterReply(
        scheduler_epoch=step.epoch,
        scheduler_id=step.scheduler_id,
        policy=step.settings.policy,
        servers=tuple(_summarise_server(step, cluster.servers[k]) for k in sorted(cluster.servers)),
        routers=tuple(sorted(cluster.routers)),
        waiting_requests=cluster.waiting_requests,
    )
    step.answer(reply_to, reply)


def _summarise(step: Step, model: Model) -> ModelSummary:
    record = model.record
    return ModelSummary(
        model_id=record.model_id,
        state=record.state,
        checkpoint_digest=record.checkpoint_digest,
        size_bytes=record.size_bytes,
        parameter_count=record.parameter_count,
        architecture=record.architecture,
        source=record.source,
        created_at_s=record.created_at_s,
        keep_alive_s=operations.model_keep_alive_s(step, model),
        instances=tuple(
            instance.instance_id
            for instance in step.cluster.instances_of(model)
            if instance.state is InstanceState.READY
        ),
        waiting_requests=len(model.waiters),
        residency=_residency(step, model),
        job_id=record.job_id,
        scaling=record.scaling,
        desired_instances=operations.desired_instances(step, model),
    )


def _residency(step: Step, model: Model) -> dict[str, Tier]:
    """The fastest tier per server that lives; GPU where an instance serves."""
    key = (model.model_id, model.record.checkpoint_digest)
    residency: dict[str, Tier] = {}
    for server in step.cluster.live_servers():
        resident = server.resident(key)
        if resident is not None and resident.tier is not Tier.REMOTE:
            residency[server.server_id] = resident.tier
    for instance in step.cluster.instances_of(model):
        if instance.state is not InstanceState.LOADING:
            residency[instance.record.server_id] = Tier.GPU
    return residency


def _summarise_server(step: Step, server: Server) -> ServerSummary:
    known = server.heartbeat
    return ServerSummary(
        server_id=server.server_id,
        is_alive=server.is_alive,
        last_seen_s=max(0.0, step.now - server.seen_s),
        slots=tuple(_summarise_slot(server.slots[k]) for k in sorted(server.slots)),
        resident=server.residency.models() if known else (),
        tasks=known.tasks if known else (),
        pool_size_bytes=known.pool_size_bytes if known else 0,
        pool_free_bytes=known.pool_free_bytes if known else 0,
        ssd_size_bytes=known.ssd_size_bytes if known else 0,
        ssd_used_bytes=known.ssd_used_bytes if known else 0,
        bandwidth_bytes_per_s={
            tier.value: 1.0 / record.seconds_per_byte
            for tier, record in server.bandwidths.items()
            if record.seconds_per_byte > 0.0
        },
        is_cordoned=server.is_cordoned,
        is_draining=server.is_draining,
        estimates={
            record.tier.value: accuracy.quality(record)
            for record in step.cluster.accuracies.values()
            if record.server_id == server.server_id
        },
    )


def _summarise_slot(slot: Slot) -> SlotSummary:
    known = slot.heartbeat
    return SlotSummary(
        slot=slot.slot,
        device=known.device if known else "",
        memory_size_bytes=known.memory_size_bytes if known else 0,
        memory_free_bytes=known.memory_free_bytes if known else 0,
        state=known.state if known else WorkerState.EMPTY,
        is_alive=slot.is_alive and known is not None,
        model_id=known.model_id if known else None,
        instance_id=known.instance_id if known else None,
        active_requests=known.active_requests if known else 0,
    )
