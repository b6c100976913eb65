"""Owns the durable records: what the scheduler writes before it speaks, and reads back after a crash (P1, P2).

A record is the whole current value of one key of one table, so replay is reading: the last one written for a key wins.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

from whimbrel.wire.messages import (
    JobStage,
    JobStatus,
    MigrationState,
    ModelState,
    NonNegative,
    Route,
    Scaling,
    Seconds,
    Stages,
    Tier,
    _tag,
)


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
    scaling: Scaling = Scaling()
    #: Bytes per partition: on GPUs a slot for each is needed (E2). Empty means one, of all bytes.
    partition_bytes: tuple[int, ...] = ()

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
    #: Beside `slot`, whose worker has it: on GPUs one for each further partition.
    more_slots: tuple[int, ...] = ()
    #: While it drains: what runs is stopped for another model.
    is_preempted: bool = False

    def key(self) -> str:
        return self.instance_id

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots that it owns, the one of its worker first."""
        return (self.slot, *self.more_slots)


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


class ServerRecord(Record, frozen=True, kw_only=True):
    """What operators decided about a server: nothing is placed on a cordoned one, and a draining one is emptied."""

    table = "servers"

    server_id: str
    is_cordoned: bool
    is_draining: bool

    def key(self) -> str:
        return self.server_id


class ResumeRecord(Record, frozen=True, kw_only=True):
    """What was learned of computing a model's requests again on a kind of device (M1): t = a (t_in + t_out) + b.

    Recursive least squares with forgetting: `covariance` is the 2 × 2 matrix, row by row. `token_s` is t, the model's
    mean time per output token (M3); a prior while `token_observations` is 0. `migrations` counts those that were
    observed; before the first one, prefills of ordinary requests are all there is to learn from.
    """

    table = "resumes"

    model_id: str
    device: str
    seconds_per_token: float
    overhead_s: float
    covariance: tuple[float, float, float, float]
    observations: NonNegative
    token_s: float = 0.0
    token_observations: NonNegative = 0
    migrations: NonNegative = 0

    def key(self) -> str:
        return f"{self.model_id}@{self.device}"


class MigrationRecord(Record, frozen=True, kw_only=True):
    """A migration on its way: an instance whose requests move to a destination. It is forgotten when it ends.

    `destination_instance_id` is empty until its load is commanded. `moving` are the requests, with their routers, that
    have not switched yet. `reason` says who wanted it; with placement, `for_model_id` needs the slots of the source.
    """

    table = "migrations"

    migration_id: str
    model_id: str
    state: MigrationState
    source_instance_id: str
    source_server_id: str
    source_slot: NonNegative
    destination_instance_id: str
    destination_server_id: str
    destination_slots: tuple[int, ...]
    reason: str
    for_model_id: str = ""
    estimate_s: Seconds = 0.0
    rounds: NonNegative = 0
    gap_tokens: NonNegative = 0
    sent_tokens: NonNegative = 0
    moving: tuple[tuple[str, str], ...] = ()

    def key(self) -> str:
        return self.migration_id


class AccuracyRecord(Record, frozen=True, kw_only=True):
    """Estimate and actual of the last loads from one tier of a server, oldest first, seconds (E7). For moves, the tier
    is GPU."""

    table = "accuracies"

    server_id: str
    tier: Tier
    recent: tuple[tuple[float, float], ...]

    def key(self) -> str:
        return f"{self.server_id}/{self.tier}"


class Forget(Record, frozen=True, kw_only=True):
    """Removes the value under `forgotten_key` of `forgotten_table`."""

    forgotten_table: str
    forgotten_key: str

    def key(self) -> str:
        return self.forgotten_key


__all__ = [
    "AccuracyRecord",
    "BandwidthRecord",
    "Forget",
    "InstanceRecord",
    "InstanceState",
    "JobRecord",
    "MigrationRecord",
    "ModelRecord",
    "Record",
    "ResumeRecord",
    "Route",
    "ServerRecord",
]
