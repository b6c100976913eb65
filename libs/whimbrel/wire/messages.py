"""Owns every message that crosses the bus inside the cluster, grouped by conversation.

Commands are imperative, events past tense, replies end in `Reply`. Commands to agents and workers are one-way and
idempotent by their `task_id`, `instance_id` or `request_id`: whoever sent one repeats it until a heartbeat or an event
shows that it was heard, so a lost message or a restarted service needs no special case.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]

# A config.json of a model is a few kB; anything near this bound is not one.
MODEL_CONFIG_BYTES_MAX = 256 * 1024
# OpenAI's bound; a token with so many alternatives takes 164 bytes more.
TOP_LOGPROBS_MAX = 20


def _tag(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag=_tag):
    """What all messages are: frozen, typed, every field required unless a default is meant.

    Subclasses repeat `frozen` and `kw_only` because type checkers read a class's own line only.
    """


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of messages and records."""


class Tier(StrEnum):
    REMOTE = "remote"
    SSD = "ssd"
    DRAM = "dram"
    GPU = "gpu"


# --- answers ---


class Ack(Message, frozen=True, kw_only=True):
    """The command was understood; its effect is told by events and heartbeats."""


class ErrorReply(Message, frozen=True, kw_only=True):
    """A typed error in place of a reply; see `wire.errors`."""

    code: str
    fields: dict[str, str | int | float | None]


# --- catalogue: models and the jobs that import them ---


class ModelState(StrEnum):
    IMPORTING = "importing"
    READY = "ready"
    FAILED = "failed"
    DELETING = "deleting"


class JobStage(StrEnum):
    QUEUED = "queued"
    DOWNLOADING = "downloading"
    CONVERTING = "converting"
    VERIFYING = "verifying"
    PUBLISHING = "publishing"
    FINISHED = "finished"
    FAILED = "failed"


class Scaling(Value, frozen=True, kw_only=True):
    """How many instances of a model there may be (R6): as many as it takes that none runs more than
    `target_concurrency` requests, within the bounds. With `min_instances` 0 it scales to zero."""

    min_instances: NonNegative = 0
    max_instances: Positive = 1
    target_concurrency: Positive = 8


class DeployModel(Message, frozen=True, kw_only=True):
    """Router → scheduler: import `source` as `model_id`: a directory that the agents can read, `hf://org/name@revision`,
    or a URL."""

    model_id: str
    source: str
    keep_alive_s: float | None = None
    scaling: Scaling | None = None


class DeployModelReply(Message, frozen=True, kw_only=True):
    job_id: str
    state: ModelState


class DeleteModel(Message, frozen=True, kw_only=True):
    model_id: str


class DeleteModelReply(Message, frozen=True, kw_only=True):
    """The model takes no request any more; its bytes are being removed."""

    model_id: str


class ScaleModel(Message, frozen=True, kw_only=True):
    """Router → scheduler: change how a model is scaled; what is None stays as it is."""

    model_id: str
    min_instances: NonNegative | None = None
    max_instances: Positive | None = None
    target_concurrency: Positive | None = None
    keep_alive_s: Seconds | None = None


class ScaleModelReply(Message, frozen=True, kw_only=True):
    """How it is scaled from now on; `desired_instances` is what its present demand asks for."""

    model_id: str
    scaling: Scaling
    keep_alive_s: Seconds
    desired_instances: NonNegative


class GetModels(Message, frozen=True, kw_only=True):
    pass


class ModelSummary(Value, frozen=True, kw_only=True):
    """What anybody may know of a model. `residency` names the fastest tier per server that holds it."""

    model_id: str
    state: ModelState
    checkpoint_digest: str
    size_bytes: NonNegative
    parameter_count: NonNegative
    architecture: str
    source: str
    created_at_s: Seconds
    keep_alive_s: Seconds
    instances: tuple[str, ...] = ()
    waiting_requests: NonNegative = 0
    residency: dict[str, Tier] = {}
    job_id: str = ""
    scaling: Scaling = Scaling()
    desired_instances: NonNegative = 0


class GetModelsReply(Message, frozen=True, kw_only=True):
    models: tuple[ModelSummary, ...]


class GetJob(Message, frozen=True, kw_only=True):
    job_id: str


