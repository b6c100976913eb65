"""Stories of models that are deployed, deployed again, and deleted."""

from __future__ import annotations

import math

import pytest
from whimbrel.wire.codec import error_of, error_reply
from whimbrel.wire.errors import Conflict, ImportFailed
from whimbrel.wire.events import ModelDeployed, ModelImportFailed, ModelImportStarted
from whimbrel.wire.messages import (
    Ack,
    CancelLoad,
    DeployModel,
    DeployModelReply,
    ErrorReply,
    GetJob,
    ImportEnded,
    ImportFinished,
    ImportModel,
    ImportProgressed,
    JobStage,
    ModelState,
    RouteAdded,
    RouteState,
    UnloadRefused,
)
from whimbrel.wire.records import InstanceState, JobRecord, ModelRecord

from services.scheduler.core.ready import Arrived, Ready, ToAgent
from services.scheduler.core.settings import ENDED_JOBS_MAX, Settings
from tests.unit.scheduler.builders import a_cluster, ask, place
from tests.unit.scheduler.import_stories import deploy, finished, job, model, refused
from tests.unit.scheduler.toys import ToyCluster


def test_a_deployment_is_recorded_and_given_to_an_agent() -> None:
    """F1, P1"""
    cluster = a_cluster()
    message = DeployModel(model_id="m", source="/models/m")
    ready = cluster.deliver(Arrived(message=message, reply_to="r"))
    assert [type(record) for record in ready.records] == [JobRecord, ModelRecord, JobRecord]
    command, reply = ready.messages
    assert command.to == ToAgent(server_id="s0")
    assert isinstance(command.message, ImportModel)
    assert isinstance(reply.message, DeployModelReply)
    assert reply.message.state is ModelState.IMPORTING
    assert command.message.job_id == reply.message.job_id
    assert [type(event) for event in ready.events] == [ModelImportStarted]
    refusal = cluster.deliver(place("q1", "m")).messages[0].message
    assert isinstance(refusal, ErrorReply)
    assert refusal.code == "unavailable"


def test_an_agent_that_stops_is_given_no_import() -> None:
    """It would not take it, and nobody else would for as long as it stays."""
    cluster = ToyCluster(servers=2)
    cluster.run(0.5)
    cluster.agents["s0"].is_stopping = True
    cluster.agents["s0"].beat()
    cluster.run(0.1)
    started = deploy(cluster)
    cluster.run(3.0)
    assert job(cluster, started.job_id).stage is JobStage.FINISHED
    assert not cluster.agents["s0"].finished, "the other one did it"


def test_an_imported_model_can_be_served() -> None:
    """F4: what the scheduler knows of it comes from its manifest."""
    cluster = a_cluster()
    reply = deploy(cluster)
    cluster.run(2.0)
    record = model(cluster)
    assert record is not None
    assert record.state is ModelState.READY
    assert (record.checkpoint_digest, record.parameter_count) == ("digest-of-/models/m", 7)
    assert record.architecture == "ToyForCausalLM"
    assert job(cluster, reply.job_id).stage is JobStage.FINISHED
    assert len(cluster.happened(ModelDeployed)) == 1
    request = cluster.router.request("q1", "m")
    cluster.run(3.0)
    assert request.is_done


def test_deploying_while_it_is_imported_is_the_same_import() -> None:
    cluster = a_cluster()
    first = deploy(cluster)
    second = deploy(cluster)
    assert first.job_id == second.job_id
    assert len(cluster.said_to_all(ImportModel)) == 1


def test_deploying_from_another_source_while_it_is_imported_is_a_conflict_that_says_what_to_do() -> None:
    cluster = a_cluster()
    first = deploy(cluster)
    answer = ask(cluster, DeployModel(model_id="m", source="https://user:secret@elsewhere/m/"))
    assert isinstance(answer, ErrorReply)
    error = error_of(answer)
    assert isinstance(error, Conflict)
    assert f"whimbrel cancel {first.job_id}" in error.reason
    assert len(cluster.said_to_all(ImportModel)) == 1


def test_deploying_the_same_bytes_again_changes_nothing_for_who_uses_them() -> None:
    cluster = a_cluster()
    deploy(cluster)
    cluster.run(2.0)
    request = cluster.router.request("q1", "m", run_s=10.0)
    cluster.run(2.0)
    reply = deploy(cluster)
    assert reply.state is ModelState.READY
    cluster.run(2.0)
    assert [record.state for record in cluster.instances()] == [InstanceState.READY]
    cluster.run(20.0)
    assert request.is_done


def test_deploying_other_bytes_drains_the_old_instances_and_serves_the_new_ones() -> None:
    cluster = a_cluster(slots=2)
    deploy(cluster)
    cluster.run(2.0)
    old = cluster.router.request("q1", "m", run_s=10.0)
    cluster.run(2.0)
    deploy(cluster, source="/models/m-v2")
    cluster.run(2.0)
    states = [m.route.state for m in cluster.said_to_all(RouteAdded) if isinstance(m, RouteAdded)]
    assert states == [RouteState.READY, RouteState.DRAINING]
    new = cluster.router.request("q2", "m")
    cluster.run(3.0)
    assert new.is_done
    cluster.run(20.0)
    assert old.is_done
    assert [record.checkpoint_digest for record in cluster.instances()] == ["digest-of-/models/m-v2"]


