"""Owns the settings of a storage agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from whimbrel.chassis.config import ConfigError
from whimbrel.wire.errors import InvalidRequest
from whimbrel.wire.ids import check_service_id

MIB = 1024 * 1024
PAGE_BYTES = 4096
# Two saturate a disk (eight the largest RAID we know of); more only take processors from inference.
READER_THREADS_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Read from WB_<FIELD>. `ssd_bytes` and `pool_bytes` are the budgets of the SSD and DRAM tiers.

    `chunk_size_bytes` must be that of the checkpoints, whose digests are per chunk. A load waits `attach_s_max` for its
    worker: one that is killed is back in a few seconds, one that needs longer is not coming. A load in which no byte
    moved for `stall_s_max` is given up; a repository that is silent is given up before, by the tries it is allowed. At
    start `probe_bytes` are written and read to learn the SSD's speed: past the start of a disk's ramp, yet 0.7 s at
    100 MB/s. Imports from a hub or a URL, and those for an object store, are prepared in `staging_dir`; by default a
    hidden directory in `ssd_dir`. With `ssd_bytes_per_s_max`, loads read the SSD no faster, for the sake of others that
    use it; 0 is no limit.
    """

    server_id: str
    repository_url: str
    ssd_dir: Path
    pool_path: Path
    ssd_bytes: int = 64 * 1024 * MIB
    pool_bytes: int = 4 * 1024 * MIB
    chunk_size_bytes: int = 16 * MIB
    reader_threads: int = 4
    attach_s_max: float = 30.0
    stall_s_max: float = 75.0
    probe_bytes: int = 64 * MIB
    staging_dir: Path | None = None
    ssd_bytes_per_s_max: float = 0.0
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
        if self.chunk_size_bytes < PAGE_BYTES or self.chunk_size_bytes % PAGE_BYTES:
            raise ConfigError("WB_CHUNK_SIZE_BYTES", f"{self.chunk_size_bytes} is no multiple of {PAGE_BYTES}")
        if self.pool_bytes < self.chunk_size_bytes:
            reason = f"{self.pool_bytes} is less than one chunk; give it at least {self.chunk_size_bytes}"
            raise ConfigError("WB_POOL_BYTES", reason)
        if self.ssd_bytes <= 0:
            raise ConfigError("WB_SSD_BYTES", f"{self.ssd_bytes} is no budget; give it a positive size")
        if self.ssd_bytes_per_s_max < 0:
            reason = f"{self.ssd_bytes_per_s_max} is no rate; give bytes per second, or 0 for no limit"
            raise ConfigError("WB_SSD_BYTES_PER_S_MAX", reason)
        for name in ("attach_s_max", "stall_s_max"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"WB_{name.upper()}", f"{getattr(self, name)} is no time to wait; give seconds")
        if not 1 <= self.reader_threads <= READER_THREADS_MAX:
            raise ConfigError("WB_READER_THREADS", f"{self.reader_threads} is not in 1 to {READER_THREADS_MAX}")

    @property
    def chunk_count(self) -> int:
        """How many whole chunks the DRAM budget holds."""
        return self.pool_bytes // self.chunk_size_bytes
