"""Owns the settings of a worker."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum

from whimbrel.chassis.config import ConfigError
from whimbrel.wire.errors import InvalidRequest
from whimbrel.wire.ids import check_service_id

from services.gpu_worker.engines.engine import Precision

# "cuda" alone would be whichever GPU is current; a slot is one of them.
DEVICE_NAME = re.compile(r"cpu|cuda:(0|[1-9]\d{0,3})")


class EngineName(StrEnum):
    TRANSFORMERS = "transformers"
    ECHO = "echo"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Read from WB_<FIELD>. `device` is cpu, or cuda:N. `requests_max` bounds the requests that run or wait here.

    `dtype` is what models are computed in (see `Precision`). `torch_threads` 0 means one per processor. `prewarm` pays
    first-time costs at start. The `echo_…` costs are seconds that the echo engine sleeps.
    """

    server_id: str
    slot: int = 0
    device: str = "cpu"
    engine: EngineName = EngineName.TRANSFORMERS
    dtype: Precision = Precision.AUTO
    torch_threads: int = 0
    prewarm: bool = True
    requests_max: int = 256
    echo_load_s: float = 0.0
    echo_prefill_s_per_token: float = 0.0
    echo_decode_s: float = 0.0
    nats_url: str = "nats://127.0.0.1:4222"
    cluster: str = "wb"
    log_level: str = "info"
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        try:
            check_service_id(self.server_id)
        except InvalidRequest as error:
            raise ConfigError("WB_SERVER_ID", error.reason) from error
        if DEVICE_NAME.fullmatch(self.device) is None:
            raise ConfigError("WB_DEVICE", f"{self.device!r} is not supported; use cpu, or cuda:0 and so on")
        if self.slot < 0:
            raise ConfigError("WB_SLOT", f"{self.slot} is no slot; count them from 0")
        if self.requests_max < 1:
            raise ConfigError("WB_REQUESTS_MAX", f"{self.requests_max} is no bound; allow at least 1 request")
        if self.torch_threads < 0:
            raise ConfigError("WB_TORCH_THREADS", f"{self.torch_threads} is no number of threads; 0 means all")
        for name in ("echo_load_s", "echo_prefill_s_per_token", "echo_decode_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"WB_{name.upper()}", f"{getattr(self, name)} is less than no time")

    @property
    def threads(self) -> int:
        return self.torch_threads or len(os.sched_getaffinity(0))
