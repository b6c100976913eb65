"""Owns the last decision about each model, kept so that people can ask why."""

from __future__ import annotations

import msgspec

from services.scheduler.core.decisions import Decision


class KeptDecision(msgspec.Struct, frozen=True, kw_only=True):
    """`decided_s` is monotonic seconds; `policy` the one that decided."""

    decision: Decision
    decided_s: float
    policy: str
