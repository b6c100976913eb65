"""Owns the storage agent's metrics."""

from __future__ import annotations

from whimbrel.chassis.telemetry import counter, gauge, histogram

LOADS = counter("whimbrel_agent_loads_total", "Load tasks that ended, by outcome and source tier", ["outcome", "tier"])
TIER_BYTES = counter("whimbrel_agent_tier_read_bytes", "Bytes that loads read from a tier", ["tier"])
TIER_SECONDS = histogram("whimbrel_agent_tier_read_seconds", "What reading one checkpoint from a tier took", ["tier"])
OVERHEAD_SECONDS = histogram("whimbrel_agent_load_overhead_seconds", "A load's time beyond reading its tiers")
QUEUE_TASKS = gauge("whimbrel_agent_queue_tasks", "Load tasks that wait or run")
POOL_USED_BYTES = gauge("whimbrel_agent_pool_used_bytes", "Bytes of the chunk pool that belong to a checkpoint")
SSD_USED_BYTES = gauge("whimbrel_agent_ssd_used_bytes", "Bytes of checkpoints in the SSD directory")
EVICTIONS = counter("whimbrel_agent_evictions_total", "Checkpoints evicted to make room, by tier", ["tier"])
COPIES_REJECTED = counter("whimbrel_agent_copies_rejected_total", "SSD copies that were corrupt when read")
CHUNKS_REJECTED = counter("whimbrel_agent_chunks_rejected_total", "SSD chunks that were corrupt, and fetched again")
IMPORTS = counter("whimbrel_agent_imports_total", "Import jobs that ended, by outcome", ["outcome"])
