"""Owns import jobs: who runs them, how far they are, how they end. Agents do the work; a job survives its agent."""

from __future__ import annotations

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Cancelled, QueueFull
from whimbrel.wire.events import ModelImportFailed, ModelImportStarted
from whimbrel.wire.messages import (
    AgentHeartbeat,
    CancelImport,
    DeployModel,
    ErrorReply,
    ImportModel,
    JobStage,
    JobStatus,
    ModelState,
)
from whimbrel.wire.records import JobRecord
from whimbrel.wire.sources import redacted

from services.scheduler.core.models import Job
from services.scheduler.core.ready import ToAgent
from services.scheduler.core.settings import ENDED_JOBS_MAX
from services.scheduler.core.step import Step, sentence


def hear_agent(step: Step, message: AgentHeartbeat) -> None:
    """Jobs that nobody runs are given to somebody; what the agent did not hear of its jobs is said again."""
    for job in list(step.cluster.jobs.values()):
        is_listed = job.job_id in message.jobs
        is_due = step.now - job.sent_s >= step.settings.repeat_s
        if not job.record.is_open:
            # An agent that was away while its job was cancelled goes on with what nobody wants.
            if is_listed and is_due and _was_cancelled(job):
                _command_end(step, job, message.server_id)
        elif not job.record.server_id:
            assign(step, job)
        elif job.record.server_id == message.server_id and is_due:
            if is_unwanted(step, job):
                _end_unwanted(step, job, is_listed=is_listed)
            elif not is_listed:
                _command(step, job)


def is_unwanted(step: Step, job: Job) -> bool:
    """Whether somebody cancelled it, or deleted its model."""
    return job.record.is_cancelled or step.cluster.models[job.model_id].record.state is ModelState.DELETING


def cancel(step: Step, job: Job) -> None:
    """Its agent is told, and says how it ended: an import that was published just now is finished, not cancelled."""
    if not job.record.is_open or job.record.is_cancelled:
        return
    if not job.record.server_id:
        fail(step, job, _cancelled(job))
        return
    update(step, job, is_cancelled=True)
    _command_end(step, job, job.record.server_id)


def lose_agent(step: Step, server_id: str) -> None:
    """Jobs of a lost agent are given to another one; of a model that is being deleted, they end."""
    for job in list(step.cluster.jobs.values()):
        if job.record.is_open and job.record.server_id == server_id:
            if is_unwanted(step, job):
                fail(step, job, _cancelled(job))
            else:
                update(step, job, server_id="")
                assign(step, job)


def add(step: Step, message: DeployModel) -> Job:
    """A new job, not yet given to anybody; raises QueueFull."""
    open_jobs = sum(job.record.is_open for job in step.cluster.jobs.values())
    if open_jobs >= step.settings.imports_max:
        raise QueueFull(queue="the list of imports", limit=step.settings.imports_max, retry_after_s=10)
    if message.model_id not in step.cluster.models and len(step.cluster.models) >= step.settings.models_max:
        raise QueueFull(queue="the catalogue", limit=step.settings.models_max, retry_after_s=60)
    status = JobStatus(job_id=step.new_id("job"), model_id=message.model_id, stage=JobStage.QUEUED)
    job = Job(record=JobRecord(job=status, source=message.source, server_id="", updated_at_s=step.wall_s))
    step.cluster.jobs[job.job_id] = job
    step.save(job.record)
    return job


def fail(step: Step, job: Job, error: ErrorReply) -> None:
    """Nothing was published: a model that was deployed before stays as it was."""
    end(step, job, JobStage.FAILED, error)
    model = step.cluster.models[job.model_id]
    if model.record.state is ModelState.IMPORTING:
        step.change_model(model, state=ModelState.FAILED)
    step.tell(ModelImportFailed(model_id=job.model_id, job_id=job.job_id, code=error.code, message=sentence(error)))


def assign(step: Step, job: Job) -> None:
    """To the live agent with the fewest jobs; without one the job waits."""
    busy = [other.record.server_id for other in step.cluster.jobs.values() if other.record.is_open]
    servers = [server.server_id for server in step.cluster.live_servers() if server.takes_jobs]
    if not servers:
        return
    server_id = min(servers, key=lambda server_id: (busy.count(server_id), server_id))
    update(step, job, server_id=server_id)
    _command(step, job)
    step.tell(
        ModelImportStarted(
            model_id=job.model_id, job_id=job.job_id, source=redacted(job.record.source), server_id=server_id
        )
    )


def update(
    step: Step,
    job: Job,
    *,
    stage: JobStage | None = None,
    server_id: str | None = None,
    error: ErrorReply | None = None,
    is_cancelled: bool | None = None,
) -> None:
    """The job's record, as it is now. Once it is over, its source is only told, so that it keeps no secrets."""
    known = job.record
    is_over = stage in (JobStage.FINISHED, JobStage.FAILED)
    job.record = JobRecord(
        job=JobStatus(
            job_id=job.job_id,
            model_id=job.model_id,
            stage=stage or known.job.stage,
            done_bytes=job.done_bytes,
            total_bytes=job.total_bytes,
            error=error,
        ),
        source=redacted(known.source) if is_over else known.source,
        server_id=known.server_id if server_id is None else server_id,
        updated_at_s=step.wall_s,
        is_cancelled=known.is_cancelled if is_cancelled is None else is_cancelled,
    )
    step.save(job.record)


def end(step: Step, job: Job, stage: JobStage, error: ErrorReply | None = None) -> None:
    """The job is over. Some of the past is kept for those who ask how it went."""
    update(step, job, stage=stage, error=error)
    ended = [job for job in step.cluster.jobs.values() if not job.record.is_open]
    ended.sort(key=lambda job: (job.record.updated_at_s, job.job_id))
    for old in ended[: max(0, len(ended) - ENDED_JOBS_MAX)]:
        del step.cluster.jobs[old.job_id]
        step.forget(old.record)


def _command(step: Step, job: Job) -> None:
    job.sent_s = step.now
    command = ImportModel(
        job_id=job.job_id, model_id=job.model_id, source=job.record.source, scheduler_epoch=step.epoch
    )
    step.send(ToAgent(server_id=job.record.server_id), command)


def _end_unwanted(step: Step, job: Job, *, is_listed: bool) -> None:
    """An agent that has the job is told again. One that does not have it will not start it: a cancel that comes before
    its job is remembered there."""
    _command_end(step, job, job.record.server_id)
    if not is_listed:
        fail(step, job, _cancelled(job))


def _command_end(step: Step, job: Job, server_id: str) -> None:
    job.sent_s = step.now
    step.send(ToAgent(server_id=server_id), CancelImport(job_id=job.job_id, scheduler_epoch=step.epoch))


def _was_cancelled(job: Job) -> bool:
    error = job.record.job.error
    return error is not None and error.code == Cancelled.code


def _cancelled(job: Job) -> ErrorReply:
    return error_reply(Cancelled(what=f"import {job.job_id} of {job.model_id}"))
