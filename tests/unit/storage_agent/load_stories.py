"""What stories of loads look at."""

from __future__ import annotations

from whimbrel.wire.messages import (
    AgentHeartbeat,
    LoadFinished,
    Tier,
)

from tests.unit.storage_agent.harness import (
    Harness,
)


def tiers_of(finished: LoadFinished) -> list[Tier]:
    return [report.tier for report in finished.reports]


def dram(heartbeat: AgentHeartbeat) -> set[str]:
    return {model.model_id for model in heartbeat.resident if model.tier is Tier.DRAM}


def commands(harness: Harness) -> list[str]:
    return [type(message).__name__ for message in harness.peer.asked]