class JobStatus(Value, frozen=True, kw_only=True):
    job_id: str
    model_id: str
    stage: JobStage
    done_bytes: NonNegative = 0
    total_bytes: NonNegative = 0
    error: ErrorReply | None = None


class GetJobReply(Message, frozen=True, kw_only=True):
    job: JobStatus


class CancelJob(Message, frozen=True, kw_only=True):
    """Router → scheduler: end this import, whoever runs it. What is over stays as it is."""

    job_id: str


class CancelJobReply(Message, frozen=True, kw_only=True):
    job: JobStatus


class CancelImport(Message, frozen=True, kw_only=True):
    """Scheduler → agent: stop an import at its next chunk; nothing of it is published."""

    job_id: str
    scheduler_epoch: NonNegative


class ImportModel(Message, frozen=True, kw_only=True):
    """Scheduler → agent: convert `source` into the repository; repeated until `job_id` is in the agent's heartbeat."""

    job_id: str
    model_id: str
    source: str
    scheduler_epoch: NonNegative


class ImportProgressed(Message, frozen=True, kw_only=True):
    job_id: str
    server_id: str
    stage: JobStage
    done_bytes: NonNegative
    total_bytes: NonNegative


class ImportFinished(Message, frozen=True, kw_only=True):
    """The checkpoint is published. `manifest` is manifest.json, `model_config` config.json, both as bytes."""

    job_id: str
    model_id: str
    server_id: str
    checkpoint_digest: str
    size_bytes: NonNegative
    manifest: bytes
    model_config: bytes


class ImportEnded(Message, frozen=True, kw_only=True):
    """The import failed or was cancelled; nothing was published."""

    job_id: str
    model_id: str
    server_id: str
    error: ErrorReply


class RemoveModel(Message, frozen=True, kw_only=True):
    """Scheduler → agent: forget every copy of the model; one agent is told to remove it from the repository as well."""

    model_id: str
    remove_from_repository: bool
    scheduler_epoch: NonNegative


class ReportRepository(Message, frozen=True, kw_only=True):
    """Scheduler → agent: say what the model repository holds, model by model, then how many that were. Asked when the
    scheduler has lost its records."""

    scheduler_epoch: NonNegative


class RepositoryModelFound(Message, frozen=True, kw_only=True):
    """Agent → scheduler: a published checkpoint; fields as in `ImportFinished`."""

    server_id: str
    model_id: str
    checkpoint_digest: str
    size_bytes: NonNegative
    manifest: bytes
    model_config: bytes


class RepositoryReported(Message, frozen=True, kw_only=True):
    """Agent → scheduler: that was all of it; `unreadable` are the models that are there but can't be read, and why."""

    server_id: str
    scheduler_epoch: NonNegative
    models: NonNegative
    unreadable: dict[str, str] = {}


class ModelRemoved(Message, frozen=True, kw_only=True):
    model_id: str
    server_id: str


# --- placement: a router asks for an instance ---


class RouteState(StrEnum):
    READY = "ready"
    DRAINING = "draining"


class Route(Value, frozen=True, kw_only=True):
    """Where an instance can be reached."""

    instance_id: str
    model_id: str
    server_id: str
    slot: NonNegative
    state: RouteState


class Stages(Value, frozen=True, kw_only=True):
    """Where the time of a cold start went, seconds. `tier` is where the bytes came from; GPU means it was loaded."""

    tier: Tier
    queue_s: Seconds = 0.0
    fetch_s: Seconds = 0.0
    load_s: Seconds = 0.0
    bind_s: Seconds = 0.0


class WaitStage(StrEnum):
    """What a waiting request is waiting for."""

    DEFERRED = "deferred"
    QUEUED = "queued"
    FETCHING = "fetching"
    LOADING = "loading"
    BINDING = "binding"


class PlaceModel(Message, frozen=True, kw_only=True):
    """Router → scheduler: I hold a request for this model. Repeated while it waits; idempotent by request_id."""

    request_id: str
    model_id: str
    router_id: str
    waited_s: Seconds


class PlaceModelReply(Message, frozen=True, kw_only=True):
    """Either a route, or what is being waited for and for how long still, as far as is known."""

    route: Route | None = None
    stages: Stages | None = None
    waiting_for: WaitStage | None = None
    remaining_s: Seconds | None = None


