"""The scheduler's shell on in-memory twins of bus and store: durable first, then spoken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from whimbrel.chassis.bus import Received
from whimbrel.chassis.config import ConfigError, from_env
from whimbrel.chassis.service import serve
from whimbrel.chassis.testing import InMemoryBus, InMemoryData, InMemoryHub, InMemoryStore
from whimbrel.wire.codec import encode_record
from whimbrel.wire.errors import ModelNotFound, PayloadTooLarge, Unavailable
from whimbrel.wire.events import InstanceStarted, SchedulerStarted
from whimbrel.wire.messages import (
    AgentHeartbeat,
    GetModels,
    GetModelsReply,
    GetRoutes,
    GetRoutesReply,
    InferenceFinished,
    InferenceStarted,
    InstanceBecameReady,
    InstanceEnded,
    LoadFinished,
    LoadModel,
    Message,
    PlaceModel,
    PlaceModelReply,
    PrepareInstance,
    RouteAdded,
    SchedulerHeartbeat,
    Tier,
    UnloadInstance,
    UnloadRefused,
    WaitStage,
    WorkerHeartbeat,
    WorkerState,
)

from services.scheduler.config import SchedulerConfig
from services.scheduler.core.policies import POLICIES
from services.scheduler.leader import EMPTIED_GRACE_S, LEASE_S
from services.scheduler.recovery import take_over
from services.scheduler.service import SchedulerService
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import a_model_record

# Anything that is awaited here takes milliseconds, or a lease; only a hang takes this long.
WAIT_S_MAX = 30.0


class Peer:
    """Everybody else, played by one bus: agent s0, worker s0/0, router r0."""

    def __init__(self, bus: InMemoryBus) -> None:
        self.bus = bus
        self.heard: asyncio.Queue[Message] = asyncio.Queue()

    async def listen(self) -> None:
        subjects = self.bus.subjects
        patterns = (
            subjects.all_to_agent("s0"),
            subjects.all_to_worker("s0", 0),
            subjects.all_to_router("r0"),
            subjects.all_heartbeats("scheduler"),
        )
        for pattern in patterns:
            await self.bus.subscribe(pattern, self.on_message)

    async def on_message(self, received: Received) -> None:
        await self.heard.put(received.message)

    async def hear(self, kind: type[Message], when: Callable[[Message], bool] = lambda message: True) -> Message:
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                message = await self.heard.get()
                if isinstance(message, kind) and when(message):
                    return message

    async def say(self, message: Message) -> None:
        await self.bus.publish(self.bus.subjects.to_scheduler(message), message)

    async def ask(self, message: Message, timeout_s: float = WAIT_S_MAX) -> Message:
        return await self.bus.request(self.bus.subjects.to_scheduler(message), message, timeout_s)

    async def ask_again(self, message: Message) -> Message:
        """As routers do while nobody leads."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                try:
                    return await self.ask(message, timeout_s=1.0)
                except Unavailable:
                    await asyncio.sleep(0.02)

    def has_heard(self, kind: type[Message]) -> bool:
        return any(isinstance(message, kind) for message in self.heard._queue)  # type: ignore[attr-defined]

    def forget(self) -> None:
        while not self.heard.empty():
            self.heard.get_nowait()

    async def beat(self, *, state: WorkerState = WorkerState.EMPTY, instance_id: str | None = None) -> None:
        agent = AgentHeartbeat(
            server_id="s0",
            epoch=1,
            resident=(),
            tasks=(),
            jobs=(),
            attached=(),
            pool_size_bytes=GB,
            pool_free_bytes=GB,
            ssd_size_bytes=GB,
            ssd_used_bytes=0,
            probe_bandwidth_bytes_per_s=1e9,
        )
        worker = WorkerHeartbeat(
            server_id="s0",
            slot=0,
            epoch=1,
            device="cpu",
            state=state,
            instance_id=instance_id,
            model_id=None if instance_id is None else "a",
            active_requests=0,
        )
        for heartbeat in (agent, worker):
            await self.bus.publish(self.bus.subjects.heartbeat(heartbeat), heartbeat)

    async def place(
        self, request_id: str = "q1", model_id: str = "a", timeout_s: float = WAIT_S_MAX
    ) -> PlaceModelReply:
        place = PlaceModel(request_id=request_id, model_id=model_id, router_id="r0", waited_s=0.0)
        reply = await self.ask(place, timeout_s)
        assert isinstance(reply, PlaceModelReply)
        return reply

    async def run(self, request_id: str, instance_id: str) -> None:
        """A request starts and ends."""
        common = {"request_id": request_id, "router_id": "r0", "instance_id": instance_id, "model_id": "a"}
        await self.say(InferenceStarted(**common, prompt_tokens=1))
        await self.say(InferenceFinished(**common, prompt_tokens=1, output_tokens=1, duration_s=0.1, token_s=0.1))

    async def load(self, load: LoadModel) -> None:
        """What agent and worker say when a load ends well."""
        common = {"instance_id": load.instance_id, "model_id": load.model_id, "server_id": "s0"}
        ready = InstanceBecameReady(**common, slot=0, worker_epoch=1, skeleton_s=0.0, bind_s=0.0)
        finished = LoadFinished(**common, task_id=load.task_id, source_tier=Tier.REMOTE, queue_s=0.0, reports=())
        await self.say(finished)
        await self.say(ready)


