"""Owns the choice of what has to leave a tier so that something else fits: least recently used first, nothing held.

The same rule serves DRAM (sizes in chunks, and a copy can give up some of them) and SSD (bytes, all or nothing).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[K]):
    """Something that occupies a tier. The smallest `used` leaves first; ties are broken by order of arrival (C5)."""

    key: K
    size: int
    used: tuple[bool, float]
    is_held: bool
    is_divisible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim(Generic[K]):
    """`size` of what `key` occupies has to go."""

    key: K
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict(Generic[K]):
    """Evict these, in this order, and it fits. None at all when it fits already."""

    victims: tuple[Victim[K], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """It fits when some of what is held now is let go: `held` of it, where only `obtainable` could be freed now."""

    obtainable: int
    held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NeverFits:
    """The tier as a whole is too small."""

    need: int
    capacity: int


def choose_victims(candidates: Iterable[Candidate[K]], *, need: int, capacity: int) -> Evict[K] | Wait | NeverFits:
    """What to evict so that `need` is free in a tier of `capacity` that `candidates` occupy (L2)."""
    assert need >= 0
    occupants = list(candidates)
    if need > capacity:
        return NeverFits(need=need, capacity=capacity)
    free = capacity - sum(occupant.size for occupant in occupants)
    victims: list[Victim[K]] = []
    for occupant in sorted((o for o in occupants if not o.is_held), key=lambda o: o.used):
        if free >= need:
            break
        size = min(occupant.size, need - free) if occupant.is_divisible else occupant.size
        victims.append(Victim(key=occupant.key, size=size))
        free += size
    if free < need:
        return Wait(obtainable=max(free, 0), held=sum(o.size for o in occupants if o.is_held))
    return Evict(victims=tuple(victims))