class CancelPlacement(Message, frozen=True, kw_only=True):
    """Router → scheduler: the request needs no instance any more (its client left or it was served elsewhere)."""

    request_id: str
    model_id: str


class RouteAdded(Message, frozen=True, kw_only=True):
    """Scheduler → every router: an instance is ready, or its state changed. `stages` tells how it started."""

    route: Route
    stages: Stages


class RouteRemoved(Message, frozen=True, kw_only=True):
    """Scheduler → every router: the instance is gone. Requests that ran there are over."""

    instance_id: str
    model_id: str
    reason: str


class PlacementFailed(Message, frozen=True, kw_only=True):
    """Scheduler → router: these requests will get no instance."""

    model_id: str
    request_ids: tuple[str, ...]
    error: ErrorReply


class GetRoutes(Message, frozen=True, kw_only=True):
    router_id: str


class GetRoutesReply(Message, frozen=True, kw_only=True):
    routes: tuple[RouteAdded, ...]


# --- loading: scheduler → agent and worker, agent → worker ---


class LoadModel(Message, frozen=True, kw_only=True):
    """Scheduler → agent: make the model's bytes resident in DRAM and give them to the worker of the first of `slots`.

    On GPUs there is one slot per partition, whose device partition k is copied to. A CPU slot maps all partitions.
    """

    task_id: str
    instance_id: str
    model_id: str
    checkpoint_digest: str
    size_bytes: NonNegative
    slots: Annotated[tuple[NonNegative, ...], msgspec.Meta(min_length=1)]
    scheduler_epoch: NonNegative


class CancelLoad(Message, frozen=True, kw_only=True):
    task_id: str


class LoadProgressed(Message, frozen=True, kw_only=True):
    task_id: str
    server_id: str
    stage: WaitStage
    done_bytes: NonNegative
    total_bytes: NonNegative


class TierReport(Value, frozen=True, kw_only=True):
    """One tier crossed by a load: where from, bytes, seconds. The source of learned bandwidth (L10, E6)."""

    tier: Tier
    size_bytes: NonNegative
    seconds: Seconds


class LoadFinished(Message, frozen=True, kw_only=True):
    task_id: str
    instance_id: str
    model_id: str
    server_id: str
    source_tier: Tier
    queue_s: Seconds
    reports: tuple[TierReport, ...]


class LoadEnded(Message, frozen=True, kw_only=True):
    """The load failed or was cancelled; its leases are released."""

    task_id: str
    instance_id: str
    model_id: str
    server_id: str
    error: ErrorReply


class PrefetchModel(Message, frozen=True, kw_only=True):
    """→ agent (request/reply): bring a checkpoint up to `tier` (SSD or DRAM) without an instance; with `is_pinned` it
    stays there. It ends by a `PrefetchEnded`, and shows in heartbeats; CancelLoad stops it."""

    task_id: str
    model_id: str
    checkpoint_digest: str
    tier: Tier
    is_pinned: bool = False


class PrefetchEnded(Message, frozen=True, kw_only=True):
    """Agent → scheduler: how a prefetch ended."""

    task_id: str
    model_id: str
    server_id: str
    source_tier: Tier
    reports: tuple[TierReport, ...] = ()
    error: ErrorReply | None = None


class PinModel(Message, frozen=True, kw_only=True):
    """→ agent (request/reply): what is, or comes to be, of the model in `tier` (SSD or DRAM) is not evicted. A pin on
    the SSD outlives the agent; one in DRAM ends with the pool."""

    model_id: str
    tier: Tier


class UnpinModel(Message, frozen=True, kw_only=True):
    """→ agent (request/reply): the model may be evicted from `tier` again."""

    model_id: str
    tier: Tier


class EvictModel(Message, frozen=True, kw_only=True):
    """→ agent (request/reply): give back what nobody uses of the model in `tier`; from the SSD means from DRAM too.
    Refused with Conflict while it is pinned there, loaded or used by an instance."""

    model_id: str
    tier: Tier


class GetLoads(Message, frozen=True, kw_only=True):
    """→ agent (request/reply): what its queue holds, and how long that will take."""


class LoadSummary(Value, frozen=True, kw_only=True):
    """A task of an agent's queue; `instance_id` is empty for a prefetch. `remaining_s` estimates the rest of one that
    runs, by its progress, and is None while it waits."""

    task_id: str
    instance_id: str
    model_id: str
    stage: WaitStage
    source_tier: Tier
    done_bytes: NonNegative
    total_bytes: NonNegative
    running_s: Seconds
    remaining_s: Seconds | None = None