def test_a_load_of_old_bytes_is_stopped_when_new_ones_are_deployed() -> None:
    cluster = a_cluster("m")
    reply = deploy(cluster, source="/models/m-v2")
    request = cluster.router.request("q1", "m")
    cluster.run(0.5)
    cluster.deliver(Arrived(message=finished(reply.job_id), reply_to="r"))
    assert len(cluster.said_to_all(CancelLoad)) == 1
    cluster.run(10.0)
    assert request.is_done
    assert [record.checkpoint_digest for record in cluster.instances()] == ["d1"]


def test_an_instance_of_old_bytes_whose_unload_is_refused_is_drained() -> None:
    cluster = a_cluster("m", settings=Settings(keep_alive_s=1.0))
    first = cluster.router.request("q1", "m")
    cluster.run_until(lambda: first.is_done, 10.0)
    cluster.drops = lambda message: not isinstance(message, ImportFinished)
    cluster.run_until(lambda: cluster.instances()[0].state is InstanceState.UNLOADING, 5.0)
    reply = deploy(cluster, source="/models/m-v2")
    cluster.deliver(Arrived(message=finished(reply.job_id), reply_to="r"))
    cluster.drops = lambda message: False
    cluster.to_scheduler(UnloadRefused(instance_id=cluster.instances()[0].instance_id))
    cluster.run(0.01)
    states = [m.route.state for m in cluster.said_to_all(RouteAdded) if isinstance(m, RouteAdded)]
    assert states[-1] is RouteState.DRAINING


def test_a_failed_import_says_why_and_can_be_tried_again_or_deleted() -> None:
    cluster = a_cluster()
    reply = deploy(cluster)
    error = error_reply(ImportFailed(model_id="m", stage="converting", reason="no such directory"))
    ended = ImportEnded(job_id=reply.job_id, model_id="m", server_id="s0", error=error)
    assert ask(cluster, ended) == Ack()
    assert ask(cluster, ended) == Ack(), "said again, it is answered again"
    status = job(cluster, reply.job_id)
    assert (status.stage, status.error) == (JobStage.FAILED, error)
    (event,) = cluster.happened(ModelImportFailed)
    assert isinstance(event, ModelImportFailed)
    assert "no such directory" in event.message
    refusal = cluster.deliver(place("q1", "m")).messages[0].message
    assert isinstance(refusal, ErrorReply)
    assert refusal.code == "model_not_found"
    again = deploy(cluster)
    assert again.job_id != reply.job_id
    assert again.state is ModelState.IMPORTING


def test_an_error_that_a_peer_got_wrong_is_told_by_its_code() -> None:
    cluster = a_cluster()
    reply = deploy(cluster)
    error = ErrorReply(code="import_failed", fields={"nonsense": 1})
    ask(cluster, ImportEnded(job_id=reply.job_id, model_id="m", server_id="s0", error=error))
    (event,) = cluster.happened(ModelImportFailed)
    assert isinstance(event, ModelImportFailed)
    assert event.message == "import_failed"


def test_a_failed_import_of_a_deployed_model_leaves_it_as_it_was() -> None:
    cluster = a_cluster("m")
    reply = deploy(cluster, source="/broken")
    error = error_reply(ImportFailed(model_id="m", stage="converting", reason="no such directory"))
    ask(cluster, ImportEnded(job_id=reply.job_id, model_id="m", server_id="s0", error=error))
    record = model(cluster)
    assert record is not None
    assert (record.state, record.checkpoint_digest) == (ModelState.READY, "digest-of-m")


def test_a_manifest_that_cannot_be_read_fails_the_import() -> None:
    cluster = a_cluster()
    reply = deploy(cluster)
    assert ask(cluster, finished(reply.job_id, manifest=b"{not json")) == Ack()
    status = job(cluster, reply.job_id)
    assert status.error is not None
    assert status.error.code == "import_failed"


def test_the_end_of_an_unknown_import_is_acknowledged_so_that_it_is_not_repeated_for_ever() -> None:
    cluster = a_cluster()
    assert ask(cluster, finished("unknown")) == Ack()
    error = error_reply(ImportFailed(model_id="m", stage="converting", reason="x"))
    assert ask(cluster, ImportEnded(job_id="unknown", model_id="m", server_id="s0", error=error)) == Ack()


