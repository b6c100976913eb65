"""Owns the routers: which of them live, and what they run on which instance (R2, R5). It decides what is idle.

A router tells each start and end of a request at once; its heartbeats repair what of that got lost.
"""

from __future__ import annotations

from whimbrel.wire.messages import InferenceFinished, InferenceStarted, InstanceActivity, RouterHeartbeat

from services.scheduler.core import counts, migration_news, resumes, waiting
from services.scheduler.core.instances import Instance, Running
from services.scheduler.core.servers import Router
from services.scheduler.core.settings import RESUME_SAVED_EVERY
from services.scheduler.core.step import Step


def on_inference_started(step: Step, message: InferenceStarted, reply_to: str | None) -> None:
    migration_news.hear_switched(step, message.instance_id, message.request_id)
    instance = step.cluster.instances.get(message.instance_id)
    if instance is None:
        return
    # On the way there before, running there now: to placement nothing has changed.
    instance.promised.pop(message.request_id, None)
    _running(instance, message.router_id).start(message.request_id, message.prompt_tokens, step.now)
    _settle(step, instance, step.cluster.hear_router(message.router_id, now=step.now))
    model = step.cluster.models[instance.record.model_id]
    waiting.remove_waiter(step, model, message.request_id)
    counts.want_more(step, model)


def on_inference_finished(step: Step, message: InferenceFinished, reply_to: str | None) -> None:
    migration_news.hear_switched(step, message.instance_id, message.request_id)
    instance = step.cluster.instances.get(message.instance_id)
    if instance is None:
        return
    waiting.keep_promise(step, instance, message.request_id)
    _learn_resumes(step, instance, message)
    _running(instance, message.router_id).finish(message.request_id, step.now)
    _settle(step, instance, step.cluster.hear_router(message.router_id, now=step.now))


def on_router_heartbeat(step: Step, message: RouterHeartbeat, reply_to: str | None) -> None:
    known = step.cluster.routers.get(message.router_id)
    if known is not None and known.epoch not in (0, message.epoch):
        forget_router(step, known)
    router = step.cluster.hear_router(message.router_id, now=step.now)
    router.epoch = message.epoch
    active = {activity.instance_id: activity for activity in message.active}
    migration_news.hear_counts(step, router.router_id, {k: said.requests for k, said in active.items()})
    for instance_id in dict.fromkeys([*router.counted, *active]):
        instance = step.cluster.instances.get(instance_id)
        if instance is not None:
            said = active.get(instance_id, InstanceActivity(instance_id=instance_id, requests=0))
            running = _running(instance, router.router_id)
            running.correct(said.requests, said.prompt_tokens, said.running_s, now=step.now)
            _settle(step, instance, router)


def forget_router(step: Step, router: Router) -> None:
    """The router is gone, its requests and those that wait with it."""
    for model in [step.cluster.models[model_id] for model_id in step.cluster.waiting]:
        for waiter in list(model.waiters.values()):
            if waiter.router_id == router.router_id:
                waiting.remove_waiter(step, model, waiter.request_id)
    migration_news.forget_router(step, router.router_id)
    for instance_id in list(router.counted):
        instance = step.cluster.instances[instance_id]
        instance.active[router.router_id].correct(0)
        _settle(step, instance, router)
    del step.cluster.routers[router.router_id]


def _learn_resumes(step: Step, instance: Instance, message: InferenceFinished) -> None:
    """Prefills and token times of requests tell what computing one again would take (M1, M3). They are learned from
    each, and made durable now and then: they change little, and losing a few loses nothing."""
    cluster = step.cluster
    if cluster.slot_of(instance).heartbeat is None or (message.prefill_s is None and message.token_s == 0.0):
        return
    record = known = cluster.resume_record(instance)
    if message.prefill_s is not None and record.migrations == 0:
        record = resumes.observe_prefill(record, tokens=message.prompt_tokens, seconds=message.prefill_s)
    if message.token_s > 0.0:
        record = resumes.observe_token_time(record, message.token_s)
    if record is known:
        return
    cluster.learn_resume(record)
    learned, before = (one.observations + one.token_observations for one in (record, known))
    if learned // RESUME_SAVED_EVERY != before // RESUME_SAVED_EVERY or known.observations == 0:
        cluster.saved_resumes[record.key()] = record
        step.save(record)


def _running(instance: Instance, router_id: str) -> Running:
    return instance.active.setdefault(router_id, Running())


def _settle(step: Step, instance: Instance, router: Router) -> None:
    """After the router's requests on the instance changed: keep-alive counts from the end of the last one."""
    if instance.active[router.router_id].count:
        router.counted[instance.instance_id] = None
    else:
        del instance.active[router.router_id]
        if instance.instance_id in router.counted:
            del router.counted[instance.instance_id]
            instance.idle_since_s = max(instance.idle_since_s, step.now)
    if not instance.demand:
        step.cluster.touch(instance.record.server_id)
    else:
        step.cluster.doubt(instance.record.server_id)
