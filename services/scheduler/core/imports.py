"""Owns deployment: the models that are to be imported, and the jobs by which agents do it (F1)."""

from __future__ import annotations

import math

import msgspec
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Conflict, ImportFailed, InvalidRequest, JobNotFound
from whimbrel.wire.events import ModelDeployed
from whimbrel.wire.ids import check_model_id
from whimbrel.wire.messages import (
    Ack,
    CancelJob,
    CancelJobReply,
    DeployModel,
    DeployModelReply,
    ImportEnded,
    ImportFinished,
    ImportProgressed,
    JobStage,
    ModelState,
    Scaling,
)
from whimbrel.wire.records import InstanceState, ModelRecord
from whimbrel.wire.sources import parse_source, redacted

from services.scheduler.core import jobs, lifecycle, operations
from services.scheduler.core.instances import InstanceEvent
from services.scheduler.core.manifests import ManifestFacts, facts_of
from services.scheduler.core.models import Job, Model
from services.scheduler.core.step import Step

#: What an agent says of a job on its way; how it ended is a message of its own.
STAGES_ON_THE_WAY = (JobStage.DOWNLOADING, JobStage.CONVERTING, JobStage.VERIFYING, JobStage.PUBLISHING)


def on_deploy_model(step: Step, message: DeployModel, reply_to: str | None) -> None:
    """Deploying is idempotent: while an import of the model runs, that one is the answer, unless it was cancelled."""
    _check(message)
    cluster = step.cluster
    model = cluster.models.get(message.model_id)
    if model is not None and model.record.state is ModelState.DELETING:
        raise Conflict(reason=f"model {message.model_id!r} is being deleted; deploy it when it is gone")
    job = cluster.open_job(message.model_id)
    if job is not None and job.record.is_cancelled:
        raise Conflict(
            reason=f"the import {job.job_id} of {message.model_id!r} is being cancelled; deploy it when it ended"
        )
    if job is not None and job.record.source != message.source:
        other = redacted(job.record.source)
        raise Conflict(
            reason=f"an import of {message.model_id!r} from {other} is running; to take another source, cancel it "
            f"first: whimbrel cancel {job.job_id}"
        )
    if job is None:
        job = jobs.add(step, message)
        if model is None or not model.is_servable:
            model = _add_model(step, message, job, model)
        else:
            # What is deployed serves on until the new checkpoint is there.
            step.change_model(model, job_id=job.job_id, source=redacted(message.source))
        jobs.assign(step, job)
    assert model is not None, "an open job has its model"
    if message.keep_alive_s is not None and message.keep_alive_s != model.record.keep_alive_s:
        step.change_model(model, keep_alive_s=message.keep_alive_s)
    if message.scaling is not None and message.scaling != model.record.scaling:
        step.change_model(model, scaling=message.scaling)
        operations.note_minimum(step, model)
    step.answer(reply_to, DeployModelReply(job_id=job.job_id, state=model.record.state))


def on_import_progressed(step: Step, message: ImportProgressed, reply_to: str | None) -> None:
    job = step.cluster.jobs.get(message.job_id)
    if job is None or not job.record.is_open:
        return
    job.done_bytes, job.total_bytes = message.done_bytes, message.total_bytes
    if message.stage is not job.record.job.stage and message.stage in STAGES_ON_THE_WAY:
        jobs.update(step, job, stage=message.stage)


def on_cancel_job(step: Step, message: CancelJob, reply_to: str | None) -> None:
    """What is over stays as it is; what waits ends now; what runs ends when its agent has stopped."""
    job = step.cluster.jobs.get(message.job_id)
    if job is None:
        raise JobNotFound(job_id=message.job_id)
    jobs.cancel(step, job)
    step.answer(reply_to, CancelJobReply(job=job.status()))


def on_import_finished(step: Step, message: ImportFinished, reply_to: str | None) -> None:
    """The checkpoint is published. Repeated by the agent until it is answered, so twice is once."""
    step.answer(reply_to, Ack())
    job = step.cluster.jobs.get(message.job_id)
    if job is None or not job.record.is_open:
        return
    try:
        facts = facts_of(message.manifest)
    except msgspec.DecodeError as cause:
        error = ImportFailed(model_id=job.model_id, stage="manifest", reason=f"its manifest is not valid: {cause}")
        jobs.fail(step, job, error_reply(error))
        return
    job.done_bytes = job.total_bytes = message.size_bytes
    jobs.end(step, job, JobStage.FINISHED)
    model = step.cluster.models[job.model_id]
    if model.record.state is not ModelState.DELETING:
        _publish(step, model, message, facts)


def on_import_ended(step: Step, message: ImportEnded, reply_to: str | None) -> None:
    step.answer(reply_to, Ack())
    job = step.cluster.jobs.get(message.job_id)
    if job is not None and job.record.is_open:
        jobs.fail(step, job, message.error)


def _check(message: DeployModel) -> None:
    check_model_id(message.model_id)
    parse_source(message.source)
    keep_alive_s = message.keep_alive_s
    if keep_alive_s is not None and not (math.isfinite(keep_alive_s) and keep_alive_s >= 0.0):
        raise InvalidRequest(field="keep_alive_s", reason="must be a number of seconds, 0 or more")
    if message.scaling is not None:
        operations.check_scaling(message.scaling)


def _add_model(step: Step, message: DeployModel, job: Job, model: Model | None) -> Model:
    """A model that nobody can use yet: new, or once failed to be imported."""
    record = ModelRecord(
        model_id=message.model_id,
        state=ModelState.IMPORTING,
        source=redacted(message.source),
        job_id=job.job_id,
        checkpoint_digest="",
        size_bytes=0,
        parameter_count=0,
        architecture="",
        model_config=b"",
        created_at_s=step.wall_s,
        keep_alive_s=message.keep_alive_s,
        scaling=message.scaling or Scaling(),
    )
    model = model or Model(record=record)
    model.record = record
    step.cluster.models[message.model_id] = model
    step.save(record)
    return model


def _publish(step: Step, model: Model, message: ImportFinished, facts: ManifestFacts) -> None:
    """The same bytes as before change nothing; others replace the instances of the old ones."""
    is_other = message.checkpoint_digest != model.record.checkpoint_digest
    step.change_model(
        model,
        state=ModelState.READY,
        checkpoint_digest=message.checkpoint_digest,
        size_bytes=message.size_bytes,
        parameter_count=facts.parameter_count,
        architecture=facts.architecture or "",
        model_config=message.model_config,
        partition_bytes=facts.partition_bytes,
    )
    operations.note_minimum(step, model)
    step.tell(
        ModelDeployed(
            model_id=model.model_id,
            job_id=message.job_id,
            checkpoint_digest=message.checkpoint_digest,
            size_bytes=message.size_bytes,
        )
    )
    for instance in step.cluster.instances_of(model) if is_other else []:
        if instance.arriving is not None:
            continue  # its requests are of the old bytes; it drains when they have moved
        if instance.state is InstanceState.READY:
            lifecycle.drain(step, instance)
        elif instance.state is InstanceState.LOADING:
            lifecycle.end_load(step, instance, InstanceEvent.LOAD_FAILED)
    if model.waiters:
        step.wanted[model.model_id] = None
