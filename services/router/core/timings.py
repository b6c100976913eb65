"""Owns what a caller is told about time: the stages of a request, and their Server-Timing form."""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.wire.messages import Stages, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Where the time to the first token went, seconds; `tier` is where the weights came from (GPU: they were there)."""

    tier: Tier
    queue_s: float
    fetch_s: float
    load_s: float
    bind_s: float
    prefill_s: float
    first_token_s: float

    def header(self) -> str:
        """The value of a Server-Timing header: the tier, then durations in milliseconds, as that header has them."""
        stages = {
            "queue": self.queue_s,
            "fetch": self.fetch_s,
            "load": self.load_s,
            "bind": self.bind_s,
            "prefill": self.prefill_s,
            "first_token": self.first_token_s,
        }
        durations = (f"{name};dur={seconds * 1000:.1f}" for name, seconds in stages.items())
        return ", ".join((f"tier;desc={self.tier}", *durations))


def stage_times(stages: Stages, *, worker_queue_s: float, prefill_s: float, first_token_s: float) -> StageTimes:
    """The stages of a start, then what the worker said of the request, then what the router's clock says."""
    return StageTimes(
        tier=stages.tier,
        queue_s=stages.queue_s + worker_queue_s,
        fetch_s=stages.fetch_s,
        load_s=stages.load_s,
        bind_s=stages.bind_s,
        prefill_s=prefill_s,
        first_token_s=first_token_s,
    )
