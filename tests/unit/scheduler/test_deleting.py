"""Stories of models that are deleted: drained, removed everywhere, then forgotten."""

from __future__ import annotations

from whimbrel.wire.events import ModelDeleted, ModelDeployed
from whimbrel.wire.messages import (
    CancelImport,
    CancelLoad,
    DeleteModel,
    DeleteModelReply,
    DeployModel,
    ErrorReply,
    JobStage,
    ModelRemoved,
    RemoveModel,
)

from services.scheduler.core.ready import Arrived, ToAgent
from tests.unit.scheduler.builders import a_cluster, ask, place
from tests.unit.scheduler.import_stories import deploy, error_code, finished, job, model, refused


def test_a_deleted_model_is_drained_then_removed_everywhere_then_forgotten() -> None:
    cluster = a_cluster("m", "other", servers=2, slots=2)
    first = cluster.router.request("q1", "m", run_s=3.0)
    cluster.run(2.0)
    assert ask(cluster, DeleteModel(model_id="m")) == DeleteModelReply(model_id="m")
    assert ask(cluster, DeleteModel(model_id="m")) == DeleteModelReply(model_id="m")
    late = cluster.deliver(place("q2", "m")).messages[0].message
    assert isinstance(late, ErrorReply)
    assert late.code == "model_not_found"
    assert cluster.said_to_all(RemoveModel) == [], "it is still in use"
    assert refused(cluster, DeployModel(model_id="m", source="/models/m")) == "conflict"
    cluster.run(5.0)
    assert first.is_done
    assert model(cluster) is None
    removals = [m for m in cluster.said_to_all(RemoveModel) if isinstance(m, RemoveModel)]
    assert sorted(removal.remove_from_repository for removal in removals) == [False, True]
    assert len(cluster.happened(ModelDeleted)) == 1
    assert refused(cluster, DeleteModel(model_id="m")) == "model_not_found"
    late_news = ModelRemoved(model_id="m", server_id="s0")
    assert cluster.deliver(Arrived(message=late_news)).records == ()


def test_deleting_ends_loads_and_whoever_waits_hears_so() -> None:
    cluster = a_cluster("m")
    waiting = cluster.router.request("q1", "m")
    cluster.run(0.5)
    ask(cluster, DeleteModel(model_id="m"))
    cluster.run(1.0)
    assert waiting.error is not None
    assert waiting.error.code == "model_not_found"
    assert len(cluster.said_to_all(CancelLoad)) == 1
    assert cluster.agents["s0"].tasks == []
    cluster.run(3.0)
    assert model(cluster) is None


def test_a_removal_is_repeated_and_the_repository_is_cleared_by_somebody_else_if_need_be() -> None:
    cluster = a_cluster("m", servers=2, drops=lambda message: isinstance(message, RemoveModel))
    ask(cluster, DeleteModel(model_id="m"))
    cluster.run(2.5)
    cluster.kill_agent("s0")
    cluster.drops = lambda message: False
    cluster.run(5.0)
    assert model(cluster) is None
    removals = [(o.to, o.message) for o in cluster.said if isinstance(o.message, RemoveModel)]
    assert len(removals) > 4
    to_second = [last for to, last in removals if to == ToAgent(server_id="s1")]
    assert isinstance(to_second[-1], RemoveModel)
    assert to_second[-1].remove_from_repository, "though it had removed its own copies before"


def test_a_deletion_is_taken_up_after_a_restart_and_waits_for_a_server() -> None:
    """P2"""
    cluster = a_cluster("m", servers=0)
    ask(cluster, DeleteModel(model_id="m"))
    cluster.stop_scheduler()
    cluster.start_scheduler()
    cluster.run(2.0)
    assert model(cluster) is not None
    cluster.start_agent("s0")
    cluster.run(2.0)
    assert model(cluster) is None


def test_a_model_that_is_deleted_while_it_is_imported_goes_when_its_import_has_been_cancelled() -> None:
    cluster = a_cluster()
    cluster.agents["s0"].import_s = 60.0
    reply = deploy(cluster)
    ask(cluster, DeleteModel(model_id="m"))
    assert cluster.said_to_all(RemoveModel) == []
    cluster.run(3.0)
    assert error_code(cluster, reply.job_id) == "cancelled"
    assert model(cluster) is None


def test_an_import_that_ends_well_though_its_model_is_deleted_is_removed_with_it() -> None:
    cluster = a_cluster(drops=lambda message: isinstance(message, CancelImport))
    reply = deploy(cluster)
    ask(cluster, DeleteModel(model_id="m"))
    ask(cluster, finished(reply.job_id))
    assert job(cluster, reply.job_id).stage is JobStage.FINISHED
    cluster.run(3.0)
    assert model(cluster) is None
    assert cluster.happened(ModelDeployed) == []
