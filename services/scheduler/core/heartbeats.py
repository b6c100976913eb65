"""Owns reconciliation with agents and workers, who are the truth about themselves: each heartbeat is compared with our
records, what was not heard is said again, what is not there is given up, what should not be there is unloaded (P2)."""

from __future__ import annotations

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.events import ServerJoined
from whimbrel.wire.messages import (
    AgentHeartbeat,
    CancelLoad,
    ResendResidency,
    WorkerExited,
    WorkerHeartbeat,
    WorkerState,
)
from whimbrel.wire.records import InstanceState

from services.scheduler.core import commands, jobs, lifecycle, loading, migration_news, moving, restore
from services.scheduler.core.instances import Instance, InstanceEvent
from services.scheduler.core.ready import ToAgent
from services.scheduler.core.servers import Server, Slot, is_other_device
from services.scheduler.core.settings import DETACHED_WAIT_S
from services.scheduler.core.step import Step


def on_agent_heartbeat(step: Step, message: AgentHeartbeat, reply_to: str | None) -> None:
    server = step.cluster.server(message.server_id, now=step.now)
    known = server.heartbeat
    is_new_life = known is None or known.epoch != message.epoch
    if is_new_life or not server.is_alive:
        step.tell(ServerJoined(server_id=message.server_id, epoch=message.epoch))
    if is_new_life or not server.is_alive or _looks_different(known, message):
        step.cluster.touch(message.server_id)
        step.cluster.reshape(message.server_id)
    entries = server.residency.entries
    is_heard = server.hear(message)
    if server.residency.entries is not entries:
        step.cluster.touch(message.server_id)
    if not is_heard:
        step.send(ToAgent(server_id=message.server_id), ResendResidency(scheduler_epoch=step.epoch))
    server.seen_s = step.now
    server.is_alive = True
    for instance_id in list(server.instances):
        instance = step.cluster.instances[instance_id]
        if instance.state is InstanceState.LOADING:
            _check_load(step, instance, message, is_restarted=known is not None and is_new_life)
    _cancel_strays(step, server, message)
    jobs.hear_agent(step, message)


def on_worker_heartbeat(step: Step, message: WorkerHeartbeat, reply_to: str | None) -> None:
    slot = step.cluster.slot(message.server_id, message.slot, now=step.now)
    known = slot.heartbeat
    is_new_life = known is not None and known.epoch != message.epoch
    before = (slot.is_free, slot.is_alive)
    slot.hear(message)
    if known is None or is_other_device(known, message):
        step.cluster.reshape(message.server_id)
        step.cluster.touch(message.server_id)
    slot.seen_s = step.now
    slot.is_alive = True
    _take_occupant(step, slot, message.instance_id)
    if (slot.is_free, slot.is_alive) != before or _running(known) != _running(message):
        step.cluster.touch(message.server_id)
    instance = _instance_on(step, slot)
    if instance is not None and is_new_life:
        lose_instance(step, instance, "its worker restarted")
    elif instance is not None:
        _check_instance(step, instance, message)
    if message.migration_id is not None:
        migration_news.hear_stray(step, message.server_id, message.slot, message.migration_id)
    stray_id = message.instance_id if message.instance_id != slot.owner else None
    if stray_id is not None and not restore.adopts(step, slot, message):
        _unload_stray(step, slot, stray_id)


def on_worker_exited(step: Step, message: WorkerExited, reply_to: str | None) -> None:
    """Its agent saw the process end: no need to wait until its heartbeats are missed."""
    slot = step.cluster.slot(message.server_id, message.slot, now=step.now)
    if slot.is_alive and slot.heartbeat is not None and slot.heartbeat.epoch == message.worker_epoch:
        lose_slot(step, slot)


def lose_slot(step: Step, slot: Slot) -> None:
    """Nobody is there to load onto, and what was there is gone."""
    slot.is_alive = False
    if slot.occupant is not None:
        step.cluster.vacate(slot.server_id, slot.slot, slot.occupant)
    slot.occupant = slot.held_through = None
    step.cluster.touch(slot.server_id)
    instance = _instance_on(step, slot)
    if instance is not None:
        lose_instance(step, instance, "its worker is gone")


def lose_instance(step: Step, instance: Instance, reason: str) -> None:
    """Its worker is gone, and what was loaded there with it."""
    if instance.state is InstanceState.LOADING:
        worker = f"worker {instance.record.server_id}/{instance.record.slot}"
        loading.lose_load(step, instance, f"{worker} ({reason})")
    else:
        lifecycle.end_instance(step, instance, InstanceEvent.LOST, reason)


