"""Owns what routers tell of running requests: it decides when an instance is idle (R2, R5)."""

from __future__ import annotations

from whimbrel.wire.messages import InferenceFinished, InferenceStarted

from services.scheduler.core import heartbeats, waiting
from services.scheduler.core.servers import Router
from services.scheduler.core.step import Step


def on_inference_started(step: Step, message: InferenceStarted, reply_to: str | None) -> None:
    router = _router(step, message.router_id)
    instance = step.cluster.instances.get(message.instance_id)
    if instance is None:
        return
    waiting.keep_promise(step, instance, message.request_id)
    heartbeats.count_requests(step, instance, router, instance.active.get(router.router_id, 0) + 1)
    model = step.cluster.models[instance.record.model_id]
    waiting.remove_waiter(step, model, message.request_id)


def on_inference_finished(step: Step, message: InferenceFinished, reply_to: str | None) -> None:
    router = _router(step, message.router_id)
    instance = step.cluster.instances.get(message.instance_id)
    if instance is None:
        return
    waiting.keep_promise(step, instance, message.request_id)
    heartbeats.count_requests(step, instance, router, max(0, instance.active.get(router.router_id, 0) - 1))


def _router(step: Step, router_id: str) -> Router:
    return step.cluster.routers.setdefault(router_id, Router(router_id=router_id, seen_s=step.now))
