"""A whole small cluster around the real controller, on a virtual clock: toy agents, workers and routers that keep the
contract of the wire, a network that delays and loses, and a store that survives the scheduler."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import LoadFailed, Unavailable
from whimbrel.wire.events import PublicEvent
from whimbrel.wire.messages import (
    AgentHeartbeat,
    CancelLoad,
    CancelPlacement,
    ErrorReply,
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
    ModelState,
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
    WaitStage,
    WorkerHeartbeat,
    WorkerState,
)
from whimbrel.wire.records import Forget, InstanceRecord, ModelRecord, Record

from services.scheduler.core.controller import Controller
from services.scheduler.core.ready import (
    Arrived,
    Event,
    Outgoing,
    Ready,
    Reply,
    Tick,
    ToAgent,
    ToRouter,
    ToWorker,
    UnloadRefused,
)
from services.scheduler.core.settings import Settings

GB = 10**9
#: What the toys really do, seconds per byte; the scheduler has to find out.
TOY_SECONDS_PER_BYTE = {Tier.REMOTE: 1 / 0.2e9, Tier.SSD: 1 / 2e9, Tier.DRAM: 0.0}
TOY_OVERHEAD_S = 0.02
DELAY_S = 0.001


def a_model_record(model_id: str, *, size_bytes: int = GB // 4, keep_alive_s: float | None = None) -> ModelRecord:
    return ModelRecord(
        model_id=model_id,
        state=ModelState.READY,
        source=f"/models/{model_id}",
        job_id="",
        checkpoint_digest=f"digest-of-{model_id}",
        size_bytes=size_bytes,
        parameter_count=size_bytes // 2,
        architecture="ToyForCausalLM",
        model_config=b"{}",
        created_at_s=0.0,
        keep_alive_s=keep_alive_s,
    )


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
    is_alive: bool = True

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
                self.jobs.append(message)
                self.cluster.after(1.0, self, lambda: self._import(message))
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
                    ResidentModel(model_id=key[0], checkpoint_digest=key[1], tier=tier, size_bytes=size_bytes)
                    for key, (tier, size_bytes) in self.tiers.items()
                ),
                tasks=tuple(task.task_id for task in self.tasks),
                jobs=tuple(job.job_id for job in self.jobs),
                attached=tuple(self.attached),
                pool_size_bytes=self.pool_bytes,
                pool_free_bytes=self.pool_bytes,
                ssd_size_bytes=100 * GB,
                ssd_used_bytes=0,
                probe_bandwidth_bytes_per_s=1e9,
            )
        )

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
        worker = self.cluster.workers.get((self.server_id, task.slot))
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
        worker = self.cluster.workers.get((self.server_id, task.slot))
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

    def _import(self, job: ImportModel) -> None:
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

    def on(self, message: Message) -> None:
        match message:
            case PrepareInstance():
                if self.state is WorkerState.EMPTY:
                    self.state = WorkerState.LOADING
                    self.instance_id, self.model_id = message.instance_id, message.model_id
            case UnloadInstance(instance_id=instance_id, drain=drain) if instance_id == self.instance_id:
                if self.requests and not drain:
                    self.cluster.refuse_unload(instance_id)
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
        self.say(ended)
        self.beat()

    def start(self, request: ToyRequest, instance_id: str) -> bool:
        is_ready = self.is_alive and self.state is WorkerState.READY and self.instance_id == instance_id
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
                device="cpu",
                state=self.state,
                instance_id=self.instance_id,
                model_id=self.model_id,
                active_requests=len(self.requests),
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
        assert self.instance_id is not None
        self.is_done = True
        self.router.say(
            InferenceFinished(
                request_id=self.request_id,
                router_id=self.router.router_id,
                instance_id=self.instance_id,
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
        for route in self.routes.values():
            if route.model_id == model_id and route.state is RouteState.READY:
                request.take(route)
                break
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


Drops = Callable[[Message], bool]


class ToyCluster:
    """`run(seconds)` lets virtual time pass; `drops` says which messages the network loses."""

    def __init__(
        self,
        *,
        models: Iterable[ModelRecord] = (),
        servers: int = 1,
        slots: int = 1,
        pool_bytes: int = 10 * GB,
        settings: Settings = Settings(),  # noqa: B008 (frozen)
        drops: Drops = lambda message: False,
    ) -> None:
        self.now = 1000.0
        self.settings = settings
        self.drops = drops
        self.store: dict[tuple[str, str], Record] = {(m.table, m.key()): m for m in models}
        self.journal: list[Record] = []
        self.events: list[PublicEvent] = []
        self.said: list[Outgoing] = []
        self.check: Callable[[ToyCluster, Ready], None] = lambda cluster, ready: None
        self._schedule: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ids = itertools.count(1)
        self._epochs = itertools.count(1)
        self.agents: dict[str, ToyAgent] = {}
        self.workers: dict[tuple[str, int], ToyWorker] = {}
        self.routers: dict[str, ToyRouter] = {}
        self.controller: Controller | None = None
        self.pool_bytes = pool_bytes
        self.start_scheduler()
        for number in range(servers):
            self.start_agent(f"s{number}")
            for slot in range(slots):
                self.start_worker(f"s{number}", slot)
        self.start_router("r0")
        self._every(1.0, self._beat_all)
        self._every(0.25, lambda: self.deliver(Tick()))

    # Lives.

    def start_scheduler(self) -> None:
        """The next life of the scheduler, from what the store holds; everybody hears its heartbeat."""
        self.controller = Controller(
            records=list(self.store.values()),
            settings=self.settings,
            epoch=next(self._epochs),
            now=self.now,
            new_id=lambda prefix: f"{prefix}-{next(self._ids)}",
        )
        self._beat_all()

    def stop_scheduler(self) -> None:
        self.controller = None

    def start_agent(self, server_id: str, *, tiers: dict[tuple[str, str], tuple[Tier, int]] | None = None) -> ToyAgent:
        agent = ToyAgent(self, server_id, next(self._epochs), self.pool_bytes, tiers=dict(tiers or {}))
        self.agents[server_id] = agent
        for worker in self.workers.values():
            if worker.server_id == server_id and worker.instance_id and worker.state is not WorkerState.LOADING:
                agent.attached[worker.instance_id] = None
        agent.beat()
        return agent

    def kill_agent(self, server_id: str) -> ToyAgent:
        agent = self.agents.pop(server_id)
        agent.is_alive = False
        return agent

    def start_worker(self, server_id: str, slot: int) -> ToyWorker:
        worker = self.workers[server_id, slot] = ToyWorker(self, server_id, slot, next(self._epochs))
        worker.beat()
        return worker

    def kill_worker(self, server_id: str, slot: int) -> None:
        worker = self.workers.pop((server_id, slot))
        worker.is_alive = False
        if server_id in self.agents and worker.instance_id is not None:
            self.agents[server_id].attached.pop(worker.instance_id, None)
        for request in worker.requests.values():
            self.after(0.5, request.router, request.lose)

    def start_router(self, router_id: str) -> ToyRouter:
        router = self.routers[router_id] = ToyRouter(self, router_id, next(self._epochs))
        router.beat()
        return router

    def kill_router(self, router_id: str) -> None:
        router = self.routers.pop(router_id)
        router.is_alive = False
        for worker in self.workers.values():
            gone = [k for k, request in worker.requests.items() if request.router is router]
            for request_id in gone:
                del worker.requests[request_id]

    @property
    def router(self) -> ToyRouter:
        return self.routers["r0"]

    # Time.

    def after(self, delay_s: float, owner: ToyAgent | ToyWorker | ToyRouter | None, act: Callable[[], None]) -> None:
        """Do it later, if its owner still lives."""

        def alive() -> None:
            if owner is None or owner.is_alive:
                act()

        heapq.heappush(self._schedule, (self.now + delay_s, next(self._order), alive))

    def run(self, seconds: float) -> None:
        end_s = self.now + seconds
        while self._schedule and self._schedule[0][0] <= end_s:
            self.now, _, act = heapq.heappop(self._schedule)
            act()
        self.now = end_s

    def run_until(self, condition: Callable[[], bool], seconds_max: float) -> None:
        end_s = self.now + seconds_max
        while not condition():
            assert self.now < end_s, f"not within {seconds_max} s"
            self.now, _, act = heapq.heappop(self._schedule)
            act()

    def _every(self, seconds: float, act: Callable[[], None]) -> None:
        def again() -> None:
            act()
            self.after(seconds, None, again)

        self.after(seconds, None, again)

    def _beat_all(self) -> None:
        for peer in [*self.agents.values(), *self.workers.values(), *self.routers.values()]:
            peer.beat()

    # The network and the store.

    def to_scheduler(self, message: Message, *, reply_to: str | None = None) -> None:
        if not self.drops(message):
            self.after(DELAY_S, None, lambda: self.deliver(Arrived(message=message, reply_to=reply_to)))

    def refuse_unload(self, instance_id: str) -> None:
        self.after(DELAY_S, None, lambda: self.deliver(UnloadRefused(instance_id=instance_id)))

    def deliver(self, *events: Event) -> Ready:
        if self.controller is None:
            return Ready()
        ready = self.controller.step(events, now=self.now, wall_s=self.now + 1.7e9)
        self.append(ready.records)
        self.events += ready.events
        for outgoing in ready.messages:
            self.said.append(outgoing)
            if not self.drops(outgoing.message):
                self.after(DELAY_S, None, lambda outgoing=outgoing: self._arrive(outgoing))  # type: ignore[misc]
        self.check(self, ready)
        return ready

    def append(self, records: Iterable[Record]) -> None:
        for record in records:
            self.journal.append(record)
            if isinstance(record, Forget):
                self.store.pop((record.forgotten_table, record.forgotten_key), None)
            else:
                self.store[record.table, record.key()] = record

    def _arrive(self, outgoing: Outgoing) -> None:
        match outgoing.to:
            case ToAgent(server_id=server_id) if server_id in self.agents:
                self.agents[server_id].on(outgoing.message)
            case ToWorker(server_id=server_id, slot=slot) if (server_id, slot) in self.workers:
                self.workers[server_id, slot].on(outgoing.message)
            case ToRouter(router_id=router_id) if router_id in self.routers:
                self.routers[router_id].on(outgoing.message)
            case Reply(reply_to=reply_to):
                router_id, _, request_id = reply_to.partition("/")
                if router_id in self.routers:
                    self.routers[router_id].on_reply(request_id, outgoing.message)

    # Looking.

    def said_to_all(self, kind: type[Message]) -> list[Message]:
        return [outgoing.message for outgoing in self.said if isinstance(outgoing.message, kind)]

    def instances(self) -> list[InstanceRecord]:
        return [record for record in self.store.values() if isinstance(record, InstanceRecord)]

    def happened(self, kind: type[PublicEvent]) -> list[PublicEvent]:
        return [event for event in self.events if isinstance(event, kind)]


def corrupt(model_id: str) -> ErrorReply:
    return error_reply(LoadFailed(model_id=model_id, reason="partition_0.bin, offset 4096: digest differs"))