class GetLoadsReply(Message, frozen=True, kw_only=True):
    loads: tuple[LoadSummary, ...]


class MeasureStorage(Message, frozen=True, kw_only=True):
    """→ agent (request/reply): measure the SSD directory now, when no load reads it."""


class MeasureStorageReply(Message, frozen=True, kw_only=True):
    """The storage of a server as measured: reads of its SSD directory, direct and buffered, into the pool.

    `warnings` are sentences about what makes loads slower than they could be.
    """

    server_id: str
    ssd_directory: str
    ssd_direct_bytes_per_s: float
    ssd_buffered_bytes_per_s: float
    is_direct: bool
    pool_size_bytes: NonNegative
    has_huge_pages: bool
    is_locked: bool
    warnings: tuple[str, ...] = ()


class PrepareInstance(Message, frozen=True, kw_only=True):
    """Scheduler → worker: build the model's skeleton now, while its bytes move."""

    instance_id: str
    model_id: str
    model_config: bytes
    scheduler_epoch: NonNegative


class PartitionChunks(Value, frozen=True, kw_only=True):
    """Where a partition's bytes are in the pool: chunk numbers, packed uint32 little-endian, in file order.

    `device` is where they go: "cpu" maps them, "cuda:0" gets a copy in memory that the worker allocates.
    """

    size_bytes: NonNegative
    chunks: bytes
    device: str = "cpu"


class AttachInstance(Message, frozen=True, kw_only=True):
    """Agent → worker (request/reply): map these chunks; the bytes may still be on their way.

    `lease_path` is a file that the worker keeps locked (shared flock) while it maps the chunks: the kernel drops the
    lock with the process, so the agent knows exactly when the chunks are free, whatever happened to the worker.
    `agent_epoch` is the agent's life: chunks of another life are filled by nobody, so a worker that holds such while
    its instance loads lets go of them and maps these instead. `index_digest` is that of the content in the chunks:
    the directory may be replaced by another content of the model.
    """

    instance_id: str
    model_id: str
    agent_epoch: NonNegative
    checkpoint_path: str
    index_digest: str
    pool_path: str
    lease_path: str
    chunk_size_bytes: NonNegative
    partitions: tuple[PartitionChunks, ...]


class AttachInstanceReply(Message, frozen=True, kw_only=True):
    """Worker → agent: done. For partitions on GPUs, in order, the CUDA IPC handles of the memory to copy them to."""

    handles: tuple[bytes, ...] = ()


class ActivateInstance(Message, frozen=True, kw_only=True):
    """Agent → worker (request/reply): every byte is in place and verified."""

    instance_id: str


class DetachInstance(Message, frozen=True, kw_only=True):
    """Agent → worker (request/reply): the load ended badly; let go of the chunks."""

    instance_id: str


class InstanceBecameReady(Message, frozen=True, kw_only=True):
    """Worker → scheduler: requests can start. Seconds are the worker's own work that loading did not hide."""

    instance_id: str
    model_id: str
    server_id: str
    slot: NonNegative
    worker_epoch: NonNegative
    skeleton_s: Seconds
    bind_s: Seconds


class InstanceEnded(Message, frozen=True, kw_only=True):
    """Worker → scheduler: the instance is not there (unloaded as asked, or failed: then with the error)."""

    instance_id: str
    model_id: str
    server_id: str
    slot: NonNegative
    error: ErrorReply | None = None


class UnloadInstance(Message, frozen=True, kw_only=True):
    """Scheduler → worker. With `drain` the worker takes no new request and unloads when idle; without, it unloads at
    once if it is idle and refuses otherwise. With `preempt` it ends what runs as PREEMPTED, and unloads. Its answer is
    InstanceEnded or UnloadRefused."""

    instance_id: str
    drain: bool
    scheduler_epoch: NonNegative
    preempt: bool = False


class UnloadRefused(Message, frozen=True, kw_only=True):
    """Worker → scheduler: the instance took a request before it was to be unloaded, so it stays."""

    instance_id: str


# --- inference: router ↔ worker, router → scheduler ---


