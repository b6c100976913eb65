"""Owns what is learned of a server's tiers from its loads: seconds per byte, their variance, and fixed overhead (E6).

Theory of operation. The last few observations of a tier are kept, and their median is the estimate. Loads of one tier
scatter by a tenth or two around what is normal, without memory of each other, so newer ones know no better than older
ones; and one slow load among many changes nothing (E7: one in 119 was slow, by far). A tier that really became slower
is believed as soon as most of the window says so: after five loads. The overhead of a load is what its bytes do not
explain (skeleton, attaching, messages), kept per tier that loads start from.
"""

from __future__ import annotations

import msgspec
from whimbrel.wire.messages import Tier
from whimbrel.wire.records import BandwidthRecord

# Odd, so that the median is an observation; five of nine relearn a tier, and four outliers in a row are ignored.
OBSERVATIONS_KEPT = 9
# What is further away from the median than this is no scatter, and does not count as such.
INLIER_FACTOR = 2.0

# Priors, used until the first load is observed and marked as such. A repository over a 1 Gbit/s network and an NVMe
# disk (an agent's own probe goes before), and PCIe 3 x16. A warm worker binds a skeleton within the overhead.
PRIOR_BANDWIDTH_BYTES_PER_S = {Tier.REMOTE: 110e6, Tier.SSD: 1.5e9, Tier.DRAM: 12e9}
PRIOR_OVERHEAD_S = 0.05
# A probe that says less than this did not work.
PROBE_BYTES_PER_S_MIN = 1e6


def prior(server_id: str, tier: Tier, probe_bytes_per_s: float = 0.0) -> BandwidthRecord:
    """What is assumed of a tier before anything was observed; `probe_bytes_per_s` is the agent's probe of its SSD."""
    bandwidth = PRIOR_BANDWIDTH_BYTES_PER_S[tier]
    if tier is Tier.SSD and probe_bytes_per_s >= PROBE_BYTES_PER_S_MIN:
        bandwidth = probe_bytes_per_s
    return BandwidthRecord(
        server_id=server_id,
        tier=tier,
        seconds_per_byte=1.0 / bandwidth,
        variance=0.0,
        overhead_s=PRIOR_OVERHEAD_S,
        observations=0,
    )


def observe_transfer(record: BandwidthRecord, *, size_bytes: int, seconds: float) -> BandwidthRecord:
    """The estimate after one more transfer of `size_bytes` over the tier. Nothing is learned from no bytes."""
    if size_bytes == 0:
        return record
    recent = _appended(record.recent_seconds_per_byte, seconds / size_bytes)
    mean, variance = _settled(recent)
    return msgspec.structs.replace(
        record,
        seconds_per_byte=mean,
        variance=variance,
        observations=record.observations + 1,
        recent_seconds_per_byte=recent,
    )


def observe_overhead(record: BandwidthRecord, overhead_s: float) -> BandwidthRecord:
    """The estimate after a load from this tier took `overhead_s` that its queue and bytes do not explain."""
    recent = _appended(record.recent_overhead_s, max(0.0, overhead_s))
    mean, _ = _settled(recent)
    return msgspec.structs.replace(record, overhead_s=mean, recent_overhead_s=recent)


def _appended(recent: tuple[float, ...], observation: float) -> tuple[float, ...]:
    return (*recent, observation)[-OBSERVATIONS_KEPT:]


def _settled(recent: tuple[float, ...]) -> tuple[float, float]:
    """The median of the observations (the lower one when even), and the variance about it of those that agree."""
    median = sorted(recent)[(len(recent) - 1) // 2]
    agreeing = [o for o in recent if median <= o * INLIER_FACTOR and o <= median * INLIER_FACTOR]
    return median, sum((o - median) ** 2 for o in agreeing) / len(agreeing)