class Bench:
    """A scheduler that runs, and its peer."""

    def __init__(self) -> None:
        self.hub = InMemoryHub()
        self.data = InMemoryData()
        self.peer = Peer(self.hub.bus(name="peer"))

    def store(self) -> InMemoryStore:
        return InMemoryStore(self.data)

    @asynccontextmanager
    async def scheduler(self, scheduler_id: str = "scheduler-0") -> AsyncIterator[SchedulerService]:
        config = SchedulerConfig(scheduler_id=scheduler_id)
        service = SchedulerService(config, bus=self.hub.bus(name=scheduler_id), store=self.store())
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(serve(service, stop))
            await self.peer.hear(SchedulerHeartbeat)
            await self.peer.beat()
            try:
                yield service
            finally:
                stop.set()
                await asyncio.wait([serving])


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.peer.listen()
    store = InMemoryStore(bench.data)
    await store.open()
    await store.append([a_model_record("a"), a_model_record("b")])
    yield bench
    await bench.peer.bus.drain()


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S_MAX):
        while not condition():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.005)


async def test_a_cold_request_goes_through_the_bus_and_its_steps_through_the_store(bench: Bench) -> None:
    """P1, R1"""
    async with bench.scheduler() as service:
        assert service.readiness() is None
        reply = await bench.peer.place()
        assert reply.waiting_for is WaitStage.QUEUED
        load = await bench.peer.hear(LoadModel)
        assert isinstance(load, LoadModel)
        await bench.peer.hear(PrepareInstance)
        assert list(bench.data.tables["instances"]) == [load.instance_id], "recorded before it is spoken"
        await bench.peer.load(load)
        added = await bench.peer.hear(RouteAdded)
        assert isinstance(added, RouteAdded)
        assert (await bench.peer.place("q2")).route == added.route
    kinds = [type(event) for event in bench.hub.events]
    assert kinds[0] is SchedulerStarted
    assert InstanceStarted in kinds


async def test_nothing_is_said_before_it_is_durable(bench: Bench) -> None:
    """P1: while the store is away the scheduler is silent; then it goes on where it was."""
    async with bench.scheduler() as service:
        await bench.peer.ask(GetRoutes(router_id="r0"))
        bench.data.is_up = False
        asking = asyncio.create_task(bench.peer.place())
        await settled(lambda: service.readiness() is not None)
        assert service.readiness() == "the store is away"
        assert not asking.done()
        assert not bench.peer.has_heard(LoadModel)
        bench.data.is_up = True
        assert (await asking).waiting_for is WaitStage.QUEUED
        await bench.peer.hear(LoadModel)
        assert service.readiness() is None


