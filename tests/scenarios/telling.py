"""Owns how a scenario tells a decision: what was decided, then every candidate with all of its terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.scheduler.core.decisions import Candidate, Decision, Deferred, Move, NeverFits, Placement
from services.scheduler.core.estimates import Estimate

GB = 10**9


def tell(decision: Decision) -> list[str]:
    """The lines of a decision; none of them is empty."""
    match decision:
        case NeverFits():
            return [f"never fits: needs {_gb(decision.need_bytes)}, the largest has {_gb(decision.capacity_bytes)}"]
        case Deferred():
            waiting = f", waiting for {decision.wait_for}" if decision.wait_for else ""
            lines = [f"{decision.model_id} is deferred{waiting}"]
        case Placement():
            lines = [
                f"{decision.model_id} loads on {decision.server_id} {_gpus(decision.slots)}"
                f" from {decision.estimate.source_tier}, cost {decision.cost_s:.3f} s",
                *(f"  first {line}" for line in _first(decision)),
            ]
    lines.append("candidates:")
    for candidate in decision.reasons.candidates():
        lines += [f"  {line}" for line in _candidate(candidate)]
    return lines


def _first(placement: Placement) -> Iterator[str]:
    """What must happen before the load, without the terms."""
    for move in placement.moves:
        yield f"{move.instance_id} moves to {_place(move)}"
    if placement.stopped:
        yield f"{', '.join(placement.stopped)} is stopped"
    if placement.evict:
        yield f"{', '.join(placement.evict)} is evicted"


def _candidate(candidate: Candidate) -> Iterator[str]:
    if candidate.refusal is not None:
        yield f"{candidate.server_id}: refused, {candidate.refusal}"
        return
    assert candidate.estimate is not None
    failed = ", just failed" if candidate.is_avoided else ""
    yield f"{candidate.server_id} {_gpus(candidate.slots)}: cost {candidate.cost_s:.3f} s{failed}"
    yield f"  loads {_load(candidate.estimate)}"
    for move in candidate.moves:
        yield f"  {_move(move)}"
    if candidate.stopped:
        yield f"  stops {', '.join(candidate.stopped)}: {candidate.stop_s:.3f} s to start again"
    if candidate.evict:
        yield f"  evicts {', '.join(candidate.evict)}: {candidate.eviction_s:.3f} s to bring back"


def _move(move: Move) -> str:
    how = "where it is idle already" if move.load is None else f"loads {_load(move.load)}"
    evicting = f", in place of {', '.join(move.evict)}" if move.evict else ""
    terms = f"resume {move.resume_s:.3f} s, pause {move.pause_s:.3f} s"
    return f"{move.instance_id} moves to {_place(move)}{evicting}: {how}, {terms}"


def _place(move: Move) -> str:
    return f"{move.server_id} {_gpus(move.slots)}"


def _load(estimate: Estimate) -> str:
    terms = f"queue {estimate.queue_s:.3f} + transfer {estimate.transfer_s:.3f} + overhead {estimate.overhead_s:.3f}"
    return f"{_gb(estimate.size_bytes)} from {estimate.source_tier}: {terms} = {estimate.total_s:.3f} s"


def _gpus(slots: Sequence[int]) -> str:
    return "gpu " + "+".join(map(str, slots))


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / GB:g} GB"
