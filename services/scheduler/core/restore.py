"""Owns the return of what an emptied store had known: models from the repository, instances from their workers (P2).

Rules. One agent at a time is asked what the repository holds. A report counts when it is whole, and all of its models
are taken over in one step: a scheduler that dies before leaves an empty store, so that the next one asks again. Until
then nobody hears that a model is not there, and no worker has to unload what nobody knows, both for a bounded time.
What is deployed meanwhile is newer than the report, and stays as it is.
"""

from __future__ import annotations

import msgspec
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.events import ModelRestored
from whimbrel.wire.messages import (
    ModelState,
    ReportRepository,
    RepositoryModelFound,
    RepositoryReported,
    WorkerHeartbeat,
    WorkerState,
)
from whimbrel.wire.records import InstanceRecord, InstanceState, ModelRecord

from services.scheduler.core import lifecycle
from services.scheduler.core.instances import Instance
from services.scheduler.core.manifests import facts_of
from services.scheduler.core.models import Model
from services.scheduler.core.ready import ToAgent
from services.scheduler.core.search import Search
from services.scheduler.core.servers import Slot
from services.scheduler.core.step import Step

#: What people read in the place of a source that nobody knows any more.
RESTORED_SOURCE = "restored from the repository"
#: Requests and workers wait no longer for the catalogue, whoever may still be reading it: a large one takes seconds.
RESTORE_WAIT_S = 30.0
#: An agent that names no further model for so long may be stuck: another one is asked as well.
REPORT_SILENT_S = 5.0


def begin(step: Step) -> None:
    """The store held no model. Agents are asked as soon as they are heard."""
    step.cluster.search = Search(began_s=step.now)


def advance(step: Step) -> None:
    """At the end of every step: ask, ask again, or be done."""
    search = step.cluster.search
    if search is None:
        return
    search.known_models.update(step.cluster.models)
    search.known_instances.update(step.cluster.instances)
    if search.finished_s is None:
        _ask(step, search)
    elif step.now - search.finished_s >= step.settings.lost_after_s:
        # Every worker that lives was heard since.
        step.cluster.search = None


def is_searching(step: Step) -> bool:
    """Whether a model that is not known may be there all the same. Without any server nobody will ever say so."""
    search = step.cluster.search
    if search is None or search.finished_s is not None or step.now - search.began_s >= RESTORE_WAIT_S:
        return False
    return step.now < step.cluster.settled_s or any(server.is_alive for server in step.cluster.servers.values())


def check_searched(step: Step, what: str = "the catalogue") -> None:
    """Raises Unavailable while it would be wrong to say that something is not there."""
    if is_searching(step):
        raise Unavailable(what=f"{what} (the list of models is being made anew from the repository)", retry_after_s=1)


def on_repository_model_found(step: Step, message: RepositoryModelFound, reply_to: str | None) -> None:
    search = step.cluster.search
    if search is None or search.finished_s is not None:
        return
    search.found.setdefault(message.server_id, {})[message.model_id] = message
    if message.server_id == search.asked:
        search.heard_s = step.now


def on_repository_reported(step: Step, message: RepositoryReported, reply_to: str | None) -> None:
    """That was all, if nothing of it got lost. What can't be read is told by the agent's log: it is not served."""
    search = step.cluster.search
    if search is None or search.finished_s is not None or message.scheduler_epoch != step.epoch:
        return
    found = search.found.setdefault(message.server_id, {})
    if len(found) < message.models:
        _command(step, search, message.server_id)
        return
    for model_id in sorted(found):
        if model_id not in step.cluster.models and model_id not in search.known_models:
            _restore(step, found[model_id])
    search.found.clear()
    search.finished_s = step.now
    for slot in list(step.cluster.slots()):
        heartbeat = slot.heartbeat
        if slot.is_alive and heartbeat is not None and heartbeat.instance_id is not None:
            adopts(step, slot, heartbeat)


