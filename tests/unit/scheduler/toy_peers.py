"""Toy agents, workers, routers and requests that keep the contract of the wire, for a `ToyCluster`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Cancelled, Unavailable
from whimbrel.wire.messages import (
    AgentHeartbeat,
    CancelImport,
    CancelLoad,
    CancelPlacement,
    ErrorReply,
    ImportEnded,
    ImportFinished,
    ImportModel,
    InferenceFinished,
    InferenceStarted,
    InstanceActivity,
    InstanceBecameReady,
    InstanceEnded,
    LoadEnded,
    LoadFinished,
    LoadModel,
    LoadProgressed,
    Message,
    ModelRemoved,
    PlacementFailed,
    PlaceModel,
    PlaceModelReply,
    PrepareInstance,
    RemoveModel,
    ResidentModel,
    Route,
    RouteAdded,
    RouteRemoved,
    RouterHeartbeat,
    RouteState,
    Tier,
    TierReport,
    UnloadInstance,
    UnloadRefused,
    WaitStage,
    WorkerHeartbeat,
    WorkerState,
)

from tests.unit.scheduler.toy_migrating import ToySource

if TYPE_CHECKING:
    from tests.unit.scheduler.toys import ToyCluster

GB = 10**9
#: What the toys really do, seconds per byte; the scheduler has to find out.
TOY_SECONDS_PER_BYTE = {Tier.REMOTE: 1 / 0.2e9, Tier.SSD: 1 / 2e9, Tier.DRAM: 0.0}
TOY_OVERHEAD_S = 0.02


@dataclass(eq=False)
class ToyAgent:
    cluster: ToyCluster
    server_id: str
    epoch: int
    pool_bytes: int
    tiers: dict[tuple[str, str], tuple[Tier, int]] = field(default_factory=dict)
    tasks: list[LoadModel] = field(default_factory=list)
    attached: dict[str, None] = field(default_factory=dict)
    jobs: list[ImportModel] = field(default_factory=list)
    finished: dict[str, ImportFinished] = field(default_factory=dict)
    errors: list[ErrorReply] = field(default_factory=list)
    revoked: set[str] = field(default_factory=set)
    import_s: float = 1.0
    is_alive: bool = True
    is_stopping: bool = False
    told: dict[tuple[str, str], tuple[Tier, int]] = field(default_factory=dict)
    version: int = 0

    def on(self, message: Message) -> None:
        match message:
            case LoadModel():
                known = [task.task_id for task in self.tasks]
                if message.task_id not in known and message.instance_id not in self.attached:
                    self.tasks.append(message)
                    if len(self.tasks) == 1:
                        self._start()
            case CancelLoad(task_id=task_id):
                for task in [task for task in self.tasks if task.task_id == task_id]:
                    self._end(task, None)
            case ImportModel(job_id=job_id) if job_id not in self.finished:
                if job_id in self.revoked:
                    self._end_import(message)
                else:
                    self.jobs.append(message)
                    self.cluster.after(self.import_s, self, lambda: self._import(message))
            case CancelImport(job_id=job_id):
                self.revoked.add(job_id)
                for job in [job for job in self.jobs if job.job_id == job_id]:
                    self.jobs.remove(job)
                    self._end_import(job)
            case RemoveModel(model_id=model_id):
                self.tiers = {key: value for key, value in self.tiers.items() if key[0] != model_id}
                self.say(ModelRemoved(model_id=model_id, server_id=self.server_id))
        self.beat()

    def say(self, message: Message) -> None:
        self.cluster.to_scheduler(message)

    def beat(self) -> None:
        if not self.is_alive:
            return
        self.say(
            AgentHeartbeat(
                server_id=self.server_id,
                epoch=self.epoch,
                resident=tuple(
                    ResidentModel(
                        model_id=key[0],
                        checkpoint_digest=key[1],
                        tier=tier,
                        size_bytes=size_bytes,
                        dram_bytes=size_bytes if tier is Tier.DRAM else 0,
                        ssd_bytes=size_bytes,
                    )
                    for key, (tier, size_bytes) in self.tiers.items()
                ),
                residency_version=self._version(),
                tasks=tuple(task.task_id for task in self.tasks),
                running=tuple(task.task_id for task in self.tasks[:1]),
                jobs=tuple(job.job_id for job in self.jobs),
                attached=tuple(self.attached),
                pool_size_bytes=self.pool_bytes,
                pool_free_bytes=self.pool_bytes,
                ssd_size_bytes=100 * GB,
                ssd_used_bytes=0,
                probe_bandwidth_bytes_per_s=1e9,
                is_stopping=self.is_stopping,
            )
        )

    def _version(self) -> int:
        if self.told != self.tiers:
            self.told = dict(self.tiers)
            self.version += 1
        return self.version

    def _start(self) -> None:
        task = self.tasks[0]
        key = (task.model_id, task.checkpoint_digest)
        source = self.tiers[key][0] if key in self.tiers else Tier.REMOTE
        crossed = {Tier.REMOTE: (Tier.REMOTE, Tier.SSD), Tier.SSD: (Tier.SSD,), Tier.DRAM: (Tier.DRAM,)}[source]
        reports = tuple(
            TierReport(tier=tier, size_bytes=task.size_bytes, seconds=task.size_bytes * TOY_SECONDS_PER_BYTE[tier])
            for tier in crossed
        )
        total_s = sum(report.seconds for report in reports) + TOY_OVERHEAD_S
        self.say(
            LoadProgressed(
                task_id=task.task_id,
                server_id=self.server_id,
                stage=WaitStage.FETCHING if source is Tier.REMOTE else WaitStage.LOADING,
                done_bytes=0,
                total_bytes=task.size_bytes,
            )
        )
        self.cluster.after(total_s, self, lambda: self._complete(task, source, reports))

    def _complete(self, task: LoadModel, source: Tier, reports: tuple[TierReport, ...]) -> None:
        if task not in self.tasks or task is not self.tasks[0]:
            return
        worker = self.cluster.workers.get((self.server_id, task.slots[0]))
        if self.errors:
            self._end(task, self.errors.pop(0))
        elif worker is None or not worker.activate(task):
            self._end(task, error_reply(Unavailable(what="the worker")))
        else:
            self.tiers[task.model_id, task.checkpoint_digest] = (Tier.DRAM, task.size_bytes)
            self.attached[task.instance_id] = None
            finished = LoadFinished(
                task_id=task.task_id,
                instance_id=task.instance_id,
                model_id=task.model_id,
                server_id=self.server_id,
                source_tier=source,
                queue_s=0.0,
                reports=reports,
            )
            self.say(finished)
            self._leave(task)
        self.beat()

    def _end(self, task: LoadModel, error: ErrorReply | None) -> None:
        """None when the scheduler cancelled it."""
        worker = self.cluster.workers.get((self.server_id, task.slots[0]))
        if worker is not None:
            worker.detach(task.instance_id)
        if error is not None:
            self.say(
                LoadEnded(
                    task_id=task.task_id,
                    instance_id=task.instance_id,
                    model_id=task.model_id,
                    server_id=self.server_id,
                    error=error,
                )
            )
        self._leave(task)

    def _leave(self, task: LoadModel) -> None:
        is_first = task is self.tasks[0]
        self.tasks.remove(task)
        if is_first and self.tasks:
            self._start()

    def _end_import(self, job: ImportModel) -> None:
        error = error_reply(Cancelled(what=f"import {job.job_id}"))
        self.say(ImportEnded(job_id=job.job_id, model_id=job.model_id, server_id=self.server_id, error=error))

    def _import(self, job: ImportModel) -> None:
        if job not in self.jobs:
            return
        key = (job.model_id, f"digest-of-{job.source}")
        self.tiers[key] = (Tier.SSD, GB // 4)
        self.finished[job.job_id] = ImportFinished(
            job_id=job.job_id,
            model_id=job.model_id,
            server_id=self.server_id,
            checkpoint_digest=key[1],
            size_bytes=GB // 4,
            manifest=b'{"parameter_count": 7, "architecture": "ToyForCausalLM", "more": []}',
            model_config=b"{}",
        )
        self.jobs = [other for other in self.jobs if other.job_id != job.job_id]
        self.say(self.finished[job.job_id])


@dataclass(eq=False)
class ToyWorker:
    cluster: ToyCluster
    server_id: str
    slot: int
    epoch: int
    state: WorkerState = WorkerState.EMPTY
    instance_id: str | None = None
    model_id: str | None = None
    requests: dict[str, ToyRequest] = field(default_factory=dict)
    is_alive: bool = True
    device: str = "cpu"
    memory_bytes: int = 0
    source: ToySource = field(init=False)

    def __post_init__(self) -> None:
        self.source = ToySource(self)

    def on(self, message: Message) -> None:
        self.source.on(message)
        match message:
            case PrepareInstance():
                if self.state is WorkerState.EMPTY:
                    self.state = WorkerState.LOADING
                    self.instance_id, self.model_id = message.instance_id, message.model_id
            case UnloadInstance(instance_id=instance_id, drain=drain) if instance_id == self.instance_id:
                if message.preempt:
                    stopped, self.requests = list(self.requests.values()), {}
                    self.end(None)
                    for request in stopped:
                        request.leave()
                        request.ask()
                elif self.requests and not drain:
                    self.say(UnloadRefused(instance_id=instance_id))
                elif self.requests:
                    self.state = WorkerState.DRAINING
                else:
                    self.end(None)
        self.beat()

    def activate(self, task: LoadModel) -> bool:
        """Every byte is there; without a skeleton yet the worker takes it from the attach."""
        if not self.is_alive or self.instance_id not in (None, task.instance_id):
            return False
        self.instance_id, self.model_id, self.state = task.instance_id, task.model_id, WorkerState.READY
        self.say(
            InstanceBecameReady(
                instance_id=task.instance_id,
                model_id=task.model_id,
                server_id=self.server_id,
                slot=self.slot,
                worker_epoch=self.epoch,
                skeleton_s=0.01,
                bind_s=0.005,
            )
        )
        self.beat()
        return True

    def detach(self, instance_id: str) -> None:
        if self.instance_id == instance_id and self.is_alive:
            self.end(None)

    def end(self, error: ErrorReply | None) -> None:
        assert self.instance_id is not None
        assert self.model_id is not None
        ended = InstanceEnded(
            instance_id=self.instance_id,
            model_id=self.model_id,
            server_id=self.server_id,
            slot=self.slot,
            error=error,
        )
        agent = self.cluster.agents.get(self.server_id)
        if agent is not None:
            agent.attached.pop(self.instance_id, None)
        self.instance_id = self.model_id = None
        self.state = WorkerState.EMPTY
        self.source.migration = None
        self.say(ended)
        self.beat()

    def start(self, request: ToyRequest, instance_id: str) -> bool:
        is_ready = self.is_alive and self.state is WorkerState.READY and self.instance_id == instance_id
        is_ready = is_ready and not self.source.is_closed
        if is_ready:
            self.requests[request.request_id] = request
            self.cluster.after(request.run_s, self, lambda: self._finish(request))
            self.beat()
        return is_ready

    def _finish(self, request: ToyRequest) -> None:
        if self.requests.pop(request.request_id, None) is not None:
            request.finish()
        if self.state is WorkerState.DRAINING and not self.requests:
            self.end(None)
        self.beat()

    def say(self, message: Message) -> None:
        self.cluster.to_scheduler(message)

    def beat(self) -> None:
        if not self.is_alive:
            return
        self.say(
            WorkerHeartbeat(
                server_id=self.server_id,
                slot=self.slot,
                epoch=self.epoch,
                device=self.device,
                memory_size_bytes=self.memory_bytes,
                state=self.state,
                instance_id=self.instance_id,
                model_id=self.model_id,
                active_requests=len(self.requests),
                migration_id=None if self.source.migration is None else self.source.migration.migration_id,
            )
        )


@dataclass(eq=False)
class ToyRequest:
    """A client's request: waits for a route, runs for `run_s`, is done or failed."""

    router: ToyRouter
    request_id: str
    model_id: str
    run_s: float
    asked_s: float
    instance_id: str | None = None
    routed_s: float | None = None
    switched: int = 0
    is_done: bool = False
    is_cancelled: bool = False
    error: ErrorReply | None = None

    @property
    def is_over(self) -> bool:
        return self.is_done or self.is_cancelled or self.error is not None

    def ask(self) -> None:
        """PlaceModel, now and every second until there is a route."""
        if self.is_over or self.instance_id is not None or not self.router.is_alive:
            return
        cluster = self.router.cluster
        place = PlaceModel(
            request_id=self.request_id,
            model_id=self.model_id,
            router_id=self.router.router_id,
            waited_s=cluster.now - self.asked_s,
        )
        cluster.to_scheduler(place, reply_to=f"{self.router.router_id}/{self.request_id}")
        cluster.after(1.0, self.router, self.ask)

    def take(self, route: Route) -> None:
        if self.is_over or self.instance_id is not None:
            return
        worker = self.router.cluster.workers.get((route.server_id, route.slot))
        if worker is None or not worker.start(self, route.instance_id):
            self.router.routes.pop(route.instance_id, None)
            return
        self.instance_id = route.instance_id
        self.routed_s = self.router.cluster.now
        self.router.say(
            InferenceStarted(
                request_id=self.request_id,
                router_id=self.router.router_id,
                instance_id=route.instance_id,
                model_id=self.model_id,
                prompt_tokens=5,
            )
        )

    def finish(self) -> None:
        self.is_done = True
        self.leave()

    def leave(self) -> None:
        """It ended on its instance, or goes on elsewhere."""
        assert self.instance_id is not None
        instance_id = self.instance_id
        if not self.is_done:
            self.instance_id = None
            # It waits since now: it had an instance until then.
            self.asked_s = self.router.cluster.now
        self.router.say(
            InferenceFinished(
                request_id=self.request_id,
                router_id=self.router.router_id,
                instance_id=instance_id,
                model_id=self.model_id,
                prompt_tokens=5,
                output_tokens=5,
                duration_s=self.run_s,
                token_s=self.run_s / 5,
            )
        )

    def lose(self) -> None:
        """Its worker died under it: start over, as the router does for requests without a token."""
        self.instance_id = None
        self.ask()

    def cancel(self) -> None:
        if not self.is_over and self.instance_id is None:
            self.is_cancelled = True
            self.router.say(CancelPlacement(request_id=self.request_id, model_id=self.model_id))


