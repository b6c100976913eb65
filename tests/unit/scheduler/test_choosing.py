"""The choice of a server, as tables of cluster snapshots."""

from __future__ import annotations

import random

import msgspec
import pytest
from whimbrel.wire.messages import Tier

from services.scheduler.core.decisions import Decision, Deferred, NeverFits, Placement, Refusal
from services.scheduler.core.estimates import PathSpeed
from services.scheduler.core.policies import migration
from services.scheduler.core.queues import PathWait
from services.scheduler.core.residency import Resident
from services.scheduler.core.views import Occupant, ServerView, Shape, SlotView, Snapshot, Task

GB = 10**9
SPEEDS = {
    tier: PathSpeed(source_tier=tier, seconds_per_byte=1 / bandwidth, overhead_s=0.1, is_prior=False)
    for tier, bandwidth in ((Tier.REMOTE, 1e8), (Tier.SSD, 1e9), (Tier.DRAM, 1e10))
}
NOW = 50.0


def a_server(
    server_id: str,
    *,
    tier: Tier | None = None,
    free: tuple[int, ...] = (0,),
    idle: tuple[Occupant, ...] = (),
    queue_s: float = 0.0,
    capacity_bytes: int = 10 * GB,
    used_bytes: int = 0,
) -> ServerView:
    return ServerView(
        server_id=server_id,
        capacity_bytes=capacity_bytes,
        used_bytes=used_bytes + sum(instance.room_bytes for instance in idle),
        free_slots=tuple(SlotView(slot) for slot in free),
        idle=idle,
        waits={tier or Tier.REMOTE: PathWait(NOW + queue_s / 2, queue_s / 2)},
        residency={} if tier is None else {("a", "d"): Resident(tier, GB)},
        speeds=SPEEDS,
    )


def a_task(size_bytes: int = GB, *, digest: str = "d", avoid: frozenset[str] = frozenset()) -> Task:
    return Task(
        model_id="a", checkpoint_digest=digest, size_bytes=size_bytes, partition_bytes=(size_bytes,), avoid=avoid
    )


def an_idle(
    instance_id: str, *, slot: int = 0, size_bytes: int = GB, since_s: float = 0.0, reload_s: float = 0.2
) -> Occupant:
    task = Task(model_id="x", checkpoint_digest="dx", size_bytes=size_bytes, partition_bytes=(size_bytes,))
    return Occupant(
        instance_id=instance_id,
        slots=(SlotView(slot),),
        task=task,
        room_bytes=size_bytes,
        idle_since_s=since_s,
        reload_s=reload_s,
    )


def place(*servers: ServerView, size_bytes: int = GB, avoid: frozenset[str] = frozenset()) -> Decision:
    shapes = frozenset(Shape(True, server.capacity_bytes, ()) for server in servers)
    return migration(Snapshot(servers=servers, shapes=shapes), a_task(size_bytes, avoid=avoid), NOW)


