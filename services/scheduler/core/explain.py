"""Owns the answer to why: a model's last decision and that of now, with the terms of every server. Changes nothing."""

from __future__ import annotations

from whimbrel.wire.errors import Conflict, ModelNotFound
from whimbrel.wire.messages import (
    CandidateSummary,
    DecisionSummary,
    ExplainModel,
    ExplainModelReply,
    ModelState,
    MoveSummary,
)

from services.scheduler.core import plans, sentences
from services.scheduler.core.decisions import Candidate, Decision, Deferred, Move, NeverFits, Placement, Reasons
from services.scheduler.core.models import Model
from services.scheduler.core.policies import POLICIES
from services.scheduler.core.step import Step


def on_explain_model(step: Step, message: ExplainModel, reply_to: str | None) -> None:
    """What was last decided for the model, and what would be decided now, also when nobody waits for it.

    Raises ModelNotFound, and Conflict for a model that can't be placed now, such as one that is being imported.
    """
    model = _placeable_model(step, message.model_id)
    cluster, policy = step.cluster, step.settings.policy
    snapshot, task = cluster.snapshot(step.now), cluster.task_of(model)
    decision = POLICIES[policy](snapshot, task, step.now)
    # A decision that nothing fits has no reasons of its own.
    reasons = Reasons(snapshot=snapshot, task=task, now=step.now, consider=plans.consider)
    now = summarise(decision, policy=policy, age_s=0.0, reasons=reasons)
    reply = ExplainModelReply(
        model_id=model.model_id,
        sentence=sentences.tell(step, model, now),
        waiting_requests=len(model.waiters),
        instances=tuple(model.instances),
        last=_last(step, model),
        now=now,
    )
    step.answer(reply_to, reply)


def summarise(decision: Decision, *, policy: str, age_s: float, reasons: Reasons | None = None) -> DecisionSummary:
    """The decision with every candidate. `reasons` are for a decision that has none of its own."""
    match decision:
        case Placement() | Deferred():
            is_placed = isinstance(decision, Placement)
            return DecisionSummary(
                outcome="placed" if is_placed else "deferred",
                policy=policy,
                age_s=age_s,
                server_id=decision.server_id if isinstance(decision, Placement) else decision.wait_for,
                candidates=_candidates(decision.reasons),
            )
        case NeverFits():
            return DecisionSummary(
                outcome="never_fits",
                policy=policy,
                age_s=age_s,
                candidates=() if reasons is None else _candidates(reasons),
                need_bytes=decision.need_bytes,
                capacity_bytes=decision.capacity_bytes,
            )


def _placeable_model(step: Step, model_id: str) -> Model:
    model = step.cluster.models.get(model_id)
    if model is None or model.record.state is ModelState.DELETING:
        raise ModelNotFound(model_id=model_id[:128])
    if not model.is_servable:
        raise Conflict(reason=f"model {model_id!r} is {model.record.state}; only a model that is ready is placed")
    return model


def _last(step: Step, model: Model) -> DecisionSummary | None:
    """Of a decision of an earlier leader only its outcome is known: the instance that it led to, at least as old as our
    own life."""
    kept = step.cluster.decisions.get(model.model_id)
    if kept is not None:
        return summarise(kept.decision, policy=kept.policy, age_s=max(0.0, step.now - kept.decided_s))
    placed = step.cluster.instances_of(model)
    if not placed:
        return None
    youngest = max(placed, key=lambda instance: (instance.placed_s, instance.instance_id))
    return DecisionSummary(
        outcome="placed",
        policy="",
        age_s=max(0.0, step.now - youngest.placed_s),
        server_id=youngest.record.server_id,
    )


def _candidates(reasons: Reasons) -> tuple[CandidateSummary, ...]:
    views = {view.server_id: view for view in reasons.snapshot.servers}
    summaries = []
    for candidate in reasons.candidates():
        if candidate.refusal is None:
            summaries.append(_able(candidate))
            continue
        view = views[candidate.server_id]
        estimate = plans.load_estimate(view, reasons.task, reasons.now)
        summaries.append(
            CandidateSummary(
                server_id=candidate.server_id,
                refusal=sentences.refusal(candidate.refusal, view, reasons.task),
                # What a load there would take, if it could be: it tells what the refusal costs.
                source_tier=estimate.source_tier,
                size_bytes=estimate.size_bytes,
                queue_s=estimate.queue_s,
                transfer_s=estimate.transfer_s,
                overhead_s=estimate.overhead_s,
                is_prior=estimate.is_prior,
                is_avoided=candidate.server_id in reasons.task.avoid,
            )
        )
    return tuple(summaries)


def _able(candidate: Candidate) -> CandidateSummary:
    estimate = candidate.estimate
    assert estimate is not None, "who is not refused has an estimate"
    return CandidateSummary(
        server_id=candidate.server_id,
        slots=candidate.slots,
        source_tier=estimate.source_tier,
        size_bytes=estimate.size_bytes,
        queue_s=estimate.queue_s,
        transfer_s=estimate.transfer_s,
        overhead_s=estimate.overhead_s,
        is_prior=estimate.is_prior,
        evicted=candidate.evict,
        eviction_s=candidate.eviction_s,
        moves=tuple(_move(move) for move in candidate.moves),
        stopped=candidate.stopped,
        is_avoided=candidate.is_avoided,
        total_s=candidate.cost_s,
    )


def _move(move: Move) -> MoveSummary:
    return MoveSummary(
        instance_id=move.instance_id,
        model_id=move.model_id,
        server_id=move.server_id,
        slots=move.slots,
        load_s=move.load_s,
        resume_s=move.resume_s,
    )
