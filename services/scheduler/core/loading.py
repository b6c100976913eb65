"""Owns the news of loads: progress, completion, failure, stalls, and when an instance counts as ready."""

from __future__ import annotations

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import LoadFailed, Unavailable
from whimbrel.wire.events import LoadWasLost, ModelPrefetched, ModelPrefetchFailed
from whimbrel.wire.messages import (
    ErrorReply,
    InstanceBecameReady,
    InstanceEnded,
    LoadEnded,
    LoadFinished,
    LoadProgressed,
    PrefetchEnded,
    Tier,
    TierReport,
    UnloadRefused,
    WaitStage,
)
from whimbrel.wire.records import InstanceState

from services.scheduler.core import lifecycle, waiting
from services.scheduler.core.bandwidth import observe_transfer
from services.scheduler.core.instances import Instance, InstanceEvent
from services.scheduler.core.models import Model
from services.scheduler.core.settings import BLOCKED_S, LOAD_REPORT_WAIT_S, LOAD_TRIES_MAX, LOST_TRIES_MAX
from services.scheduler.core.step import Step, sentence


def on_load_progressed(step: Step, message: LoadProgressed, reply_to: str | None) -> None:
    instance = _loading_by_task(step, message.server_id, message.task_id)
    if instance is None:
        return
    instance.progress_s = step.now
    instance.stage = message.stage
    # The stage that an estimate is made of: the slowest tier of the path. The other is short beside it.
    slowest = WaitStage.FETCHING if instance.record.source_tier is Tier.REMOTE else WaitStage.LOADING
    if message.stage is slowest and message.total_bytes > 0:
        queues = step.cluster.servers[message.server_id].queues
        queues.progress(message.task_id, message.done_bytes / message.total_bytes, now=step.now)
        step.cluster.doubt(message.server_id)


def on_load_finished(step: Step, message: LoadFinished, reply_to: str | None) -> None:
    """The bytes are in place; the agent's queue moves on, and its reports are learned from (L10, E6)."""
    instance = step.cluster.instances.get(message.instance_id)
    if instance is None or instance.load is not None or instance.record.task_id != message.task_id:
        return
    instance.load = message
    _learn_transfers(step, message.server_id, message.reports)
    if instance.state is not InstanceState.LOADING:
        return
    instance.progress_s = step.now
    instance.stage = WaitStage.BINDING
    step.cluster.servers[message.server_id].queues.remove(message.task_id, now=step.now)
    step.cluster.doubt(message.server_id)
    if instance.ready_heard_s is not None:
        hear_ready(step, instance)


def on_prefetch_ended(step: Step, message: PrefetchEnded, reply_to: str | None) -> None:
    """Nobody waits for it here; its bandwidth is as good as that of a load, and people may want to know."""
    _learn_transfers(step, message.server_id, message.reports)
    if message.error is None:
        step.tell(
            ModelPrefetched(model_id=message.model_id, server_id=message.server_id, source_tier=message.source_tier)
        )
    else:
        step.tell(
            ModelPrefetchFailed(
                model_id=message.model_id,
                server_id=message.server_id,
                code=message.error.code,
                message=sentence(message.error),
            )
        )


def on_load_ended(step: Step, message: LoadEnded, reply_to: str | None) -> None:
    instance = step.cluster.instances.get(message.instance_id)
    if instance is not None and instance.record.task_id == message.task_id:
        fail_load(step, instance, message.error)


def on_instance_became_ready(step: Step, message: InstanceBecameReady, reply_to: str | None) -> None:
    instance = step.cluster.instances.get(message.instance_id)
    if instance is None or instance.state is not InstanceState.LOADING:
        return
    instance.bind_s = message.bind_s
    instance.is_reported = True
    hear_ready(step, instance)