def _take_occupant(step: Step, slot: Slot, instance_id: str | None) -> None:
    """What its worker has; a slot that another worker holds is none of its business."""
    if slot.held_through is not None and instance_id is None:
        return
    if slot.occupant is not None and slot.occupant != instance_id:
        step.cluster.vacate(slot.server_id, slot.slot, slot.occupant)
    slot.occupant, slot.held_through = instance_id, None


def _instance_on(step: Step, slot: Slot) -> Instance | None:
    """The instance that the worker of this slot should have. An instance on several GPUs is had by the worker of its
    first slot; those of the others have nothing."""
    instance = step.cluster.instances.get(slot.owner) if slot.owner is not None else None
    return instance if instance is not None and instance.record.slot == slot.slot else None


def _looks_different(known: AgentHeartbeat | None, message: AgentHeartbeat) -> bool:
    """Whether placement would see another server than before."""
    return known is None or (
        known.pool_size_bytes != message.pool_size_bytes
        or known.ssd_size_bytes != message.ssd_size_bytes
        or known.probe_bandwidth_bytes_per_s != message.probe_bandwidth_bytes_per_s
        or known.is_stopping != message.is_stopping
    )


def _running(heartbeat: WorkerHeartbeat | None) -> tuple[str | None, int]:
    """What the worker has, and how many requests it counts there."""
    return (None, 0) if heartbeat is None else (heartbeat.instance_id, heartbeat.active_requests)


def _check_load(step: Step, instance: Instance, message: AgentHeartbeat, *, is_restarted: bool) -> None:
    """Say LoadModel again when the agent doesn't know the task; a task that waits its turn is making progress."""
    record = instance.record
    if record.task_id in message.tasks:
        if record.task_id not in message.running:
            instance.progress_s = step.now
        return
    is_done = instance.load is not None or record.instance_id in message.attached
    is_due = is_restarted or step.now - instance.commanded_s >= step.settings.repeat_s
    if is_due and not is_done:
        commands.command_load(step, instance)


def _cancel_strays(step: Step, server: Server, message: AgentHeartbeat) -> None:
    """Tasks of instances that are gone: the command to stop was lost."""
    known = {step.cluster.instances[k].record.task_id for k in server.instances}
    for task_id in message.tasks:
        if task_id not in known:
            step.send(ToAgent(server_id=message.server_id), CancelLoad(task_id=task_id))


def _check_instance(step: Step, instance: Instance, message: WorkerHeartbeat) -> None:
    """What the worker says about the instance that owns its slot."""
    is_there = message.instance_id == instance.instance_id
    match instance.state:
        case InstanceState.LOADING:
            _check_loading(step, instance, message, is_there=is_there)
        case _ if not is_there:
            is_expected = instance.state is not InstanceState.READY
            reason = lifecycle.UNLOADED if is_expected else "its worker no longer has it"
            lifecycle.end_instance(step, instance, InstanceEvent.ENDED, reason)
        case InstanceState.READY if message.state is WorkerState.DRAINING and not instance.is_migrating:
            # It stops: what runs there goes on elsewhere, or ends there when nowhere has a place for it.
            moving.leave(step, instance)
        case InstanceState.DRAINING | InstanceState.UNLOADING:
            is_heard = message.state is WorkerState.DRAINING
            if not is_heard and step.now - instance.unload_sent_s >= step.settings.repeat_s:
                commands.command_unload(step, instance)


def _check_loading(step: Step, instance: Instance, message: WorkerHeartbeat, *, is_there: bool) -> None:
    if is_there:
        instance.is_prepared = True
        if message.state is WorkerState.READY:
            loading.hear_ready(step, instance)
    elif instance.detached_s is not None or instance.is_prepared:
        # It had the instance and let go. The agent says why, or else this is all that will be heard of it.
        instance.detached_s = step.now if instance.detached_s is None else instance.detached_s
        if step.now - instance.detached_s >= DETACHED_WAIT_S:
            what = f"worker {message.server_id}/{message.slot} (it let go of the instance)"
            loading.fail_load(step, instance, error_reply(Unavailable(what=what)))
    elif message.instance_id is None and step.now - instance.prepared_s >= step.settings.repeat_s:
        commands.command_prepare(step, instance)


def _unload_stray(step: Step, slot: Slot, instance_id: str) -> None:
    """The worker has an instance that we gave up: unload it, once it has finished what it runs."""
    if step.now - slot.unload_sent_s >= step.settings.repeat_s:
        slot.unload_sent_s = step.now
        commands.unload_instance(step, slot.server_id, slot.slot, instance_id, is_drain=True)
