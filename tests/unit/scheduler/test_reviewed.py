"""What a review of the controller found, each as a story that once went wrong."""

from __future__ import annotations

import time

import pytest
from whimbrel.wire.messages import (
    CordonServer,
    DeleteModel,
    InferenceFinished,
    LoadModel,
    PlaceModel,
    ScaleModel,
    Scaling,
    Tier,
    UnloadInstance,
)
from whimbrel.wire.records import InstanceState

from services.scheduler.core.decisions import Placement
from services.scheduler.core.ready import Arrived, Tick
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster, ask, place, served
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import ToyCluster, a_model_record


def loads(cluster: ToyCluster, model_id: str) -> int:
    return sum(isinstance(m, LoadModel) and m.model_id == model_id for m in cluster.said_to_all(LoadModel))


def test_a_model_never_evicts_its_own_instance_to_be_loaded_again() -> None:
    """R6: all that waited went to the first instance that was ready; the second had nothing to do."""
    cluster = ToyCluster(models=[a_model_record("a", scaling=Scaling(max_instances=3))], servers=2)
    cluster.run(5.0)
    requests = [cluster.router.request(f"q{k}", "a", run_s=20.0) for k in range(17)]
    cluster.run(40.0)
    assert all(request.is_done for request in requests)
    assert loads(cluster, "a") <= 3


def test_a_model_that_is_deleted_while_it_waits_for_a_slot_lets_go_of_it() -> None:
    """It had a reservation without anybody who waits, for its minimum."""
    is_lost = [True]
    cluster = a_cluster("a", "b", drops=lambda m: isinstance(m, UnloadInstance) and is_lost[0])
    served(cluster, "b")
    ask(cluster, ScaleModel(model_id="a", min_instances=1))
    ask(cluster, DeleteModel(model_id="a"))
    is_lost[0] = False
    cluster.run(10.0)
    assert cluster.controller is not None
    assert cluster.controller.cluster.reservations == {}
    assert "a" not in cluster.controller.cluster.models


def test_a_minimum_that_is_given_up_lets_go_of_the_slot_it_waited_for() -> None:
    cluster = a_cluster("a", "b", drops=lambda message: isinstance(message, UnloadInstance))
    served(cluster, "b")
    ask(cluster, ScaleModel(model_id="a", min_instances=1))
    assert cluster.controller is not None
    assert set(cluster.controller.cluster.reservations) == {"a"}
    ask(cluster, ScaleModel(model_id="a", min_instances=0))
    assert cluster.controller.cluster.reservations == {}


def test_a_model_does_not_wait_for_one_long_request_while_others_come_and_go() -> None:
    """C4: the bound on the wait holds behind a drain that takes long."""
    cluster = a_cluster("a", "b", "c", servers=2, settings=Settings(fair_wait_s=2.0))
    cluster.router.request("long", "a", run_s=300.0)
    cluster.run(3.0)
    cluster.router.request("b0", "b", run_s=1.2)
    cluster.run(3.0)
    waiting = cluster.router.request("c", "c")
    for number in range(1, 20):
        cluster.router.request(f"b{number}", "b", run_s=1.2)
        cluster.run(1.0)
    assert waiting.is_done


def test_a_drain_on_a_server_that_is_then_cordoned_is_not_waited_for() -> None:
    cluster = a_cluster("a", "b", "c", servers=2, settings=Settings(fair_wait_s=2.0))
    for model_id in "ab":
        cluster.router.request(model_id, model_id, run_s=30.0)
        cluster.run(3.0)
    waiting = cluster.router.request("c", "c")
    cluster.run(3.0)
    assert cluster.controller is not None
    (reservation,) = cluster.controller.cluster.reservations.values()
    ask(cluster, CordonServer(server_id=reservation.server_id))
    cluster.run(2.0)
    (other,) = cluster.controller.cluster.reservations.values()
    assert other.server_id != reservation.server_id
    cluster.run(60.0)
    assert waiting.is_done


