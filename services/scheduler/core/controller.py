"""Owns the step: events in, `Ready` out. The only entrance to the scheduler's decisions, and all of them are pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import ProtocolError, WhimbrelError
from whimbrel.wire.messages import (
    AgentHeartbeat,
    CancelJob,
    CancelPlacement,
    CordonServer,
    DeleteModel,
    DeployModel,
    ExplainModel,
    GetCluster,
    GetJob,
    GetMigrations,
    GetModels,
    GetRoutes,
    ImportEnded,
    ImportFinished,
    ImportProgressed,
    InferenceFinished,
    InferenceStarted,
    InstanceBecameReady,
    InstanceEnded,
    LoadEnded,
    LoadFinished,
    LoadProgressed,
    Message,
    MigrateModel,
    MigrationEnded,
    ModelRemoved,
    PlaceModel,
    PrefetchEnded,
    RepositoryModelFound,
    RepositoryReported,
    RoundCompleted,
    RouterHeartbeat,
    ScaleModel,
    SourceStopped,
    UncordonServer,
    UnloadRefused,
    WorkerExited,
    WorkerHeartbeat,
)
from whimbrel.wire.records import Record

from services.scheduler.core import (
    deletion,
    explain,
    heartbeats,
    imports,
    loading,
    migration_news,
    migrations,
    moving,
    operations,
    queries,
    restore,
    routers,
    timeouts,
    waiting,
)
from services.scheduler.core.cluster import Cluster
from services.scheduler.core.ready import Arrived, Event, Ready, Tick
from services.scheduler.core.rebuilding import rebuild
from services.scheduler.core.settings import PAUSE_S, Settings
from services.scheduler.core.step import Step

M = TypeVar("M", bound=Message)
Handler = Callable[[Step, Message, str | None], None]


def _handler(kind: type[M], handle: Callable[[Step, M, str | None], None]) -> tuple[type[Message], Handler]:
    def checked(step: Step, message: Message, reply_to: str | None) -> None:
        assert isinstance(message, kind)
        handle(step, message, reply_to)

    return kind, checked


HANDLERS: dict[type[Message], Handler] = dict(
    (
        _handler(DeployModel, imports.on_deploy_model),
        _handler(CancelJob, imports.on_cancel_job),
        _handler(ImportProgressed, imports.on_import_progressed),
        _handler(ImportFinished, imports.on_import_finished),
        _handler(ImportEnded, imports.on_import_ended),
        _handler(DeleteModel, deletion.on_delete_model),
        _handler(ModelRemoved, deletion.on_model_removed),
        _handler(PlaceModel, waiting.on_place_model),
        _handler(CancelPlacement, waiting.on_cancel_placement),
        _handler(LoadProgressed, loading.on_load_progressed),
        _handler(LoadFinished, loading.on_load_finished),
        _handler(LoadEnded, loading.on_load_ended),
        _handler(InstanceBecameReady, loading.on_instance_became_ready),
        _handler(InstanceEnded, loading.on_instance_ended),
        _handler(UnloadRefused, loading.on_unload_refused),
        _handler(RoundCompleted, migration_news.on_round_completed),
        _handler(SourceStopped, migration_news.on_source_stopped),
        _handler(MigrationEnded, migration_news.on_migration_ended),
        _handler(InferenceStarted, routers.on_inference_started),
        _handler(InferenceFinished, routers.on_inference_finished),
        _handler(AgentHeartbeat, heartbeats.on_agent_heartbeat),
        _handler(WorkerHeartbeat, heartbeats.on_worker_heartbeat),
        _handler(WorkerExited, heartbeats.on_worker_exited),
        _handler(PrefetchEnded, loading.on_prefetch_ended),
        _handler(RouterHeartbeat, routers.on_router_heartbeat),
        _handler(RepositoryModelFound, restore.on_repository_model_found),
        _handler(RepositoryReported, restore.on_repository_reported),
        _handler(ScaleModel, operations.on_scale_model),
        _handler(MigrateModel, moving.on_migrate_model),
        _handler(GetMigrations, moving.on_get_migrations),
        _handler(CordonServer, operations.on_cordon_server),
        _handler(UncordonServer, operations.on_uncordon_server),
        _handler(ExplainModel, explain.on_explain_model),
        _handler(GetModels, queries.on_get_models),
        _handler(GetJob, queries.on_get_job),
        _handler(GetRoutes, queries.on_get_routes),
        _handler(GetCluster, queries.on_get_cluster),
    )
)


class Controller:
    """The scheduler's brain. `records` is what the store holds; `epoch` is that of this life (fencing). `is_emptied`
    says that the store held nothing at all: what can be found again is asked for.

    The same events at the same times with the same ids lead to the same state and output, always.
    """

    def __init__(
        self,
        *,
        records: Iterable[Record],
        settings: Settings,
        epoch: int,
        now: float,
        new_id: Callable[[str], str],
        scheduler_id: str = "",
        is_emptied: bool = False,
    ) -> None:
        self.cluster: Cluster = rebuild(records, now=now, lost_after_s=settings.lost_after_s)
        self._settings = settings
        self._epoch = epoch
        self._scheduler_id = scheduler_id
        self._is_emptied = is_emptied
        self._new_id = new_id
        self._last_step_s = now

    def step(self, events: Sequence[Event], *, now: float, wall_s: float) -> Ready:
        """Take the events in their order, then place whom can be placed.

        `now` is monotonic and never goes back; `wall_s` is for what people read. The caller appends `records`
        durably before it sends `messages`.
        """
        assert now >= self._last_step_s, "time does not go back"
        step = Step(
            now=now,
            wall_s=wall_s,
            epoch=self._epoch,
            scheduler_id=self._scheduler_id,
            cluster=self.cluster,
            settings=self._settings,
            new_id=self._new_id,
        )
        if now - self._last_step_s > PAUSE_S:
            timeouts.pardon(step)
        self._last_step_s = now
        if self._is_emptied:
            self._is_emptied = False
            restore.begin(step)
        for event in events:
            match event:
                case Arrived(message=message, reply_to=reply_to):
                    _hear(step, message, reply_to)
                case _:
                    assert isinstance(event, Tick)
                    if event.was_away:
                        timeouts.pardon(step)
                    timeouts.on_tick(step)
        migrations.settle(step)
        deletion.advance(step)
        waiting.settle(step)
        restore.advance(step)
        return step.ready()


def _hear(step: Step, message: Message, reply_to: str | None) -> None:
    """Operating errors are the answer to whoever asked; they change nothing."""
    handle = HANDLERS.get(type(message))
    try:
        if handle is None:
            reason = f"{type(message).__name__} is not for the scheduler"
            raise ProtocolError(size_bytes=0, reason=reason)
        handle(step, message, reply_to)
    except WhimbrelError as error:
        step.answer(reply_to, error_reply(error))