async def test_a_scheduler_whose_place_was_taken_stands_by_and_has_said_nothing(bench: Bench) -> None:
    """P2: two never write, and what was not written is not said."""
    async with bench.scheduler() as service:
        assert service.is_leader
        await InMemoryStore(bench.data).open()
        bench.data.leader, bench.data.lease_until_s = "usurper", time.monotonic() + 60.0
        with pytest.raises(Unavailable):
            await bench.peer.place(timeout_s=1.0)
        await settled(lambda: not service.is_leader and service.readiness() is None)
        assert bench.data.tables["instances"] == {}
        assert not bench.peer.has_heard(LoadModel)

        bench.data.leader = ""  # the usurper goes
        await bench.peer.hear(SchedulerHeartbeat)
        assert service.is_leader
        await bench.peer.beat()
        assert service.readiness() is None
        await bench.peer.place()
        await bench.peer.hear(LoadModel)


async def test_one_of_three_leads_and_another_follows_when_it_stops(bench: Bench) -> None:
    """P2: a stopped leader releases the lease, so nobody waits for it to run out."""
    services = [
        SchedulerService(SchedulerConfig(scheduler_id=f"s{n}"), bus=bench.hub.bus(name=f"s{n}"), store=bench.store())
        for n in range(3)
    ]
    stops = [asyncio.Event() for _ in services]
    serving = [asyncio.create_task(serve(*pair)) for pair in zip(services, stops, strict=True)]
    epochs = []
    left = list(range(3))
    while left:
        await settled(lambda: all(services[n].readiness() is None for n in left))
        (leader,) = [n for n in left if services[n].is_leader]
        heartbeat = await bench.peer.hear(SchedulerHeartbeat)
        assert isinstance(heartbeat, SchedulerHeartbeat)
        assert heartbeat.scheduler_id == f"s{leader}"
        epochs.append(heartbeat.epoch)
        assert isinstance(await bench.peer.ask_again(GetModels()), GetModelsReply)
        stops[leader].set()
        await serving[leader]
        assert bench.data.leader != f"s{leader}", "the lease was released"
        bench.peer.forget()
        left.remove(leader)
        if left:
            await settled(lambda: any(services[n].is_leader for n in left))
    assert epochs == sorted(set(epochs))


async def test_a_leader_whose_lease_lapsed_is_silent_until_it_has_it_again(bench: Bench) -> None:
    """P2: whoever can't reach the store can't know whether another leads, so it answers nobody, and goes on after."""
    async with bench.scheduler() as service:
        await bench.peer.ask(GetModels())
        bench.data.is_up = False
        await asyncio.sleep(LEASE_S + 0.1)
        assert service.readiness() == "the store is away"
        with pytest.raises(Unavailable):
            await bench.peer.ask(GetModels(), timeout_s=1.0)
        epoch = bench.data.epoch
        bench.data.is_up = True
        assert isinstance(await bench.peer.ask_again(GetModels()), GetModelsReply)
        assert service.readiness() is None
        assert bench.data.epoch == epoch, "nobody took over, so it is the same term"


async def test_a_store_that_lost_its_data_is_given_it_back_by_the_leader_that_lives(bench: Bench) -> None:
    """P2: FLUSHALL under a leader loses nothing that the leader knows, though a standby is there."""
    other = SchedulerService(SchedulerConfig(scheduler_id="s1"), bus=bench.hub.bus(name="s1"), store=bench.store())
    async with bench.scheduler() as service:
        stop = asyncio.Event()
        standby = asyncio.create_task(serve(other, stop))
        await settled(lambda: other.readiness() is None)
        await bench.peer.place()
        load = await bench.peer.hear(LoadModel)
        assert isinstance(load, LoadModel)
        before = {table: dict(values) for table, values in bench.data.tables.items()}
        epoch = bench.data.epoch
        bench.peer.forget()

        bench.data.lose()

        again = await bench.peer.hear(SchedulerHeartbeat, lambda m: getattr(m, "epoch", 0) > epoch)
        assert isinstance(again, SchedulerHeartbeat)
        assert again.scheduler_id == "scheduler-0"
        assert (service.is_leader, other.is_leader) == (True, False)
        assert bench.data.tables == before
        await bench.peer.beat()
        repeated = await bench.peer.hear(LoadModel)
        assert isinstance(repeated, LoadModel)
        assert (repeated.task_id, repeated.scheduler_epoch) == (load.task_id, again.epoch)
        stop.set()
        await standby


