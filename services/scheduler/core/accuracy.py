"""Owns how good our estimates were: what the last loads per server and tier took, and were thought to (E7)."""

from __future__ import annotations

import msgspec
from whimbrel.wire.messages import EstimateQuality, Tier
from whimbrel.wire.records import AccuracyRecord

KEPT = 32
# Shares of shorter times than this are of no interest to anybody, and would say nothing of those that are.
ACTUAL_S_MIN = 0.001


def unknown(server_id: str, tier: Tier) -> AccuracyRecord:
    """Before any load from this tier ended on the server."""
    return AccuracyRecord(server_id=server_id, tier=tier, recent=())


def observe(record: AccuracyRecord, *, estimate_s: float, actual_s: float) -> AccuracyRecord:
    """The record after one more load (or move) was estimated at `estimate_s` and took `actual_s`."""
    return msgspec.structs.replace(record, recent=(*record.recent, (estimate_s, actual_s))[-KEPT:])


def quality(record: AccuracyRecord) -> EstimateQuality:
    """The error that nine of ten of the last loads stayed within, in seconds and as a share of what they took."""
    errors_s = [abs(estimate_s - actual_s) for estimate_s, actual_s in record.recent]
    actuals_s = [max(actual_s, ACTUAL_S_MIN) for _, actual_s in record.recent]
    shares = [error_s / actual_s for error_s, actual_s in zip(errors_s, actuals_s, strict=True)]
    return EstimateQuality(observations=len(errors_s), error_s_p90=_p90(errors_s), error_share_p90=_p90(shares))


def _p90(values: list[float]) -> float:
    """The smallest of them that at least nine of ten don't exceed; 0 of none."""
    return sorted(values)[-(-len(values) * 9 // 10) - 1] if values else 0.0
