"""Owns how the state in memory is made from the durable records of an earlier life (P2)."""

from __future__ import annotations

from collections.abc import Iterable

from whimbrel.wire.messages import MigrationState, ModelState
from whimbrel.wire.records import (
    AccuracyRecord,
    BandwidthRecord,
    InstanceRecord,
    InstanceState,
    JobRecord,
    MigrationRecord,
    ModelRecord,
    Record,
    ResumeRecord,
    ServerRecord,
)

from services.scheduler.core.cluster import Cluster
from services.scheduler.core.instances import Instance
from services.scheduler.core.migration import Migration, MigrationEvent
from services.scheduler.core.models import Job, Model


def rebuild(records: Iterable[Record], *, now: float, lost_after_s: float) -> Cluster:
    """The cluster that these records describe (P2). Whoever they name is presumed alive until it has had its time to
    be heard; instances that load are commanded again once their agent is heard."""
    cluster = Cluster(settled_s=now + lost_after_s)
    instances: list[InstanceRecord] = []
    migrations: list[MigrationRecord] = []
    for record in records:
        match record:
            case ModelRecord():
                cluster.models[record.model_id] = Model(record=record)
                if record.state is ModelState.DELETING:
                    cluster.deleting[record.model_id] = None
                if record.scaling.min_instances and cluster.models[record.model_id].is_servable:
                    cluster.minimums[record.model_id] = None
            case JobRecord():
                cluster.jobs[record.key()] = Job(record=record, total_bytes=record.job.total_bytes)
            case InstanceRecord():
                instances.append(record)
            case ServerRecord():
                cluster.server(record.server_id, now=now).record = record
            case ResumeRecord():
                cluster.resumes[record.key()] = cluster.saved_resumes[record.key()] = record
            case MigrationRecord():
                migrations.append(record)
            case AccuracyRecord():
                cluster.accuracies[record.key()] = record
            case _:
                assert isinstance(record, BandwidthRecord), "no other record has a table"
                cluster.server(record.server_id, now=now).bandwidths[record.tier] = record
    for record in sorted(instances, key=InstanceRecord.key):
        _add_known_instance(cluster, record, now)
    for moved in sorted(migrations, key=MigrationRecord.key):
        _add_known_migration(cluster, moved, now)
    for job in cluster.jobs.values():
        if job.record.is_open and job.record.server_id:
            cluster.server(job.record.server_id, now=now).is_alive = True
            cluster.touch(job.record.server_id)
    return cluster


def _add_known_migration(cluster: Cluster, record: MigrationRecord, now: float) -> None:
    """It goes on where it was: the source is asked what it said last."""
    migration = Migration(record=record, started_s=now, progress_s=now)
    migration.enter(MigrationEvent.LEADER_CHANGED)
    cluster.migrations[record.migration_id] = migration
    source = cluster.instances.get(record.source_instance_id)
    if source is not None:
        source.leaving, source.is_closed = record.migration_id, record.state is not MigrationState.PREPARING
    destination = cluster.instances.get(record.destination_instance_id)
    if destination is not None:
        destination.arriving = record.migration_id


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
