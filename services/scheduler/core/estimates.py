"""Owns the estimate of a load: t_load = q + n / b, with the overhead that was learned (D3)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from whimbrel.wire.messages import Tier
from whimbrel.wire.records import BandwidthRecord

from services.scheduler.core.bandwidth import prior, spread

# The tiers whose bandwidth bytes cross on their way up, by the tier that a load starts from.
PATHS: dict[Tier, tuple[Tier, ...]] = {
    Tier.REMOTE: (Tier.REMOTE, Tier.SSD, Tier.DRAM),
    Tier.SSD: (Tier.SSD, Tier.DRAM),
    Tier.DRAM: (Tier.DRAM,),
}


class PathSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """A path on one server: seconds per byte of its slowest tier (1/b, E3), overhead in seconds.

    `is_prior` is true when the slowest tier has never been observed there. `spread` says how sure the bandwidth is: the
    relative standard deviation of the last loads over the slowest tier, None while there are too few to tell.
    """

    source_tier: Tier
    seconds_per_byte: float
    overhead_s: float
    is_prior: bool
    spread: float | None = None


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of one estimate: `queue_s` is q, `transfer_s` is n / b, and what is paid whatever the size."""

    source_tier: Tier
    size_bytes: int
    queue_s: float
    transfer_s: float
    overhead_s: float
    is_prior: bool

    @property
    def load_s(self) -> float:
        """Its own time once it runs: n / b + overhead."""
        return self.transfer_s + self.overhead_s

    @property
    def total_s(self) -> float:
        """t_load = q + n / b + overhead"""
        return self.queue_s + self.transfer_s + self.overhead_s


def seconds_to_load(*, queue_s: float, size_bytes: int, speed: PathSpeed) -> float:
    """t_load = q + n / b + overhead (E1, E2, E3), the sum alone."""
    return queue_s + size_bytes * speed.seconds_per_byte + speed.overhead_s


def estimate_load(*, queue_s: float, size_bytes: int, speed: PathSpeed) -> Estimate:
    """t_load = q + n / b + overhead (E1, E2, E3): `size_bytes` is n, `speed` holds 1/b of the slowest tier."""
    return Estimate(
        source_tier=speed.source_tier,
        size_bytes=size_bytes,
        queue_s=queue_s,
        transfer_s=size_bytes * speed.seconds_per_byte,
        overhead_s=speed.overhead_s,
        is_prior=speed.is_prior,
    )


def path_speeds(
    server_id: str, learned: Mapping[Tier, BandwidthRecord], probe_bytes_per_s: float
) -> dict[Tier, PathSpeed]:
    """The speed of every path of a server: what was learned where something was, priors elsewhere (E3, E6)."""
    tiers = {tier: learned.get(tier) or prior(server_id, tier, probe_bytes_per_s) for tier in PATHS}
    return {source: _path_speed(source, tiers) for source in PATHS}


def _path_speed(source: Tier, tiers: Mapping[Tier, BandwidthRecord]) -> PathSpeed:
    slowest = max((tiers[tier] for tier in PATHS[source]), key=lambda record: record.seconds_per_byte)
    return PathSpeed(
        source_tier=source,
        seconds_per_byte=slowest.seconds_per_byte,
        overhead_s=tiers[source].overhead_s,
        is_prior=slowest.observations == 0,
        spread=spread(slowest),
    )
