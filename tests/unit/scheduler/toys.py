"""A whole small cluster around the real controller: a virtual clock, a network that loses, a store that lasts."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import LoadFailed
from whimbrel.wire.events import PublicEvent
from whimbrel.wire.messages import (
    ErrorReply,
    Message,
    ModelState,
    Scaling,
    Tier,
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
)
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.toy_peers import GB, ToyAgent, ToyRouter, ToyWorker

DELAY_S = 0.001


def a_model_record(
    model_id: str,
    *,
    size_bytes: int = GB // 4,
    keep_alive_s: float | None = None,
    scaling: Scaling = Scaling(),  # noqa: B008 (frozen)
    partition_bytes: tuple[int, ...] = (),
) -> ModelRecord:
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
        scaling=scaling,
        partition_bytes=partition_bytes,
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

    def start_worker(self, server_id: str, slot: int, *, device: str = "cpu", memory_bytes: int = 0) -> ToyWorker:
        worker = self.workers[server_id, slot] = ToyWorker(
            self, server_id, slot, next(self._epochs), device=device, memory_bytes=memory_bytes
        )
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
