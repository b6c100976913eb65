"""Owns the public events: what ops tooling may rely on, as CloudEvents 1.0 JSON.

Each event class fixes its noun, its past-tense verb and its data. Nothing inside the cluster depends on one being read.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import ClassVar

import msgspec

from whimbrel.wire.errors import ProtocolError

SPEC_VERSION = "1.0"


class PublicEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened in the cluster. `subject_id()` is the id the event is about."""

    noun: ClassVar[str] = ""
    verb: ClassVar[str] = ""

    def subject_id(self) -> str:
        raise AssertionError("every event names what it is about")


class _ModelEvent(PublicEvent, frozen=True, kw_only=True):
    noun = "model"
    model_id: str

    def subject_id(self) -> str:
        return self.model_id


class ModelImportStarted(_ModelEvent, frozen=True, kw_only=True):
    verb = "import_started"
    job_id: str
    source: str
    server_id: str


class ModelDeployed(_ModelEvent, frozen=True, kw_only=True):
    verb = "deployed"
    job_id: str
    checkpoint_digest: str
    size_bytes: int


class ModelImportFailed(_ModelEvent, frozen=True, kw_only=True):
    verb = "import_failed"
    job_id: str
    code: str
    message: str


class ModelPrefetched(_ModelEvent, frozen=True, kw_only=True):
    verb = "prefetched"
    server_id: str
    source_tier: str


class ModelPrefetchFailed(_ModelEvent, frozen=True, kw_only=True):
    verb = "prefetch_failed"
    server_id: str
    code: str
    message: str


class ModelDeleted(_ModelEvent, frozen=True, kw_only=True):
    verb = "deleted"


class ModelScaled(_ModelEvent, frozen=True, kw_only=True):
    """Somebody changed how the model is scaled."""

    verb = "scaled"
    min_instances: int
    max_instances: int
    target_concurrency: int
    keep_alive_s: float


class ModelRestored(_ModelEvent, frozen=True, kw_only=True):
    """The scheduler had lost its records and found the model in the repository, without the settings it had."""

    verb = "restored"
    checkpoint_digest: str
    size_bytes: int


class _LoadEvent(PublicEvent, frozen=True, kw_only=True):
    noun = "load"
    task_id: str
    model_id: str
    server_id: str

    def subject_id(self) -> str:
        return self.task_id


class LoadStarted(_LoadEvent, frozen=True, kw_only=True):
    verb = "started"
    slot: int
    source_tier: str
    size_bytes: int
    estimate_s: float


class LoadSucceeded(_LoadEvent, frozen=True, kw_only=True):
    verb = "finished"
    source_tier: str
    estimate_s: float
    observed_s: float
    queue_s: float
    size_bytes: int


class LoadWasLost(_LoadEvent, frozen=True, kw_only=True):
    verb = "failed"
    code: str
    message: str


class _InstanceEvent(PublicEvent, frozen=True, kw_only=True):
    noun = "instance"
    instance_id: str
    model_id: str
    server_id: str
    slot: int

    def subject_id(self) -> str:
        return self.instance_id


class InstanceStarted(_InstanceEvent, frozen=True, kw_only=True):
    verb = "ready"
    startup_s: float


class InstanceUnloaded(_InstanceEvent, frozen=True, kw_only=True):
    verb = "unloaded"
    reason: str


class InstanceWasLost(_InstanceEvent, frozen=True, kw_only=True):
    verb = "lost"
    reason: str


class InstanceWasPreempted(_InstanceEvent, frozen=True, kw_only=True):
    """Its requests were stopped for another model, and start again elsewhere."""

    verb = "preempted"
    requests: int


class _MigrationEvent(PublicEvent, frozen=True, kw_only=True):
    noun = "migration"
    migration_id: str
    model_id: str
    source_instance_id: str
    destination_server_id: str

    def subject_id(self) -> str:
        return self.migration_id


class MigrationStarted(_MigrationEvent, frozen=True, kw_only=True):
    """The destination is being loaded. `reason`: placement, operator or drain; `estimate_s` is for load and resume."""

    verb = "started"
    reason: str
    for_model_id: str
    estimate_s: float


class MigrationResuming(_MigrationEvent, frozen=True, kw_only=True):
    """The destination is ready, and tokens are on their way there."""

    verb = "resuming"
    destination_instance_id: str


class MigrationHandedOver(_MigrationEvent, frozen=True, kw_only=True):
    """The source has stopped; routers switch."""

    verb = "handed_over"
    destination_instance_id: str
    requests: int
    rounds: int
    gap_tokens: int
    sent_tokens: int


