"""Owns the words of commands and routes: what agents, workers and routers are told about an instance."""

from __future__ import annotations

from whimbrel.wire.messages import LoadModel, PrepareInstance, Route, RouteAdded, RouteState, Stages, UnloadInstance
from whimbrel.wire.records import InstanceState

from services.scheduler.core.instances import Instance
from services.scheduler.core.ready import ToAgent, ToWorker
from services.scheduler.core.step import Step


def command_load(step: Step, instance: Instance) -> None:
    """Say, or say again, what the agent should do."""
    record = instance.record
    instance.commanded_s = step.now
    load = LoadModel(
        task_id=record.task_id,
        instance_id=record.instance_id,
        model_id=record.model_id,
        checkpoint_digest=record.checkpoint_digest,
        size_bytes=instance.size_bytes,
        slots=record.slots,
        scheduler_epoch=step.epoch,
    )
    step.send(ToAgent(server_id=record.server_id), load)


def command_prepare(step: Step, instance: Instance) -> None:
    """Say, or say again, what the worker should do; its model's config goes along."""
    record = instance.record
    instance.prepared_s = step.now
    prepare = PrepareInstance(
        instance_id=record.instance_id,
        model_id=record.model_id,
        model_config=step.cluster.models[record.model_id].record.model_config,
        scheduler_epoch=step.epoch,
    )
    step.send(ToWorker(server_id=record.server_id, slot=record.slot), prepare)


def command_unload(step: Step, instance: Instance) -> None:
    """Say, or say again, that the worker should unload: at once, when it has drained, or when it has stopped."""
    record = instance.record
    instance.unload_sent_s = step.now
    unload_instance(
        step,
        record.server_id,
        record.slot,
        record.instance_id,
        is_drain=record.state is InstanceState.DRAINING,
        is_preempted=record.is_preempted,
    )


def unload_instance(
    step: Step, server_id: str, slot: int, instance_id: str, *, is_drain: bool, is_preempted: bool = False
) -> None:
    unload = UnloadInstance(instance_id=instance_id, drain=is_drain, scheduler_epoch=step.epoch, preempt=is_preempted)
    step.send(ToWorker(server_id=server_id, slot=slot), unload)


def route_added(instance: Instance) -> RouteAdded:
    """The route of an instance that is ready or draining."""
    record = instance.record
    is_draining = record.state is not InstanceState.READY or instance.is_closed
    route = Route(
        instance_id=record.instance_id,
        model_id=record.model_id,
        server_id=record.server_id,
        slot=record.slot,
        state=RouteState.DRAINING if is_draining else RouteState.READY,
    )
    return RouteAdded(route=route, stages=record.stages or Stages(tier=record.source_tier))
