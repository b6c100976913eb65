"""Owns what must hold after every step of a simulated cluster, and when everything has come to rest."""

from __future__ import annotations

from whimbrel.wire.messages import WorkerState
from whimbrel.wire.records import InstanceRecord, InstanceState

from services.gpu_worker.core.instance import State
from services.scheduler.core import sights
from services.scheduler.core.cluster import Cluster
from services.scheduler.core.ready import Ready
from tests.simulation.cluster import SimCluster
from tests.simulation.schedulers import SimScheduler
from tests.simulation.store import at_once

#: The store itself is read back so seldom, because decoding all of it takes as long as a step.
STORE_EVERY = 200
#: Looking at every server anew takes longer than a step as well.
VIEWS_EVERY = 5
#: A scheduler that stands still, or waits for the store, is late by some seconds.
PROMISE_LATE_S_MAX = 8.0


def check_step(sim: SimCluster, scheduler: SimScheduler, ready: Ready) -> None:
    """After a step of the leader became durable."""
    assert scheduler.controller is not None
    cluster = scheduler.controller.cluster
    assert cluster.durable() == sim.records.mirror, "records replay to the same state"
    if scheduler.steps % STORE_EVERY == 0 and sim.records.data.is_up:
        stored = {(record.table, record.key()): record for record in at_once(scheduler.read())}
        assert stored == sim.records.mirror, "the store holds what was appended"
    _check_slots(cluster)
    _check_waiters(cluster)
    _check_reservations(cluster)
    _check_migrations(cluster)
    _check_workers(sim)
    for instance in cluster.instances.values():
        overdue = [k for k, until_s in instance.promised.items() if until_s < sim.clock.now - PROMISE_LATE_S_MAX]
        assert not overdue, f"{instance.instance_id} is held for {overdue}"
    _check_loads(cluster, ready)
    if scheduler.steps % VIEWS_EVERY == 0:
        check_views(cluster, sim.clock.now)
    for outgoing in ready.messages:
        epoch = getattr(outgoing.message, "scheduler_epoch", scheduler.epoch)
        assert epoch == scheduler.epoch, "a leader speaks in its own name"


def _check_slots(cluster: Cluster) -> None:
    owners: dict[tuple[str, int], str] = {}
    for instance in cluster.instances.values():
        record = instance.record
        assert record.state is not InstanceState.GONE, "what is gone is forgotten"
        for slot in record.slots:
            other = owners.setdefault((record.server_id, slot), record.instance_id)
            assert other == record.instance_id, f"slot {record.server_id}/{slot} has two owners"
            assert cluster.servers[record.server_id].slots[slot].owner == record.instance_id, "owners are known"
    owned = [slot for slot in cluster.slots() if slot.owner is not None]
    assert len(owned) == len(owners), "a slot is owned by nobody that exists"


def _check_loads(cluster: Cluster, ready: Ready) -> None:
    """Nothing is loaded that its model may not have, nor on a server that was taken out."""
    for record in ready.records:
        if isinstance(record, InstanceRecord) and record.state is InstanceState.LOADING:
            model = cluster.models[record.model_id]
            scaling = model.record.scaling
            count = len(cluster.standing_instances(model))
            loaded = cluster.instances.get(record.instance_id)
            # The destination of a migration takes the place of its source.
            is_more = loaded is None or loaded.arriving is None
            is_allowed = count <= max(scaling.min_instances, scaling.max_instances)
            assert is_allowed or not is_more, f"{count} instances of {record.model_id}"
            known = cluster.servers[record.server_id].record
            assert known is None or not known.is_cordoned, f"{record.server_id} was taken out"


def _check_waiters(cluster: Cluster) -> None:
    assert cluster.waiting_requests == sum(len(model.waiters) for model in cluster.models.values())
    assert set(cluster.waiting) == {model.model_id for model in cluster.models.values() if model.waiters}
    for model_id in cluster.waiting:
        model = cluster.models[model_id]
        oldest_s = min(waiter.since_s for waiter in model.waiters.values())
        assert model.oldest_wait_s == oldest_s, "the oldest waiter is known"
        ready = [cluster.instances[k] for k in model.instances if cluster.instances[k].is_open]
        assert not ready, f"{model_id} is waited for, and ready"