@pytest.mark.parametrize(
    ("servers", "chosen"),
    [
        pytest.param([a_server("s0"), a_server("s1", tier=Tier.SSD)], "s1", id="ssd beats remote"),
        pytest.param([a_server("s0", tier=Tier.SSD), a_server("s1", tier=Tier.DRAM)], "s1", id="dram beats ssd"),
        pytest.param(
            [a_server("s0", tier=Tier.DRAM, queue_s=3.0), a_server("s1", tier=Tier.SSD)], "s1", id="queue counts"
        ),
        pytest.param(
            [a_server("s0", tier=Tier.DRAM, queue_s=3.0), a_server("s1")], "s0", id="a short queue is waited for"
        ),
        pytest.param([a_server("s0", tier=Tier.DRAM, free=()), a_server("s1")], "s1", id="busy is no candidate"),
        pytest.param([a_server("s1"), a_server("s0")], "s0", id="ties go to the lower id"),
        pytest.param(
            [a_server("s0", tier=Tier.DRAM, free=(), idle=(an_idle("i"),)), a_server("s1")],
            "s0",
            id="evicting beats a slow load",
        ),
        pytest.param(
            [a_server("s0", tier=Tier.SSD, free=(), idle=(an_idle("i"),)), a_server("s1", tier=Tier.SSD)],
            "s1",
            id="a free slot beats evicting for the same load",
        ),
        pytest.param(
            [a_server("s0", tier=Tier.DRAM, capacity_bytes=GB // 2), a_server("s1")], "s1", id="too small is none"
        ),
        pytest.param(
            [a_server("s0", tier=Tier.DRAM, used_bytes=GB * 95 // 10), a_server("s1")], "s1", id="full of busy ones"
        ),
    ],
)
def test_the_cheapest_server_is_chosen(servers: list[ServerView], chosen: str) -> None:
    """C1, C2, C5, C6"""
    decision = place(*servers)
    assert isinstance(decision, Placement)
    assert decision.server_id == chosen


@pytest.mark.parametrize("seed", range(50))
def test_no_candidate_is_better_than_the_chosen_one(seed: int) -> None:
    """C1, C2, C5: the choice agrees with the terms that explain it, on random clusters."""
    chance = random.Random(seed)
    servers = []
    for number in range(chance.randrange(1, 8)):
        idle = tuple(
            an_idle(f"i{number}-{k}", slot=k, size_bytes=chance.randrange(1, 3) * GB, since_s=k)
            for k in range(1, chance.randrange(1, 4))
        )
        servers.append(
            a_server(
                f"s{number}",
                tier=chance.choice([None, Tier.SSD, Tier.DRAM]),
                free=(0,) if chance.random() < 0.5 else (),
                idle=idle,
                queue_s=chance.choice([0.0, 0.0, 2.0]),
                capacity_bytes=chance.randrange(1, 9) * GB,
            )
        )
    avoid = frozenset({"s0"}) if chance.random() < 0.3 else frozenset()
    decision = place(*servers, size_bytes=GB, avoid=avoid)
    assert not isinstance(decision, NeverFits)
    terms = {
        c.server_id: (c.is_avoided, c.estimate.total_s + c.eviction_s, len(c.evict), c.server_id)
        for c in decision.reasons.candidates()
        if c.estimate is not None
    }
    if isinstance(decision, Placement):
        assert decision.server_id == min(terms, key=lambda server_id: terms[server_id])
    else:
        assert not terms


def test_the_answer_names_server_slot_and_terms_and_keeps_every_candidate() -> None:
    """C3"""
    decision = place(
        a_server("s0", tier=Tier.SSD, queue_s=2.0, free=(3, 5)),
        a_server("s1", free=()),
        a_server("s2", capacity_bytes=1),
        a_server("s3", used_bytes=10 * GB),
    )
    assert isinstance(decision, Placement)
    assert (decision.server_id, decision.slots) == ("s0", (3,))
    assert decision.estimate.queue_s == pytest.approx(2.0)
    assert decision.estimate.transfer_s == pytest.approx(1.0)
    assert decision.estimate.overhead_s == pytest.approx(0.1)
    assert decision.estimate.source_tier is Tier.SSD
    reasons = {candidate.server_id: candidate.refusal for candidate in decision.reasons.candidates()}
    assert reasons == {"s0": None, "s1": Refusal.BUSY, "s2": Refusal.TOO_SMALL, "s3": Refusal.NO_ROOM}


def test_only_the_same_checkpoint_counts_as_resident() -> None:
    """C1"""
    server = a_server("s0", tier=Tier.DRAM)
    decision = migration(Snapshot(servers=(server,), shapes=None), a_task(digest="another"), NOW)
    assert isinstance(decision, Placement)
    assert decision.estimate.source_tier is Tier.REMOTE


def test_the_longest_idle_instance_is_evicted_and_its_slot_used() -> None:
    """C6"""
    idle = (an_idle("old", slot=4, since_s=1.0), an_idle("new", slot=2, since_s=9.0))
    decision = place(a_server("s0", free=(), idle=idle))
    assert isinstance(decision, Placement)
    assert (decision.evict, decision.slots) == (("old",), (4,))


def test_what_is_cheapest_to_bring_back_is_evicted_before_what_is_idle_longest() -> None:
    """C6: models count equally, so what its eviction may cost its next request is what counts."""
    idle = (an_idle("old", slot=4, since_s=1.0, reload_s=0.3), an_idle("new", slot=2, since_s=9.0, reload_s=0.2))
    decision = place(a_server("s0", free=(), idle=idle))
    assert isinstance(decision, Placement)
    assert decision.evict == ("new",)


def test_as_many_idle_instances_go_as_the_model_needs_room() -> None:
    idle = (an_idle("i1", slot=1), an_idle("i2", slot=2), an_idle("i3", slot=3))
    decision = place(a_server("s0", free=(0,), idle=idle, capacity_bytes=4 * GB), size_bytes=2 * GB)
    assert isinstance(decision, Placement)
    assert (decision.evict, decision.slots) == (("i1",), (0,))
    decision = place(a_server("s0", free=(), idle=idle, capacity_bytes=4 * GB), size_bytes=3 * GB)
    assert isinstance(decision, Placement)
    assert (decision.evict, decision.slots) == (("i1", "i2"), (1,))


def test_idle_instances_that_are_not_enough_are_left_alone() -> None:
    decision = place(a_server("s0", idle=(an_idle("i1"),), capacity_bytes=4 * GB, used_bytes=2 * GB), size_bytes=3 * GB)
    assert isinstance(decision, Deferred)
    assert decision.reasons.candidates()[0].refusal is Refusal.NO_ROOM


def test_without_a_slot_the_task_is_deferred_not_failed() -> None:
    """C4"""
    decision = place(a_server("s0", free=()), a_server("s1", free=()))
    assert isinstance(decision, Deferred)
    assert [candidate.refusal for candidate in decision.reasons.candidates()] == [Refusal.BUSY, Refusal.BUSY]
    assert isinstance(place(), Deferred), "a cluster without servers may get some"


def test_a_model_that_no_server_can_hold_is_refused_naming_need_and_capacity() -> None:
    decision = place(a_server("s0"), a_server("s1", capacity_bytes=20 * GB), size_bytes=30 * GB)
    assert decision == NeverFits(model_id="a", need_bytes=30 * GB, capacity_bytes=20 * GB)


def test_nothing_is_refused_for_ever_before_the_largest_server_was_heard() -> None:
    decision = migration(Snapshot(servers=(a_server("s0"),), shapes=None), a_task(30 * GB), NOW)
    assert isinstance(decision, Deferred)


def test_a_server_that_just_failed_comes_last_but_is_better_than_none() -> None:
    fast, slow = a_server("s0", tier=Tier.DRAM), a_server("s1")
    decision = place(fast, slow, avoid=frozenset({"s0"}))
    assert isinstance(decision, Placement)
    assert decision.server_id == "s1"
    decision = place(fast, avoid=frozenset({"s0"}))
    assert isinstance(decision, Placement)
    assert decision.server_id == "s0"


def test_nothing_is_placed_on_a_cordoned_server() -> None:
    cordoned = msgspec.structs.replace(a_server("s0", tier=Tier.DRAM), takes_loads=False)
    decision = place(cordoned, a_server("s1"))
    assert isinstance(decision, Placement)
    assert decision.server_id == "s1"
    assert decision.reasons.candidates()[-1].refusal is Refusal.CLOSED
    assert isinstance(place(cordoned), Deferred), "it may come back"


def a_gpu_server(server_id: str, *memories: int) -> ServerView:
    slots = tuple(SlotView(number, memory * GB) for number, memory in enumerate(memories))
    return msgspec.structs.replace(a_server(server_id), free_slots=slots, is_host=False)


def two_partitions(large: int, small: int) -> Task:
    return msgspec.structs.replace(a_task((large + small) * GB), partition_bytes=(large * GB, small * GB))


def test_each_partition_gets_the_smallest_slot_that_has_memory_for_it() -> None:
    """E2, M5: heterogeneous slots."""
    decision = migration(Snapshot(servers=(a_gpu_server("s0", 4, 1, 2),), shapes=None), two_partitions(2, 1), NOW)
    assert isinstance(decision, Placement)
    assert decision.slots == (2, 1)


def test_a_model_that_no_device_can_hold_is_refused_even_when_the_pool_is_large_enough() -> None:
    server = a_gpu_server("s0", 2, 2)
    shapes = frozenset({Shape(False, 10 * GB, (2 * GB, 2 * GB))})
    decision = migration(Snapshot(servers=(server,), shapes=shapes), two_partitions(4, 1), NOW)
    assert decision == NeverFits(model_id="a", need_bytes=5 * GB, capacity_bytes=4 * GB)
    bigger = shapes | {Shape(False, 10 * GB, (4 * GB, 2 * GB))}
    assert isinstance(migration(Snapshot(servers=(server,), shapes=bigger), two_partitions(4, 1), NOW), Deferred)
