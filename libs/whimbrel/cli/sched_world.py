"""Owns the peers of the scheduler benchmark: agents, workers and a router that answer at once, and never fail."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator

from services.scheduler.core.controller import Controller
from services.scheduler.core.estimates import PathSpeed
from services.scheduler.core.queues import NO_WAIT
from services.scheduler.core.ready import Arrived, Event, Outgoing, Tick, ToAgent, ToWorker
from services.scheduler.core.residency import Resident
from services.scheduler.core.settings import Settings
from services.scheduler.core.views import Nearness, Occupant, Resume, ServerView, SlotView, Snapshot, Task
from whimbrel.wire.messages import (
    AgentHeartbeat,
    InferenceFinished,
    InferenceStarted,
    InstanceBecameReady,
    InstanceEnded,
    LoadFinished,
    LoadModel,
    Message,
    ModelState,
    PlaceModel,
    PlaceModelReply,
    ResidentModel,
    Route,
    RouteAdded,
    RouterHeartbeat,
    RouteState,
    Tier,
    TierReport,
    UnloadInstance,
    WorkerHeartbeat,
    WorkerState,
)
from whimbrel.wire.records import ModelRecord

MODEL_BYTES = 125_000_000
POOL_BYTES = 64_000_000_000
SSD_BYTES = 1_000_000_000_000
ROUTER = "router-0"
# As the service takes them: one append makes a step durable.
EVENTS_PER_STEP_MAX = 256
IN_FLIGHT = 64
STEP_S = 0.01
TICK_S = 0.25
# Each model is on this many servers' SSDs or in their DRAM.
COPIES = 2


def model_record(number: int) -> ModelRecord:
    return ModelRecord(
        model_id=f"m{number}",
        state=ModelState.READY,
        source="",
        job_id="",
        checkpoint_digest=f"d{number}",
        size_bytes=MODEL_BYTES,
        parameter_count=MODEL_BYTES // 2,
        architecture="",
        model_config=b"{}",
        created_at_s=0.0,
        keep_alive_s=3600.0,
    )


def agent_heartbeat(server: int, servers: int, models: int) -> AgentHeartbeat:
    """Models are placed round-robin: half of the copies are in DRAM."""
    held = [m for copy in range(COPIES) for m in range((server + copy * servers // 2) % servers, models, servers)]
    return AgentHeartbeat(
        server_id=f"s{server:04}",
        epoch=1,
        resident=tuple(
            ResidentModel(
                model_id=f"m{m}",
                checkpoint_digest=f"d{m}",
                tier=Tier.DRAM if k % 2 else Tier.SSD,
                size_bytes=MODEL_BYTES,
                dram_bytes=MODEL_BYTES if k % 2 else 0,
                ssd_bytes=MODEL_BYTES,
            )
            for k, m in enumerate(held)
        ),
        tasks=(),
        jobs=(),
        attached=(),
        pool_size_bytes=POOL_BYTES,
        pool_free_bytes=POOL_BYTES,
        ssd_size_bytes=SSD_BYTES,
        ssd_used_bytes=0,
        probe_bandwidth_bytes_per_s=2e9,
    )


def worker_heartbeat(server_id: str, slot: int, instance_id: str | None, model_id: str | None) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        server_id=server_id,
        slot=slot,
        epoch=1,
        device="cpu",
        state=WorkerState.EMPTY if instance_id is None else WorkerState.READY,
        instance_id=instance_id,
        model_id=model_id,
        active_requests=0,
    )


class Peers:
    """What everybody else answers to a message of the scheduler. Requests are for models without an instance."""

    def __init__(self, *, models: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._cold = [f"m{number}" for number in range(models)]
        self._chance.shuffle(self._cold)
        self._numbers = itertools.count()
        self._asked: dict[str, dict[str, None]] = {}
        self._placed: dict[str, tuple[str, str, int]] = {}
        self.in_flight = 0
        self.ended = 0

    def request(self) -> PlaceModel:
        """A request for a cold model."""
        model_id = self._cold.pop(self._chance.randrange(len(self._cold)))
        request_id = f"r{next(self._numbers)}"
        self._asked.setdefault(model_id, {})[request_id] = None
        self.in_flight += 1
        return PlaceModel(request_id=request_id, model_id=model_id, router_id=ROUTER, waited_s=0.0)

    def answer(self, server_id: str | None, slot: int, message: Message) -> Iterator[Message]:
        """What those that hear a message say then; `server_id` and `slot` are whom it was for."""
        match message:
            case LoadModel():
                assert server_id is not None, "loads are for agents"
                yield from self._load(server_id, message)
            case PlaceModelReply(route=Route() as route):
                yield from self._serve(route)
            case RouteAdded(route=Route(state=RouteState.READY) as route):
                yield from self._serve(route)
            case UnloadInstance(instance_id=instance_id) if instance_id in self._placed:
                model_id, server, place = self._placed.pop(instance_id)
                self._cold.append(model_id)
                yield InstanceEnded(instance_id=instance_id, model_id=model_id, server_id=server, slot=place)

    def _load(self, server_id: str, load: LoadModel) -> Iterator[Message]:
        self._placed[load.instance_id] = (load.model_id, server_id, load.slots[0])
        yield LoadFinished(
            task_id=load.task_id,
            instance_id=load.instance_id,
            model_id=load.model_id,
            server_id=server_id,
            source_tier=Tier.SSD,
            queue_s=0.0,
            reports=(TierReport(tier=Tier.SSD, size_bytes=load.size_bytes, seconds=load.size_bytes / 2e9),),
        )
        yield InstanceBecameReady(
            instance_id=load.instance_id,
            model_id=load.model_id,
            server_id=server_id,
            slot=load.slots[0],
            worker_epoch=1,
            skeleton_s=0.0,
            bind_s=0.0,
        )

    def _serve(self, route: Route) -> Iterator[Message]:
        for request_id in self._asked.pop(route.model_id, {}):
            self.in_flight -= 1
            self.ended += 1
            yield InferenceStarted(
                request_id=request_id,
                router_id=ROUTER,
                instance_id=route.instance_id,
                model_id=route.model_id,
                prompt_tokens=20,
            )
            yield InferenceFinished(
                request_id=request_id,
                router_id=ROUTER,
                instance_id=route.instance_id,
                model_id=route.model_id,
                prompt_tokens=20,
                output_tokens=20,
                duration_s=0.5,
                token_s=0.02,
                prefill_s=0.1,
            )


class World:
    """The controller with its peers on a virtual clock; `controller_s` is the processor time that it took."""

    def __init__(self, *, servers: int, slots: int, models: int, seed: int) -> None:
        ids = itertools.count()
        self._now = 100.0
        self._ticked = self._now
        self._controller = Controller(
            records=[model_record(number) for number in range(models)],
            settings=Settings(),
            epoch=1,
            now=self._now,
            new_id=lambda prefix: f"{prefix}-{next(ids)}",
        )
        self._peers = Peers(models=models, seed=seed)
        self._queue: deque[Event] = deque()
        self._fill = servers * slots
        self.controller_s = 0.0
        self._say(agent_heartbeat(server, servers, models) for server in range(servers))
        places = itertools.product(range(servers), range(slots))
        self._say(worker_heartbeat(f"s{server:04}", slot, None, None) for server, slot in places)
        self._say([RouterHeartbeat(router_id=ROUTER, epoch=1, active=(), waiting_requests=0, oldest_wait_s=0.0)])
        while self._queue:
            self._step()

    def fill(self) -> None:
        """Use every slot once."""
        self.run(self._fill)

    def run(self, tasks: int) -> None:
        """So many load tasks, from the request to its end."""
        end = self._peers.ended + tasks
        while self._peers.ended < end:
            while self._peers.in_flight < IN_FLIGHT:
                place = self._peers.request()
                self._queue.append(Arrived(message=place, reply_to=place.request_id))
            self._step()

    def _say(self, messages: Iterable[Message]) -> None:
        self._queue.extend(Arrived(message=message) for message in messages)

    def _step(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(EVENTS_PER_STEP_MAX, len(self._queue)))]
        self._now += STEP_S
        if self._now - self._ticked >= TICK_S:
            self._ticked = self._now
            batch.append(Tick())
            # Nobody is lost in a world without failures; its heartbeats would not be the scheduler's work.
            self._refresh()
        started_s = time.process_time()
        ready = self._controller.step(batch, now=self._now, wall_s=self._now)
        self.controller_s += time.process_time() - started_s
        for outgoing in ready.messages:
            self._say(self._peers.answer(*_whom(outgoing), outgoing.message))

    def _refresh(self) -> None:
        cluster = self._controller.cluster
        for server in cluster.servers.values():
            server.seen_s = self._now
        for slot in cluster.slots():
            slot.seen_s = self._now
        for router in cluster.routers.values():
            router.seen_s = self._now


def _whom(outgoing: Outgoing) -> tuple[str | None, int]:
    match outgoing.to:
        case ToAgent(server_id=server_id):
            return server_id, 0
        case ToWorker(server_id=server_id, slot=slot):
            return server_id, slot
        case _:
            return None, 0


def random_tasks(chance: random.Random, count: int, *, models: int) -> Iterator[Task]:
    for _ in range(count):
        yield _task(chance.randrange(models))


def snapshot_of_movable(chance: random.Random, *, servers: int, slots: int, models: int) -> Snapshot:
    """Servers whose slots run what can be moved, but for one in twenty, which is free."""
    views = tuple(_view(chance, server, servers, slots, models) for server in range(servers))
    return Snapshot(servers=views, shapes=None, nearness=Nearness.of(views))


def _task(number: int) -> Task:
    return Task(
        model_id=f"m{number}",
        checkpoint_digest=f"d{number}",
        size_bytes=MODEL_BYTES,
        partition_bytes=(MODEL_BYTES,),
    )


def _view(chance: random.Random, server: int, servers: int, slots: int, models: int) -> ServerView:
    is_free = [chance.random() < 0.05 for _ in range(slots)]
    heartbeat = agent_heartbeat(server, servers, models)
    bandwidths = {Tier.REMOTE: 1.1e8, Tier.SSD: 2e9, Tier.DRAM: 1.2e10}
    return ServerView(
        server_id=heartbeat.server_id,
        capacity_bytes=POOL_BYTES,
        used_bytes=MODEL_BYTES * is_free.count(False),
        free_slots=tuple(SlotView(slot) for slot in range(slots) if is_free[slot]),
        idle=(),
        running=tuple(
            Occupant(
                instance_id=f"i{server}-{slot}",
                slots=(SlotView(slot),),
                task=_task(chance.randrange(models)),
                room_bytes=MODEL_BYTES,
                resume=Resume(chance.uniform(0.05, 0.5), 0.01, 90.0),
                pause_s=0.03,
            )
            for slot in range(slots)
            if not is_free[slot]
        ),
        waits={Tier.REMOTE: NO_WAIT, Tier.SSD: NO_WAIT},
        residency={
            (held.model_id, held.checkpoint_digest): Resident(held.tier, MODEL_BYTES) for held in heartbeat.resident
        },
        speeds={
            tier: PathSpeed(source_tier=tier, seconds_per_byte=1 / bandwidth, overhead_s=0.05, is_prior=False)
            for tier, bandwidth in bandwidths.items()
        },
    )
