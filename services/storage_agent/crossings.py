"""Owns what a filling has moved over each tier: bytes and seconds, right at every moment (L10)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from whimbrel.wire.messages import Tier

from services.storage_agent.core.path import Crossed


class Crossings:
    """One tier is being crossed at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._crossed: dict[Tier, Crossed] = {}
        self._now = Crossed()
        self._since_s = 0.0
        self._is_crossing = False

    def begin(self, tier: Tier) -> None:
        """From now on bytes cross this tier; what crossed it before counts on."""
        self._now = self._crossed.setdefault(tier, Crossed())
        self._since_s = self._clock() - self._now.seconds
        self._is_crossing = True

    def end(self) -> None:
        """Nothing crosses now: time that goes by does not count."""
        self._is_crossing = False

    def add(self, size_bytes: int) -> None:
        """So many bytes have crossed: noted with each chunk, so that whoever is woken by the last one can report it."""
        self._now.size_bytes += size_bytes
        self._now.seconds = self._clock() - self._since_s

    def so_far(self) -> dict[Tier, Crossed]:
        """What has crossed each tier by now; it does not change any more. The time since the last chunk counts: whoever
        joins now did not spend it."""
        if self._is_crossing:
            self._now.seconds = self._clock() - self._since_s
        return {tier: replace(crossed) for tier, crossed in self._crossed.items()}
