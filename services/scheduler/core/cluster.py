"""Owns the scheduler's state in memory: servers, models, instances, jobs, routers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from zlib import crc32

from whimbrel.wire.messages import MigrationState, MigrationStatus
from whimbrel.wire.records import AccuracyRecord, InstanceState, Record, ResumeRecord

from services.scheduler.core import resumes, scaling, sights
from services.scheduler.core.instances import Instance
from services.scheduler.core.kept import KeptDecision
from services.scheduler.core.migration import Migration
from services.scheduler.core.models import Job, Model, Reservation
from services.scheduler.core.overview import Overview
from services.scheduler.core.search import Search
from services.scheduler.core.servers import Router, Server, Slot
from services.scheduler.core.settings import DECISIONS_KEPT_MAX, MIGRATIONS_KEPT_MAX
from services.scheduler.core.views import ServerView, Shape, Snapshot, Task

# Instances that stand for their model: they count as those that it has. One that unloads is soon gone or stays after
# all; one that drains may take long and takes no request, so it doesn't count.
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
        #: Models that want instances though nobody asks for them.
        self.minimums: dict[str, None] = {}
        #: The last decision about each model, and what was learned of resumes and of our estimates.
        self.decisions: dict[str, KeptDecision] = {}
        self.resumes: dict[str, ResumeRecord] = {}
        self.saved_resumes: dict[str, ResumeRecord] = {}
        self.accuracies: dict[str, AccuracyRecord] = {}
        #: Those on their way, and what is told of the last ones that ended, the newest last.
        self.migrations: dict[str, Migration] = {}
        self.ended_migrations: deque[MigrationStatus] = deque(maxlen=MIGRATIONS_KEPT_MAX)
        #: Models with waiters, and how many waiters there are in all.
        self.waiting: dict[str, None] = {}
        self.waiting_requests = 0
        #: Of the repository, when the store had lost what it knew.
        self.search: Search | None = None
        #: Whether a slot may have been released since the deferred models were last tried.
        self.is_released = False
        #: How far in the order of arrival those that wait were tried, when not all were.
        self.tried_until: tuple[float, str] | None = None
        self._draws = 0
        self._shapes: frozenset[Shape] | None = None
        self._overview = Overview()

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
        """The slot whose worker has the instance."""
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
        """The instance owns its slots from now on."""
        record = instance.record
        for number in record.slots:
            slot = self.slot(record.server_id, number, now=now)
            assert slot.owner is None, "a slot has one owner"
            slot.owner = record.instance_id
        self.instances[record.instance_id] = instance
        self.servers[record.server_id].instances[record.instance_id] = None
        self.models[record.model_id].instances[record.instance_id] = None
        self.touch_peers(instance)

    def remove_instance(self, instance: Instance) -> None:
        """The instance is gone; its slots have no owner any more."""
        record = instance.record
        for number in record.slots:
            slot = self.servers[record.server_id].slots[number]
            assert slot.owner == record.instance_id, "only the owner leaves a slot"
            slot.owner = None
        del self.instances[record.instance_id]
        del self.servers[record.server_id].instances[record.instance_id]
        del self.models[record.model_id].instances[record.instance_id]
        self.touch_peers(instance)

    def occupy(self, instance: Instance) -> None:
        """Its worker has it, or may have: until that worker says otherwise, none of its slots is free."""
        record = instance.record
        for number in record.slots:
            slot = self.servers[record.server_id].slots[number]
            slot.occupant = record.instance_id
            slot.held_through = None if number == record.slot else record.slot

    def vacate(self, server_id: str, slot: int, instance_id: str) -> None:
        """The worker of the slot does not have the instance any more."""
        for other in self.servers[server_id].slots.values():
            if other.occupant == instance_id and (other.slot == slot or other.held_through == slot):
                other.occupant = other.held_through = None
        self.touch(server_id)

    def instances_of(self, model: Model) -> list[Instance]:
        return [self.instances[instance_id] for instance_id in model.instances]

    def standing_instances(self, model: Model) -> list[Instance]:
        """Those that load, serve or are asked to unload. Of a migration's two, one counts: the source until it stops,
        and then the destination."""
        found = [self.instances[instance_id] for instance_id in model.instances]
        standing = [instance for instance in found if instance.record.state in STANDING]
        return [i for i in standing if i.arriving is None or self._has_arrived(i.arriving)]

    def _has_arrived(self, migration_id: str) -> bool:
        migration = self.migrations.get(migration_id)
        return migration is not None and migration.state is MigrationState.HANDOVER

    def ready_instance(self, model: Model) -> Instance | None:
        """The one that serves and has the least to do; the oldest of equals."""
        ready = [instance for instance in self.instances_of(model) if instance.is_open]
        return min(ready, key=lambda instance: instance.demand, default=None)

    def demand(self, model: Model) -> int:
        """Requests that wait, and those of instances that stay: a draining one takes no more."""
        return len(model.waiters) + sum(instance.demand for instance in self.standing_instances(model))

    def shortfall(self, model: Model) -> int:
        """How many more instances it should have; negative when it has more than its demand asks for."""
        if not model.is_servable:
            return 0
        standing = self.standing_instances(model)
        demand = len(model.waiters) + sum([instance.demand for instance in standing])
        wanted = scaling.desired(demand, model.record.scaling)
        if wanted > len(standing) and any(i.record.state is InstanceState.READY and not i.demand for i in standing):
            # One that has nothing to do will take what comes next.
            wanted = max(model.record.scaling.min_instances, len(standing))
        return wanted - len(standing)

    def open_job(self, model_id: str) -> Job | None:
        return next((j for j in self.jobs.values() if j.model_id == model_id and j.record.is_open), None)

    def live_servers(self) -> list[Server]:
        """Those whose agent lives, by id."""
        return [self.servers[k] for k in sorted(self.servers) if self.servers[k].is_alive]

    # Reserving.

    def reserve(self, reservation: Reservation) -> None:
        slots = [self.servers[reservation.server_id].slots[slot] for slot in reservation.slots]
        assert all(slot.reserved_for is None for slot in slots), "a slot is reserved once"
        assert reservation.key not in self.reservations, "one waits for one set of slots"
        for slot in slots:
            slot.reserved_for = reservation.key
        self.reservations[reservation.key] = reservation
        self.touch(reservation.server_id)

    def release(self, key: str) -> None:
        """The model, or the migration, does not wait for slots any more; without a reservation nothing happens."""
        reservation = self.reservations.pop(key, None)
        if reservation is not None:
            for slot in reservation.slots:
                self.servers[reservation.server_id].slots[slot].reserved_for = None
            self.touch(reservation.server_id)

    # What placement sees.

    def touch(self, server_id: str) -> None:
        """Something that placement looks at changed on this server, perhaps to a waiting model's good."""
        self._overview.doubt(server_id)
        self.is_released = True

    def doubt(self, server_id: str) -> None:
        """What placement sees of this server changed, though no slot was released: its queues, or its speeds."""
        self._overview.doubt(server_id)

    def touch_peers(self, instance: Instance) -> None:
        """As `touch`; with one fewer, the others of its model may not go any more."""
        for other_id in self.models[instance.record.model_id].instances:
            self.touch(self.instances[other_id].record.server_id)
        self.touch(instance.record.server_id)

    def reshape(self, server_id: str) -> None:
        """How large a server is has changed."""
        self.servers[server_id].reshape()
        self._shapes = None

    def is_idle(self, instance: Instance) -> bool:
        """Whether it could be unloaded at once, as far as we know; its worker has the last word."""
        return sights.is_idle(instance, self.slot_of(instance))

    def is_minimum(self, instance: Instance) -> bool:
        """Whether its model would have fewer instances than it should always have, if it went."""
        if instance.record.model_id not in self.minimums:
            return False
        model = self.models[instance.record.model_id]
        return model.record.scaling.min_instances >= len(self.standing_instances(model))

    def resume_record(self, instance: Instance) -> ResumeRecord:
        """What is known of computing requests of its model again on such a device as it is on, be it only a prior."""
        model_id, heartbeat = instance.record.model_id, self.slot_of(instance).heartbeat
        device = resumes.kind_of(resumes.PRIOR_KIND if heartbeat is None else heartbeat.device)
        known = self.resumes.get(f"{model_id}@{device}")
        if known is None:
            parameter_count = self.models[model_id].record.parameter_count
            known = resumes.prior(model_id, device, parameter_count=parameter_count)
        return known

    def learn_resume(self, record: ResumeRecord) -> None:
        """What is known of computing a model's requests again from now on."""
        self.resumes[record.key()] = record
        for instance_id in self.models[record.model_id].instances:
            # What moving any of them would take is another estimate now.
            self.doubt(self.instances[instance_id].record.server_id)

    def snapshot(self, now: float) -> Snapshot:
        """The live servers; views of servers that nothing happened to are used again."""
        views = self._overview.views(self)
        nearness = self._overview.nearness
        if now < self.settled_s:
            return Snapshot(servers=views, shapes=None, nearness=nearness)
        if self._shapes is None:
            shapes = (server.shape() for server in self.servers.values() if server.capacity_bytes > 0)
            self._shapes = frozenset(shapes)
        return Snapshot(servers=views, shapes=self._shapes or None, nearness=nearness)

    def view(self, server_id: str) -> ServerView | None:
        """What placement sees of one server; None when it does not live."""
        return self._overview.view(self, server_id)

    def has_open_slot(self) -> bool:
        """Whether any server has a slot that is free or could be freed at once."""
        return self._overview.has_open(self)

    def draw(self, model_id: str) -> int:
        """A number that looks drawn, and is the same for the same history."""
        self._draws += 1
        return crc32(f"{model_id}/{self._draws}".encode())

    def keep(self, model_id: str, decision: KeptDecision) -> None:
        """For those who ask why; the oldest are forgotten."""
        self.decisions.pop(model_id, None)
        self.decisions[model_id] = decision
        if len(self.decisions) > DECISIONS_KEPT_MAX:
            del self.decisions[next(iter(self.decisions))]

    def task_of(self, model: Model) -> Task:
        """What loading the model takes."""
        return sights.task_of(model)

    # Durability.

    def durable(self) -> dict[tuple[str, str], Record]:
        """The durable part of the state, by table and key: what replaying all records must lead to."""
        records: list[Record] = [model.record for model in self.models.values()]
        records += [job.record for job in self.jobs.values()]
        records += [instance.record for instance in self.instances.values()]
        records += [migration.record for migration in self.migrations.values()]
        records += self.saved_resumes.values()
        records += self.accuracies.values()
        for server in self.servers.values():
            records += server.bandwidths.values()
            if server.record is not None:
                records.append(server.record)
        return {(record.table, record.key()): record for record in records}
