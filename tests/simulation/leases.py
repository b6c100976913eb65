"""Owns the leases of a simulated server: who maps the chunks that were lent, without asking him."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.workers import SimWorker


@dataclass(slots=True, eq=False)
class Lease:
    """Chunks that were lent for an instance on these slots; `holder` maps them until it lets go or dies."""

    slots: tuple[int, ...]
    holder: SimWorker | None = None
    is_ended: bool = False


@dataclass(slots=True)
class Holding:
    """What the worker maps: the newest lease, and those that it replaced and has not given back."""

    leases: list[Lease] = field(default_factory=list)

    @property
    def current(self) -> Lease | None:
        return self.leases[-1] if self.leases else None

    def give_back(self, *, but_current: bool) -> None:
        kept = self.leases[-1:] if but_current else []
        for lease in self.leases:
            if lease not in kept:
                lease.holder = None
        self.leases = kept
