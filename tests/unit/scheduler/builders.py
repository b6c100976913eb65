"""Owns what the stories begin with: clusters that have been up for a while, and things to say to the scheduler."""

from __future__ import annotations

from collections.abc import Callable

from whimbrel.wire.messages import (
    InstanceBecameReady,
    LoadFinished,
    Message,
    PlaceModel,
    Tier,
    TierReport,
)
from whimbrel.wire.records import InstanceRecord

from services.scheduler.core.ready import Arrived, Reply
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import ToyCluster, a_model_record


def a_cluster(
    *models: str,
    servers: int = 1,
    slots: int = 1,
    pool_bytes: int = 10 * GB,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    drops: Callable[[Message], bool] = lambda message: False,
) -> ToyCluster:
    """One that has been up for a while."""
    cluster = ToyCluster(
        models=[a_model_record(model_id) for model_id in models],
        servers=servers,
        slots=slots,
        pool_bytes=pool_bytes,
        settings=settings,
        drops=drops,
    )
    cluster.run(5.0)
    cluster.said.clear()
    return cluster


def place(request_id: str, model_id: str = "a", *, waited_s: float = 0.0, router_id: str = "r0") -> Arrived:
    message = PlaceModel(request_id=request_id, model_id=model_id, router_id=router_id, waited_s=waited_s)
    return Arrived(message=message, reply_to=f"{router_id}/{request_id}")


def became_ready(record: InstanceRecord) -> InstanceBecameReady:
    return InstanceBecameReady(
        instance_id=record.instance_id,
        model_id=record.model_id,
        server_id=record.server_id,
        slot=record.slot,
        worker_epoch=1,
        skeleton_s=0.01,
        bind_s=0.005,
    )


def load_finished(record: InstanceRecord, *, queue_s: float = 0.0) -> LoadFinished:
    return LoadFinished(
        task_id=record.task_id,
        instance_id=record.instance_id,
        model_id=record.model_id,
        server_id=record.server_id,
        source_tier=Tier.REMOTE,
        queue_s=queue_s,
        reports=(
            TierReport(tier=Tier.REMOTE, size_bytes=GB // 4, seconds=1.25),
            TierReport(tier=Tier.SSD, size_bytes=GB // 4, seconds=0.125),
        ),
    )


def served(cluster: ToyCluster, model_id: str = "a", request_id: str = "q1") -> None:
    """The model has an idle, ready instance."""
    request = cluster.router.request(request_id, model_id)
    cluster.run_until(lambda: request.is_done, 10.0)
    cluster.run(0.1)
    cluster.said.clear()


def ask(cluster: ToyCluster, message: Message) -> Message:
    """The answer to a request."""
    messages = cluster.deliver(Arrived(message=message, reply_to="r")).messages
    (answer,) = [outgoing.message for outgoing in messages if outgoing.to == Reply(reply_to="r")]
    return answer
