"""No sequence of operations breaks the account of a server's tiers."""

from __future__ import annotations

import random

from hypothesis import given, seed, settings
from hypothesis import strategies as st

from services.storage_agent.core.chunks import CheckpointKey, Layout
from services.storage_agent.core.eviction import Evict, choose_victims
from services.storage_agent.core.residency import Residency

LAYOUT = Layout(partition_bytes=(25, 10), chunk_size_bytes=10)


class Model:
    """Random operations on a residency, with a set of free chunks kept beside it as a pool does."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.residency = Residency(chunk_count=12, ssd_size_bytes=100)
        self.free = set(range(12))
        self.holds: list[tuple[int, str]] = []
        self.now = 0.0

    def step(self) -> None:
        self.now += 1.0
        actions = (self.load, self.fill, self.fill, self.hold, self.let_go, self.drop, self.evict, self.reject)
        self.chance.choice(actions)()
        self.residency.check()
        assert self.residency.used_chunks() + len(self.free) == 12
        assert len(self.holds) == sum(len(copy.holders) for copy in self.residency.dram_copies())

    def give_back(self, chunks: tuple[int, ...]) -> None:
        assert self.free.isdisjoint(chunks), "freed twice"
        self.free.update(chunks)

    def key(self) -> CheckpointKey:
        return CheckpointKey(model_id=f"m{self.chance.randrange(4)}", checkpoint_digest="d")

    def load(self) -> None:
        size_bytes = self.chance.randrange(1, 6) * 10
        holder = f"load {self.now}"
        layout = Layout(partition_bytes=(size_bytes, 5), chunk_size_bytes=10)
        copy = self.residency.open_copy(self.key(), layout=layout, size_bytes=1, holder=holder, now=self.now)
        self.holds.append((copy.copy_id, holder))
        need = len(copy.unplaced())
        decision = choose_victims(self.residency.dram_candidates(), need=need, capacity=12)
        if not isinstance(decision, Evict):
            self.let_go(len(self.holds) - 1)
            return
        for victim in decision.victims:
            assert victim.key != copy.copy_id, "its own chunks"
            self.give_back(self.residency.shed(victim.key, victim.size))
        chunks = tuple(sorted(self.free)[:need])
        self.free.difference_update(chunks)
        self.residency.place(copy.copy_id, chunks)

    def fill(self) -> None:
        if self.holds:
            copy = self.residency.copy(self.chance.choice(self.holds)[0])
            assert copy is not None, "it is held"
            if copy.places:
                self.residency.arrive(copy.copy_id, self.chance.choice(sorted(copy.places)))

    def hold(self) -> None:
        copy = self.residency.find(self.key())
        if copy is not None:
            self.residency.hold(copy.copy_id, f"instance {self.now}", now=self.now)
            self.holds.append((copy.copy_id, f"instance {self.now}"))

    def let_go(self, number: int | None = None) -> None:
        if self.holds:
            number = self.chance.randrange(len(self.holds)) if number is None else number
            self.give_back(self.residency.let_go(*self.holds.pop(number), now=self.now))

    def drop(self) -> None:
        copies = self.residency.dram_copies()
        if copies:
            self.give_back(self.residency.drop(self.chance.choice(copies).copy_id))

    def evict(self) -> None:
        key = self.key()
        if self.residency.ssd(key) is None:
            self.residency.add_ssd(key, layout=LAYOUT, size_bytes=5, now=self.now)
        else:
            self.give_back(self.residency.evict(key))

    def reject(self) -> None:
        self.residency.remove_ssd(self.key())


@seed(20261129)
@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, 2**32))
def test_used_chunks_are_the_sum_of_the_residents_after_every_step(random_seed: int) -> None:
    model = Model(random.Random(random_seed))
    for _ in range(120):
        model.step()
    while model.holds:
        model.let_go()
    for copy in model.residency.dram_copies():
        model.give_back(model.residency.drop(copy.copy_id))
    assert model.free == set(range(12)), f"chunks were lost with seed {random_seed}"
