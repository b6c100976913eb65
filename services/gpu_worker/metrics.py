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
