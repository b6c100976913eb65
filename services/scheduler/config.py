"""Owns the scheduler's configuration: environment variables `WB_<FIELD>`, checked once at start."""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.chassis.config import ConfigError
from whimbrel.wire.errors import InvalidRequest
from whimbrel.wire.ids import check_service_id

from services.scheduler.core.policies import POLICIES
from services.scheduler.core.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Times in seconds. `metrics_port` 0 means no metrics and no health endpoints."""

    scheduler_id: str = "scheduler-0"
    nats_url: str = "nats://127.0.0.1:4222"
    redis_url: str = "redis://127.0.0.1:6379/0"
    cluster: str = "wb"
    log_level: str = "info"
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    #: How long an idle instance is kept when its model does not say.
    keep_alive_s: float = 60.0
    #: How long a model waits before a busy instance is drained for it.
    fair_wait_s: float = 2.0
    #: A load without progress for so long has failed.
    load_stall_s: float = 90.0
    #: Not ready while a request has waited for longer than a client would.
    wait_s_max: float = 300.0
    #: How servers are chosen: migration, or what it is compared with (availability, locality, preemption, random).
    policy: str = "migration"
    #: Look for models in the repository when the store knows of none.
    restore_catalogue: bool = True

    def __post_init__(self) -> None:
        try:
            check_service_id(self.scheduler_id)
        except InvalidRequest as error:
            raise ConfigError("WB_SCHEDULER_ID", error.reason) from None
        for name in ("keep_alive_s", "fair_wait_s", "load_stall_s", "wait_s_max"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"WB_{name.upper()}", "must be 0 or more seconds")
        if self.policy not in POLICIES:
            raise ConfigError("WB_POLICY", f"{self.policy!r} is no policy; use one of {', '.join(sorted(POLICIES))}")

    def settings(self) -> Settings:
        return Settings(
            keep_alive_s=self.keep_alive_s,
            fair_wait_s=self.fair_wait_s,
            load_stall_s=self.load_stall_s,
            policy=self.policy,
        )