class Sampling(Value, frozen=True, kw_only=True):
    """Everything that decides the next token besides the tokens; travels with the request."""

    temperature: Annotated[float, msgspec.Meta(ge=0)]
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    seed: NonNegative = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    logit_bias: dict[int, float] = {}


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"
    #: It goes on elsewhere: the entry says where.
    MOVED = "moved"
    #: It was stopped for another model, and starts again wherever it finds a place.
    PREEMPTED = "preempted"


class StartInference(Message, frozen=True, kw_only=True):
    """Router → worker (request/reply): go on from these tokens. `epoch` counts the times this request was started.

    `tokens` are packed uint32 little-endian; the first `prompt_tokens` of the request's tokens are its prompt, the rest
    was already generated elsewhere. Positions of frames count output tokens from 0. With `base_tokens`, the instance
    has computed so many of the first ones already, from ResumeInference: `tokens` are those after them. One that does
    not have them answers InferenceLost, and is told all. With `top_logprobs`, each token comes with its log probability
    and so many alternatives.
    """

    request_id: str
    epoch: NonNegative
    router_id: str
    router_epoch: NonNegative
    instance_id: str
    model_id: str
    tokens: bytes
    prompt_tokens: NonNegative
    output_tokens_max: NonNegative
    stop_tokens: tuple[int, ...]
    sampling: Sampling
    base_tokens: NonNegative = 0
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None


class AbortInference(Message, frozen=True, kw_only=True):
    request_id: str
    epoch: NonNegative


class ResendTokens(Message, frozen=True, kw_only=True):
    """Router → worker (request/reply): say again everything from this position on."""

    request_id: str
    epoch: NonNegative
    position: NonNegative


class Moved(Value, frozen=True, kw_only=True):
    """Where a request goes on, and how many of its first tokens (prompt and output) are computed there already."""

    route: Route
    base_tokens: NonNegative


class TokenEntry(Value, frozen=True, kw_only=True):
    """New tokens of one request; `position` is that of the first of them in the output. An entry with a finish reason
    is the last. `prefill_s` and `queue_s` (in the worker) come with the first token of each start of the request.
    `moved` comes with the finish reason MOVED, and only then. `logprobs` has a record (`wire.logprobs`) for each of the
    tokens when the start asked for them."""

    request_id: str
    epoch: NonNegative
    position: NonNegative
    tokens: bytes
    finish_reason: FinishReason | None = None
    queue_s: Seconds | None = None
    prefill_s: Seconds | None = None
    error: ErrorReply | None = None
    moved: Moved | None = None
    logprobs: bytes = b""


class TokenFrame(Message, frozen=True, kw_only=True):
    """Worker → router: one decode step's tokens of all that router's requests on this worker."""

    server_id: str
    slot: NonNegative
    entries: tuple[TokenEntry, ...]


class InferenceStarted(Message, frozen=True, kw_only=True):
    """Router → scheduler: a request began on an instance (R2)."""

    request_id: str
    router_id: str
    instance_id: str
    model_id: str
    prompt_tokens: NonNegative


class InferenceFinished(Message, frozen=True, kw_only=True):
    """Router → scheduler: a request left an instance (R5, M3: d and t come from the router's clock)."""

    request_id: str
    router_id: str
    instance_id: str
    model_id: str
    prompt_tokens: NonNegative
    output_tokens: NonNegative
    duration_s: Seconds
    token_s: Seconds
    prefill_s: Seconds | None = None


# --- migration: scheduler ↔ source, source ↔ destination ---


class MigrateInstance(Message, frozen=True, kw_only=True):
    """Scheduler → source worker: take no new request, and send the tokens of those that run to `destination`, which is
    loaded (G4, G5). That is the first round; the answer is RoundCompleted, or MigrationEnded. Repeating it while the
    migration goes on has the worker say again what it said last."""

    migration_id: str
    instance_id: str
    destination: Route
    scheduler_epoch: NonNegative


class StartRound(Message, frozen=True, kw_only=True):
    """Scheduler → source worker: send what was generated since the last round (G7). `round` counts from 1, which is
    that of MigrateInstance."""

    migration_id: str
    instance_id: str
    round: Positive
    scheduler_epoch: NonNegative