def _check_migrations(cluster: Cluster) -> None:
    """Who is on the move is known on both ends, and nobody is marked for a migration that is over."""
    for instance in cluster.instances.values():
        for migration_id in (instance.leaving, instance.arriving):
            assert migration_id is None or migration_id in cluster.migrations, f"{migration_id} is over"
        is_serving = instance.state is InstanceState.READY
        assert not (is_serving and instance.is_closed and instance.leaving is None), "an instance is closed for nothing"
    for migration in cluster.migrations.values():
        record = migration.record
        assert not migration.is_over, "what is over is forgotten"
        source = cluster.instances.get(record.source_instance_id)
        destination = cluster.instances.get(record.destination_instance_id)
        assert source is None or source.leaving == record.migration_id, "a source leaves in one migration"
        assert destination is None or destination.arriving == record.migration_id, "a destination has one source"


def _check_reservations(cluster: Cluster) -> None:
    reserved = {(s.server_id, s.slot): s.reserved_for for s in cluster.slots() if s.reserved_for is not None}
    kept: dict[tuple[str, int], str] = {}
    for model_id, reservation in cluster.reservations.items():
        for slot in reservation.slots:
            kept[reservation.server_id, slot] = model_id
        assert all(k in cluster.instances for k in reservation.waiting_for), "a slot is kept until what is gone goes"
    assert kept == reserved, "a slot is kept for nobody"


def _check_workers(sim: SimCluster) -> None:
    """By what the workers hold: an instance is on one worker, and requests run where an instance serves."""
    holders: dict[str, tuple[str, int]] = {}
    for name, worker in sim.workers.items():
        if worker.instance is None:
            assert worker.inferences.active == 0, f"{name} runs requests without an instance"
            continue
        other = holders.setdefault(worker.instance.instance_id, name)
        assert other == name, f"{worker.instance.instance_id} is on {other} and on {name}"
        if worker.inferences.active:
            assert worker.state in (State.READY, State.DRAINING), f"{name} runs requests while {worker.state}"


def check_rest(sim: SimCluster) -> None:
    """Everything is back to zero once nobody asks for anything, and models need no instance."""
    leader = sim.leader
    assert leader is not None, "somebody leads"
    assert leader.controller is not None
    cluster = leader.controller.cluster
    assert cluster.durable() == sim.records.mirror
    assert not [record for record in sim.records.mirror.values() if isinstance(record, InstanceRecord)]
    assert cluster.waiting_requests == 0
    assert not cluster.reservations
    assert not cluster.instances
    assert len(cluster.routers) == len(sim.routers)
    for server in cluster.servers.values():
        assert len(server.queues) == 0, f"tasks stay queued on {server.server_id}"
    for slot in cluster.slots():
        assert slot.occupant is None, f"{slot.server_id}/{slot.slot} has {slot.occupant}"
        assert slot.owner is None, f"{slot.server_id}/{slot.slot} is owned by {slot.owner}"
    for worker in sim.workers.values():
        assert worker.heartbeat().state is WorkerState.EMPTY
        assert worker.inferences.active == 0
        assert not worker.holding.leases, "leases are given back"
    for agent in sim.agents.values():
        assert not len(agent.loads), "loads end"
        assert not agent.lent, "leases end"
        agent.residency.check()
        assert all(not copy.is_held for copy in agent.residency.dram_copies()), "nobody holds a copy"
        assert agent.residency.used_chunks() + len(agent.free_chunks) == agent.residency.chunk_count
    for router in sim.routers.values():
        assert not router.streams
        assert not router.routes.activity(), "nothing is counted as running"
        assert len(router.routes) == 0, f"{router.router_id} still knows routes"


def check_views(cluster: Cluster, now: float) -> None:
    """Placement sees what is: no change of a server was forgotten to be told."""
    seen = {view.server_id: view for view in cluster.snapshot(now).servers}
    fresh = {server.server_id: sights.look(cluster, server) for server in cluster.live_servers()}
    assert seen.keys() == fresh.keys(), "other servers live than placement thinks"
    stale = {
        f"{server_id}.{name}": (getattr(seen[server_id], name), getattr(view, name))
        for server_id, view in fresh.items()
        for name in view.__struct_fields__
        if getattr(seen[server_id], name) != getattr(view, name)
    }
    assert not stale, f"out of date, and what it is: {stale}"