async def test_a_store_that_went_back_in_time_is_corrected_by_the_leader_that_lives(bench: Bench) -> None:
    """P2: a backup that was put back holds what has been given up since, and lacks what is new."""
    async with bench.scheduler():
        epoch = bench.data.epoch
        right = {table: dict(values) for table, values in bench.data.tables.items()}
        bench.data.tables["models"] = {"old": encode_record(a_model_record("old"))}
        bench.data.epoch = 1
        bench.peer.forget()
        await bench.peer.hear(SchedulerHeartbeat, lambda m: getattr(m, "epoch", 0) > epoch)
        assert bench.data.tables == right


async def test_a_standby_takes_over_an_emptied_store_when_no_leader_comes_back(bench: Bench) -> None:
    other = SchedulerService(SchedulerConfig(scheduler_id="s1"), bus=bench.hub.bus(name="s1"), store=bench.store())
    stop = asyncio.Event()
    bench.data.leader, bench.data.lease_until_s = "s0", time.monotonic() + 2 * WAIT_S_MAX
    standby = asyncio.create_task(serve(other, stop))
    await settled(lambda: other.readiness() is None)
    bench.data.lose()
    lost_s = time.monotonic()
    await bench.peer.hear(SchedulerHeartbeat)
    assert time.monotonic() - lost_s >= EMPTIED_GRACE_S
    stop.set()
    await standby


async def test_the_next_life_knows_what_the_last_one_recorded(bench: Bench) -> None:
    """P2"""
    async with bench.scheduler():
        await bench.peer.place()
        load = await bench.peer.hear(LoadModel)
        assert isinstance(load, LoadModel)
    async with bench.scheduler():
        again = await bench.peer.hear(LoadModel)
        assert isinstance(again, LoadModel)
        assert (again.task_id, again.instance_id) == (load.task_id, load.instance_id)
        assert again.scheduler_epoch > load.scheduler_epoch
        await bench.peer.load(load)
        await settled(lambda: any(isinstance(event, InstanceStarted) for event in bench.hub.events))


@pytest.mark.parametrize("is_busy", [True, False], ids=["refused", "done"])
async def test_an_unload_is_asked_for_and_a_refusal_is_heard(bench: Bench, is_busy: bool) -> None:
    async with bench.scheduler():
        await bench.peer.place()
        load = await bench.peer.hear(LoadModel)
        assert isinstance(load, LoadModel)
        await bench.peer.load(load)
        await bench.peer.hear(RouteAdded)
        await bench.peer.run("q1", load.instance_id)
        await bench.peer.place("q2", "b")
        await bench.peer.hear(UnloadInstance)
        if is_busy:
            await bench.peer.say(UnloadRefused(instance_id=load.instance_id))
            await bench.peer.hear(RouteAdded)
            assert (await bench.peer.place("q3")).route is not None, "the instance stays"
        else:
            ended = InstanceEnded(instance_id=load.instance_id, model_id="a", server_id="s0", slot=0)
            await bench.peer.say(ended)
            other = await bench.peer.hear(LoadModel, lambda m: isinstance(m, LoadModel) and m.model_id == "b")
            assert isinstance(other, LoadModel)


async def test_an_unload_without_an_answer_is_left_to_reconciliation(bench: Bench) -> None:
    async with bench.scheduler():
        await bench.peer.beat(state=WorkerState.READY, instance_id="stray")
        await bench.peer.hear(UnloadInstance)
        await bench.peer.beat()
        await bench.peer.place()
        load = await bench.peer.hear(LoadModel)
        assert isinstance(load, LoadModel)
        assert load.slots == (0,), "the slot was free again when its worker said so"


async def test_errors_come_back_as_their_class(bench: Bench) -> None:
    async with bench.scheduler():
        with pytest.raises(ModelNotFound):
            await bench.peer.place("q1", "unknown")


