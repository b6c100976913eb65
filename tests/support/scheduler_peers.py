"""Agents, workers and a router that keep the contract of the wire over a real bus, and watch a scheduler's deeds.

They load nothing and compute nothing, so that hundreds of requests a minute fit a small machine; what they are asked to
do that must never be asked is written to `violations`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from whimbrel.chassis.bus import Bus, Received
from whimbrel.wire.errors import InstanceGone, StaleEpoch, WhimbrelError
from whimbrel.wire.messages import (
    AgentHeartbeat,
    InferenceFinished,
    InferenceStarted,
    InstanceActivity,
    InstanceBecameReady,
    InstanceEnded,
    LoadFinished,
    LoadModel,
    Message,
    PlacementFailed,
    PlaceModel,
    PlaceModelReply,
    PrepareInstance,
    ResidentModel,
    Route,
    RouteAdded,
    RouterHeartbeat,
    SchedulerHeartbeat,
    Tier,
    UnloadInstance,
    UnloadRefused,
    WorkerHeartbeat,
    WorkerState,
)

GB = 10**9
ROUTER = "r0"
BEAT_S = 0.25
# As routers do, only sooner: requests here are short.
REPEAT_S = 0.5
ANSWER_S_MAX = 1.0


@dataclass(eq=False)
class Slot:
    """What a worker holds."""

    server_id: str
    slot: int
    state: WorkerState = WorkerState.EMPTY
    instance_id: str | None = None
    model_id: str | None = None
    requests: set[str] = field(default_factory=set)

    @property
    def where(self) -> str:
        return f"{self.server_id}/{self.slot}"


@dataclass(eq=False)
class Asked:
    """A client's request."""

    request_id: str
    model_id: str
    run_s: float
    routed: asyncio.Future[Route]
    asked_s: float = field(default_factory=time.monotonic)


