"""What leaves a tier so that something else fits."""

from __future__ import annotations

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from services.storage_agent.core.eviction import Candidate, Evict, NeverFits, Victim, Wait, choose_victims


def occupant(key: str, size: int, used_s: float, *, held: bool = False, divisible: bool = False) -> Candidate[str]:
    return Candidate(key=key, size=size, used=(False, used_s), is_held=held, is_divisible=divisible)


def evict(**sizes: int) -> Evict[str]:
    return Evict(victims=tuple(Victim(key=key, size=size) for key, size in sizes.items()))


A = occupant("a", 4, 3.0)
B = occupant("b", 3, 1.0)
C = occupant("c", 2, 2.0)
HELD = occupant("h", 4, 0.0, held=True)
PARTS = occupant("p", 5, 0.5, divisible=True)


@pytest.mark.parametrize(
    ("occupants", "need", "expected"),
    [
        ([], 10, evict()),
        ([A, B], 3, evict()),
        ([A, B, C], 1, evict()),
        ([A, B, C], 2, evict(b=3)),
        ([A, B, C], 5, evict(b=3, c=2)),
        ([A, B, C], 10, evict(b=3, c=2, a=4)),
        ([PARTS, B], 4, evict(p=2)),
        ([PARTS, B], 7, evict(p=5)),
        ([PARTS, B], 8, evict(p=5, b=3)),
        ([HELD, A], 6, evict(a=4)),
        ([HELD, A], 7, Wait(obtainable=6, held=4)),
        ([HELD], 11, NeverFits(need=11, capacity=10)),
        ([HELD], 0, evict()),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else None,
)
def test_least_recently_used_leaves_first_and_nothing_held_ever(
    occupants: list[Candidate[str]], need: int, expected: object
) -> None:
    """L2: eviction is ours: least recently used first, and no more of it than is needed."""
    assert choose_victims(occupants, need=need, capacity=10) == expected


def test_of_two_equally_old_the_first_comer_leaves() -> None:
    """C5: ties are deterministic."""
    twins = [occupant("x", 5, 1.0), occupant("y", 5, 1.0)]
    assert choose_victims(twins, need=5, capacity=10) == evict(x=5)


sizes = st.lists(st.tuples(st.integers(0, 20), st.floats(0, 9), st.booleans(), st.booleans()), max_size=8)


@seed(20261129)
@settings(max_examples=150, deadline=None, database=None)
@given(sizes, st.integers(0, 120), st.integers(0, 40))
def test_a_decision_is_sufficient_and_takes_no_more_than_needed(
    occupants: list[tuple[int, float, bool, bool]], need: int, slack: int
) -> None:
    tier = [
        occupant(str(n), size, used, held=held, divisible=divisible)
        for n, (size, used, held, divisible) in enumerate(occupants)
    ]
    capacity = sum(o.size for o in tier) + slack
    decision = choose_victims(tier, need=need, capacity=capacity)
    by_key = {o.key: o for o in tier}
    evictable = sum(o.size for o in tier if not o.is_held)
    match decision:
        case Evict(victims=victims):
            freed = [victim.size for victim in victims]
            assert slack + sum(freed) >= need
            assert not victims or slack + sum(freed[:-1]) < need
            assert not any(by_key[victim.key].is_held for victim in victims)
            for victim in victims:
                whole = by_key[victim.key]
                assert victim.size == whole.size or (whole.is_divisible and victim.size < whole.size)
            if victims and by_key[victims[-1].key].is_divisible:
                assert slack + sum(freed) == need, "no chunk too many"
            gone = {victim.key for victim in victims}
            kept = [o for o in tier if not o.is_held and o.key not in gone]
            assert all(by_key[key].used <= other.used for key in gone for other in kept)
        case Wait(obtainable=obtainable, held=held):
            assert obtainable == slack + evictable < need <= capacity
            assert obtainable + held == capacity
        case NeverFits():
            assert need > capacity
