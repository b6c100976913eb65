"""Owns when instances go: keep-alive, scale to zero, and whose turn is over when a model has waited too long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A ready instance as scaling sees it. `keep_alive_s` is its model's; `is_idle` says that nothing runs on it."""

    instance_id: str
    model_id: str
    capacity_bytes: int
    ready_s: float
    idle_since_s: float
    keep_alive_s: float
    is_idle: bool
    is_promised: bool
    is_reserved: bool


def expired(instances: Iterable[Held], now: float) -> list[str]:
    """Idle instances whose keep-alive has run out, counted from the end of the last request (R6): with the last of
    them, a model is scaled to zero."""
    return [held.instance_id for held in instances if held.is_idle and now - held.idle_since_s >= held.keep_alive_s]


def choose_drain(instances: Sequence[Held], *, model_id: str, size_bytes: int) -> str | None:
    """The instance that must give up its slot to a model that has waited too long: the one that has been ready
    longest, on a server where the model fits. Not one that is idle, which would be evicted if that helped; not one
    whose first requests have not reached it, nor one whose slot is kept for another model. None when there is none."""
    fitting = [
        held
        for held in instances
        if held.model_id != model_id
        and held.capacity_bytes >= size_bytes
        and not held.is_idle
        and not held.is_promised
        and not held.is_reserved
    ]
    oldest = min(fitting, key=lambda held: (held.ready_s, held.instance_id), default=None)
    return None if oldest is None else oldest.instance_id