async def test_an_answer_that_is_too_large_is_a_typed_error(bench: Bench) -> None:
    async with bench.scheduler():
        bench.hub.max_payload_bytes = 300
        with pytest.raises(PayloadTooLarge):
            await bench.peer.ask(GetModels())
        bench.hub.max_payload_bytes = 1_000_000
        assert isinstance(await bench.peer.ask(GetModels()), GetModelsReply)


async def test_readiness_is_red_while_the_bus_is_away_or_somebody_waits_too_long(bench: Bench) -> None:
    config = SchedulerConfig(wait_s_max=0.0)
    service = SchedulerService(config, bus=bench.hub.bus(name="s"), store=InMemoryStore(bench.data))
    assert service.readiness() == "the state is not loaded yet"
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(service, stop))
    await bench.peer.hear(SchedulerHeartbeat)
    bench.hub.go_down()
    assert service.readiness() == "NATS is away"
    bench.hub.come_back()
    await bench.peer.place()
    await asyncio.sleep(0.01)
    assert "a request has waited" in (service.readiness() or "")
    stop.set()
    await serving


async def test_nobody_is_lost_while_nats_is_away_however_long(bench: Bench) -> None:
    """It would throw away every loaded model because it could not hear."""
    lost_after_s = SchedulerConfig().settings().lost_after_s
    async with bench.scheduler():
        await bench.peer.beat()
        await bench.peer.place()
        load = await bench.peer.hear(LoadModel)
        assert isinstance(load, LoadModel)
        await bench.peer.load(load)
        added = await bench.peer.hear(RouteAdded)
        bench.hub.go_down()
        await asyncio.sleep(lost_after_s + 1.0)
        bench.hub.come_back()
        assert await bench.peer.ask(GetRoutes(router_id="r0")) == GetRoutesReply(routes=(added,))  # type: ignore[arg-type]


async def test_time_that_passes_while_it_stops_is_no_trouble(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.term.TICK_S", 0.0)
    bus = bench.hub.bus(name="s")
    service = SchedulerService(SchedulerConfig(), bus=bus, store=InMemoryStore(bench.data))
    async with asyncio.TaskGroup() as group:
        ticking = asyncio.create_task(_run_in_group(service))
        await bench.peer.hear(SchedulerHeartbeat)
        await service.drain()
        await asyncio.wait_for(ticking, WAIT_S_MAX)
        assert ticking.exception() is None
        group.create_task(service.close())


async def _run_in_group(service: SchedulerService) -> None:
    async with asyncio.TaskGroup() as group:
        await service.start(group)


async def test_taking_over_waits_for_the_store() -> None:
    data = InMemoryData()
    store = InMemoryStore(data)
    claim = await store.acquire("s0", 60.0)
    data.is_up = False
    taking = asyncio.create_task(take_over(store, claim))
    await asyncio.sleep(0.1)
    assert not taking.done()
    data.is_up = True
    recovered = await asyncio.wait_for(taking, WAIT_S_MAX)
    assert (recovered.records, recovered.is_emptied) == ((), True)


def test_configuration_comes_from_the_environment_and_names_what_is_wrong() -> None:
    config = from_env(SchedulerConfig, {"WB_KEEP_ALIVE_S": "7.5", "WB_FAIR_WAIT_S": "1", "WB_SCHEDULER_ID": "x"})
    assert (config.settings().keep_alive_s, config.settings().fair_wait_s) == (7.5, 1.0)
    with pytest.raises(ConfigError, match="WB_SCHEDULER_ID"):
        from_env(SchedulerConfig, {"WB_SCHEDULER_ID": "a.b"})
    with pytest.raises(ConfigError, match="WB_KEEP_ALIVE_S"):
        from_env(SchedulerConfig, {"WB_KEEP_ALIVE_S": "-1"})
    with pytest.raises(ConfigError, match="WB_POLICY"):
        from_env(SchedulerConfig, {"WB_POLICY": "astrology"})
    for policy in POLICIES:
        assert from_env(SchedulerConfig, {"WB_POLICY": policy}).settings().policy == policy
