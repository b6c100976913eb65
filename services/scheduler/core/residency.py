"""Owns what is known of a server's tiers: all of it, kept up with what its agent says has changed (P2).

Each change has a version. An entry is what is true, not a difference, so news that overlap do no harm; news that leave
a gap are not heard, and the agent is asked for everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from whimbrel.wire.messages import AgentHeartbeat, ResidentModel, Tier

Key = tuple[str, str]


class Resident(NamedTuple):
    """The fastest tier that has a checkpoint whole (REMOTE when none of the server does), and the bytes that a load
    still has to move over it: what is there in part need not be moved (E2)."""

    tier: Tier
    left_bytes: int


class Residency:
    """The checkpoints of one server by model id and digest."""

    def __init__(self) -> None:
        self.entries: Mapping[Key, Resident] = {}
        self._models: dict[Key, ResidentModel] = {}
        self._epoch = -1
        self._version = -1

    def models(self) -> tuple[ResidentModel, ...]:
        """As the agent told it."""
        return tuple(self._models.values())

    def hear(self, heartbeat: AgentHeartbeat) -> bool:
        """Take over the news of a heartbeat. False, changing nothing, when earlier ones were missed."""
        base_version = heartbeat.base_version
        if base_version is None:
            models: dict[Key, ResidentModel] = {}
        elif heartbeat.epoch == self._epoch and base_version <= self._version:
            models = dict(self._models)
        else:
            return False
        is_news = (heartbeat.epoch, heartbeat.residency_version) != (self._epoch, self._version)
        self._epoch, self._version = heartbeat.epoch, heartbeat.residency_version
        if is_news:
            for model in heartbeat.resident:
                _take(models, model)
            self._models = models
            self.entries = {key: _resident(model) for key, model in models.items()}
        return True


def _take(models: dict[Key, ResidentModel], model: ResidentModel) -> None:
    key = (model.model_id, model.checkpoint_digest)
    if model.dram_bytes or model.ssd_bytes:
        models[key] = model
    else:
        models.pop(key, None)


def _resident(model: ResidentModel) -> Resident:
    match model.tier:
        case Tier.SSD:
            return Resident(Tier.SSD, model.size_bytes - model.dram_bytes)
        case Tier.REMOTE:
            return Resident(Tier.REMOTE, model.size_bytes - max(model.dram_bytes, model.ssd_bytes))
        case tier:
            return Resident(tier, model.size_bytes)
