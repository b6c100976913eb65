"""Owns the durable part of the scheduler benchmark: a scheduler process between a real NATS and a real Redis.

Redis writes its file to the disk with every append. This process plays all agents, workers and the router, so what is
measured on a small machine is bounded by it and by NATS as well; `fsync_s`, the median time of one synced write to the
same disk, is the floor of a step's latency.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from whimbrel.chassis.servers import NatsServer, RedisServer
from whimbrel.chassis.store import RedisStore
from whimbrel.cli.processes import Child, base_environ, service_argv
from whimbrel.cli.sched_world import ROUTER, Peers, agent_heartbeat, model_record, worker_heartbeat
from whimbrel.wire.codec import decode, encode
from whimbrel.wire.messages import LoadModel, Message, RouterHeartbeat, UnloadInstance
from whimbrel.wire.subjects import Subjects

IN_FLIGHT = 128
TASKS = 6_000
WARM_UP_TASKS = 1_000
BEAT_S = 1.0
START_S_MAX = 30.0
RUN_S_MAX = 180.0
FSYNCS = 200
SUBJECTS = Subjects("wb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """`p50_s` and `p99_s`: from a request to the command that its decision led to, as its agent sees it."""

    tasks_per_s: float
    p50_s: float
    p99_s: float
    fsync_s: float


async def run(directory: Path, servers: int, slots: int, models: int) -> Durable:
    """One run, with servers of its own. Raises TimeoutError when the scheduler does not keep going."""
    directory.mkdir(parents=True)
    async with AsyncExitStack() as at_end:
        nats_server, redis_server = NatsServer(directory / "nats"), RedisServer(directory / "redis")
        for server in (nats_server, redis_server):
            await server.start()
            at_end.push_async_callback(server.stop)
        await _deploy(redis_server.url, models)
        environ = {"WB_NATS_URL": nats_server.url, "WB_REDIS_URL": redis_server.url, "WB_LOG_LEVEL": "error"}
        log = directory / "scheduler.log"
        scheduler = Child(
            "scheduler", service_argv("scheduler"), base_environ() | environ, log, lambda name, what: None
        )
        client = await nats.connect(nats_server.url, pending_size=64 * 1024 * 1024)
        at_end.push_async_callback(client.close)
        players = Players(client, servers=servers, slots=slots, models=models)
        await players.listen()
        await scheduler.start()
        at_end.push_async_callback(scheduler.stop)
        async with asyncio.timeout(RUN_S_MAX):
            await players.run(WARM_UP_TASKS)
            players.latencies_s.clear()
            started_s = time.perf_counter()
            await players.run(TASKS)
            seconds = time.perf_counter() - started_s
        players.stop()
    ordered = sorted(players.latencies_s)
    return Durable(
        tasks_per_s=TASKS / seconds,
        p50_s=statistics.median(ordered),
        p99_s=ordered[int(0.99 * len(ordered))],
        fsync_s=await asyncio.to_thread(_fsync_s, directory),
    )


async def _deploy(url: str, models: int) -> None:
    """The catalogue, as earlier deployments left it."""
    store = await RedisStore.connect(url, cluster="wb")
    await store.open()
    await store.append([model_record(number) for number in range(models)])
    await store.close()


class Players:
    """Everybody but the scheduler."""

    def __init__(self, client: Client, *, servers: int, slots: int, models: int) -> None:
        self._client = client
        self._places = list(itertools.product(range(servers), range(slots)))
        self._agents = [agent_heartbeat(server, servers, models) for server in range(servers)]
        self._peers = Peers(models=models, seed=1)
        self._held: dict[tuple[str, int], tuple[str, str]] = {}
        self._slots: dict[str, tuple[str, int]] = {}
        self._asked_s: dict[str, float] = {}
        self._end = 0
        self._ended = asyncio.Event()
        self._is_known = asyncio.Event()
        self._beats: asyncio.Task[None] | None = None
        self.latencies_s: list[float] = []

    async def listen(self) -> None:
        everybody = (SUBJECTS.all_to_agents(), SUBJECTS.all_to_workers(), SUBJECTS.all_to_routers())
        for subject in (*everybody, "answers.>"):
            await self._client.subscribe(subject, cb=self._on_message, pending_msgs_limit=-1, pending_bytes_limit=-1)
        await self._client.subscribe(SUBJECTS.all_heartbeats("scheduler"), cb=self._on_scheduler)
        self._beats = asyncio.create_task(self._beat())

    def stop(self) -> None:
        if self._beats is not None:
            self._beats.cancel()

    async def run(self, tasks: int) -> None:
        """Return when so many more requests have been served."""
        async with asyncio.timeout(START_S_MAX):
            await self._is_known.wait()
        self._end = self._peers.ended + tasks
        self._ended.clear()
        await self._ask()
        await self._ended.wait()

    async def _ask(self) -> None:
        while self._peers.in_flight < IN_FLIGHT and self._peers.ended + self._peers.in_flight < self._end:
            place = self._peers.request()
            self._asked_s[place.model_id] = time.perf_counter()
            await self._publish(place, reply=f"answers.{place.request_id}")

    async def _on_scheduler(self, _: Msg) -> None:
        """Somebody leads, and asks everybody to say what they are."""
        if not self._is_known.is_set():
            await self._say_all()
            await self._client.flush()
            self._is_known.set()

    async def _on_message(self, received: Msg) -> None:
        message = decode(received.data)
        parts = received.subject.split(".")
        server_id = parts[3] if len(parts) > 4 else None
        if isinstance(message, LoadModel):
            self.latencies_s.append(time.perf_counter() - self._asked_s[message.model_id])
            self._held[server_id or "", message.slots[0]] = (message.instance_id, message.model_id)
            self._slots[message.instance_id] = (server_id or "", message.slots[0])
        elif isinstance(message, UnloadInstance):
            self._held.pop(self._slots.pop(message.instance_id, ("", 0)), None)
        for answer in self._peers.answer(server_id, 0, message):
            await self._publish(answer)
        if self._peers.ended >= self._end:
            self._ended.set()
        await self._ask()

    async def _publish(self, message: Message, reply: str = "") -> None:
        await self._client.publish(SUBJECTS.to_scheduler(message), encode(message), reply=reply)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._say_all()

    async def _say_all(self) -> None:
        for agent in self._agents:
            await self._client.publish(SUBJECTS.heartbeat(agent), encode(agent))
        for server, slot in self._places:
            server_id = self._agents[server].server_id
            instance_id, model_id = self._held.get((server_id, slot), (None, None))
            worker = worker_heartbeat(server_id, slot, instance_id, model_id)
            await self._client.publish(SUBJECTS.heartbeat(worker), encode(worker))
        router = RouterHeartbeat(router_id=ROUTER, epoch=1, active=(), waiting_requests=0, oldest_wait_s=0.0)
        await self._client.publish(SUBJECTS.heartbeat(router), encode(router))


def _fsync_s(directory: Path) -> float:
    """The median time of a synced write of one page."""
    times: list[float] = []
    with (directory / "fsync").open("wb", buffering=0) as file:
        for _ in range(FSYNCS):
            started_s = time.perf_counter()
            file.write(b"\0" * 4096)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - started_s)
    return statistics.median(times)
