"""Stories of imports that are cancelled, and of what is left of their secrets."""

from __future__ import annotations

from whimbrel.wire.events import ModelImportStarted
from whimbrel.wire.messages import (
    CancelImport,
    CancelJob,
    DeleteModel,
    DeployModel,
    ImportModel,
    JobStage,
    ModelState,
)
from whimbrel.wire.records import JobRecord

from tests.unit.scheduler.builders import a_cluster, ask
from tests.unit.scheduler.import_stories import cancel, deploy, error_code, finished, job, model, refused


def test_a_job_that_is_cancelled_ends_when_its_agent_has_stopped_and_can_be_deployed_again() -> None:
    cluster = a_cluster()
    reply = deploy(cluster)
    cluster.run(0.1)
    assert cancel(cluster, reply.job_id).stage is JobStage.QUEUED
    cluster.run(0.1)
    assert error_code(cluster, reply.job_id) == "cancelled"
    record = model(cluster)
    assert record is not None
    assert record.state is ModelState.FAILED
    assert cancel(cluster, reply.job_id).stage is JobStage.FAILED, "twice is once"
    deploy(cluster)
    cluster.run(2.0)
    record = model(cluster)
    assert record is not None
    assert record.state is ModelState.READY


def test_a_cancelled_job_of_a_deployed_model_leaves_it_as_it_was() -> None:
    cluster = a_cluster("m")
    reply = deploy(cluster, source="/models/m-v2")
    cancel(cluster, reply.job_id)
    assert refused(cluster, DeployModel(model_id="m", source="/models/m-v3")) == "conflict", "it is not over yet"
    cluster.run(2.0)
    record = model(cluster)
    assert record is not None
    assert (record.state, record.checkpoint_digest) == (ModelState.READY, "digest-of-m")


def test_a_cancel_is_told_again_until_the_agent_has_heard_it_also_after_a_restart() -> None:
    """P1: what was accepted is not lost with the scheduler's life."""
    cluster = a_cluster(drops=lambda message: isinstance(message, CancelImport))
    cluster.agents["s0"].import_s = 60.0
    reply = deploy(cluster)
    cancel(cluster, reply.job_id)
    cluster.run(2.5)
    assert len(cluster.said_to_all(CancelImport)) >= 3
    cluster.stop_scheduler()
    cluster.start_scheduler()
    cluster.drops = lambda message: False
    cluster.run(3.0)
    assert error_code(cluster, reply.job_id) == "cancelled"


def test_a_cancel_that_finds_no_agent_ends_the_job_and_one_that_finds_a_lost_one_ends_it_then() -> None:
    cluster = a_cluster(servers=0)
    reply = deploy(cluster)
    assert cancel(cluster, reply.job_id).stage is JobStage.FAILED
    cluster = a_cluster(servers=2)
    reply = deploy(cluster)
    cluster.kill_agent("s0")
    cancel(cluster, reply.job_id)
    cluster.run(6.0)
    assert error_code(cluster, reply.job_id) == "cancelled"
    assert len(cluster.said_to_all(ImportModel)) == 1, "it is not given to another agent"


def test_a_cancel_of_a_job_that_its_agent_never_heard_of_ends_it() -> None:
    cluster = a_cluster(drops=lambda message: isinstance(message, ImportModel))
    reply = deploy(cluster)
    cancel(cluster, reply.job_id)
    cluster.run(3.0)
    assert error_code(cluster, reply.job_id) == "cancelled"
    assert reply.job_id in cluster.agents["s0"].revoked, "if the job comes after all, it is not started"


def test_an_import_that_was_published_before_the_cancel_came_is_finished() -> None:
    cluster = a_cluster(drops=lambda message: isinstance(message, CancelImport))
    reply = deploy(cluster)
    cancel(cluster, reply.job_id)
    ask(cluster, finished(reply.job_id))
    assert job(cluster, reply.job_id).stage is JobStage.FINISHED


def test_an_agent_that_goes_on_with_a_cancelled_job_is_told_again() -> None:
    cluster = a_cluster(servers=2)
    reply = deploy(cluster)
    cluster.run(0.1)
    running = cluster.agents["s0"].jobs[0]
    cancel(cluster, reply.job_id)
    cluster.run(1.0)
    assert job(cluster, reply.job_id).stage is JobStage.FAILED
    told = len(cluster.said_to_all(CancelImport))
    cluster.agents["s0"].jobs.append(running)
    cluster.run(2.5)
    assert len(cluster.said_to_all(CancelImport)) > told
    assert cluster.agents["s0"].jobs == []


def test_there_is_no_job_to_cancel_under_an_unknown_id() -> None:
    assert refused(a_cluster(), CancelJob(job_id="absent")) == "job_not_found"


def test_secrets_in_a_source_are_for_the_agent_only_and_forgotten_with_the_job() -> None:
    cluster = a_cluster()
    source = "https://alice:s3cret@models.example/m"
    reply = deploy(cluster, source=source)
    (command,) = [m for m in cluster.said_to_all(ImportModel) if isinstance(m, ImportModel)]
    assert command.source == source
    record = model(cluster)
    assert record is not None
    assert record.source == "https://models.example/m"
    (event,) = cluster.happened(ModelImportStarted)
    assert isinstance(event, ModelImportStarted)
    assert event.source == "https://models.example/m"
    cluster.run(3.0)
    assert job(cluster, reply.job_id).stage is JobStage.FINISHED
    stored = cluster.store[("jobs", reply.job_id)]
    assert isinstance(stored, JobRecord)
    assert stored.source == "https://models.example/m"


def test_a_deleted_models_import_ends_with_its_agent() -> None:
    cluster = a_cluster(servers=2)
    reply = deploy(cluster)
    ask(cluster, DeleteModel(model_id="m"))
    cluster.kill_agent("s0")
    cluster.run(6.0)
    status = job(cluster, reply.job_id)
    assert status.error is not None
    assert status.error.code == "cancelled"
    assert model(cluster) is None
