"""Owns the worker's metrics."""

from __future__ import annotations

from whimbrel.chassis import telemetry

PREFILL_SECONDS = telemetry.histogram(
    "whimbrel_gpu_worker_prefill_seconds", "From a request's turn to its first token.", ["model"]
)
QUEUE_SECONDS = telemetry.histogram(
    "whimbrel_gpu_worker_queue_seconds", "From a request's arrival at the worker to its turn."
)
TOKENS = telemetry.counter("whimbrel_gpu_worker_output_tokens_total", "Output tokens that were computed.", ["model"])
REQUESTS = telemetry.counter(
    "whimbrel_gpu_worker_requests_total", "Requests that have ended, by finish reason.", ["finish_reason"]
)
ACTIVE_REQUESTS = telemetry.gauge("whimbrel_gpu_worker_active_requests", "Requests that run or wait their turn.")
INSTANCE_STATE = telemetry.gauge(
    "whimbrel_gpu_worker_instance_state", "1 for the state that the slot is in, 0 for the others.", ["state"]
)
SKELETON_SECONDS = telemetry.histogram(
    "whimbrel_gpu_worker_skeleton_seconds", "Building a model's skeleton, or taking it from the cache."
)
BIND_SECONDS = telemetry.histogram(
    "whimbrel_gpu_worker_bind_seconds", "Binding and activating, as far as loading did not hide it."
)
FRAMES_LOST = telemetry.counter(
    "whimbrel_gpu_worker_lost_frames_total", "Token frames that could not be sent; routers ask for them again."
)

# A gap of a few tokens is handed over; a first round may find as many as were generated during a long prefill.
GAP_BUCKETS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 987)

MIGRATION_ROUNDS = telemetry.counter(
    "whimbrel_worker_migration_rounds_total", "Rounds that this worker completed as a source."
)
MIGRATION_GAP_TOKENS = telemetry.histogram(
    "whimbrel_worker_migration_gap_tokens", "Tokens that were generated during a round.", buckets=GAP_BUCKETS
)
MIGRATION_SENT_TOKENS = telemetry.counter(
    "whimbrel_worker_migration_sent_tokens_total", "Tokens that this worker sent as a source, 4 bytes each."
)
MIGRATION_MOVED_REQUESTS = telemetry.counter(
    "whimbrel_worker_migration_moved_requests_total", "Requests that went on elsewhere."
)
MIGRATION_RESUMED_TOKENS = telemetry.counter(
    "whimbrel_worker_migration_resumed_tokens_total", "Tokens of other workers' requests that were computed here."
)
MIGRATION_RESUME_SECONDS = telemetry.histogram(
    "whimbrel_worker_migration_resume_seconds", "Computing what one round brought."
)
