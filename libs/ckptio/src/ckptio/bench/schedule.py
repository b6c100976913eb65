"""The order of the measurements: seeded and random, with what is compared side by side; pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Their ratios are a few per cent, less than a shared disk moves within a minute: so they run as neighbours.
NEIGHBOURS = ("ckptio", "ckptio.unverified", "ckptio.stock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measurement; `is_raw` for the plain read that precedes a cold load of `loader`."""

    round: int
    temperature: str
    loader: str
    is_raw: bool = False


def plan_steps(
    loaders: Sequence[str], temperatures: Sequence[str], *, rounds: int, seed: int
) -> tuple[Step, ...]:
    """Every loader once per round and temperature, in an order that only `seed` decides."""
    generator = random.Random(seed)
    steps: list[Step] = []
    neighbours = tuple(loader for loader in loaders if loader in NEIGHBOURS)
    groups: list[tuple[str, ...]] = [(loader,) for loader in loaders if loader not in NEIGHBOURS]
    groups += [neighbours] if neighbours else []
    for number in range(rounds):
        units = [(temperature, group) for temperature in temperatures for group in groups]
        generator.shuffle(units)
        for temperature, unit in units:
            for loader in generator.sample(unit, len(unit)):
                if temperature == "cold" and is_pooled(loader):
                    steps.append(Step(round=number, temperature=temperature, loader=loader, is_raw=True))
                steps.append(Step(round=number, temperature=temperature, loader=loader))
    return tuple(steps)


def is_pooled(loader: str) -> bool:
    """Whether the loader's speed is compared with a plain read."""
    return loader in NEIGHBOURS