def on_instance_ended(step: Step, message: InstanceEnded, reply_to: str | None) -> None:
    slot = step.cluster.slot(message.server_id, message.slot, now=step.now)
    if slot.occupant == message.instance_id:
        step.cluster.vacate(message.server_id, message.slot, message.instance_id)
    instance = step.cluster.instances.get(message.instance_id)
    if instance is None:
        return
    if instance.state is not InstanceState.LOADING:
        reason = lifecycle.UNLOADED if message.error is None else message.error.code
        lifecycle.end_instance(step, instance, InstanceEvent.ENDED, reason)
    elif message.error is not None:
        instance.detached_s = step.now
        fail_load(step, instance, message.error)
    elif instance.detached_s is None:
        # The agent told it to let go; its own report, which names the cause, is on the way.
        instance.detached_s = step.now


def on_unload_refused(step: Step, message: UnloadRefused, reply_to: str | None) -> None:
    instance = step.cluster.instances.get(message.instance_id)
    if instance is not None and instance.accepts(InstanceEvent.UNLOAD_REFUSED):
        lifecycle.refuse_unload(step, instance)


def hear_ready(step: Step, instance: Instance) -> None:
    """The worker is ready. Agent and worker report their stages at about the same time: both are waited for, shortly,
    because routers tell clients where the time went."""
    assert instance.state is InstanceState.LOADING
    if instance.ready_heard_s is None:
        instance.ready_heard_s = step.now
    is_known = instance.load is not None and instance.is_reported
    if is_known or step.now - instance.ready_heard_s >= LOAD_REPORT_WAIT_S:
        lifecycle.become_ready(step, instance)


def fail_load(step: Step, instance: Instance, error: ErrorReply) -> None:
    """A load ended badly. A checkpoint that can't be loaded fails whoever waits; other errors are tried once more,
    elsewhere if possible. Nothing happens to an instance that does not load."""
    if instance.state is not InstanceState.LOADING:
        return
    lifecycle.end_load(step, instance, InstanceEvent.LOAD_FAILED)
    _tell_failed(step, instance, error)
    if instance.arriving is not None:
        return  # nobody waits for it but its migration, which is abandoned
    model = step.cluster.models[instance.record.model_id]
    model.load_failures += 1
    is_final = error.code == LoadFailed.code or model.load_failures >= LOAD_TRIES_MAX
    _go_on(step, model, instance, error, is_final=is_final)


def lose_load(step: Step, instance: Instance, what: str) -> None:
    """The worker or the server of a load is gone: it is placed again, but not for ever."""
    lifecycle.end_load(step, instance, InstanceEvent.LOST)
    error = error_reply(Unavailable(what=what))
    _tell_failed(step, instance, error)
    if instance.arriving is not None:
        return
    model = step.cluster.models[instance.record.model_id]
    model.losses += 1
    _go_on(step, model, instance, error, is_final=model.losses >= LOST_TRIES_MAX)


def _go_on(step: Step, model: Model, instance: Instance, error: ErrorReply, *, is_final: bool) -> None:
    """Whoever waits has the model loaded once more, elsewhere if possible, or hears why not."""
    if is_final or not model.waiters:
        waiting.fail_waiters(step, model, error)
        model.forgive()
        model.blocked_until_s = step.now + BLOCKED_S
    else:
        model.avoid |= {instance.record.server_id}
        step.wanted[model.model_id] = None


def _tell_failed(step: Step, instance: Instance, error: ErrorReply) -> None:
    record = instance.record
    step.tell(
        LoadWasLost(
            task_id=record.task_id,
            model_id=record.model_id,
            server_id=record.server_id,
            code=error.code,
            message=sentence(error),
        )
    )


def _learn_transfers(step: Step, server_id: str, reports: tuple[TierReport, ...]) -> None:
    server = step.cluster.server(server_id, now=step.now)
    for report in reports:
        if report.size_bytes > 0 and report.tier is not Tier.GPU:
            known = server.bandwidth(report.tier)
            record = observe_transfer(known, size_bytes=report.size_bytes, seconds=report.seconds)
            server.learn(record)
            step.cluster.doubt(server_id)
            step.save(record)


def _loading_by_task(step: Step, server_id: str, task_id: str) -> Instance | None:
    server = step.cluster.servers.get(server_id)
    if server is None:
        return None
    instances = (step.cluster.instances[k] for k in server.instances)
    return next((i for i in instances if i.record.task_id == task_id and i.state is InstanceState.LOADING), None)
