"""Owns what is learned of a server's tiers from its loads: seconds per byte, their variance, and fixed overhead (E6).

Theory of operation. The last few observations of a tier are kept. Those that agree with their median are averaged, and
newer ones count more: loads scatter by a tenth or two around what is normal, and what is normal drifts with whatever
else the machine does. One slow load among many agrees with nobody and changes nothing (E7: one in 119 was slow, by
far). A tier that really became slower is believed as soon as most of the window says so: after five loads. The
overhead of a load is what its bytes do not explain (skeleton, attaching, messages), kept per tier that loads start
from.

A transfer of few bytes is mostly what every transfer costs (opening files, one round trip), so its seconds per byte can
be many times those of a large one: a model of 2 MB, loaded often, would make one of 700 MB look six times slower than
it is. Such a transfer is only believed when it says that the tier is faster; what it took too long is overhead.
"""

from __future__ import annotations

from math import sqrt

import msgspec
from whimbrel.wire.messages import Tier
from whimbrel.wire.records import BandwidthRecord

# Odd, so that the median is an observation; five of nine relearn a tier, and four outliers in a row are ignored.
OBSERVATIONS_KEPT = 9
# What is further away from the median than this does not agree with it: it is no scatter.
INLIER_FACTOR = 1.5
# What an observation counts for beside the next one. With a full window, and the factor above, one load moves an
# estimate by less than a fifth.
AGING = 0.8

# A transfer says how slow a tier is when its bytes would cross the tier in more than this at the prior's speed. What is
# wrong with smaller ones is a time that nobody notices.
TELLING_S = 0.04

# Fewer observations than this say nothing of their scatter.
SPREAD_OBSERVATIONS_MIN = 3

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
    """The estimate after one more transfer of `size_bytes` over the tier. Nothing is learned from no bytes, nor from
    few when they took longer than was thought."""
    if size_bytes == 0 or seconds > explained_s(record, size_bytes=size_bytes, seconds=seconds):
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


def explained_s(record: BandwidthRecord, *, size_bytes: int, seconds: float) -> float:
    """How much of the `seconds` of a transfer its bytes explain: all, but for few bytes no more than they should take.
    The rest is overhead."""
    if size_bytes > TELLING_S * PRIOR_BANDWIDTH_BYTES_PER_S[record.tier]:
        return seconds
    return min(seconds, size_bytes * record.seconds_per_byte)


def observe_overhead(record: BandwidthRecord, overhead_s: float) -> BandwidthRecord:
    """The estimate after a load from this tier took `overhead_s` that its queue and bytes do not explain."""
    recent = _appended(record.recent_overhead_s, max(0.0, overhead_s))
    mean, _ = _settled(recent)
    return msgspec.structs.replace(record, overhead_s=mean, recent_overhead_s=recent)


def spread(record: BandwidthRecord) -> float | None:
    """How much the seconds per byte scatter, as a share of them (one standard deviation); None while unknown."""
    if len(record.recent_seconds_per_byte) < SPREAD_OBSERVATIONS_MIN:
        return None
    return sqrt(record.variance) / record.seconds_per_byte if record.seconds_per_byte > 0.0 else 0.0


def _appended(recent: tuple[float, ...], observation: float) -> tuple[float, ...]:
    return (*recent, observation)[-OBSERVATIONS_KEPT:]


def _settled(recent: tuple[float, ...]) -> tuple[float, float]:
    """The mean of the observations that agree with their median (the lower one when even), and their variance."""
    median = sorted(recent)[(len(recent) - 1) // 2]
    least, most = median / INLIER_FACTOR, median * INLIER_FACTOR
    mean = squares = total = 0.0
    weight = 1.0
    for observation in reversed(recent):
        if least <= observation <= most:
            total += weight
            above = observation - mean
            mean += above * weight / total
            squares += weight * above * (observation - mean)
        weight *= AGING
    return mean, max(0.0, squares / total)  # rounding may take equal ones below
