"""Owns the tier path of a load: what crosses which tier next, and what crossing them took (L1, E3).

A checkpoint may be in parts everywhere. What DRAM has is not moved at all; what the SSD has is read from there; what
nobody has is fetched, and goes to DRAM and to the SSD in the same pass; what DRAM has and the SSD lacks is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.wire.messages import Tier, TierReport

from services.storage_agent.core.chunks import ChunkId
from services.storage_agent.core.residency import DramCopy, SsdCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """SSD → DRAM: these chunks, in this order."""

    chunks: tuple[ChunkId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """REMOTE → DRAM and SSD: `chunks` from the repository; `store` are in DRAM already and go to the SSD as well."""

    chunks: tuple[ChunkId, ...]
    store: tuple[ChunkId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Nothing is known of the checkpoint here: its small files come first."""


Move = Begin | Read | Fetch


def next_move(dram: DramCopy | None, ssd: SsdCopy | None, *, wanted: Tier) -> Move | None:
    """What has to cross a tier next so that the checkpoint is whole in `wanted` (SSD or DRAM); None when it is.

    The faster tier goes first: its bytes are in place while the slower one is still asked.
    """
    if wanted is Tier.DRAM and dram is not None and dram.is_whole:
        return None
    if ssd is None:
        return Begin()
    ready = dram.ready if dram is not None else set()
    if wanted is Tier.DRAM:
        read = tuple(chunk for chunk in ssd.layout.chunks() if chunk not in ready and chunk not in ssd.missing)
        if read:
            return Read(chunks=read)
    chunks = tuple(chunk for chunk in ssd.layout.chunks() if chunk in ssd.missing and chunk not in ready)
    store = tuple(chunk for chunk in ssd.layout.chunks() if chunk in ssd.missing and chunk in ready)
    if not chunks and not store:
        return None
    return Fetch(chunks=chunks, store=store)


def source_tier(dram: DramCopy | None, ssd: SsdCopy | None) -> Tier:
    """The slowest tier that a load of the checkpoint has to read from; it names the path of the load (C1, E3)."""
    if dram is not None and dram.is_whole:
        return Tier.DRAM
    if ssd is not None and (ssd.is_whole or (dram is not None and ssd.missing <= dram.ready)):
        return Tier.SSD
    return Tier.REMOTE


@dataclass(slots=True, kw_only=True)
class Crossed:
    """What moved over one tier so far: bytes and seconds."""

    size_bytes: int = 0
    seconds: float = 0.0


def reports(crossed: dict[Tier, Crossed]) -> tuple[TierReport, ...]:
    """One report per tier that bytes were read from (L10), the slowest first."""
    return tuple(
        TierReport(tier=tier, size_bytes=crossed[tier].size_bytes, seconds=max(0.0, crossed[tier].seconds))
        for tier in (Tier.REMOTE, Tier.SSD, Tier.DRAM)
        if tier in crossed and crossed[tier].size_bytes
    )


def since(before: dict[Tier, Crossed], now: dict[Tier, Crossed]) -> dict[Tier, Crossed]:
    """What crossed between two moments: whoever joined a load late reports only that."""
    nothing = Crossed()
    return {
        tier: Crossed(
            size_bytes=crossed.size_bytes - before.get(tier, nothing).size_bytes,
            seconds=crossed.seconds - before.get(tier, nothing).seconds,
        )
        for tier, crossed in now.items()
    }


def remaining_s(*, done_bytes: int, total_bytes: int, running_s: float, probe_bytes_per_s: float) -> float | None:
    """An estimate of the rest of a running load: what is left at the speed so far, or at the measured speed of the SSD
    while nothing has moved. None when neither is known (E1: what remains of the running task)."""
    left_bytes = max(0, total_bytes - done_bytes)
    if done_bytes > 0 and running_s > 0.0:
        return left_bytes * running_s / done_bytes
    return left_bytes / probe_bytes_per_s if total_bytes and probe_bytes_per_s > 0.0 else None
