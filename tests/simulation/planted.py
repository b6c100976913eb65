"""Owns the planted bugs: real slips of the cores, one at a time, each of which the simulation has to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from whimbrel.chassis.memory_store import InMemoryStore
from whimbrel.wire.codec import unpack_tokens
from whimbrel.wire.records import InstanceState

from services.gpu_worker.core.instance import Instance as WorkerInstance
from services.router.core.progress import Progress, Verdict
from services.router.core.routes import RouteTable
from services.scheduler.core import counts, deletion, heartbeats, rebuilding, scaling, timeouts, waiting
from services.scheduler.core.cluster import Cluster
from services.scheduler.core.instances import Running
from services.scheduler.core.servers import Server, Slot
from services.scheduler.core.step import Step
from services.storage_agent.core.residency import Residency


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """`owner.name` is replaced by what `make` makes of it."""

    what: str
    owner: Any
    name: str
    make: Callable[[Any], Any]


def _never(result: Any = None) -> Callable[[Any], Any]:
    """The original is not called."""
    return lambda original: lambda *args, **kwargs: result


def _repeated_tokens_count(original: Any) -> Any:
    def accept(self: Progress, entry: Any, now: float) -> Verdict:
        if entry.epoch == self.epoch and self.finish is None and entry.position < self.position:
            self.tokens.extend(unpack_tokens(entry.tokens))
            return Verdict.ACCEPTED
        return original(self, entry, now)  # type: ignore[no-any-return]

    return accept


def _gaps_are_skipped(original: Any) -> Any:
    def accept(self: Progress, entry: Any, now: float) -> Verdict:
        if entry.epoch == self.epoch and entry.position > self.position:
            self.tokens.extend(unpack_tokens(entry.tokens))
            return Verdict.ACCEPTED
        return original(self, entry, now)  # type: ignore[no-any-return]

    return accept


def _waiters_are_not_counted_down(original: Any) -> Any:
    def remove_waiter(step: Any, model: Any, request_id: str) -> None:
        known = step.cluster.waiting_requests
        original(step, model, request_id)
        step.cluster.waiting_requests = known

    return remove_waiter


def _reservations_stay_on_slots(original: Any) -> Any:
    return lambda self, model_id: self.reservations.pop(model_id, None) and None


def _unloading_ones_are_forgotten(original: Any) -> Any:
    def add(cluster: Any, record: Any, now: float) -> None:
        if record.state is not InstanceState.UNLOADING:
            original(cluster, record, now)

    return add


def _one_more_than_asked_for(original: Any) -> Any:
    return lambda self, model: original(self, model) + 1


def _busy_ones_count_as_idle(original: Any) -> Any:
    return lambda self, now, *, is_idle, may_drain: original(self, now, is_idle=True, may_drain=may_drain)


def _owned_ones_are_free(original: Any) -> Any:
    return property(lambda slot: slot.is_alive and slot.heartbeat is not None and slot.occupant is None)


def _is_false(original: Any) -> Any:
    return property(lambda self: False)


PLANTED = (
    Planted(what="records of what is gone stay", owner=Step, name="forget", make=_never()),
    Planted(what="an old leader writes", owner=InMemoryStore, name="_check", make=_never()),
    Planted(what="repeated tokens count again", owner=Progress, name="accept", make=_repeated_tokens_count),
    Planted(what="missing tokens are skipped", owner=Progress, name="accept", make=_gaps_are_skipped),
    Planted(what="waiters stay counted", owner=waiting, name="remove_waiter", make=_waiters_are_not_counted_down),
    Planted(what="reservations stay", owner=Cluster, name="release", make=_reservations_stay_on_slots),
    Planted(what="nobody is drained for the starving", owner=counts, name="_drain_for_starving", make=_never()),
    Planted(what="keep-alive times don't end", owner=scaling, name="expired", make=_never([])),
    Planted(what="promises don't end", owner=timeouts, name="_end_promises", make=_never()),
    Planted(what="routers' counts correct nothing", owner=Running, name="correct", make=_never()),
    Planted(what="strays stay", owner=heartbeats, name="_unload_stray", make=_never()),
    Planted(
        what="a new life forgets what unloads",
        owner=rebuilding,
        name="_add_known_instance",
        make=_unloading_ones_are_forgotten,
    ),
    Planted(what="models get one too many", owner=Cluster, name="shortfall", make=_one_more_than_asked_for),
    Planted(what="owned slots are free", owner=Slot, name="is_free", make=_owned_ones_are_free),
    Planted(what="cordons are ignored", owner=Server, name="is_cordoned", make=_is_false),
    Planted(what="removals aren't heard", owner=deletion, name="_remove", make=_never()),
    Planted(what="workers unload while busy", owner=WorkerInstance, name="unload", make=_busy_ones_count_as_idle),
    Planted(what="routers don't count down", owner=RouteTable, name="release", make=_never()),
    Planted(what="copies stay held", owner=Residency, name="let_go", make=_never(())),
)
