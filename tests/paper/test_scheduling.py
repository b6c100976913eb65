"""What part 3 of the seeds says that the scheduler does, sentence by sentence, as far as it is built. Each test cites
the requirement (D3, D5, D6, D7) that the sentence became."""

from __future__ import annotations

import pytest
from whimbrel.wire.events import LoadSucceeded
from whimbrel.wire.messages import LoadModel, LoadProgressed, PlaceModelReply, Tier, WaitStage
from whimbrel.wire.records import BandwidthRecord, InstanceRecord, InstanceState, ModelRecord, Record

from services.scheduler.core.decisions import Deferred, Placement
from services.scheduler.core.estimates import PathSpeed, estimate_load, path_speeds
from services.scheduler.core.queues import LoadQueue
from services.scheduler.core.ready import Arrived
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import place
from tests.unit.scheduler.toy_peers import GB, TOY_SECONDS_PER_BYTE
from tests.unit.scheduler.toys import ToyCluster, a_model_record


def a_cluster(
    *models: ModelRecord,
    servers: int = 1,
    slots: int = 1,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
) -> ToyCluster:
    cluster = ToyCluster(models=models, servers=servers, slots=slots, settings=settings)
    cluster.run(5.0)
    return cluster


def hold(cluster: ToyCluster, server_id: str, model_id: str, tier: Tier) -> None:
    """The server has the model's bytes in this tier."""
    cluster.agents[server_id].tiers[model_id, f"digest-of-{model_id}"] = (tier, GB // 4)
    cluster.agents[server_id].beat()
    cluster.run(0.01)


# --- the controller (part3:7) ---


def test_the_router_sends_requests_to_running_instances_without_a_loading_task() -> None:
    """R1"""
    cluster = a_cluster(a_model_record("a"))
    cluster.router.request("q1", "a")
    cluster.run(5.0)
    warm = cluster.router.request("q2", "a")
    assert warm.instance_id is not None, "at once, from its own routes"
    cluster.run(1.0)
    assert len(cluster.said_to_all(LoadModel)) == 1


def test_when_no_instance_exists_the_scheduler_gets_a_loading_task() -> None:
    """R1"""
    cluster = a_cluster(a_model_record("a"))
    ready = cluster.deliver(place("q1"))
    assert [type(outgoing.message) for outgoing in ready.messages].count(LoadModel) == 1


def test_a_loading_queue_is_kept_per_server() -> None:
    """R3"""
    cluster = a_cluster(*(a_model_record(m) for m in "abcd"), servers=2, slots=2)
    for number, model_id in enumerate("abcd"):
        cluster.deliver(place(f"q{number}", model_id))
    assert cluster.controller is not None
    assert [len(server.queues) for server in cluster.controller.cluster.servers.values()] == [2, 2]


def test_every_decision_is_recorded_so_that_a_crash_is_recovered_from() -> None:
    """P1, P2"""
    cluster = a_cluster(a_model_record("a"))
    ready = cluster.deliver(place("q1"))
    (record,) = ready.records
    assert isinstance(record, InstanceRecord)
    cluster.start_scheduler()
    cluster.run(5.0)
    assert [instance.instance_id for instance in cluster.instances()] == [record.instance_id]
    assert cluster.instances()[0].state is InstanceState.READY


# --- estimating a load (part3:13-27) ---


@pytest.mark.parametrize(
    ("queue_s", "size_bytes", "bandwidth", "expected_s"),
    [(0.0, 13 * GB, 6.5e9, 2.0), (4.0, 13 * GB, 6.5e9, 6.0), (4.0, 26 * GB, 1.3e9, 24.0)],
)
def test_the_estimate_is_queue_time_plus_size_over_bandwidth(
    queue_s: float, size_bytes: int, bandwidth: float, expected_s: float
) -> None:
    """E1, E2, E3: t_load = q + n / b"""
    speed = PathSpeed(source_tier=Tier.SSD, seconds_per_byte=1 / bandwidth, overhead_s=0.0, is_prior=False)
    assert estimate_load(queue_s=queue_s, size_bytes=size_bytes, speed=speed).total_s == pytest.approx(expected_s)


def test_q_is_the_sum_of_the_estimates_already_in_the_queue() -> None:
    """E1"""
    queue = LoadQueue()
    for number, load_s in enumerate((1.0, 2.0, 3.5)):
        queue.enqueue(f"t{number}", load_s, now=0.0)
    assert queue.drain_s(0.0) == pytest.approx(6.5)


def test_one_loading_task_runs_at_a_time_per_server_so_a_later_one_waits_for_the_earlier() -> None:
    """E4, L9"""
    cluster = a_cluster(*(a_model_record(m) for m in "abc"), slots=3)
    warm_up = cluster.router.request("q0", "c")
    cluster.run_until(lambda: warm_up.is_done, 10.0)
    first, second = (cluster.deliver(place(f"q-{model_id}", model_id)).decisions[0] for model_id in ("a", "b"))
    assert isinstance(first, Placement)
    assert isinstance(second, Placement)
    assert first.estimate.queue_s == 0.0
    assert second.estimate.queue_s == pytest.approx(first.estimate.load_s)
    cluster.run(5.0)
    told = [e for e in cluster.happened(LoadSucceeded) if isinstance(e, LoadSucceeded)][-2:]
    assert all(event.observed_s == pytest.approx(event.estimate_s, abs=0.04) for event in told)


def test_the_size_is_known_before_the_model_is_opened() -> None:
    """E2, F4: it comes from the record made of the manifest; no message brought it."""
    cluster = a_cluster(a_model_record("a", size_bytes=123_456_789))
    (decision,) = cluster.deliver(place("q1")).decisions
    assert isinstance(decision, Placement)
    assert decision.estimate.size_bytes == 123_456_789


@pytest.mark.parametrize(
    ("source", "slowest"),
    [(Tier.REMOTE, Tier.REMOTE), (Tier.SSD, Tier.SSD), (Tier.DRAM, Tier.DRAM)],
    ids=["downloaded: the network", "on SSD: the SSD", "in pinned DRAM: the PCIe link"],
)
def test_bandwidth_is_that_of_the_slowest_tier_involved(source: Tier, slowest: Tier) -> None:
    """E3"""
    seconds_per_byte = {Tier.REMOTE: 1 / 1.25e9, Tier.SSD: 1 / 6e9, Tier.DRAM: 1 / 2.5e10}
    learned = {
        tier: BandwidthRecord(
            server_id="s0", tier=tier, seconds_per_byte=value, variance=0.0, overhead_s=0.0, observations=9
        )
        for tier, value in seconds_per_byte.items()
    }
    assert path_speeds("s0", learned, 0.0)[source].seconds_per_byte == seconds_per_byte[slowest]


def test_servers_report_every_load_and_the_scheduler_corrects_its_bandwidths() -> None:
    """E6, L10: no fixed constants."""
    cluster = a_cluster(*(a_model_record(m) for m in "abc"))
    for number, model_id in enumerate("abc"):
        request = cluster.router.request(f"q{number}", model_id)
        cluster.run_until(lambda: request.is_done, 10.0)  # noqa: B023
    learned = [record for record in cluster.store.values() if isinstance(record, BandwidthRecord)]
    assert {r.tier: r.seconds_per_byte for r in learned} == pytest.approx(
        {tier: TOY_SECONDS_PER_BYTE[tier] for tier in (Tier.REMOTE, Tier.SSD)}
    )


# --- choosing a server (part3:43) ---


def test_each_server_is_judged_by_the_fastest_tier_that_holds_the_model_and_the_cheapest_wins() -> None:
    """C1, C2, C3"""
    cluster = a_cluster(a_model_record("a"), servers=3)
    hold(cluster, "s1", "a", Tier.DRAM)
    hold(cluster, "s2", "a", Tier.SSD)
    (decision,) = cluster.deliver(place("q1")).decisions
    assert isinstance(decision, Placement)
    assert (decision.server_id, decision.slots) == ("s1", (0,))
    tiers = {c.server_id: c.estimate.source_tier for c in decision.reasons.candidates() if c.estimate is not None}
    assert tiers == {"s0": Tier.REMOTE, "s1": Tier.DRAM, "s2": Tier.SSD}


def test_a_task_that_finds_no_gpu_is_held_and_tried_again_when_the_router_reports_a_release() -> None:
    """C4, R5"""
    cluster = a_cluster(a_model_record("a"), a_model_record("b"), settings=Settings(fair_wait_s=1000.0))
    busy = cluster.router.request("q1", "a", run_s=20.0)
    cluster.run(5.0)
    ready = cluster.deliver(place("q2", "b"))
    assert isinstance(ready.decisions[0], Deferred)
    assert isinstance(ready.messages[0].message, PlaceModelReply)
    held = cluster.router.request("q3", "b")
    cluster.run_until(lambda: busy.is_done, 30.0)
    released_s = cluster.now
    cluster.run_until(lambda: held.is_done, 10.0)
    assert held.routed_s is not None
    assert held.routed_s - released_s < 1.397 + 0.02, "a load, and no waiting for anything else"


def test_equal_servers_are_chosen_between_deterministically() -> None:
    """C5"""
    choices = set()
    for _ in range(3):
        cluster = a_cluster(a_model_record("a"), servers=4, slots=2)
        (decision,) = cluster.deliver(place("q1")).decisions
        assert isinstance(decision, Placement)
        choices.add((decision.server_id, decision.slots))
    assert choices == {("s0", (0,))}


# --- writing and recovering (part3:47) ---


def test_the_slot_is_recorded_as_taken_when_its_task_is_dispatched_and_storage_when_it_completes() -> None:
    """P1"""
    cluster = a_cluster(a_model_record("a"))
    seen: list[list[type[Record]]] = []
    dispatched = cluster.deliver(place("q1"))
    seen.append([type(record) for record in dispatched.records])
    cluster.check = lambda cluster, ready: seen.append([type(r) for r in ready.records]) if ready.records else None
    cluster.run(5.0)
    assert seen[0] == [InstanceRecord]
    assert [kind for kinds in seen[1:] for kind in kinds].count(BandwidthRecord) == 3, "two tiers, then overhead"
    assert [kind for kinds in seen[1:] for kind in kinds].count(InstanceRecord) == 1


def test_a_replacement_reads_the_latest_status_back_and_resynchronises() -> None:
    """P2: nothing lost, nothing twice."""
    cluster = a_cluster(*(a_model_record(m) for m in "abc"), servers=2, slots=2)
    requests = [cluster.router.request(f"q-{model_id}", model_id, run_s=0.5) for model_id in "abc"]
    for _ in range(20):
        cluster.run(0.1)
        cluster.stop_scheduler()
        cluster.run(0.05)
        cluster.start_scheduler()
    cluster.run(10.0)
    assert all(request.is_done for request in requests)
    loads = [message.task_id for message in cluster.said_to_all(LoadModel) if isinstance(message, LoadModel)]
    assert len(set(loads)) == 3


def test_progress_of_the_running_task_corrects_the_queue() -> None:
    """E5"""
    cluster = a_cluster(a_model_record("a"), a_model_record("b"), slots=2)
    cluster.kill_agent("s0")
    cluster.deliver(place("q1", "a"))
    (record,) = cluster.instances()
    half = LoadProgressed(task_id=record.task_id, server_id="s0", stage=WaitStage.FETCHING, done_bytes=1, total_bytes=2)
    cluster.deliver(Arrived(message=half))
    (decision,) = cluster.deliver(place("q2", "b")).decisions
    assert isinstance(decision, Placement)
    assert decision.estimate.queue_s == pytest.approx(record.estimate_s / 2)
