"""Owns the tier path of a load: which tiers its bytes have to cross, and what crossing them took."""

from __future__ import annotations

from whimbrel.wire.messages import Tier, TierReport

from services.storage_agent.core.residency import CheckpointKey, Residency

# The last step, DRAM to a CPU slot, is a mapping that moves nothing: a tier of the path only when it is all of it.
TIER_PATHS: dict[Tier, tuple[Tier, ...]] = {
    Tier.REMOTE: (Tier.REMOTE, Tier.SSD),
    Tier.SSD: (Tier.SSD,),
    Tier.DRAM: (Tier.DRAM,),
    Tier.GPU: (),
}


def source_tier(residency: Residency, key: CheckpointKey) -> Tier:
    """The fastest tier of this server that holds the whole checkpoint; REMOTE when none does (C1, E3)."""
    if residency.find(key) is not None:
        return Tier.DRAM
    if residency.ssd(key) is not None:
        return Tier.SSD
    return Tier.REMOTE


def tiers_crossed(source: Tier) -> tuple[Tier, ...]:
    """The tiers that bytes from `source` are read from, in order, until an instance on a CPU slot has them."""
    return TIER_PATHS[source]


def reports(source: Tier, *, size_bytes: int, seconds: dict[Tier, float]) -> tuple[TierReport, ...]:
    """One report per tier crossed (L10). `seconds` is what reading the checkpoint from that tier took."""
    return tuple(
        TierReport(tier=tier, size_bytes=size_bytes, seconds=max(0.0, seconds[tier]))
        for tier in tiers_crossed(source)
        if tier in seconds
    )