def test_progress_is_told_and_only_its_stages_are_recorded() -> None:
    cluster = a_cluster()
    reply = deploy(cluster)

    def progressed(stage: JobStage, done_bytes: int) -> Ready:
        message = ImportProgressed(
            job_id=reply.job_id, server_id="s0", stage=stage, done_bytes=done_bytes, total_bytes=100
        )
        return cluster.deliver(Arrived(message=message))

    assert len(progressed(JobStage.DOWNLOADING, 5).records) == 1
    assert len(progressed(JobStage.CONVERTING, 10).records) == 1
    assert progressed(JobStage.CONVERTING, 20).records == ()
    status = job(cluster, reply.job_id)
    assert (status.stage, status.done_bytes, status.total_bytes) == (JobStage.CONVERTING, 20, 100)
    assert len(progressed(JobStage.VERIFYING, 0).records) == 1
    assert len(progressed(JobStage.PUBLISHING, 0).records) == 1
    assert progressed(JobStage.FINISHED, 0).records == (), "only the end itself says so"
    ask(cluster, finished(reply.job_id))
    assert progressed(JobStage.CONVERTING, 99).records == ()
    assert job(cluster, reply.job_id).stage is JobStage.FINISHED


def test_an_import_is_commanded_again_until_its_agent_lists_it() -> None:
    cluster = a_cluster(drops=lambda message: isinstance(message, ImportModel))
    reply = deploy(cluster)
    cluster.run(2.5)
    assert len(cluster.said_to_all(ImportModel)) == 3
    cluster.drops = lambda message: False
    cluster.run(3.0)
    assert job(cluster, reply.job_id).stage is JobStage.FINISHED
    assert len(cluster.said_to_all(ImportModel)) == 4


def test_an_import_whose_agent_is_lost_is_given_to_another_one() -> None:
    cluster = a_cluster(servers=2)
    reply = deploy(cluster)
    cluster.run(0.5)
    cluster.kill_agent("s0")
    cluster.run(6.0)
    assert job(cluster, reply.job_id).stage is JobStage.FINISHED
    assert [o.to for o in cluster.said if isinstance(o.message, ImportModel)] == [
        ToAgent(server_id="s0"),
        ToAgent(server_id="s1"),
    ]


def test_an_import_waits_for_an_agent_when_there_is_none() -> None:
    cluster = a_cluster(servers=0)
    reply = deploy(cluster)
    cluster.run(5.0)
    assert job(cluster, reply.job_id).stage is JobStage.QUEUED
    cluster.stop_scheduler()
    cluster.start_scheduler()
    cluster.start_agent("s0")
    cluster.run(2.0)
    assert job(cluster, reply.job_id).stage is JobStage.FINISHED


def test_imports_are_spread_over_agents_and_survive_a_restart_of_the_scheduler() -> None:
    """P2"""
    cluster = a_cluster(servers=2)
    jobs = [deploy(cluster, model_id=f"m{n}", source=f"/models/m{n}").job_id for n in range(4)]
    imports = [o.to for o in cluster.said if isinstance(o.message, ImportModel)]
    assert imports.count(ToAgent(server_id="s0")) == 2
    cluster.stop_scheduler()
    cluster.kill_agent("s1")
    cluster.start_scheduler()
    cluster.run(8.0)
    assert [job(cluster, job_id).stage for job_id in jobs] == [JobStage.FINISHED] * 4


def test_old_jobs_are_forgotten() -> None:
    cluster = a_cluster(settings=Settings(models_max=1000, imports_max=1000))
    first = deploy(cluster, model_id="m-0").job_id
    for number in range(ENDED_JOBS_MAX + 1):
        reply = deploy(cluster, model_id=f"m-{number}")
        cluster.now += 0.01
        ask(cluster, finished(reply.job_id))
    assert refused(cluster, GetJob(job_id=first)) == "job_not_found"
    assert len([key for key in cluster.store if key[0] == "jobs"]) == ENDED_JOBS_MAX


@pytest.mark.parametrize(
    "message",
    [
        DeployModel(model_id="../x", source="/models/m"),
        DeployModel(model_id="m", source="  "),
        DeployModel(model_id="m", source="/models/m", keep_alive_s=-1.0),
        DeployModel(model_id="m", source="/models/m", keep_alive_s=math.nan),
    ],
    ids=["model id", "source", "negative keep-alive", "keep-alive that is no number"],
)
def test_a_deployment_that_makes_no_sense_is_refused(message: DeployModel) -> None:
    cluster = a_cluster()
    assert refused(cluster, message) == "invalid_request"
    assert model(cluster, message.model_id) is None


def test_there_is_room_for_so_many_models_and_imports() -> None:
    cluster = a_cluster("m1", settings=Settings(models_max=2, imports_max=1))
    deploy(cluster, model_id="m2")
    assert refused(cluster, DeployModel(model_id="m1", source="/m")) == "queue_full"
    cluster.run(2.0)
    assert refused(cluster, DeployModel(model_id="m3", source="/m")) == "queue_full"
    deploy(cluster, model_id="m1")


def test_keep_alive_can_be_changed_by_deploying_again() -> None:
    cluster = a_cluster("m")
    deploy(cluster, keep_alive_s=7.0)
    record = model(cluster)
    assert record is not None
    assert record.keep_alive_s == 7.0
