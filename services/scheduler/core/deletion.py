"""Owns the end of a model: its instances go, agents remove their copies, one the repository's."""

from __future__ import annotations

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import ModelNotFound
from whimbrel.wire.events import ModelDeleted
from whimbrel.wire.messages import DeleteModel, DeleteModelReply, ModelRemoved, ModelState, RemoveModel
from whimbrel.wire.records import InstanceState

from services.scheduler.core import lifecycle, restore, waiting
from services.scheduler.core.instances import InstanceEvent
from services.scheduler.core.models import Model
from services.scheduler.core.ready import ToAgent
from services.scheduler.core.step import Step


def on_delete_model(step: Step, message: DeleteModel, reply_to: str | None) -> None:
    """No request is placed from now on. Deleting twice is deleting once, until it is done."""
    model = step.cluster.models.get(message.model_id)
    if model is None:
        restore.check_searched(step, f"model {message.model_id!r}")
        raise ModelNotFound(model_id=message.model_id)
    if model.record.state is not ModelState.DELETING:
        step.change_model(model, state=ModelState.DELETING)
        step.cluster.deleting[model.model_id] = None
        step.cluster.minimums.pop(model.model_id, None)
        step.cluster.release(model.model_id)
        waiting.fail_waiters(step, model, error_reply(ModelNotFound(model_id=model.model_id)))
    step.answer(reply_to, DeleteModelReply(model_id=model.model_id))


def on_model_removed(step: Step, message: ModelRemoved, reply_to: str | None) -> None:
    model = step.cluster.models.get(message.model_id)
    if model is not None and message.model_id in step.cluster.deleting:
        model.removed.add(message.server_id)


def advance(step: Step) -> None:
    """What can be done now for the models that are being deleted; repeated until it is done."""
    for model_id in list(step.cluster.deleting):
        model = step.cluster.models[model_id]
        _end_instances(step, model)
        if not model.instances and step.cluster.open_job(model_id) is None:
            _remove(step, model)


def _end_instances(step: Step, model: Model) -> None:
    for instance in step.cluster.instances_of(model):
        if instance.arriving is not None:
            continue  # what moves to it ends there, or its migration is abandoned with its source
        if instance.state is InstanceState.READY:
            lifecycle.drain(step, instance)
        elif instance.state is InstanceState.LOADING:
            lifecycle.end_load(step, instance, InstanceEvent.LOAD_FAILED)


def _remove(step: Step, model: Model) -> None:
    """Tell every agent that lives; the first one also clears the repository, another one if that is lost before."""
    server_ids = [server.server_id for server in step.cluster.live_servers()]
    if model.repository_server_id not in (*model.removed, *server_ids):
        model.repository_server_id = server_ids[0] if server_ids else None
        # It may have removed its own copies already; it is asked again, for the repository's.
        model.removed.discard(model.repository_server_id or "")
        model.remove_sent_s.pop(model.repository_server_id or "", None)
    for server_id in server_ids:
        is_due = step.now - model.remove_sent_s.get(server_id, -step.settings.repeat_s) >= step.settings.repeat_s
        if server_id not in model.removed and is_due:
            model.remove_sent_s[server_id] = step.now
            remove = RemoveModel(
                model_id=model.model_id,
                remove_from_repository=server_id == model.repository_server_id,
                scheduler_epoch=step.epoch,
            )
            step.send(ToAgent(server_id=server_id), remove)
    if model.repository_server_id in model.removed and model.removed.issuperset(server_ids):
        del step.cluster.models[model.model_id]
        del step.cluster.deleting[model.model_id]
        step.cluster.minimums.pop(model.model_id, None)
        step.cluster.decisions.pop(model.model_id, None)
        _forget_resumes(step, model)
        step.forget(model.record)
        step.tell(ModelDeleted(model_id=model.model_id))


def _forget_resumes(step: Step, model: Model) -> None:
    """What was learned of its resumes goes with it."""
    cluster = step.cluster
    for key in [key for key, record in cluster.resumes.items() if record.model_id == model.model_id]:
        del cluster.resumes[key]
        saved = cluster.saved_resumes.pop(key, None)
        if saved is not None:
            step.forget(saved)
