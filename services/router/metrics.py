"""Owns the router's metrics. Labels hold outcomes and tiers, never ids: their number is fixed."""

from __future__ import annotations

from whimbrel.chassis import telemetry

REQUESTS = telemetry.counter(
    "whimbrel_router_requests_total", "Inference requests that are over.", ("outcome", "start")
)
FIRST_TOKEN = telemetry.histogram(
    "whimbrel_router_first_token_seconds", "From the arrival of a request to its first token.", ("tier",)
)
TOKEN = telemetry.histogram(
    "whimbrel_router_token_seconds", "Mean time per output token after the first, of each finished request."
)
OVERHEAD = telemetry.histogram(
    "whimbrel_router_start_seconds", "From the arrival of a warm request to its start on a worker: the router's part."
)
TOKENS = telemetry.counter("whimbrel_router_tokens_total", "Tokens of finished requests.", ("direction",))
ENTRIES = telemetry.counter("whimbrel_router_token_entries_total", "Token entries received.", ("verdict",))
RESENDS = telemetry.counter("whimbrel_router_resends_total", "Times that missing tokens were asked for.")
STARTS_LOST = telemetry.counter("whimbrel_router_instances_lost_total", "Requests whose instance went away under them.")
SWITCHES = telemetry.counter(
    "whimbrel_router_switches_total",
    "Requests that left their instance to go on elsewhere: resumed, failed_over from a destination, failed, cancelled, "
    "or finished when no more tokens were needed.",
    ("kind", "outcome"),
)
# Half an ordinary token time to a cold start, finer where migrations should be.
PAUSE_BUCKETS = (
    0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
PAUSE = telemetry.histogram(
    "whimbrel_migration_pause_seconds",
    "Between the last token before a switch and the first after it, less the usual time of a token.",
    ("kind",),
    PAUSE_BUCKETS,
)
WAITING = telemetry.gauge("whimbrel_router_waiting_requests", "Requests that have no instance yet.")
RUNNING = telemetry.gauge("whimbrel_router_running_requests", "Requests that run on an instance.")
ROUTES = telemetry.gauge("whimbrel_router_routes_count", "Instances in the route table.")
NOTES_DROPPED = telemetry.counter(
    "whimbrel_router_notes_dropped_total", "One-way messages dropped because too many waited."
)