class HandOver(Message, frozen=True, kw_only=True):
    """Scheduler → source worker: finish the step that runs, stop, and tell routers where their requests go on (G8).
    The answer is SourceStopped."""

    migration_id: str
    instance_id: str
    scheduler_epoch: NonNegative


class AbandonMigration(Message, frozen=True, kw_only=True):
    """Scheduler → source worker: carry on as if nothing had been; → destination worker: forget what was resumed.
    Who does not know the migration does nothing."""

    migration_id: str
    scheduler_epoch: NonNegative


class ResumeInference(Message, frozen=True, kw_only=True):
    """Source worker → destination worker: compute these tokens (packed uint32) into the KV cache kept for the request
    (G6). `position` counts all of its tokens, the prompt's too: what is known already is not computed twice. The answer
    is InferenceResumed, to the worker that asked."""

    migration_id: str
    instance_id: str
    source_server_id: str
    source_slot: NonNegative
    request_id: str
    position: NonNegative
    tokens: bytes


class InferenceResumed(Message, frozen=True, kw_only=True):
    """Destination worker → source worker: so many of the request's tokens are computed here, in `prefill_s` for the
    last of them. With an error, resuming is not possible. An answer that has fewer tokens than were sent asks for all
    from there on."""

    migration_id: str
    request_id: str
    tokens: NonNegative
    prefill_s: Seconds = 0.0
    error: ErrorReply | None = None


class RoundCompleted(Message, frozen=True, kw_only=True):
    """Source worker → scheduler: the destination has computed what this round sent. `gap_tokens` is the most that any
    of the requests has generated since; `sent_tokens` were sent in all rounds so far, `round_tokens` in this one, which
    took `round_s`."""

    migration_id: str
    instance_id: str
    round: Positive
    requests: Positive
    gap_tokens: NonNegative
    round_tokens: NonNegative
    sent_tokens: NonNegative
    round_s: Seconds


class StoppedRequest(Value, frozen=True, kw_only=True):
    """A request that goes on elsewhere, and the position of its next output token."""

    request_id: str
    router_id: str
    position: NonNegative


class SourceStopped(Message, frozen=True, kw_only=True):
    """Source worker → scheduler: nothing runs there any more; these go on at the destination."""

    migration_id: str
    instance_id: str
    requests: tuple[StoppedRequest, ...]
    sent_tokens: NonNegative


class MigrationEnd(StrEnum):
    """Why a source says that its migration is over before the handover."""

    #: All of its requests ended (X1).
    FINISHED = "finished"
    #: The destination can't resume (X5); the source carries on.
    RESUME_FAILED = "resume_failed"
    #: The source has no such instance, or one that can't be migrated.
    REFUSED = "refused"


class MigrationEnded(Message, frozen=True, kw_only=True):
    """Source worker → scheduler: there is nothing (more) to move, and it serves on."""

    migration_id: str
    instance_id: str
    reason: MigrationEnd
    error: ErrorReply | None = None


class MigrateModel(Message, frozen=True, kw_only=True):
    """Router → scheduler: an operator wants an instance elsewhere; `what` names a model, an instance or a request.
    Without a slot, the scheduler chooses one on that server."""

    what: str
    server_id: str
    slot: NonNegative | None = None


class MigrationState(StrEnum):
    PREPARING = "preparing"
    RESUMING = "resuming"
    HANDOVER = "handover"
    FINISHED = "finished"
    ABANDONED = "abandoned"
    REQUEUED = "requeued"


class MigrationStatus(Value, frozen=True, kw_only=True):
    """A migration as people see it. `reason` says who wanted it: placement (`for_model_id` needs the slot), operator,
    drain. `estimate_s` is t_migrate, with the load where one was needed; `resume_estimate_s` is t_migrate when the
    destination was ready, and `resume_s` what it took from there to the stop of the source, 0 until then."""

    migration_id: str
    model_id: str
    state: MigrationState
    source_instance_id: str
    source_server_id: str
    source_slot: NonNegative
    destination_server_id: str
    destination_slots: tuple[int, ...]
    reason: str
    for_model_id: str = ""
    rounds: NonNegative = 0
    gap_tokens: NonNegative = 0
    sent_tokens: NonNegative = 0
    estimate_s: Seconds = 0.0
    resume_estimate_s: Seconds = 0.0
    resume_s: Seconds = 0.0
    age_s: Seconds = 0.0
    end: str = ""


