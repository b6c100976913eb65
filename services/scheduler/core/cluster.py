"""Owns the scheduler's state in memory: servers, models, instances, jobs, routers, and its rebuild from records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from whimbrel.wire.messages import ModelState, Tier
from whimbrel.wire.records import (
    BandwidthRecord,
    InstanceRecord,
    InstanceState,
    JobRecord,
    ModelRecord,
    Record,
)

from services.scheduler.core.estimates import estimate_load
from services.scheduler.core.instances import Instance
from services.scheduler.core.models import Job, Model, Reservation
from services.scheduler.core.placement import IdleInstance, ServerView, Snapshot
from services.scheduler.core.servers import Router, Server, Slot

# Instances that stand for their model: while one is there, the model gets no other (one instance per model). One that
# unloads is soon gone or stays after all; one that drains may take long and takes no request, so it doesn't count.
STANDING = (InstanceState.LOADING, InstanceState.READY, InstanceState.UNLOADING)


class Cluster:
    """All of it. `settled_s` is when every server that lives must have been heard."""

    def __init__(self, *, settled_s: float) -> None:
        self.settled_s = settled_s
        self.servers: dict[str, Server] = {}
        self.models: dict[str, Model] = {}
        self.instances: dict[str, Instance] = {}
        self.jobs: dict[str, Job] = {}
        self.routers: dict[str, Router] = {}
        self.reservations: dict[str, Reservation] = {}
        self.deleting: dict[str, None] = {}
        #: Models with waiters, and how many waiters there are in all.
        self.waiting: dict[str, None] = {}
        self.waiting_requests = 0
        #: Whether a slot may have been released since the deferred models were last tried.
        self.is_released = False

    # Looking up and adding.

    def server(self, server_id: str, *, now: float) -> Server:
        """The server, made known if it was not."""
        if server_id not in self.servers:
            self.servers[server_id] = Server(server_id=server_id, seen_s=now)
        return self.servers[server_id]

    def slot(self, server_id: str, slot: int, *, now: float) -> Slot:
        """The slot, made known if it was not."""
        slots = self.server(server_id, now=now).slots
        if slot not in slots:
            slots[slot] = Slot(server_id=server_id, slot=slot, seen_s=now)
        return slots[slot]

    def slot_of(self, instance: Instance) -> Slot:
        return self.servers[instance.record.server_id].slots[instance.record.slot]

    def hear_router(self, router_id: str, *, now: float) -> Router:
        """The router, made known if it was not: whoever speaks lives."""
        if router_id not in self.routers:
            self.routers[router_id] = Router(router_id=router_id, seen_s=now)
        self.routers[router_id].seen_s = now
        return self.routers[router_id]

    def slots(self) -> Iterator[Slot]:
        for server in self.servers.values():
            yield from server.slots.values()

    def add_instance(self, instance: Instance, *, now: float) -> None:
        """The instance owns its slot from now on."""
        record = instance.record
        slot = self.slot(record.server_id, record.slot, now=now)
        assert slot.owner is None, "a slot has one owner"
        slot.owner = record.instance_id
        self.instances[record.instance_id] = instance
        self.servers[record.server_id].instances[record.instance_id] = None
        self.models[record.model_id].instances[record.instance_id] = None
        self.touch(record.server_id)

    def remove_instance(self, instance: Instance) -> None:
        """The instance is gone; its slot has no owner any more."""
        record = instance.record
        slot = self.slot_of(instance)
        assert slot.owner == record.instance_id, "only the owner leaves a slot"
        slot.owner = None
        del self.instances[record.instance_id]
        del self.servers[record.server_id].instances[record.instance_id]
        del self.models[record.model_id].instances[record.instance_id]
        self.touch(record.server_id)

    def instances_of(self, model: Model) -> list[Instance]:
        return [self.instances[instance_id] for instance_id in model.instances]

    def standing_instance(self, model: Model) -> Instance | None:
        """The one instance of the model that loads, serves or is asked to unload."""
        return next((i for i in self.instances_of(model) if i.state in STANDING), None)

    def ready_instance(self, model: Model) -> Instance | None:
        return next((i for i in self.instances_of(model) if i.state is InstanceState.READY), None)

    def open_job(self, model_id: str) -> Job | None:
        return next((j for j in self.jobs.values() if j.model_id == model_id and j.record.is_open), None)

    def live_servers(self) -> list[Server]:
        """Those whose agent lives, by id."""
        return [self.servers[k] for k in sorted(self.servers) if self.servers[k].is_alive]

    # Reserving.

    def reserve(self, reservation: Reservation) -> None:
        slot = self.servers[reservation.server_id].slots[reservation.slot]
        assert slot.reserved_for is None, "a slot is reserved once"
        assert reservation.model_id not in self.reservations, "a model waits for one slot"
        slot.reserved_for = reservation.model_id
        self.reservations[reservation.model_id] = reservation
        self.touch(reservation.server_id)

    def release(self, model_id: str) -> None:
        """The model does not wait for its slot any more; without a reservation nothing happens."""
        reservation = self.reservations.pop(model_id, None)
        if reservation is not None:
            self.servers[reservation.server_id].slots[reservation.slot].reserved_for = None
            self.touch(reservation.server_id)

    # What placement sees.

    def touch(self, server_id: str) -> None:
        """Something that placement looks at changed on this server, perhaps to a waiting model's good."""
        self.servers[server_id].view = None
        self.is_released = True

    def is_idle(self, instance: Instance) -> bool:
        """Whether it could be unloaded at once, as far as we know; its worker has the last word."""
        slot = self.slot_of(instance)
        return (
            instance.state is InstanceState.READY
            and slot.is_alive
            and instance.requests == 0
            and not instance.promised
            and instance.held_until_s is None
            and slot.active_requests(instance.instance_id) == 0
        )

    def snapshot(self, now: float) -> Snapshot:
        """The live servers; views of servers that nothing happened to are used again."""
        views = tuple([server.view or self._look(server) for server in self.servers.values() if server.is_alive])
        capacity_bytes = max((server.capacity_bytes for server in self.servers.values()), default=0)
        is_known = capacity_bytes > 0 and now >= self.settled_s
        return Snapshot(servers=views, capacity_bytes_max=capacity_bytes if is_known else None)

    def has_open_slot(self) -> bool:
        """Whether any server has a slot that is free or could be freed at once."""
        views = (server.view or self._look(server) for server in self.servers.values() if server.is_alive)
        return any(view.is_open for view in views)

    def _look(self, server: Server) -> ServerView:
        speeds = server.speeds()
        instances = [self.instances[instance_id] for instance_id in server.instances]
        idle = [i for i in instances if self.is_idle(i) and self.slot_of(i).reserved_for is None]
        idle.sort(key=lambda instance: (instance.idle_since_s, instance.instance_id))
        server.view = ServerView(
            server_id=server.server_id,
            capacity_bytes=server.capacity_bytes,
            used_bytes=sum(instance.size_bytes for instance in instances),
            free_slots=tuple(k for k in sorted(server.slots) if server.slots[k].is_free),
            idle=tuple(
                IdleInstance(
                    instance_id=instance.instance_id,
                    slot=instance.record.slot,
                    size_bytes=instance.size_bytes,
                    idle_since_s=instance.idle_since_s,
                    reload_s=estimate_load(
                        queue_s=0.0, size_bytes=instance.size_bytes, speed=speeds[Tier.DRAM]
                    ).total_s,
                )
                for instance in idle
            ),
            waits=server.queues.waits(),
            residency=server.residency.entries,
            speeds=speeds,
        )
        return server.view

    # Durability.

    def durable(self) -> dict[tuple[str, str], Record]:
        """The durable part of the state, by table and key: what replaying all records must lead to."""
        records: list[Record] = [model.record for model in self.models.values()]
        records += [job.record for job in self.jobs.values()]
        records += [instance.record for instance in self.instances.values()]
        for server in self.servers.values():
            records += server.bandwidths.values()
        return {(record.table, record.key()): record for record in records}


