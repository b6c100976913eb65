"""Owns the durable records: what the scheduler writes before it speaks, and reads back after a crash (P1, P2).

A record is the whole current value of one key of one table, so replay is reading: the last one written for a key wins.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from whimbrel.wire.messages import JobStage, JobStatus, ModelState, NonNegative, Route, Seconds, Stages, Tier, _tag


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag=_tag):
    """A value in `table` under `key()`."""

    table: ClassVar[str] = ""

    def key(self) -> str:
        raise AssertionError("every record names its key")


class ModelRecord(Record, frozen=True, kw_only=True):
    """A deployed model: what placement needs to know without touching weights (F4)."""

    table = "models"

    model_id: str
    state: ModelState
    source: str
    job_id: str
    checkpoint_digest: str
    size_bytes: NonNegative
    parameter_count: NonNegative
    architecture: str
    model_config: bytes
    created_at_s: Seconds
    keep_alive_s: Seconds | None

    def key(self) -> str:
        return self.model_id


class JobRecord(Record, frozen=True, kw_only=True):
    """An import job, with the agent that runs it. Kept for some time after its end, without secrets in `source`.

    `is_cancelled`: somebody asked for its end, which its agent may not have heard yet.
    """

    table = "jobs"

    job: JobStatus
    source: str
    server_id: str
    updated_at_s: Seconds
    is_cancelled: bool = False

    def key(self) -> str:
        return self.job.job_id

    @property
    def is_open(self) -> bool:
        return self.job.stage not in (JobStage.FINISHED, JobStage.FAILED)


class InstanceState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    UNLOADING = "unloading"
    GONE = "gone"


class InstanceRecord(Record, frozen=True, kw_only=True):
    """An instance and the load task that brings it up; the slot is owned by it until it is gone."""

    table = "instances"

    instance_id: str
    model_id: str
    checkpoint_digest: str
    server_id: str
    slot: NonNegative
    state: InstanceState
    task_id: str
    source_tier: Tier
    estimate_s: Seconds
    stages: Stages | None

    def key(self) -> str:
        return self.instance_id


class BandwidthRecord(Record, frozen=True, kw_only=True):
    """What was learned of one tier of one server (E6): mean seconds per byte, its variance, fixed overhead, count.

    The last few observations, oldest first, are kept with it: the estimate is made from them.
    """

    table = "bandwidths"

    server_id: str
    tier: Tier
    seconds_per_byte: float
    variance: float
    overhead_s: float
    observations: NonNegative
    recent_seconds_per_byte: tuple[float, ...] = ()
    recent_overhead_s: tuple[float, ...] = ()

    def key(self) -> str:
        return f"{self.server_id}/{self.tier}"


class Forget(Record, frozen=True, kw_only=True):
    """Removes the value under `forgotten_key` of `forgotten_table`."""

    forgotten_table: str
    forgotten_key: str

    def key(self) -> str:
        return self.forgotten_key


__all__ = [
    "BandwidthRecord",
    "Forget",
    "InstanceRecord",
    "InstanceState",
    "JobRecord",
    "ModelRecord",
    "Record",
    "Route",
]
