"""Owns what may happen to an instance; `core.instance` says when, and what it leads to."""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.wire.errors import WhimbrelError


@dataclass(frozen=True, slots=True)
class ConfigArrived:
    """The scheduler said which model comes."""


@dataclass(frozen=True, slots=True)
class ChunksMapped:
    """The agent lent the chunks, and they are mapped under a lease."""


@dataclass(frozen=True, slots=True)
class ChunksReplaced:
    """The agent's next life lent other chunks, and they are mapped under its lease."""


@dataclass(frozen=True, slots=True)
class BytesVerified:
    """The agent said that every byte is in place."""


@dataclass(frozen=True, slots=True)
class SkeletonBuilt:
    pass


@dataclass(frozen=True, slots=True)
class TensorsBound:
    pass


@dataclass(frozen=True, slots=True)
class ModelActivated:
    pass


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """Building, binding or activating did not work."""

    error: WhimbrelError


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """No new request; unload when the last one has ended."""


@dataclass(frozen=True, slots=True)
class UnloadAsked:
    """Nothing runs here (any more): let go of everything."""


@dataclass(frozen=True, slots=True)
class Emptied:
    """Tensors dropped, chunks unmapped, lease released."""


Event = (
    ConfigArrived
    | ChunksMapped
    | ChunksReplaced
    | BytesVerified
    | SkeletonBuilt
    | TensorsBound
    | ModelActivated
    | WorkFailed
    | DrainAsked
    | UnloadAsked
    | Emptied
)
