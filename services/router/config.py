"""Owns the router's configuration; every field is an environment variable `WB_<FIELD>`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from whimbrel.chassis.config import ConfigError
from whimbrel.wire.errors import InvalidRequest
from whimbrel.wire.ids import check_service_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Times in seconds. `http_port` 0 takes a free port; `requests_max` counts all requests that are not over."""

    repository_url: str
    cache_dir: Path
    nats_url: str = "nats://127.0.0.1:4222"
    cluster: str = "wb"
    router_id: str = "router-0"
    log_level: str = "info"
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    http_host: str = "127.0.0.1"
    http_port: int = 8343
    # From the arrival of a request to its first token, whatever it waits for but a worker that is at work; the paper's
    # evaluation uses 300 s.
    cold_start_s_max: float = 300.0
    # Between two tokens of a running stream.
    idle_s_max: float = 60.0
    # Without a token on a worker that lives: then the stream goes on elsewhere. Longer than the slowest step of a large
    # model on a CPU, and short enough that a client still waits.
    stalled_s_max: float = 10.0
    # Without any answer of the scheduler; long enough for it to be restarted.
    unanswered_s_max: float = 15.0
    # The age of the oldest waiting request at which /readyz turns red.
    oldest_wait_s_max: float = 60.0
    requests_max: int = 1024

    def __post_init__(self) -> None:
        try:
            check_service_id(self.router_id)
        except InvalidRequest as error:
            raise ConfigError("WB_ROUTER_ID", error.reason) from None
        if "://" not in self.repository_url:
            raise ConfigError("WB_REPOSITORY_URL", f"{self.repository_url!r} is no URL; write file:///path")
        times = ("cold_start_s_max", "idle_s_max", "stalled_s_max", "unanswered_s_max", "oldest_wait_s_max")
        for name in (*times, "requests_max"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"WB_{name.upper()}", "must be above 0")
        if not 0 <= self.http_port < 2**16:
            raise ConfigError("WB_HTTP_PORT", f"{self.http_port} is no port")