def rebuild(records: Iterable[Record], *, now: float, lost_after_s: float) -> Cluster:
    """The cluster that these records describe (P2). Whoever they name is presumed alive until it has had its time to
    be heard; instances that load are commanded again once their agent is heard."""
    cluster = Cluster(settled_s=now + lost_after_s)
    instances: list[InstanceRecord] = []
    for record in records:
        match record:
            case ModelRecord():
                cluster.models[record.model_id] = Model(record=record)
                if record.state is ModelState.DELETING:
                    cluster.deleting[record.model_id] = None
            case JobRecord():
                cluster.jobs[record.key()] = Job(record=record, total_bytes=record.job.total_bytes)
            case InstanceRecord():
                instances.append(record)
            case _:
                assert isinstance(record, BandwidthRecord), "no other record has a table"
                cluster.server(record.server_id, now=now).bandwidths[record.tier] = record
    for record in sorted(instances, key=InstanceRecord.key):
        _add_known_instance(cluster, record, now)
    for job in cluster.jobs.values():
        if job.record.is_open and job.record.server_id:
            cluster.server(job.record.server_id, now=now).is_alive = True
    return cluster


def _add_known_instance(cluster: Cluster, record: InstanceRecord, now: float) -> None:
    model = cluster.models.get(record.model_id)
    assert model is not None, "models outlive their instances"
    instance = Instance(
        record=record,
        size_bytes=model.record.size_bytes,
        placed_s=now,
        is_rebuilt=True,
        progress_s=now,
        ready_s=now,
        idle_since_s=now,
    )
    server = cluster.server(record.server_id, now=now)
    server.is_alive = True
    cluster.add_instance(instance, now=now)
    if record.state is InstanceState.LOADING:
        server.queues.enqueue(record.source_tier, record.task_id, record.estimate_s, now=now)
    else:
        cluster.slot_of(instance).occupant = record.instance_id
