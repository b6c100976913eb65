"""What stories of imports tell with: deployments, their jobs, and what agents say of them."""

from __future__ import annotations

from whimbrel.wire.messages import (
    CancelJob,
    CancelJobReply,
    DeployModel,
    DeployModelReply,
    ErrorReply,
    GetJob,
    GetJobReply,
    ImportFinished,
    JobStage,
    JobStatus,
    Message,
)
from whimbrel.wire.records import ModelRecord

from tests.unit.scheduler.builders import ask
from tests.unit.scheduler.toys import ToyCluster


def deploy(
    cluster: ToyCluster, model_id: str = "m", source: str = "/models/m", keep_alive_s: float | None = None
) -> DeployModelReply:
    reply = ask(cluster, DeployModel(model_id=model_id, source=source, keep_alive_s=keep_alive_s))
    assert isinstance(reply, DeployModelReply)
    return reply


def refused(cluster: ToyCluster, message: Message) -> str:
    reply = ask(cluster, message)
    assert isinstance(reply, ErrorReply)
    return reply.code


def model(cluster: ToyCluster, model_id: str = "m") -> ModelRecord | None:
    record = cluster.store.get(("models", model_id))
    assert record is None or isinstance(record, ModelRecord)
    return record


def job(cluster: ToyCluster, job_id: str) -> JobStatus:
    reply = ask(cluster, GetJob(job_id=job_id))
    assert isinstance(reply, GetJobReply)
    return reply.job


def finished(job_id: str, *, digest: str = "d1", manifest: bytes | None = None) -> ImportFinished:
    return ImportFinished(
        job_id=job_id,
        model_id="m",
        server_id="s0",
        checkpoint_digest=digest,
        size_bytes=1000,
        manifest=manifest or b'{"parameter_count": 7, "architecture": null}',
        model_config=b"{}",
    )


def error_code(cluster: ToyCluster, job_id: str) -> str | None:
    status = job(cluster, job_id)
    assert status.stage is JobStage.FAILED
    return status.error and status.error.code


def cancel(cluster: ToyCluster, job_id: str) -> JobStatus:
    reply = ask(cluster, CancelJob(job_id=job_id))
    assert isinstance(reply, CancelJobReply)
    return reply.job
