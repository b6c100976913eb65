"""Owns the plain words for a model's state and for why a server can't take it."""

from __future__ import annotations

from collections.abc import Sequence

from whimbrel.wire.messages import DecisionSummary
from whimbrel.wire.records import InstanceState

from services.scheduler.core.decisions import Refusal
from services.scheduler.core.instances import Instance
from services.scheduler.core.models import Model
from services.scheduler.core.step import Step
from services.scheduler.core.views import ServerView, Task

#: More servers than this are not named in a sentence; the candidates have them all.
SERVERS_NAMED_MAX = 3

_DOING = {
    InstanceState.READY: "serves",
    InstanceState.DRAINING: "ends its last requests",
    InstanceState.UNLOADING: "is asked to unload",
}


def tell(step: Step, model: Model, now: DecisionSummary) -> str:
    """The model's state: its instances, who waits, what it waits for, and what would be decided `now` if it needs or
    could need another instance."""
    parts = [*_instances(step, model), *_waiters(step, model), *_reservation(step, model)]
    if model.blocked_until_s > step.now:
        left_s = model.blocked_until_s - step.now
        parts.append(f"its last load failed, so it is not loaded for its minimum alone for another {left_s:.0f} s")
    is_short = step.cluster.shortfall(model) > 0
    kept = step.cluster.reservations.get(model.model_id)
    # While idle instances leave for it, nothing else is decided.
    if (is_short or not model.instances) and (kept is None or kept.is_drain):
        parts.append(_outlook(now, is_wanted=is_short))
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def refusal(kind: Refusal, view: ServerView, task: Task) -> str:
    """Why the server can't take the task."""
    match kind:
        case Refusal.CLOSED:
            return "closed: nothing is placed here until it is uncordoned, or its agent is started again"
        case Refusal.TOO_SMALL:
            return (
                f"too small: the model has {_size(task.size_bytes)}, {_size(view.capacity_bytes)} can be here at most"
            )
        case Refusal.NO_ROOM:
            freeable = view.capacity_bytes - view.used_bytes + sum(idle.room_bytes for idle in view.idle)
            need = f"the model has {_size(task.size_bytes)}, {_size(max(0, freeable))} are free or idle"
            return "; ".join([f"no room: {need}", *_running(view)])
        case Refusal.BUSY:
            return "busy: " + ("; ".join([*_slots(view, task), *_running(view)]) or "no slot is free")


def _slots(view: ServerView, task: Task) -> list[str]:
    """What the slots that are free or idle lack; nothing when there are none and something runs, which says enough."""
    usable = [*view.free_slots, *(slot for idle in view.idle for slot in idle.slots)]
    if not usable:
        return (
            []
            if view.running
            else ["its slots load something, are kept for a minimum or another model, or have no worker"]
        )
    if view.is_host:
        return []
    sizes = ", ".join(_size(size_bytes) for size_bytes in task.partition_bytes)
    found = ", ".join("?" if slot.memory_bytes == 0 else _size(slot.memory_bytes) for slot in usable)
    return [f"the model needs {_count(len(task.partition_bytes), 'slot')} ({sizes}), free or idle are {found}"]


def _running(view: ServerView) -> list[str]:
    if not view.running:
        return []
    return [f"{_count(len(view.running), 'running instance')} that can't go elsewhere"]


def _instances(step: Step, model: Model) -> list[str]:
    instances = step.cluster.instances_of(model)
    if not instances:
        return [f"model {model.model_id} has no instance"]
    return [f"model {model.model_id}: " + ", ".join(_instance(step, instance) for instance in instances)]


def _instance(step: Step, instance: Instance) -> str:
    record = instance.record
    place = f"{record.server_id} slot{'s' if record.more_slots else ''} {', '.join(map(str, record.slots))}"
    if instance.state is not InstanceState.LOADING:
        return f"{record.instance_id} {_DOING[instance.state]} on {place}"
    left_s = max(0.0, instance.placed_s + record.estimate_s - step.now)
    return f"{record.instance_id} loads on {place} from {record.source_tier}, about {left_s:.1f} s to go"


def _waiters(step: Step, model: Model) -> list[str]:
    if not model.waiters:
        return []
    verb = "waits" if len(model.waiters) == 1 else "wait"
    waited_s = max(0.0, step.now - model.oldest_wait_s)
    return [f"{_count(len(model.waiters), 'request')} {verb}, the longest for {waited_s:.1f} s"]


def _reservation(step: Step, model: Model) -> list[str]:
    kept = step.cluster.reservations.get(model.model_id)
    if kept is None:
        return []
    slots = f"slot{'s' if len(kept.slots) > 1 else ''} {', '.join(map(str, kept.slots))} of {kept.server_id}"
    gone = f" when {' and '.join(sorted(kept.waiting_for))} {'has' if len(kept.waiting_for) == 1 else 'have'} left"
    return [f"{slots} {'are' if len(kept.slots) > 1 else 'is'} kept for it{gone if kept.waiting_for else ''}"]


def _outlook(now: DecisionSummary, *, is_wanted: bool) -> str:
    match now.outcome:
        case "placed":
            chosen = next(candidate for candidate in now.candidates if candidate.server_id == now.server_id)
            reason = "it would be" if is_wanted else "nobody waits for it; a request would have it"
            prior = ", a guess from before the first load there" if chosen.is_prior else ""
            return f"{reason} loaded on {now.server_id} from {chosen.source_tier}, cost {chosen.total_s:.2f} s{prior}"
        case "never_fits":
            need, most = _size(now.need_bytes), _size(now.capacity_bytes)
            return f"no server is large enough: it needs {need}, the largest has {most}"
    if now.server_id:
        return f"the policy {now.policy} waits for {now.server_id}, where it would load fastest"
    if not now.candidates:
        return "no server lives that could take it"
    return f"no server can take it now: {_refusals([(c.server_id, c.refusal) for c in now.candidates])}"


def _refusals(refused: Sequence[tuple[str, str]]) -> str:
    named = "; ".join(f"{server_id} is {words}" for server_id, words in refused[:SERVERS_NAMED_MAX])
    left = len(refused) - SERVERS_NAMED_MAX
    return f"{named}; and {left} more" if left > 0 else named


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _size(size_bytes: int) -> str:
    """Decimal units, as disks are sold."""
    if size_bytes < 1_000_000_000:
        return f"{size_bytes / 1e6:.0f} MB"
    return f"{size_bytes / 1e9:.1f} GB"