class Peers:
    """`servers` servers of `slots` slots each. `served` counts how often each request was computed to its end."""

    def __init__(self, bus: Bus, *, models: tuple[str, ...], servers: int, slots: int, load_s: float) -> None:
        self.bus = bus
        self.slots = {
            (f"s{n}", slot): Slot(server_id=f"s{n}", slot=slot) for n in range(servers) for slot in range(slots)
        }
        self.violations: list[str] = []
        self.served: Counter[str] = Counter()
        self.waits_s: list[float] = []
        self.epoch = 0
        self.leads: asyncio.Queue[tuple[int, str, float]] = asyncio.Queue()
        self._models = models
        self._load_s = load_s
        self._loads: dict[str, LoadModel] = {}
        self._loaded: set[str] = set()
        self._waiting: dict[str, Asked] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        subjects = self.bus.subjects
        for server_id in sorted({server_id for server_id, _ in self.slots}):
            await self.bus.subscribe(subjects.all_to_agent(server_id), self._on_agent_command)
        for server_id, slot in self.slots:
            await self.bus.subscribe(subjects.all_to_worker(server_id, slot), self._worker(self.slots[server_id, slot]))
        await self.bus.subscribe(subjects.all_to_router(ROUTER), self._on_router_command)
        await self.bus.subscribe(subjects.all_heartbeats("scheduler"), self._on_scheduler)
        self._spawn(self._beat_for_ever())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def request(self, request_id: str, model_id: str, run_s: float) -> None:
        """Returns when it was served; asks again until then, and fails only when the scheduler says so."""
        asked = Asked(request_id, model_id, run_s, asyncio.get_running_loop().create_future())
        self._waiting[request_id] = asked
        while True:
            self._spawn(self._place(asked))
            try:
                async with asyncio.timeout(REPEAT_S):
                    route = await asyncio.shield(asked.routed)
            except TimeoutError:
                continue
            if await self._run(asked, route):
                del self._waiting[request_id]
                return
            asked.routed = asyncio.get_running_loop().create_future()

    # The router.

    async def _place(self, asked: Asked) -> None:
        waited_s = time.monotonic() - asked.asked_s
        place = PlaceModel(request_id=asked.request_id, model_id=asked.model_id, router_id=ROUTER, waited_s=waited_s)
        try:
            reply = await self.bus.request(self.bus.subjects.to_scheduler(place), place, ANSWER_S_MAX)
        except WhimbrelError:
            return  # nobody leads right now; it is asked again
        if isinstance(reply, PlaceModelReply) and reply.route is not None and not asked.routed.done():
            asked.routed.set_result(reply.route)

    async def _run(self, asked: Asked, route: Route) -> bool:
        slot = self.slots[route.server_id, route.slot]
        if slot.instance_id != route.instance_id or slot.state is not WorkerState.READY:
            return False
        self.waits_s.append(time.monotonic() - asked.asked_s)
        slot.requests.add(asked.request_id)
        common = {
            "request_id": asked.request_id,
            "router_id": ROUTER,
            "instance_id": route.instance_id,
            "model_id": asked.model_id,
            "prompt_tokens": 1,
        }
        await self._say(InferenceStarted(**common))
        await asyncio.sleep(asked.run_s)
        if slot.instance_id != route.instance_id:
            self.violations.append(f"{asked.request_id} lost its instance {route.instance_id} while it ran")
        self.served[asked.request_id] += 1
        slot.requests.discard(asked.request_id)
        await self._say(InferenceFinished(**common, output_tokens=1, duration_s=asked.run_s, token_s=asked.run_s))
        if slot.state is WorkerState.DRAINING and not slot.requests:
            await self._end(slot)
        return True

    async def _on_router_command(self, received: Received) -> None:
        match received.message:
            case RouteAdded(route=route):
                for asked in self._waiting.values():
                    if asked.model_id == route.model_id and not asked.routed.done():
                        asked.routed.set_result(route)
            case PlacementFailed(request_ids=request_ids, error=error):
                self.violations.append(f"{request_ids} failed: {error}")

    async def _on_scheduler(self, received: Received) -> None:
        message = received.message
        if isinstance(message, SchedulerHeartbeat) and message.epoch > self.epoch:
            self.epoch = message.epoch
            self.leads.put_nowait((message.epoch, message.scheduler_id, time.monotonic()))
            await self._beat()

    # Agents.

    async def _on_agent_command(self, received: Received) -> None:
        message = received.message
        if isinstance(message, LoadModel):
            self._obey(message.scheduler_epoch)
            slot = self.slots[received.subject.split(".")[3], message.slots[0]]
            if message.task_id not in self._loads and slot.instance_id in (None, message.instance_id):
                self._loads[message.task_id] = message
                self._spawn(self._load(slot, message))
            elif slot.instance_id not in (None, message.instance_id):
                self.violations.append(f"{message.instance_id} is to be loaded at {slot.where}: {slot.instance_id}")

    async def _load(self, slot: Slot, load: LoadModel) -> None:
        await asyncio.sleep(self._load_s)
        del self._loads[load.task_id]
        if slot.instance_id not in (None, load.instance_id):
            self.violations.append(f"{load.instance_id} was loaded into {slot.where}, which has {slot.instance_id}")
            return
        slot.state, slot.instance_id, slot.model_id = WorkerState.READY, load.instance_id, load.model_id
        common = {"instance_id": load.instance_id, "model_id": load.model_id, "server_id": slot.server_id}
        await self._say(LoadFinished(**common, task_id=load.task_id, source_tier=Tier.DRAM, queue_s=0.0, reports=()))
        await self._say(InstanceBecameReady(**common, slot=slot.slot, worker_epoch=1, skeleton_s=0.0, bind_s=0.0))

    # Workers.

    def _worker(self, slot: Slot) -> Any:
        async def on_command(received: Received) -> None:
            match received.message:
                case PrepareInstance() as prepare:
                    self._obey(prepare.scheduler_epoch)
                    if slot.instance_id is None:
                        slot.state = WorkerState.LOADING
                        slot.instance_id, slot.model_id = prepare.instance_id, prepare.model_id
                    elif slot.instance_id != prepare.instance_id:
                        self.violations.append(f"{slot.where} has {slot.instance_id}, is given {prepare.instance_id}")
                case UnloadInstance() as unload:
                    await self._unload(slot, unload)

        return on_command

    async def _unload(self, slot: Slot, unload: UnloadInstance) -> None:
        if slot.instance_id != unload.instance_id:
            raise InstanceGone(instance_id=unload.instance_id)
        if slot.requests and not unload.drain:
            await self._say(UnloadRefused(instance_id=unload.instance_id))
        elif slot.requests:
            slot.state = WorkerState.DRAINING
        else:
            await self._end(slot)

    async def _end(self, slot: Slot) -> None:
        assert slot.instance_id is not None
        assert slot.model_id is not None
        ended = InstanceEnded(
            instance_id=slot.instance_id, model_id=slot.model_id, server_id=slot.server_id, slot=slot.slot
        )
        slot.state, slot.instance_id, slot.model_id = WorkerState.EMPTY, None, None
        await self._say(ended)

    # All of them.

    def _obey(self, scheduler_epoch: int) -> None:
        if scheduler_epoch < self.epoch:
            raise StaleEpoch(epoch=scheduler_epoch, current_epoch=self.epoch)

    async def _say(self, message: Message) -> None:
        await self.bus.publish(self.bus.subjects.to_scheduler(message), message)

    async def _beat_for_ever(self) -> None:
        while True:
            await self._beat()
            await asyncio.sleep(BEAT_S)

    async def _beat(self) -> None:
        for heartbeat in self._heartbeats():
            await self.bus.publish(self.bus.subjects.heartbeat(heartbeat), heartbeat)

    def _heartbeats(self) -> list[AgentHeartbeat | WorkerHeartbeat | RouterHeartbeat]:
        beats: list[AgentHeartbeat | WorkerHeartbeat | RouterHeartbeat] = []
        for server_id in sorted({server_id for server_id, _ in self.slots}):
            mine = [slot for slot in self.slots.values() if slot.server_id == server_id]
            beats.append(self._agent_heartbeat(server_id, mine))
            beats += [self._worker_heartbeat(slot) for slot in mine]
        running = tuple(
            InstanceActivity(instance_id=slot.instance_id, requests=len(slot.requests))
            for slot in self.slots.values()
            if slot.instance_id is not None and slot.requests
        )
        waiting = len(self._waiting) - sum(len(slot.requests) for slot in self.slots.values())
        return [
            *beats,
            RouterHeartbeat(
                router_id=ROUTER, epoch=1, active=running, waiting_requests=max(0, waiting), oldest_wait_s=0.0
            ),
        ]

    def _agent_heartbeat(self, server_id: str, slots: list[Slot]) -> AgentHeartbeat:
        resident = tuple(
            ResidentModel(
                model_id=model_id,
                checkpoint_digest=f"digest-of-{model_id}",
                tier=Tier.DRAM,
                size_bytes=GB // 4,
                dram_bytes=GB // 4,
                ssd_bytes=GB // 4,
            )
            for model_id in self._models
        )
        tasks = tuple(task_id for task_id, load in self._loads.items() if self._is_at(load, slots))
        return AgentHeartbeat(
            server_id=server_id,
            epoch=1,
            resident=resident,
            residency_version=1,
            tasks=tasks,
            running=tasks,
            jobs=(),
            attached=tuple(slot.instance_id for slot in slots if slot.instance_id and slot.state in _ATTACHED),
            pool_size_bytes=100 * GB,
            pool_free_bytes=90 * GB,
            ssd_size_bytes=100 * GB,
            ssd_used_bytes=0,
            probe_bandwidth_bytes_per_s=1e9,
        )

    def _is_at(self, load: LoadModel, slots: list[Slot]) -> bool:
        return any(slot.instance_id == load.instance_id for slot in slots)

    def _worker_heartbeat(self, slot: Slot) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            server_id=slot.server_id,
            slot=slot.slot,
            epoch=1,
            device="cpu",
            state=slot.state,
            instance_id=slot.instance_id,
            model_id=slot.model_id,
            active_requests=len(slot.requests),
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


_ATTACHED = (WorkerState.READY, WorkerState.DRAINING)