class MigrateModelReply(Message, frozen=True, kw_only=True):
    migration: MigrationStatus


class GetMigrations(Message, frozen=True, kw_only=True):
    """Router → scheduler: the migrations that run, and the last ones that ended."""


class GetMigrationsReply(Message, frozen=True, kw_only=True):
    migrations: tuple[MigrationStatus, ...]


# --- operators: what was decided and why, and which servers take part ---


class MoveSummary(Value, frozen=True, kw_only=True):
    """A running instance that goes elsewhere first: `load_s` until its model is there, `resume_s` to compute its
    requests again."""

    instance_id: str
    model_id: str
    server_id: str
    slots: tuple[int, ...]
    load_s: Seconds
    resume_s: Seconds


class CandidateSummary(Value, frozen=True, kw_only=True):
    """One server's terms in a decision: t_load = q + n / b + overhead, and what must go first, or why it can't.

    `total_s` is what servers are compared by. `refusal` is empty for a server that could take the model.
    """

    server_id: str
    refusal: str = ""
    slots: tuple[int, ...] = ()
    source_tier: Tier | None = None
    size_bytes: NonNegative = 0
    queue_s: Seconds = 0.0
    transfer_s: Seconds = 0.0
    overhead_s: Seconds = 0.0
    is_prior: bool = False
    evicted: tuple[str, ...] = ()
    eviction_s: Seconds = 0.0
    moves: tuple[MoveSummary, ...] = ()
    stopped: tuple[str, ...] = ()
    is_avoided: bool = False
    total_s: Seconds = 0.0


class DecisionSummary(Value, frozen=True, kw_only=True):
    """What was decided for a model `age_s` ago: `outcome` is placed, deferred or never_fits. Every candidate is there,
    the cheapest first; `server_id` names the chosen one. A decision of an earlier leader has no candidates."""

    outcome: str
    policy: str
    age_s: Seconds
    server_id: str = ""
    candidates: tuple[CandidateSummary, ...] = ()
    need_bytes: NonNegative = 0
    capacity_bytes: NonNegative = 0


class ExplainModel(Message, frozen=True, kw_only=True):
    """Router → scheduler: what was last decided for this model and why, and what would be decided now."""

    model_id: str


class ExplainModelReply(Message, frozen=True, kw_only=True):
    """`last` is None when nothing was decided yet. `sentence` says in words what the model's state is."""

    model_id: str
    sentence: str
    waiting_requests: NonNegative
    instances: tuple[str, ...]
    last: DecisionSummary | None
    now: DecisionSummary


class CordonServer(Message, frozen=True, kw_only=True):
    """Router → scheduler: place nothing on this server from now on. With `drain`, what is there goes: idle instances
    at once, others when their requests have ended."""

    server_id: str
    drain: bool = False


class CordonServerReply(Message, frozen=True, kw_only=True):
    """The server as it is now; `instances` are those that are still there."""

    server_id: str
    is_cordoned: bool
    is_draining: bool
    instances: tuple[str, ...]


class UncordonServer(Message, frozen=True, kw_only=True):
    """Router → scheduler: the server takes part again. Answered by a CordonServerReply, too."""

    server_id: str


# --- health ---


class ResidentModel(Value, frozen=True, kw_only=True):
    """What a server has of a checkpoint. `tier` is the fastest that holds all of it: DRAM, SSD, or REMOTE when none
    does. `size_bytes` is all of it, `dram_bytes` and `ssd_bytes` what is there of it; nothing in both: it is gone."""

    model_id: str
    checkpoint_digest: str
    tier: Tier
    size_bytes: NonNegative
    dram_bytes: NonNegative = 0
    ssd_bytes: NonNegative = 0
    pinned: tuple[Tier, ...] = ()