@dataclass(eq=False)
class ToyRouter:
    cluster: ToyCluster
    router_id: str
    epoch: int
    routes: dict[str, Route] = field(default_factory=dict)
    requests: dict[str, ToyRequest] = field(default_factory=dict)
    replies: list[PlaceModelReply | ErrorReply] = field(default_factory=list)
    is_alive: bool = True

    def request(self, request_id: str, model_id: str, *, run_s: float = 0.1) -> ToyRequest:
        request = ToyRequest(self, request_id, model_id, run_s, self.cluster.now)
        self.requests[request_id] = request
        usable = [r for r in self.routes.values() if r.model_id == model_id and r.state is RouteState.READY]
        if usable:
            request.take(min(usable, key=lambda route: self._running(route.instance_id)))
        request.ask()
        return request

    def on(self, message: Message) -> None:
        match message:
            case RouteAdded(route=route):
                self.routes[route.instance_id] = route
                if route.state is RouteState.READY:
                    for request in self.waiting(route.model_id):
                        request.take(route)
            case RouteRemoved(instance_id=instance_id):
                self.routes.pop(instance_id, None)
            case PlacementFailed(request_ids=request_ids, error=error):
                for request_id in request_ids:
                    request = self.requests.get(request_id)
                    if request is not None and not request.is_over and request.instance_id is None:
                        request.error = error

    def on_reply(self, request_id: str, message: Message) -> None:
        assert isinstance(message, PlaceModelReply | ErrorReply)
        self.replies.append(message)
        request = self.requests.get(request_id)
        if isinstance(message, ErrorReply):
            if request is not None and not request.is_over and request.instance_id is None:
                request.error = message
        elif message.route is not None and request is not None:
            self.routes[message.route.instance_id] = message.route
            request.take(message.route)

    def waiting(self, model_id: str) -> list[ToyRequest]:
        return [
            request
            for request in self.requests.values()
            if request.model_id == model_id and request.instance_id is None and not request.is_over
        ]

    def say(self, message: Message) -> None:
        if self.is_alive:
            self.cluster.to_scheduler(message)

    def _running(self, instance_id: str) -> int:
        return sum(r.instance_id == instance_id and not r.is_over for r in self.requests.values())

    def beat(self) -> None:
        running: dict[str, int] = {}
        for request in self.requests.values():
            if request.instance_id is not None and not request.is_over:
                running[request.instance_id] = running.get(request.instance_id, 0) + 1
        self.say(
            RouterHeartbeat(
                router_id=self.router_id,
                epoch=self.epoch,
                active=tuple(InstanceActivity(instance_id=k, requests=n) for k, n in running.items()),
                waiting_requests=0,
                oldest_wait_s=0.0,
            )
        )
