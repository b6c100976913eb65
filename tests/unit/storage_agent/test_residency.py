"""Which checkpoint is in which tier, and that no sequence of operations breaks the accounts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from whimbrel.wire.messages import Tier, TierReport

from services.storage_agent.core.eviction import Evict, Wait, choose_victims
from services.storage_agent.core.path import reports, source_tier, tiers_crossed
from services.storage_agent.core.residency import CheckpointKey, DramCopy, Residency

KEY = CheckpointKey(model_id="m", checkpoint_digest="xxh3:1")
OTHER = CheckpointKey(model_id="m", checkpoint_digest="xxh3:2")


def a_residency() -> Residency:
    return Residency(chunk_count=8, ssd_size_bytes=100)


def reserve(residency: Residency, key: CheckpointKey, *partitions: tuple[int, ...], now: float) -> DramCopy:
    sizes = tuple(4096 * len(chunks) for chunks in partitions)
    return residency.reserve(key, size_bytes=sum(sizes), partition_bytes=sizes, partitions=partitions, now=now)


def a_whole_copy(residency: Residency, key: CheckpointKey = KEY, *chunks: int) -> DramCopy:
    copy = reserve(residency, key, chunks or (0, 1), now=0.0)
    residency.complete(copy.copy_id)
    assert residency.end_load(copy.copy_id, now=1.0) == ()
    residency.check()
    return copy


def test_a_copy_is_found_only_when_every_byte_of_it_is_in() -> None:
    residency = a_residency()
    copy = reserve(residency, KEY, (0, 1), (2,), now=0.0)
    assert residency.find(KEY) is None
    assert source_tier(residency, KEY) is Tier.REMOTE
    residency.complete(copy.copy_id)
    found = residency.find(KEY)
    assert found is not None
    assert found.chunks == (0, 1, 2)
    assert residency.used_chunks() == 3
    assert source_tier(residency, KEY) is Tier.DRAM
    assert residency.find(OTHER) is None, "other content is another checkpoint"


def test_the_source_is_the_fastest_tier_that_holds_it() -> None:
    residency = a_residency()
    assert source_tier(residency, KEY) is Tier.REMOTE
    residency.add_ssd(KEY, size_bytes=10, now=0.0)
    assert source_tier(residency, KEY) is Tier.SSD
    a_whole_copy(residency)
    assert source_tier(residency, KEY) is Tier.DRAM


def test_chunks_of_a_load_that_did_not_end_well_are_free_again() -> None:
    residency = a_residency()
    copy = reserve(residency, KEY, (3, 4), now=0.0)
    assert residency.end_load(copy.copy_id, now=1.0) == (3, 4)
    assert residency.used_chunks() == 0


def test_chunks_that_a_worker_still_maps_are_freed_when_it_lets_go() -> None:
    residency = a_residency()
    copy = reserve(residency, KEY, (3, 4), now=0.0)
    residency.add_lease(copy.copy_id, "inst-1")
    assert residency.end_load(copy.copy_id, now=1.0) == ()
    assert residency.find(KEY) is None
    residency.check()
    assert residency.end_lease("inst-1", now=2.0) == (3, 4)
    assert residency.end_lease("inst-1", now=3.0) == (), "the end of a lease may be seen twice"


def test_a_resident_copy_outlives_its_leases() -> None:
    """L11: unload is free; the bytes stay for the next load."""
    residency = a_residency()
    copy = a_whole_copy(residency)
    residency.add_lease(copy.copy_id, "inst-1")
    residency.add_lease(copy.copy_id, "inst-2")
    assert sorted(residency.leases()) == ["inst-1", "inst-2"]
    assert residency.dram_candidates()[0].is_held
    residency.end_lease("inst-1", now=2.0)
    assert residency.dram_candidates()[0].is_held
    residency.end_lease("inst-2", now=3.0)
    assert not residency.dram_candidates()[0].is_held
    assert residency.find(KEY) is not None


def test_dropping_a_leased_copy_waits_for_the_lease_and_hides_it_at_once() -> None:
    residency = a_residency()
    copy = a_whole_copy(residency)
    residency.add_lease(copy.copy_id, "inst-1")
    assert residency.drop(copy.copy_id) == ()
    assert residency.find(KEY) is None
    second = reserve(residency, KEY, (5,), now=2.0)
    residency.check()
    assert residency.end_lease("inst-1", now=3.0) == (0, 1)
    assert residency.copy(second.copy_id) is not None
    assert residency.drop(copy.copy_id) == (), "it is gone already"


def test_a_hit_is_held_while_it_is_being_given_out() -> None:
    residency = a_residency()
    copy = a_whole_copy(residency)
    residency.begin_load(copy.copy_id, now=2.0)
    assert residency.drop(copy.copy_id) == ()
    residency.check()
    assert residency.end_load(copy.copy_id, now=3.0) == (0, 1)


def test_an_ssd_copy_goes_together_with_what_dram_holds_of_it() -> None:
    residency = a_residency()
    residency.add_ssd(KEY, size_bytes=10, now=0.0)
    a_whole_copy(residency)
    assert residency.evict(KEY) == (0, 1)
    assert residency.ssd(KEY) is None
    assert residency.ssd_used_bytes() == 0


def test_an_ssd_copy_is_held_by_instances_and_loads_and_cold_ones_go_first() -> None:
    residency = a_residency()
    cold, warm = KEY, OTHER
    residency.add_ssd(warm, size_bytes=30, now=0.0)
    residency.add_ssd(cold, size_bytes=40, now=5.0)
    copy = a_whole_copy(residency, warm)
    candidates = residency.ssd_candidates()
    assert choose_victims(candidates, need=50, capacity=100) == Evict(keys=(cold,)), "DRAM holds the older one"
    residency.add_lease(copy.copy_id, "inst-1")
    residency.use_ssd(warm, now=6.0)
    decision = choose_victims(residency.ssd_candidates(), need=100, capacity=100)
    assert decision == Wait(obtainable=70, held=30), "an instance maps the warm one"
    reserve(residency, cold, (6,), now=7.0)
    assert all(candidate.is_held for candidate in residency.ssd_candidates()), "a load reads the cold one"
    residency.end_lease("inst-1", now=8.0)
    assert [candidate.is_held for candidate in residency.ssd_candidates()] == [False, True]


def test_using_a_copy_that_was_removed_meanwhile_changes_nothing() -> None:
    residency = a_residency()
    residency.add_ssd(KEY, size_bytes=10, now=0.0)
    residency.remove_ssd(KEY)
    residency.use_ssd(KEY, now=2.0)
    assert residency.ssd_copies() == ()


def test_what_is_resident_is_told_once_with_its_fastest_tier() -> None:
    residency = a_residency()
    for key in (KEY, OTHER):
        residency.add_ssd(key, size_bytes=10, now=0.0)
    copy = a_whole_copy(residency)
    reserve(residency, OTHER, (7,), now=2.0)
    tiers = {model.checkpoint_digest: model.tier for model in residency.resident()}
    assert tiers == {KEY.checkpoint_digest: Tier.DRAM, OTHER.checkpoint_digest: Tier.SSD}
    residency.add_lease(copy.copy_id, "inst-1")
    residency.drop(copy.copy_id)
    assert {model.tier for model in residency.resident()} == {Tier.SSD}, "what is doomed is not offered"


def test_copies_can_be_listed_by_model() -> None:
    residency = a_residency()
    residency.add_ssd(KEY, size_bytes=10, now=0.0)
    a_whole_copy(residency)
    assert len(residency.ssd_copies("m")) == len(residency.dram_copies("m")) == 1
    assert residency.ssd_copies("n") == residency.dram_copies("n") == ()


@pytest.mark.parametrize(
    ("source", "crossed"),
    [
        (Tier.REMOTE, (Tier.REMOTE, Tier.SSD)),
        (Tier.SSD, (Tier.SSD,)),
        (Tier.DRAM, (Tier.DRAM,)),
        (Tier.GPU, ()),
    ],
)
def test_a_load_reports_every_tier_that_it_crossed(source: Tier, crossed: tuple[Tier, ...]) -> None:
    """L10: every load reports actual latency and tier path."""
    assert tiers_crossed(source) == crossed
    seconds = dict.fromkeys(crossed, 2.0)
    assert reports(source, size_bytes=7, seconds=seconds) == tuple(
        TierReport(tier=tier, size_bytes=7, seconds=2.0) for tier in crossed
    )


class Model:
    """Random operations on a residency, with a set of free chunks kept beside it as a pool does."""

    def __init__(self, random_source: random.Random) -> None:
        self.random = random_source
        self.residency = Residency(chunk_count=12, ssd_size_bytes=100)
        self.free = set(range(12))
        self.loading: list[int] = []
        self.now = 0.0
        self.instances = 0

    def step(self) -> None:
        self.now += 1.0
        actions = (self.reserve, self.complete, self.hit, self.end, self.lease, self.end_lease, self.drop, self.evict)
        self.give_back(self.random.choice(actions)())
        self.residency.check()
        assert self.residency.used_chunks() + len(self.free) == 12
        assert len(self.loading) == sum(copy.is_loading for copy in self.residency.dram_copies())

    def give_back(self, chunks: tuple[int, ...]) -> None:
        assert self.free.isdisjoint(chunks), "freed twice"
        self.free.update(chunks)

    def key(self) -> CheckpointKey:
        return CheckpointKey(model_id=f"m{self.random.randrange(4)}", checkpoint_digest="d")

    def reserve(self) -> tuple[int, ...]:
        key, need = self.key(), self.random.randrange(1, 6)
        if self.residency.find(key) is not None:
            return ()
        decision = choose_victims(self.residency.dram_candidates(), need=need, capacity=12)
        if not isinstance(decision, Evict):
            return ()
        for copy_id in decision.keys:
            self.give_back(self.residency.drop(copy_id))
        assert len(self.free) >= need, "what was evicted is free now"
        chunks = tuple(sorted(self.free)[:need])
        self.free.difference_update(chunks)
        copy = reserve(self.residency, key, chunks, now=self.now)
        self.loading.append(copy.copy_id)
        return ()

    def complete(self) -> tuple[int, ...]:
        if self.loading:
            self.residency.complete(self.random.choice(self.loading))
        return ()

    def hit(self) -> tuple[int, ...]:
        copy = self.residency.find(self.key())
        if copy is not None and not copy.is_loading:
            self.residency.begin_load(copy.copy_id, now=self.now)
            self.loading.append(copy.copy_id)
        return ()

    def end(self) -> tuple[int, ...]:
        if not self.loading:
            return ()
        return self.residency.end_load(self.loading.pop(self.random.randrange(len(self.loading))), now=self.now)

    def lease(self) -> tuple[int, ...]:
        if self.loading:
            self.instances += 1
            self.residency.add_lease(self.random.choice(self.loading), f"inst-{self.instances}")
        return ()

    def end_lease(self) -> tuple[int, ...]:
        leases = list(self.residency.leases())
        return self.residency.end_lease(self.random.choice(leases), now=self.now) if leases else ()

    def drop(self) -> tuple[int, ...]:
        copies = self.residency.dram_copies()
        return self.residency.drop(self.random.choice(copies).copy_id) if copies else ()

    def evict(self) -> tuple[int, ...]:
        key = self.key()
        if self.residency.ssd(key) is None:
            self.residency.add_ssd(key, size_bytes=5, now=self.now)
            return ()
        return self.residency.evict(key)


@seed(20261129)
@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, 2**32))
def test_used_chunks_are_the_sum_of_the_residents_after_every_step(random_seed: int) -> None:
    model = Model(random.Random(random_seed))
    for _ in range(120):
        model.step()
    for instance_id in list(model.residency.leases()):
        model.give_back(model.residency.end_lease(instance_id, now=model.now))
    while model.loading:
        model.give_back(model.end())
    for copy in model.residency.dram_copies():
        model.give_back(model.residency.drop(copy.copy_id))
    assert model.free == set(range(12)), f"chunks were lost with seed {random_seed}"
