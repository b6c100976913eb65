"""Owns the requests that wait for an instance: who may, who is next, what they are told, when they give up."""

from __future__ import annotations

import math
from heapq import heapify, heappop
from math import inf

import msgspec
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import ModelNotFound, ModelTooLarge, QueueFull, Unavailable
from whimbrel.wire.messages import (
    CancelPlacement,
    ErrorReply,
    ModelState,
    PlacementFailed,
    PlaceModel,
    PlaceModelReply,
    Stages,
    Tier,
    WaitStage,
)
from whimbrel.wire.records import InstanceState

from services.scheduler.core import commands, lifecycle, migration_news, migrations, plans, restore
from services.scheduler.core.cluster import Cluster
from services.scheduler.core.decisions import Decision, Deferred, NeverFits, Placement
from services.scheduler.core.instances import Instance
from services.scheduler.core.kept import KeptDecision
from services.scheduler.core.models import Model, Reservation, Waiter
from services.scheduler.core.policies import POLICIES
from services.scheduler.core.ready import ToRouter
from services.scheduler.core.settings import BLOCKED_S, DEFERRED_S, PROMISE_S, TRIES_PER_STEP_MAX
from services.scheduler.core.step import Question, Step


def on_place_model(step: Step, message: PlaceModel, reply_to: str | None) -> None:
    """A request needs an instance. With one that is ready, it has its route in this very step."""
    model = servable_model(step, message.model_id)
    step.cluster.hear_router(message.router_id, now=step.now)
    migration_news.hear_placed(step, message.request_id)
    instance = step.cluster.ready_instance(model)
    if instance is not None:
        step.answer(reply_to, _promise(step, instance, message.request_id))
        return
    _add_waiter(step, model, message)
    step.wanted[model.model_id] = None
    step.questions.append(Question(request_id=message.request_id, model_id=model.model_id, reply_to=reply_to))


def on_cancel_placement(step: Step, message: CancelPlacement, reply_to: str | None) -> None:
    """The request needs nothing any more. A load that runs for it goes on: its bytes are worth having."""
    model = step.cluster.models.get(message.model_id)
    if model is None:
        return
    remove_waiter(step, model, message.request_id)
    for instance in step.cluster.instances_of(model):
        keep_promise(step, instance, message.request_id)


def servable_model(step: Step, model_id: str) -> Model:
    """The model, when requests may be placed; raises ModelNotFound or Unavailable."""
    model = step.cluster.models.get(model_id)
    if model is None:
        restore.check_searched(step, f"model {model_id!r}")
    if model is None or model.record.state in (ModelState.FAILED, ModelState.DELETING):
        raise ModelNotFound(model_id=model_id)
    if not model.is_servable:
        raise Unavailable(what=f"model {model_id!r} (it is still being imported)", retry_after_s=5)
    return model


def keep_promise(step: Step, instance: Instance, request_id: str) -> None:
    """The request that was given this instance's route reached it, or will not come."""
    if instance.promised.pop(request_id, None) is not None:
        instance.idle_since_s = max(instance.idle_since_s, step.now)
        if instance.demand:
            step.cluster.doubt(instance.record.server_id)
        else:
            step.cluster.touch(instance.record.server_id)


def remove_waiter(step: Step, model: Model, request_id: str) -> None:
    """Without anybody who waits, a model holds no slot for itself."""
    if not model.remove_waiter(request_id):
        return
    step.cluster.waiting_requests -= 1
    if not model.waiters:
        del step.cluster.waiting[model.model_id]
        model.forgive()
        if step.cluster.shortfall(model) <= 0:
            step.cluster.release(model.model_id)


def expire(step: Step) -> None:
    """Waiters whose router stopped repeating them are gone."""
    oldest_s = step.now - step.settings.waiter_silent_s
    for model in [step.cluster.models[model_id] for model_id in step.cluster.waiting]:
        for waiter in list(model.waiters.values()):
            if waiter.repeated_s < oldest_s:
                remove_waiter(step, model, waiter.request_id)


def fail_waiters(step: Step, model: Model, error: ErrorReply) -> None:
    """Nobody who waits for this model now will get an instance; later requests may try again."""
    requests: dict[str, list[str]] = {}
    for waiter in model.waiters.values():
        requests.setdefault(waiter.router_id, []).append(waiter.request_id)
        step.failed[waiter.request_id] = error
    for router_id, request_ids in requests.items():
        failed = PlacementFailed(model_id=model.model_id, request_ids=tuple(request_ids), error=error)
        step.send(ToRouter(router_id=router_id), failed)
    for waiter in list(model.waiters.values()):
        remove_waiter(step, model, waiter.request_id)