class MigrationFinished(_MigrationEvent, frozen=True, kw_only=True):
    """Every request goes on at the destination."""

    verb = "finished"
    destination_instance_id: str
    rounds: int
    sent_tokens: int
    estimate_s: float
    observed_s: float


class MigrationAbandoned(_MigrationEvent, frozen=True, kw_only=True):
    """Nothing moved; the source serves on, if it is there."""

    verb = "abandoned"
    cause: str


class MigrationRequeued(_MigrationEvent, frozen=True, kw_only=True):
    """The destination was lost after the source had stopped: routers start the requests again from their tokens."""

    verb = "requeued"
    cause: str


class _ServerEvent(PublicEvent, frozen=True, kw_only=True):
    noun = "server"
    server_id: str

    def subject_id(self) -> str:
        return self.server_id


class ServerJoined(_ServerEvent, frozen=True, kw_only=True):
    verb = "joined"
    epoch: int


class ServerLost(_ServerEvent, frozen=True, kw_only=True):
    verb = "lost"
    last_seen_s: float


class ServerCordoned(_ServerEvent, frozen=True, kw_only=True):
    verb = "cordoned"
    is_draining: bool


class ServerUncordoned(_ServerEvent, frozen=True, kw_only=True):
    verb = "uncordoned"


class ServerDrained(_ServerEvent, frozen=True, kw_only=True):
    """Nothing is left on a server that was being drained: it can be switched off."""

    verb = "drained"


class RequestFinished(PublicEvent, frozen=True, kw_only=True):
    """One request's life: tokens, stage times, how it ended. Times in seconds."""

    noun = "request"
    verb = "finished"
    request_id: str
    model_id: str
    router_id: str
    server_id: str
    tier: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    queue_s: float
    fetch_s: float
    load_s: float
    bind_s: float
    prefill_s: float
    first_token_s: float
    duration_s: float

    def subject_id(self) -> str:
        return self.request_id


class RequestFailed(PublicEvent, frozen=True, kw_only=True):
    noun = "request"
    verb = "failed"
    request_id: str
    model_id: str
    router_id: str
    code: str
    message: str
    output_tokens: int
    duration_s: float

    def subject_id(self) -> str:
        return self.request_id


class RequestSwitched(PublicEvent, frozen=True, kw_only=True):
    """A request went on elsewhere after `output_tokens`, on `server_id`; its client saw a pause of `pause_s` more than
    between other tokens. `reason` says whether it was a migration or a failover, and why."""

    noun = "request"
    verb = "switched"
    request_id: str
    model_id: str
    router_id: str
    server_id: str
    reason: str
    output_tokens: int
    pause_s: float

    def subject_id(self) -> str:
        return self.request_id


class SchedulerStarted(PublicEvent, frozen=True, kw_only=True):
    noun = "scheduler"
    verb = "started"
    scheduler_id: str
    epoch: int

    def subject_id(self) -> str:
        return self.scheduler_id


EVENTS: dict[str, type[PublicEvent]] = {
    f"{cls.noun}.{cls.verb}": cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, PublicEvent) and cls.verb
}


class CloudEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The CloudEvents 1.0 envelope in JSON format."""

    specversion: str
    id: str
    source: str
    type: str
    subject: str
    time: datetime
    datacontenttype: str = "application/json"
    data: msgspec.Raw


def event_type(event: PublicEvent) -> str:
    return f"{event.noun}.{event.verb}"


def encode_event(event: PublicEvent, *, event_id: str, source: str, time_s: float) -> bytes:
    """The event as CloudEvents JSON. `source` is a URI reference such as `/whimbrel/wb/scheduler/a`."""
    return msgspec.json.encode(
        CloudEvent(
            specversion=SPEC_VERSION,
            id=event_id,
            source=source,
            type=event_type(event),
            subject=event.subject_id(),
            time=datetime.fromtimestamp(time_s, UTC),
            data=msgspec.Raw(msgspec.json.encode(event)),
        )
    )


def decode_event(data: bytes) -> tuple[CloudEvent, PublicEvent]:
    """Envelope and typed event; raises ProtocolError for anything else. Unknown data fields pass: events grow."""
    try:
        envelope = msgspec.json.decode(data, type=CloudEvent)
        kind = EVENTS.get(envelope.type)
        if envelope.specversion != SPEC_VERSION or kind is None:
            raise ProtocolError(size_bytes=len(data), reason=f"event type {envelope.type!r} is unknown")
        return envelope, msgspec.json.decode(envelope.data, type=kind)
    except msgspec.DecodeError as cause:
        raise ProtocolError(size_bytes=len(data), reason=str(cause)) from cause
