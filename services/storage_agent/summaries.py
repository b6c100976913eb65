"""Owns what is told of a task to whoever asks: where its bytes are, and how long the rest of it should take (E1)."""

from __future__ import annotations

from whimbrel.wire.messages import LoadSummary, Tier, WaitStage

from services.storage_agent.core.path import remaining_s
from services.storage_agent.filling import Filling


def summarise(
    filling: Filling | None,
    *,
    task_id: str,
    instance_id: str,
    model_id: str,
    size_bytes: int,
    running_s: float | None,
    probe_bytes_per_s: float,
) -> LoadSummary:
    """A task that has run for `running_s`, or waits when that is None; without a filling DRAM has what it needs."""
    is_running = running_s is not None
    if filling is None:
        stage, source, done_bytes, total_bytes = WaitStage.BINDING, Tier.DRAM, size_bytes, size_bytes
    else:
        stage, source = filling.stage, filling.source_tier
        done_bytes, total_bytes = filling.done_bytes, filling.total_bytes or size_bytes
    rest_s = remaining_s(
        done_bytes=done_bytes,
        total_bytes=total_bytes,
        running_s=running_s or 0.0,
        probe_bytes_per_s=probe_bytes_per_s,
    )
    return LoadSummary(
        task_id=task_id,
        instance_id=instance_id,
        model_id=model_id,
        stage=stage if is_running else WaitStage.QUEUED,
        source_tier=source,
        done_bytes=done_bytes,
        total_bytes=total_bytes,
        running_s=running_s or 0.0,
        remaining_s=rest_s if is_running else None,
    )
