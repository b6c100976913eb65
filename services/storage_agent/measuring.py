"""Owns what a measurement of a server's storage says to the person who asked: what makes loads slower than need be."""

from __future__ import annotations

import ckptio

from services.storage_agent.probing import Probe

# Below this a load of a few GB takes longer than people wait for an answer.
SLOW_SSD_BYTES_PER_S = 500e6


def storage_warnings(probe: Probe, pool: ckptio.PoolReport) -> tuple[str, ...]:
    """One sentence for each thing, with what to do about it."""
    warnings = []
    if probe.bandwidth_bytes_per_s < SLOW_SSD_BYTES_PER_S:
        speed = f"{probe.bandwidth_bytes_per_s / 1e6:.0f} MB/s"
        warnings.append(f"The SSD directory reads at {speed}; put WB_SSD_DIR on a local NVMe disk.")
    if not probe.is_direct:
        warnings.append("Buffered reads are faster than direct ones here, so load times depend on the page cache.")
    if not pool.has_huge_pages:
        warnings.append(f"The pool has small pages ({pool.huge_pages_error}); mount its tmpfs with huge=always.")
    if not pool.is_locked:
        warnings.append(f"The pool is not locked in memory ({pool.lock_error}); raise the memlock limit.")
    return tuple(warnings)
