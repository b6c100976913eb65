"""Owns the last decision about each model, kept so that people can ask why."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.core.decisions import Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDecision:
    """`decided_s` is monotonic seconds; `policy` the one that decided."""

    decision: Decision
    decided_s: float
    policy: str