def adopts(step: Step, slot: Slot, message: WorkerHeartbeat) -> bool:
    """Whether the instance on this slot, which nobody knows, is not to be unloaded: it is ours from now on, or may be
    soon, when its model is known and its agent has said which content of it the server has."""
    search = step.cluster.search
    if search is None or message.state is not WorkerState.READY or message.model_id is None:
        return False
    if slot.owner is not None or slot.reserved_for is not None or message.instance_id in search.known_instances:
        return False
    model = step.cluster.models.get(message.model_id)
    if model is None or not model.is_servable:
        return is_searching(step)
    if len(model.record.partition_bytes) > 1 and not slot.is_host:
        # It is on several GPUs, and its worker does not say on which.
        return False
    server = step.cluster.servers[slot.server_id]
    digests = [digest for model_id, digest in server.residency.entries if model_id == model.model_id]
    if not digests:
        return search.finished_s is not None or is_searching(step)
    if digests != [model.record.checkpoint_digest]:
        # It may have been loaded from the other content.
        return False
    _adopt(step, slot, model, message)
    return True


def _ask(step: Step, search: Search) -> None:
    """The same agent until it is gone or silent, then the next one."""
    server_ids = [server.server_id for server in step.cluster.live_servers() if server.takes_jobs]
    if not server_ids:
        return
    asked = search.asked
    is_silent = step.now - search.heard_s >= REPORT_SILENT_S
    if asked is None or asked not in server_ids or is_silent:
        later = [server_id for server_id in server_ids if asked is not None and server_id > asked]
        search.asked = (later or server_ids)[0]
        search.heard_s = step.now
        _command(step, search, search.asked)
    elif step.now - max(search.heard_s, search.asked_s) >= step.settings.repeat_s:
        _command(step, search, asked)


def _command(step: Step, search: Search, server_id: str) -> None:
    """An agent that is at it already goes on."""
    search.asked_s = step.now
    step.send(ToAgent(server_id=server_id), ReportRepository(scheduler_epoch=step.epoch))


def _restore(step: Step, message: RepositoryModelFound) -> None:
    """As it would be after a deployment without settings. What is no manifest was none before, either: nobody could
    have deployed it."""
    try:
        facts = facts_of(message.manifest)
    except msgspec.DecodeError:
        return
    record = ModelRecord(
        model_id=message.model_id,
        state=ModelState.READY,
        source=RESTORED_SOURCE,
        job_id="",
        checkpoint_digest=message.checkpoint_digest,
        size_bytes=message.size_bytes,
        parameter_count=facts.parameter_count,
        architecture=facts.architecture or "",
        model_config=message.model_config,
        created_at_s=step.wall_s,
        keep_alive_s=None,
        partition_bytes=facts.partition_bytes,
    )
    step.cluster.models[record.model_id] = Model(record=record)
    step.save(record)
    step.tell(
        ModelRestored(
            model_id=record.model_id, checkpoint_digest=record.checkpoint_digest, size_bytes=record.size_bytes
        )
    )


def _adopt(step: Step, slot: Slot, model: Model, message: WorkerHeartbeat) -> None:
    """It serves already: it only needs a record, and routers that know of it."""
    assert message.instance_id is not None, "only an instance is adopted"
    key = (model.model_id, model.record.checkpoint_digest)
    instance = Instance(
        record=InstanceRecord(
            instance_id=message.instance_id,
            model_id=model.model_id,
            checkpoint_digest=model.record.checkpoint_digest,
            server_id=slot.server_id,
            slot=slot.slot,
            state=InstanceState.READY,
            task_id=step.new_id("task"),
            source_tier=step.cluster.servers[slot.server_id].residency.entries[key].tier,
            estimate_s=0.0,
            stages=None,
        ),
        size_bytes=model.record.size_bytes,
        placed_s=step.now,
        is_rebuilt=True,
        progress_s=step.now,
        ready_s=step.now,
        idle_since_s=step.now,
    )
    step.cluster.add_instance(instance, now=step.now)
    slot.occupant = message.instance_id
    step.save(instance.record)
    lifecycle.serve_waiters(step, instance)
