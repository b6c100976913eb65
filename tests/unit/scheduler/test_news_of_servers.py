"""What agents say of their tiers and workers, and how the scheduler keeps up with it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.events import LoadWasLost, ModelPrefetched, ModelPrefetchFailed
from whimbrel.wire.messages import (
    AgentHeartbeat,
    LoadModel,
    PrefetchEnded,
    ResendResidency,
    ResidentModel,
    Tier,
    TierReport,
    WorkerExited,
)

from services.scheduler.core.queues import PathQueues
from services.scheduler.core.ready import Arrived, ToAgent
from services.scheduler.core.residency import Residency, Resident
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster, place, served
from tests.unit.scheduler.toy_peers import GB


def a_model(model_id: str = "a", *, tier: Tier = Tier.SSD, dram_bytes: int = 0, ssd_bytes: int = 100) -> ResidentModel:
    return ResidentModel(
        model_id=model_id,
        checkpoint_digest="d",
        tier=tier,
        size_bytes=100,
        dram_bytes=dram_bytes,
        ssd_bytes=ssd_bytes,
    )


def a_heartbeat(
    *resident: ResidentModel,
    version: int,
    base: int | None = None,
    epoch: int = 1,
    server_id: str = "s0",
    running: Sequence[str] = (),
) -> AgentHeartbeat:
    return AgentHeartbeat(
        server_id=server_id,
        epoch=epoch,
        resident=resident,
        residency_version=version,
        base_version=base,
        tasks=tuple(running),
        running=tuple(running),
        jobs=(),
        attached=(),
        pool_size_bytes=10 * GB,
        pool_free_bytes=10 * GB,
        ssd_size_bytes=10 * GB,
        ssd_used_bytes=0,
        probe_bandwidth_bytes_per_s=1e9,
    )


def names(residency: Residency) -> set[str]:
    return {model.model_id for model in residency.models()}


def test_news_are_heard_when_they_begin_where_one_knows_already() -> None:
    """P2: what an agent says of itself is the truth, whole or by what changed."""
    residency = Residency()
    assert residency.hear(a_heartbeat(a_model("a"), a_model("b"), version=4))
    assert residency.hear(a_heartbeat(a_model("c"), a_model("b", ssd_bytes=0), version=6, base=3))
    assert names(residency) == {"a", "c"}
    assert residency.hear(a_heartbeat(a_model("c"), version=6, base=4)), "overlapping news do no harm"
    assert residency.hear(a_heartbeat(version=6, base=6))
    assert names(residency) == {"a", "c"}


def test_news_that_leave_a_gap_or_are_of_another_life_change_nothing() -> None:
    residency = Residency()
    assert not residency.hear(a_heartbeat(a_model("x"), version=2, base=1)), "nothing was known"
    assert residency.hear(a_heartbeat(a_model("a"), version=4))
    assert not residency.hear(a_heartbeat(a_model("x"), version=9, base=5))
    assert not residency.hear(a_heartbeat(a_model("x"), version=9, base=4, epoch=2))
    assert names(residency) == {"a"}
    assert residency.hear(a_heartbeat(a_model("y"), version=1, epoch=2)), "all of it is always heard"
    assert names(residency) == {"y"}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (a_model(tier=Tier.DRAM, dram_bytes=100), Resident(Tier.DRAM, 100)),
        (a_model(tier=Tier.SSD, dram_bytes=30), Resident(Tier.SSD, 70)),
        (a_model(tier=Tier.REMOTE, dram_bytes=30, ssd_bytes=60), Resident(Tier.REMOTE, 40)),
    ],
    ids=["all in DRAM", "some in DRAM", "some everywhere"],
)
def test_only_bytes_that_still_have_to_move_count(model: ResidentModel, expected: Resident) -> None:
    """E2: partial residency counts."""
    residency = Residency()
    residency.hear(a_heartbeat(model, version=1))
    assert residency.entries["a", "d"] == expected


def test_a_gap_is_closed_by_asking_for_everything() -> None:
    cluster = a_cluster("a")
    agent = cluster.agents["s0"]
    ready = cluster.deliver(Arrived(message=a_heartbeat(version=99, base=98, epoch=agent.epoch)))
    assert [outgoing.to for outgoing in ready.messages if isinstance(outgoing.message, ResendResidency)] == [
        ToAgent(server_id="s0")
    ]


def test_what_follows_news_that_were_refused_changes_what_placement_sees() -> None:
    """The version is the same: that of the refused news was never heard."""
    cluster = a_cluster("a")
    epoch = cluster.agents["s0"].epoch
    assert cluster.controller is not None

    def seen() -> set[str]:
        assert cluster.controller is not None
        (view,) = cluster.controller.cluster.snapshot(cluster.now).servers
        return {model_id for model_id, _ in view.residency}

    cluster.deliver(Arrived(message=a_heartbeat(a_model("x"), version=1, epoch=epoch)))
    assert seen() == {"x"}
    cluster.deliver(Arrived(message=a_heartbeat(a_model("z"), version=50, base=40, epoch=epoch)))
    assert seen() == {"x"}, "the news that were refused"
    cluster.deliver(Arrived(message=a_heartbeat(a_model("y"), version=50, epoch=epoch)))
    assert seen() == {"y"}


def test_a_task_that_runs_beside_others_is_watched_for_progress_and_one_that_waits_is_not() -> None:
    cluster = a_cluster("a", "b", slots=2, settings=Settings(load_stall_s=20.0))
    agent = cluster.kill_agent("s0")
    cluster.deliver(place("q1", "a"), place("q2", "b"))
    running, waiting = cluster.instances()
    for _ in range(40):
        cluster.run(1.0)
        beat = a_heartbeat(version=1, epoch=agent.epoch, running=[running.task_id])
        cluster.deliver(Arrived(message=msgspec.structs.replace(beat, tasks=(running.task_id, waiting.task_id))))
    lost = [event.task_id for event in cluster.happened(LoadWasLost) if isinstance(event, LoadWasLost)]
    assert running.task_id in lost
    assert waiting.task_id not in lost


def test_a_worker_whose_process_ended_is_lost_at_once_and_its_model_loaded_again() -> None:
    cluster = a_cluster("a", slots=2)
    served(cluster)
    (record,) = cluster.instances()
    worker = cluster.workers["s0", record.slot]
    cluster.kill_worker("s0", record.slot)
    stale = WorkerExited(server_id="s0", slot=record.slot, worker_epoch=worker.epoch + 1)
    cluster.deliver(Arrived(message=stale))
    assert cluster.instances() == [record], "news of another life"
    exited = WorkerExited(server_id="s0", slot=record.slot, worker_epoch=worker.epoch)
    cluster.deliver(Arrived(message=exited), Arrived(message=exited), place("q2"))
    (again,) = cluster.instances()
    assert again.slot != record.slot
    assert [command.instance_id for command in cluster.said_to_all(LoadModel) if isinstance(command, LoadModel)] == [
        again.instance_id
    ]


def test_each_path_has_its_queue_and_what_dram_has_waits_for_nobody() -> None:
    """E4: one queue per shared path."""
    queues = PathQueues()
    queues.enqueue(Tier.REMOTE, "r", 30.0, now=0.0)
    queues.enqueue(Tier.SSD, "s1", 2.0, now=0.0)
    queues.enqueue(Tier.SSD, "s2", 3.0, now=0.0)
    queues.enqueue(Tier.DRAM, "d", 0.1, now=0.0)
    assert len(queues) == 3
    assert {tier: wait.queue_s(1.0) for tier, wait in queues.waits().items()} == {Tier.REMOTE: 29.0, Tier.SSD: 4.0}
    queues.progress("s1", 0.5, now=1.5)
    queues.remove("r", now=1.0)
    queues.remove("d", now=1.0)
    assert {tier: wait.queue_s(1.5) for tier, wait in queues.waits().items()} == {Tier.REMOTE: 0.0, Tier.SSD: 4.0}


def test_a_prefetch_teaches_the_bandwidth_of_its_tiers_and_is_told() -> None:
    """E6"""
    cluster = a_cluster("a")
    ended = PrefetchEnded(
        task_id="p",
        model_id="a",
        server_id="s0",
        source_tier=Tier.REMOTE,
        reports=(TierReport(tier=Tier.REMOTE, size_bytes=GB, seconds=2.0),),
    )
    cluster.deliver(Arrived(message=ended))
    assert cluster.controller is not None
    record = cluster.controller.cluster.servers["s0"].bandwidths[Tier.REMOTE]
    assert 1.0 / record.seconds_per_byte == pytest.approx(GB / 2.0)
    failed = PrefetchEnded(
        task_id="q",
        model_id="a",
        server_id="s0",
        source_tier=Tier.REMOTE,
        error=error_reply(Unavailable(what="the repository")),
    )
    cluster.deliver(Arrived(message=failed))
    assert len(cluster.happened(ModelPrefetched)) == 1
    (event,) = cluster.happened(ModelPrefetchFailed)
    assert isinstance(event, ModelPrefetchFailed)
    assert "the repository" in event.message
