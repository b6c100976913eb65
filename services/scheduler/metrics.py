"""Owns the scheduler's metrics: what a step decided, what it cost, and how good the estimates were (E7)."""

from __future__ import annotations

from whimbrel.chassis import telemetry
from whimbrel.wire.events import LoadSucceeded, LoadWasLost, MigrationAbandoned, MigrationFinished, MigrationRequeued
from whimbrel.wire.records import AccuracyRecord, BandwidthRecord, InstanceState

from services.scheduler.core.accuracy import quality
from services.scheduler.core.bandwidth import spread
from services.scheduler.core.cluster import Cluster
from services.scheduler.core.decisions import Deferred, NeverFits, Placement
from services.scheduler.core.ready import Ready

# Estimate over actual, or actual over estimate: 1 is perfect, within 15 % is the target.
RATIO_BUCKETS = (1.02, 1.05, 1.1, 1.15, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0)

STEP_S = telemetry.histogram("whimbrel_scheduler_step_seconds", "Time of one step of the controller.")
STEP_EVENTS = telemetry.histogram(
    "whimbrel_scheduler_step_events_count", "Events in a step.", buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500)
)
PLACEMENTS = telemetry.counter(
    "whimbrel_scheduler_placements_total", "Placement decisions by outcome.", labels=("outcome",)
)
LOADS = telemetry.counter(
    "whimbrel_scheduler_loads_total", "Loads that ended, by source tier and result.", labels=("tier", "result")
)
LOAD_S = telemetry.histogram(
    "whimbrel_scheduler_load_seconds", "From the decision to an instance that is ready.", labels=("tier",)
)
ESTIMATE_ERROR_S = telemetry.histogram(
    "whimbrel_scheduler_estimate_error_seconds", "Absolute difference of estimate and actual.", labels=("tier",)
)
ESTIMATE_ERROR_RATIO = telemetry.histogram(
    "whimbrel_scheduler_estimate_error_ratio",
    "The larger of estimate and actual over the smaller.",
    labels=("tier",),
    buckets=RATIO_BUCKETS,
)
ESTIMATE_ERROR_P90_S = telemetry.gauge(
    "whimbrel_scheduler_estimate_error_p90_seconds",
    "What nine of ten estimates of the last loads were off by at most.",
    labels=("server", "tier"),
)
ESTIMATE_ERROR_P90_SHARE = telemetry.gauge(
    "whimbrel_scheduler_estimate_error_p90_ratio",
    "The same as a share of what the loads took.",
    labels=("server", "tier"),
)
BANDWIDTH = telemetry.gauge(
    "whimbrel_scheduler_bandwidth_bytes_per_second",
    "What was learned of a tier of a server.",
    labels=("server", "tier"),
)
BANDWIDTH_SPREAD = telemetry.gauge(
    "whimbrel_scheduler_bandwidth_spread_ratio",
    "How much the last loads scatter about it, as a share of it.",
    labels=("server", "tier"),
)
MIGRATIONS = telemetry.counter(
    "whimbrel_scheduler_migrations_total", "Migrations that ended, by outcome.", labels=("outcome",)
)
MIGRATION_S = telemetry.histogram(
    "whimbrel_scheduler_migration_seconds", "From the decision to the last request that went on at the destination."
)
MIGRATION_ROUNDS = telemetry.histogram(
    "whimbrel_scheduler_migration_rounds_count", "Rounds before the handover.", buckets=(1, 2, 3, 4, 5, 6, 8)
)
MIGRATION_TOKENS = telemetry.counter(
    "whimbrel_scheduler_migration_sent_tokens_total", "Tokens that sources sent to destinations."
)
MIGRATION_ERROR_RATIO = telemetry.histogram(
    "whimbrel_scheduler_migration_estimate_error_ratio",
    "The larger of estimate and actual of a migration over the smaller.",
    buckets=RATIO_BUCKETS,
)
WAITING = telemetry.gauge("whimbrel_scheduler_waiting_requests", "Requests that wait for an instance.")
INSTANCES = telemetry.gauge("whimbrel_scheduler_instances_count", "Instances by state.", labels=("state",))
SERVERS = telemetry.gauge("whimbrel_scheduler_live_servers_count", "Servers whose storage agent is heard.")
UNHEARD = telemetry.counter(
    "whimbrel_scheduler_unsent_messages_total", "Messages that could not be sent; all are repeated if needed."
)