def settle(step: Step) -> None:
    """The end of a step: place whom can be placed, in the order of arrival, and answer who asked."""
    for model_id in [k for k, reservation in step.cluster.reservations.items() if not reservation.waiting_for]:
        _fulfil(step, step.cluster.reservations[model_id])
    _place_due(step)
    for question in step.questions:
        step.answer(question.reply_to, _tell_waiting(step, question))


def _fulfil(step: Step, reservation: Reservation) -> None:
    """All that stood in the way is gone. What was decided is done, unless the server is not what it was; then, and
    after a drain, which takes long, the model is placed anew, before the others."""
    cluster = step.cluster
    model = cluster.models[reservation.model_id]
    placement = reservation.placement
    cluster.release(reservation.key)
    if reservation.migration_id is not None:
        _load_destination(step, model, reservation)
        return
    if placement is not None and cluster.shortfall(model) > 0:
        server = cluster.view(placement.server_id)
        current = plans.renewed(placement, cluster.task_of(model), server, step.now)
        if current is not None:
            lifecycle.start_load(step, model, current)
            return
    if not _place(step, model) and reservation.is_drain and isinstance(_kept(cluster, model), Deferred):
        # It was drained for this model: a policy that waits for another server would have it drained again and again.
        _place(step, model, policy="migration")


def _load_destination(step: Step, model: Model, reservation: Reservation) -> None:
    """As decided, or not at all: its migration is abandoned then."""
    cluster, placement = step.cluster, reservation.placement
    migration = cluster.migrations.get(reservation.migration_id or "")
    assert placement is not None, "slots of a destination are reserved with what is to be there"
    current = plans.renewed(placement, cluster.task_of(model), cluster.view(placement.server_id), step.now)
    if migration is not None and current is not None:
        migrations.load_destination(step, migration, current)


def _kept(cluster: Cluster, model: Model) -> Decision | None:
    kept = cluster.decisions.get(model.model_id)
    return None if kept is None else kept.decision


def _place_due(step: Step) -> None:
    """Place whom can be placed, the oldest first: those that are new, and all that wait when a slot was released.

    Of those that wait only so many are tried in a step; the next one goes on from there. When nothing is open any more
    the rest is not tried, and the next release begins with the oldest again.
    """
    cluster = step.cluster
    due = _due(step)
    is_open, tries = True, 0
    while due:
        wait_s, model_id, model = heappop(due)
        if model_id not in step.wanted:
            if not is_open:
                continue
            if tries == TRIES_PER_STEP_MAX:
                is_open = False
                continue
            tries += 1
            cluster.tried_until = (wait_s, model_id) if tries == TRIES_PER_STEP_MAX else None
        # Whether anything is open is asked when somebody found no place, not after everyone who did.
        if not _place(step, model) and is_open and not cluster.has_open_slot():
            is_open, cluster.tried_until = False, None


def _due(step: Step) -> list[tuple[float, str, Model]]:
    """A heap by age: seldom are there slots for all, so they are not sorted."""
    cluster = step.cluster
    model_ids = set(step.wanted)
    if cluster.waiting and (cluster.is_released or cluster.tried_until is not None) and cluster.has_open_slot():
        after = cluster.tried_until or (-inf, "")
        model_ids.update(k for k in cluster.waiting if (cluster.models[k].oldest_wait_s, k) > after)
    if cluster.tried_until is None:
        cluster.is_released = False
    cluster.tried_until = None
    models = [cluster.models[model_id] for model_id in model_ids if model_id in cluster.models]
    heap = [(model.oldest_wait_s, model.model_id, model) for model in models]
    heapify(heap)
    return heap


def _place(step: Step, model: Model, policy: str = "") -> bool:
    """Whether the model needed an instance and has, or will soon have, slots for it."""
    cluster = step.cluster
    if cluster.shortfall(model) <= 0:
        return False
    reservation = cluster.reservations.get(model.model_id)
    if reservation is not None and not (reservation.is_drain or reservation.is_move):
        return False
    policy = policy or step.settings.policy
    task = cluster.task_of(model)
    if policy == "random":
        task = msgspec.structs.replace(task, draw=cluster.draw(model.model_id))
    decision = POLICIES[policy](cluster.snapshot(step.now), task, step.now)
    if reservation is not None and reservation.is_move and not _is_better(step, decision, reservation):
        return False
    cluster.keep(model.model_id, KeptDecision(decision=decision, decided_s=step.now, policy=policy))
    step.decide(decision)
    if not model.waiters and not isinstance(decision, Placement):
        model.blocked_until_s = step.now + (BLOCKED_S if isinstance(decision, NeverFits) else DEFERRED_S)
    if isinstance(decision, NeverFits):
        need_bytes, capacity_bytes = decision.need_bytes, decision.capacity_bytes
        error = ModelTooLarge(model_id=model.model_id, need_bytes=need_bytes, capacity_bytes=capacity_bytes)
        fail_waiters(step, model, error_reply(error))
    if not isinstance(decision, Placement):
        return False
    if not all(migrations.can_start(step, move) for move in decision.moves):
        return False
    cluster.release(model.model_id)
    if decision.moves or decision.stopped or decision.evict:
        _make_room(step, model, decision)
    else:
        lifecycle.start_load(step, model, decision)
    return True