class AgentHeartbeat(Message, frozen=True, kw_only=True):
    """Storage agent → all. `epoch` is new with each life; `tasks` and `jobs` are queued or running, in order, and
    `running` those tasks that are being worked on.

    Residency has a version that counts up. `resident` is all of it when `base_version` is None, else what changed since
    that version; who knows an older one asks with ResendResidency. Workers of the server say that they live by staying
    connected to the Unix socket `presence_path`. An agent that `is_stopping` takes no load, and ends when nothing runs
    on its server any more, or after a while.
    """

    server_id: str
    epoch: NonNegative
    resident: tuple[ResidentModel, ...]
    residency_version: NonNegative = 0
    base_version: NonNegative | None = None
    tasks: tuple[str, ...]
    running: tuple[str, ...] = ()
    jobs: tuple[str, ...]
    attached: tuple[str, ...]
    pool_size_bytes: NonNegative
    pool_free_bytes: NonNegative
    ssd_size_bytes: NonNegative
    ssd_used_bytes: NonNegative
    probe_bandwidth_bytes_per_s: float
    presence_path: str = ""
    is_stopping: bool = False


class ResendResidency(Message, frozen=True, kw_only=True):
    """Scheduler → agent: the next heartbeat should hold all of your residency."""

    scheduler_epoch: NonNegative


class WorkerExited(Message, frozen=True, kw_only=True):
    """Agent → scheduler: the process of a worker is gone, by the word of the kernel."""

    server_id: str
    slot: NonNegative
    worker_epoch: NonNegative


class WorkerHello(Value, frozen=True, kw_only=True):
    """Worker → agent, over the Unix socket `presence_path`: one line of JSON. The connection then stays open for as
    long as the process lives; the kernel closes it at the very end."""

    slot: NonNegative
    worker_epoch: NonNegative
    pid: NonNegative


class WorkerState(StrEnum):
    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class WorkerHeartbeat(Message, frozen=True, kw_only=True):
    """GPU worker → all. `active_requests` counts running and queued ones, not those that were handed over; memory is
    that of the slot's device."""

    server_id: str
    slot: NonNegative
    epoch: NonNegative
    device: str
    memory_size_bytes: NonNegative = 0
    memory_free_bytes: NonNegative = 0
    state: WorkerState
    instance_id: str | None
    model_id: str | None
    active_requests: NonNegative
    #: The migration that it is the source of.
    migration_id: str | None = None


class InstanceActivity(Value, frozen=True, kw_only=True):
    """A router's requests on an instance: how many, the sum of their prompt tokens (t_in), and the sum of the seconds
    that they have been running (d), by the router's own clock (M2, M3)."""

    instance_id: str
    requests: NonNegative
    prompt_tokens: NonNegative = 0
    running_s: Seconds = 0.0


class RouterHeartbeat(Message, frozen=True, kw_only=True):
    router_id: str
    epoch: NonNegative
    active: tuple[InstanceActivity, ...]
    waiting_requests: NonNegative
    oldest_wait_s: Seconds


class SchedulerHeartbeat(Message, frozen=True, kw_only=True):
    """Scheduler → all. A new epoch asks everybody to send a heartbeat, and routers to repeat what they wait for."""

    scheduler_id: str
    epoch: NonNegative


class GetCluster(Message, frozen=True, kw_only=True):
    pass


class SlotSummary(Value, frozen=True, kw_only=True):
    slot: NonNegative
    device: str
    memory_size_bytes: NonNegative = 0
    memory_free_bytes: NonNegative = 0
    state: WorkerState
    is_alive: bool
    model_id: str | None
    instance_id: str | None
    active_requests: NonNegative


class EstimateQuality(Value, frozen=True, kw_only=True):
    """How good the estimates of loads from one tier of a server were lately: how many there were, and the 90th
    percentile of |estimate - actual| in seconds and as a share of the actual."""

    observations: NonNegative
    error_s_p90: Seconds
    error_share_p90: float


class ServerSummary(Value, frozen=True, kw_only=True):
    server_id: str
    is_alive: bool
    last_seen_s: Seconds
    slots: tuple[SlotSummary, ...]
    resident: tuple[ResidentModel, ...]
    tasks: tuple[str, ...]
    pool_size_bytes: NonNegative
    pool_free_bytes: NonNegative
    ssd_size_bytes: NonNegative
    ssd_used_bytes: NonNegative
    bandwidth_bytes_per_s: dict[str, float] = {}
    is_cordoned: bool = False
    is_draining: bool = False
    estimates: dict[str, EstimateQuality] = {}


class GetClusterReply(Message, frozen=True, kw_only=True):
    scheduler_epoch: NonNegative
    scheduler_id: str = ""
    policy: str = ""
    servers: tuple[ServerSummary, ...]
    routers: tuple[str, ...]
    waiting_requests: NonNegative