#: What was learned and is not shown yet: much more is learned than anybody looks at.
_learned: dict[tuple[str, str], BandwidthRecord | AccuracyRecord] = {}


def observe(ready: Ready, *, step_s: float, events: int) -> None:
    """What one step did."""
    STEP_S.observe(step_s)
    STEP_EVENTS.observe(events)
    for decision in ready.decisions:
        match decision:
            case Placement(evict=()):
                PLACEMENTS.labels("placed").inc()
            case Placement():
                PLACEMENTS.labels("evicts").inc()
            case Deferred():
                PLACEMENTS.labels("deferred").inc()
            case NeverFits():
                PLACEMENTS.labels("never_fits").inc()
    for record in ready.records:
        if isinstance(record, BandwidthRecord | AccuracyRecord):
            _learned[record.table, record.key()] = record
    for event in ready.events:
        if isinstance(event, LoadSucceeded):
            _observe_load(event)
        elif isinstance(event, LoadWasLost):
            LOADS.labels("", event.code).inc()
        elif isinstance(event, MigrationFinished):
            _observe_migration(event)
        elif isinstance(event, MigrationAbandoned | MigrationRequeued):
            MIGRATIONS.labels(event.verb).inc()


def observe_cluster(cluster: Cluster) -> None:
    """What there is now."""
    show_learned()
    WAITING.set(cluster.waiting_requests)
    SERVERS.set(len(cluster.live_servers()))
    counts = dict.fromkeys(InstanceState, 0)
    for instance in cluster.instances.values():
        counts[instance.state] += 1
    for state, count in counts.items():
        INSTANCES.labels(state.value).set(count)


def show_learned() -> None:
    """What was learned since the last time."""
    for record in _learned.values():
        _show(record)
    _learned.clear()


def _show(record: BandwidthRecord | AccuracyRecord) -> None:
    """What is known of a server's tier, and how well estimates made of it held."""
    match record:
        case BandwidthRecord(server_id=server_id, tier=tier, seconds_per_byte=seconds_per_byte, observations=seen):
            if seen > 0 and seconds_per_byte > 0.0:
                BANDWIDTH.labels(server_id, tier.value).set(1.0 / seconds_per_byte)
            scatter = spread(record)
            if scatter is not None:
                BANDWIDTH_SPREAD.labels(server_id, tier.value).set(scatter)
        case AccuracyRecord(server_id=server_id, tier=tier):
            known = quality(record)
            ESTIMATE_ERROR_P90_S.labels(server_id, tier.value).set(known.error_s_p90)
            ESTIMATE_ERROR_P90_SHARE.labels(server_id, tier.value).set(known.error_share_p90)


def _observe_load(event: LoadSucceeded) -> None:
    LOADS.labels(event.source_tier, "ready").inc()
    LOAD_S.labels(event.source_tier).observe(event.observed_s)
    ESTIMATE_ERROR_S.labels(event.source_tier).observe(abs(event.observed_s - event.estimate_s))
    smaller, larger = sorted((event.observed_s, event.estimate_s))
    if smaller > 0.0:
        ESTIMATE_ERROR_RATIO.labels(event.source_tier).observe(larger / smaller)


def _observe_migration(event: MigrationFinished) -> None:
    MIGRATIONS.labels(event.verb).inc()
    MIGRATION_S.observe(event.observed_s)
    MIGRATION_ROUNDS.observe(event.rounds)
    MIGRATION_TOKENS.inc(event.sent_tokens)
    smaller, larger = sorted((event.observed_s, event.estimate_s))
    if smaller > 0.0:
        MIGRATION_ERROR_RATIO.observe(larger / smaller)