def _is_better(step: Step, decision: Decision, reservation: Reservation) -> bool:
    """Whether a model whose slots are being emptied by moves should rather go where a slot is free now: when it starts
    sooner there, or when the moves take longer than they were estimated to."""
    if not isinstance(decision, Placement) or decision.moves or decision.evict or decision.stopped:
        return False
    assert reservation.placement is not None, "moves are made for a placement"
    left_s = reservation.placement.cost_s - (step.now - reservation.since_s)
    return left_s <= 0.0 or decision.cost_s < left_s


def _make_room(step: Step, model: Model, placement: Placement) -> None:
    """Idle instances go, running ones move away or are stopped; the slots are kept for the model meanwhile."""
    elsewhere = {instance_id for move in placement.moves for instance_id in move.evict}
    evicted_here = [instance_id for instance_id in placement.evict if instance_id not in elsewhere]
    moved = [move.instance_id for move in placement.moves]
    step.cluster.reserve(
        Reservation(
            model_id=model.model_id,
            server_id=placement.server_id,
            slots=placement.slots,
            waiting_for={*evicted_here, *moved, *placement.stopped},
            is_drain=False,
            since_s=step.now,
            placement=placement,
        )
    )
    lifecycle.displace(step, evicted_here)
    for instance_id in placement.stopped:
        lifecycle.preempt(step, step.cluster.instances[instance_id])
    for move in placement.moves:
        migrations.start(step, move, placement.reasons, reason=migrations.PLACEMENT, for_model_id=model.model_id)


def _add_waiter(step: Step, model: Model, message: PlaceModel) -> None:
    since_s = step.now - message.waited_s
    known = model.waiters.get(message.request_id)
    if known is not None:
        known.repeated_s = step.now
        known.since_s = min(known.since_s, since_s)
        model.add_waiter(known)
        return
    settings = step.settings
    if len(model.waiters) >= settings.waiting_per_model_max:
        raise QueueFull(
            queue=f"model {model.model_id!r}",
            limit=settings.waiting_per_model_max,
            retry_after_s=max(1, math.ceil(_remaining_s(step, model) or settings.fair_wait_s)),
        )
    if step.cluster.waiting_requests >= settings.waiting_max:
        raise QueueFull(queue="the cluster", limit=settings.waiting_max)
    step.cluster.waiting_requests += 1
    step.cluster.waiting[model.model_id] = None
    model.add_waiter(
        Waiter(request_id=message.request_id, router_id=message.router_id, since_s=since_s, repeated_s=step.now)
    )


def _promise(step: Step, instance: Instance, request_id: str) -> PlaceModelReply:
    """The route, held for this request until it arrives. Who did not wait for the load had a warm start."""
    added = commands.route_added(instance)
    is_warm = request_id not in instance.promised
    if not instance.demand:
        step.cluster.doubt(instance.record.server_id)
    instance.promised[request_id] = step.now + PROMISE_S
    return PlaceModelReply(route=added.route, stages=Stages(tier=Tier.GPU) if is_warm else added.stages)


def _tell_waiting(step: Step, question: Question) -> PlaceModelReply | ErrorReply:
    if question.request_id in step.failed:
        return step.failed[question.request_id]
    model = step.cluster.models[question.model_id]
    ready = step.cluster.ready_instance(model)
    if ready is not None:
        return _promise(step, ready, question.request_id)
    loading = _next_ready(step, model)
    if loading is None:
        return PlaceModelReply(waiting_for=WaitStage.DEFERRED)
    return PlaceModelReply(waiting_for=loading.stage, remaining_s=_remaining_s(step, model))


def _remaining_s(step: Step, model: Model) -> float | None:
    """What is left of the estimate of the model's load."""
    instance = _next_ready(step, model)
    return None if instance is None else max(0.0, _expected_s(instance) - step.now)


def _next_ready(step: Step, model: Model) -> Instance | None:
    """Of those that load, the one that should be ready first."""
    loading = (i for i in step.cluster.instances_of(model) if i.state is InstanceState.LOADING)
    return min(loading, key=_expected_s, default=None)


def _expected_s(instance: Instance) -> float:
    """When it should be ready."""
    return instance.placed_s + instance.record.estimate_s