def test_what_was_drained_for_a_model_is_given_to_it_whatever_its_policy_waits_for() -> None:
    """C8: under locality the model waits for s0, which is held by a minimum; s1 was drained for it again and again."""
    cluster = a_cluster("a", "b", "m", servers=2, settings=Settings(fair_wait_s=1.0, policy="locality"))
    cluster.agents["s0"].tiers["a", "digest-of-a"] = (Tier.SSD, GB // 4)
    cluster.agents["s0"].tiers["m", "digest-of-m"] = (Tier.SSD, GB // 4)
    cluster.agents["s1"].tiers["b", "digest-of-b"] = (Tier.SSD, GB // 4)
    ask(cluster, ScaleModel(model_id="m", min_instances=1))
    cluster.run(5.0)
    waiting = cluster.router.request("q", "a")
    for number in range(20):
        cluster.router.request(f"b{number}", "b", run_s=1.5)
        cluster.run(1.0)
    assert waiting.is_done


def test_the_random_policy_spreads_models_over_servers() -> None:
    """C8"""
    cluster = a_cluster(*"abcdefgh", servers=4, slots=4, settings=Settings(policy="random"))
    for model_id in "abcdefgh":
        cluster.router.request(model_id, model_id)
    cluster.run(5.0)
    assert len({record.server_id for record in cluster.instances()}) > 1


def a_gpu_cluster(*, memory_bytes: int, slots: int = 2, **options: object) -> ToyCluster:
    two = a_model_record("two", size_bytes=GB // 2, partition_bytes=(GB // 4, GB // 4), keep_alive_s=3600.0)
    one = a_model_record("one", size_bytes=GB // 4, partition_bytes=(GB // 4,))
    cluster = ToyCluster(models=[two, one], servers=1, slots=0, **options)  # type: ignore[arg-type]
    for slot in range(slots):
        cluster.start_worker("s0", slot, device=f"cuda:{slot}", memory_bytes=memory_bytes)
    cluster.run(5.0)
    return cluster


def test_a_model_of_two_partitions_owns_two_slots_and_gives_both_back() -> None:
    """E2, C3"""
    cluster = a_gpu_cluster(memory_bytes=GB // 3)
    first = cluster.router.request("q1", "two")
    cluster.run(5.0)
    assert first.is_done
    (record,) = cluster.instances()
    assert sorted(record.slots) == [0, 1]
    second = cluster.router.request("q2", "one")
    cluster.run(5.0)
    assert second.is_done


def test_no_slot_of_a_load_that_ended_is_free_before_its_worker_let_go() -> None:
    dropped = [False]
    cluster = a_gpu_cluster(memory_bytes=GB // 3, drops=lambda m: dropped[0] and isinstance(m, UnloadInstance))
    cluster.router.request("q1", "two")
    cluster.run(0.5)
    (record,) = cluster.instances()
    assert record.state is InstanceState.LOADING
    dropped[0] = True
    cluster.kill_agent("s0")
    ask(cluster, DeleteModel(model_id="two"))
    cluster.run(1.5)
    assert cluster.controller is not None
    slots = cluster.controller.cluster.servers["s0"].slots
    assert [slot.is_free for slot in slots.values()] == [False, False]
    dropped[0] = False
    cluster.run(3.0)
    assert [slot.is_free for slot in slots.values()] == [True, True]


def test_an_instance_on_two_slots_gives_way_when_the_worker_of_its_second_slot_is_gone() -> None:
    cluster = a_gpu_cluster(memory_bytes=GB // 3)
    first = cluster.router.request("q1", "two")
    cluster.run(5.0)
    assert first.is_done
    (record,) = cluster.instances()
    cluster.kill_worker("s0", record.slots[1])
    cluster.run(5.0)
    second = cluster.router.request("q2", "one")
    cluster.run(5.0)
    assert second.is_done


def a_busy_cluster(*, servers: int, slots: int, starving: int) -> ToyCluster:
    held = [f"h{k}" for k in range(servers * slots)]
    waiting = [f"w{k}" for k in range(starving)]
    cluster = a_cluster(*held, *waiting, servers=servers, slots=slots, settings=Settings(fair_wait_s=5.0))
    for name in held:
        cluster.router.request(name, name, run_s=10_000.0)
    cluster.run(6.0)
    for name in waiting:
        cluster.deliver(place(f"q-{name}", name, waited_s=60.0))
    return cluster


def test_a_tick_with_many_starving_models_takes_no_longer_than_a_lease_allows() -> None:
    """Every starving model looked at every instance: with 200 of them a tick took seconds, and the leader its lease."""
    cluster = a_busy_cluster(servers=20, slots=8, starving=200)
    ready = sum(record.state is InstanceState.READY for record in cluster.instances())
    assert ready > 50
    started_s = time.process_time()
    cluster.deliver(Tick())
    assert time.process_time() - started_s < 1.0
    for _ in range(20):
        cluster.deliver(Tick())
    assert cluster.controller is not None
    assert len(cluster.controller.cluster.reservations) == ready, "all that can be drained is, a few in each tick"


def test_many_models_that_find_no_place_are_not_all_tried_in_every_step_and_all_have_their_turn() -> None:
    """One open slot, and 300 models that don't fit there, before one that does."""
    large = [a_model_record(f"l{k}", size_bytes=2 * GB, partition_bytes=(GB, GB)) for k in range(300)]
    cluster = ToyCluster(models=[*large, a_model_record("fits")], servers=1, slots=0)
    for slot in range(2):
        cluster.start_worker("s0", slot, device=f"cuda:{slot}", memory_bytes=GB)
    cluster.run(5.0)
    cluster.kill_worker("s0", 1)
    cluster.run(5.0)
    for number, record in enumerate(large):
        cluster.deliver(place(f"q{number}", record.model_id, waited_s=100.0 - number / 10))
    decisions = [len(cluster.deliver(Tick()).decisions) for _ in range(3)]
    assert max(decisions) <= 64
    cluster.deliver(Arrived(message=PlaceModel(request_id="z", model_id="fits", router_id="r0", waited_s=0.0)))
    cluster.run(3.0)
    assert "fits" in {record.model_id for record in cluster.instances()}


def test_who_has_waited_longest_has_a_released_slot_before_who_comes_in_the_same_step() -> None:
    """C4: the name of the newcomer comes first in the alphabet, and its request in the very step of the release."""
    cluster = a_cluster("a", "b", "z", settings=Settings(fair_wait_s=100.0))
    running = cluster.router.request("q", "b", run_s=30.0)
    cluster.run(3.0)
    cluster.deliver(place("old", "z", waited_s=20.0))
    assert running.instance_id is not None
    finished = InferenceFinished(
        request_id="q",
        router_id="r0",
        instance_id=running.instance_id,
        model_id="b",
        prompt_tokens=5,
        output_tokens=5,
        duration_s=1.0,
        token_s=0.1,
    )
    worker = cluster.workers["s0", 0]
    worker.requests.clear()
    worker.beat()
    cluster.run(0.01)
    decisions = cluster.deliver(place("new", "a"), Arrived(message=finished)).decisions
    assert [(decision.model_id, isinstance(decision, Placement)) for decision in decisions] == [
        ("z", True),
        ("a", False),
    ]


@pytest.mark.parametrize("size_bytes", [GB // 4, 100 * GB])
def test_a_minimum_that_finds_no_place_is_not_decided_anew_at_every_tick(size_bytes: int) -> None:
    cluster = ToyCluster(models=[a_model_record("a", size_bytes=size_bytes)], servers=1)
    cluster.run(5.0)
    ask(cluster, CordonServer(server_id="s0"))
    ask(cluster, ScaleModel(model_id="a", min_instances=1))
    decisions = 0
    for _ in range(40):
        decisions += len(cluster.deliver(Tick()).decisions)
        cluster.run(0.25)
    assert decisions <= 8
