"""Which chunks stay in a pool, and which go: pure, and against a simple model of it."""

from __future__ import annotations

import random

import pytest

from ckptio.residency import ChunkKey, ResidentChunks


def keys(checkpoint: str, count: int) -> list[ChunkKey]:
    return [ChunkKey(checkpoint, 0, number) for number in range(count)]


def admitted(checkpoint: str, count: int, first_index: int = 0) -> ResidentChunks:
    residents = ResidentChunks()
    admit(residents, checkpoint, count, first_index)
    return residents


def admit(residents: ResidentChunks, checkpoint: str, count: int, first_index: int) -> None:
    residents.admit((key, first_index + key.chunk_index) for key in keys(checkpoint, count))


def test_a_chunk_stays_when_its_lease_ends_and_is_found_again() -> None:
    """L2: unloading is no work; the bytes are there for the next load."""
    residents = admitted("a", 3)
    residents.release(keys("a", 3))
    assert (residents.leases, residents.idle_chunks, len(residents)) == (0, 3, 3)
    assert residents.lease(keys("a", 5)) == dict(zip(keys("a", 3), (0, 1, 2), strict=True))


def test_a_leased_chunk_is_never_evicted() -> None:
    residents = admitted("a", 3)
    assert residents.evict(3) == []
    residents.release(keys("a", 2))
    assert sorted(residents.evict(3)) == [0, 1]
    assert residents.lease(keys("a", 3)) == {keys("a", 3)[2]: 2}


def test_what_was_used_longest_ago_goes_first_and_of_one_checkpoint_its_end() -> None:
    residents = admitted("old", 2)
    admit(residents, "new", 2, 10)
    residents.release(keys("old", 2))
    residents.release(keys("new", 2))
    residents.lease(keys("old", 2))
    residents.release(keys("old", 2))
    assert [residents.evict(1) for _ in range(4)] == [[11], [10], [1], [0]]


def test_one_checkpoint_can_be_dropped_without_the_others() -> None:
    residents = admitted("a", 2)
    admit(residents, "b", 2, 10)
    residents.release([*keys("a", 2), *keys("b", 1)])
    assert sorted(residents.drop("a")) == [0, 1]
    assert residents.drop("a") == []
    assert len(residents) == 2


@pytest.mark.parametrize("wrong", [[ChunkKey("a", 0, 9)], keys("a", 1) * 2])
def test_a_lease_ends_once_only(wrong: list[ChunkKey]) -> None:
    residents = admitted("a", 1)
    with pytest.raises(ValueError, match="has no lease"):
        residents.release(wrong)


def test_a_chunk_cannot_be_resident_twice() -> None:
    residents = admitted("a", 1)
    with pytest.raises(ValueError, match="resident already"):
        admit(residents, "a", 1, 5)


@pytest.mark.parametrize("seed", range(5))
def test_leases_and_places_add_up_after_every_step(seed: int) -> None:
    """L2, against a model that only counts: no place is lost, lent twice, or given back while leased."""
    generator = random.Random(seed)
    residents = ResidentChunks()
    free = set(range(20))
    leased: dict[ChunkKey, int] = {}
    places: dict[ChunkKey, int] = {}
    for _ in range(600):
        key = ChunkKey(generator.choice("abc"), 0, generator.randrange(8))
        action = generator.choice(["lease", "release", "evict"])
        if action == "lease" and (key in places or free):
            found = residents.lease([key])
            assert found == ({key: places[key]} if key in places else {})
            if not found:
                places[key] = free.pop()
                residents.admit([(key, places[key])])
            leased[key] = leased.get(key, 0) + 1
        elif action == "release" and leased.get(key):
            residents.release([key])
            leased[key] -= 1
        elif action == "evict":
            for index in residents.evict(generator.randrange(4)):
                victim = next(key for key, place in places.items() if place == index)
                assert not leased.get(victim), f"seed {seed}: a leased chunk went"
                del places[victim]
                free.add(index)
        assert residents.leases == sum(leased.values()), f"seed {seed}"
        assert len(residents) == len(places) == 20 - len(free), f"seed {seed}"
