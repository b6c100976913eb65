"""The cluster that is harmed: two servers of one slot, two schedulers, and a proxy between the router and NATS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
from whimbrel.chassis.servers import free_port
from whimbrel.cli.cluster import ClusterOptions, LocalCluster
from whimbrel.client import AdminClient, ApiError
from whimbrel.client.admin import MIGRATION_ENDS

from tests.chaos.client import MODEL
from tests.chaos.timeline import Watch
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster
from tests.support.faulty_proxy import FaultyProxy

POOL_BYTES = 256 * 1024 * 1024
# From the SSD, some hundred milliseconds.
MODEL_BYTES = 150_000_000
# A load and the computing of all tokens again take half a second or more each: long beside the time that a harm needs
# to come after the news it waits for.
SETTINGS = {
    "WB_ECHO_LOAD_S": "0.6",
    "WB_ECHO_PREFILL_S_PER_TOKEN": "0.0015",
    "WB_ECHO_DECODE_S": "0.01",
}
# Idle instances go at once, so that slots and leases can be seen to return to zero.
KEEP_ALIVE_S = 0.5
AWAY = (httpx.TransportError, ApiError, TimeoutError)


class World(LocalCluster):
    """A local cluster as `whimbrel up` starts it, but for the router's way to NATS."""

    def __init__(self, directory: Path) -> None:
        options = ClusterOptions(
            directory=directory, servers=2, slots=1, schedulers=2, port=0, engine="echo",
            pool_bytes=POOL_BYTES, environ=SETTINGS,
        )  # fmt: skip
        super().__init__(options)
        self.admin = AdminClient(self.url)
        self.proxy: FaultyProxy | None = None
        self.watch: Watch | None = None

    async def start(self) -> None:
        await super().start()
        assert self.proxy is not None
        await self.proxy.come()
        self.watch = Watch(self.nats.url, self.options.cluster)
        await self.watch.start()

    async def stop(self) -> None:
        for pid in filter(None, self._pids().values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self.watch is not None:
            await self.watch.stop()
        await super().stop()
        if self.proxy is not None:
            await self.proxy.go_away()

    async def deploy(self) -> None:
        """One model, in the memory of both servers."""
        source = make_checkpoint(self.directory / "source", 1, padding_bytes=MODEL_BYTES)
        await self.admin.deploy_and_wait(MODEL, str(source), keep_alive_s=KEEP_ALIVE_S)
        for server_id in ("s0", "s1"):
            await self.admin.prefetch(server_id, MODEL, "dram")

    def pid(self, name: str) -> int:
        """Of a service, `nats-server` or `redis-server`; raises RuntimeError while it is down."""
        pid = self._pids().get(name)
        if pid is None:
            raise RuntimeError(f"{name} does not run")
        return pid

    async def leader(self) -> str:
        """The name of the scheduler's process that leads."""
        name: str = (await self.admin.cluster())["scheduler_id"]
        return "scheduler" if name == "scheduler-0" else name

    async def where(self) -> str:
        """The server that runs a request; "" when none does."""
        for server in (await self.admin.cluster())["servers"]:
            if any(slot["active_requests"] for slot in server["slots"]):
                return str(server["server_id"])
        return ""

    async def unrest(self) -> list[str]:
        """What is not as it was before the first request: everybody is there, and nobody has anything."""
        found = [f"{name} does not run" for name, pid in self._pids().items() if pid is None]
        found += [f"{name} is down" for name in ("nats-server", "redis-server") if name not in self._pids()]
        found += [f"lease {path.name}" for path in Cluster(self.directory).leases()]
        try:
            found += self._unrest_of_servers(await self.admin.cluster())
            found += [
                f"migration {one['migration_id']} is {one['state']}"
                for one in await self.admin.migrations()
                if one["state"] not in MIGRATION_ENDS
            ]
            found += await self._unrest_of_router()
        except AWAY as error:
            found.append(f"nobody answers: {error!r}")
        return found

    def keep_logs(self, place: Path) -> None:
        """For whoever looks into a cell that failed."""
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.directory / "logs", place)

    def _unrest_of_servers(self, cluster: dict[str, Any]) -> Iterator[str]:
        slots = [(server, slot) for server in cluster["servers"] for slot in server["slots"]]
        if len(slots) != self.options.servers:
            yield f"{len(slots)} slots are known"
        for server, slot in slots:
            name = f"{server['server_id']}/{slot['slot']}"
            if not (server["is_alive"] and slot["is_alive"]):
                yield f"{name} is lost"
            if slot["active_requests"]:
                yield f"{name} has {slot['active_requests']} requests"
            if slot["instance_id"] is not None:
                yield f"{name} has {slot['instance_id']}"
            if server["tasks"]:
                yield f"{name} loads {server['tasks']}"
        if cluster["waiting_requests"]:
            yield f"{cluster['waiting_requests']} requests wait"

    async def _unrest_of_router(self) -> list[str]:
        async with httpx.AsyncClient(timeout=5) as http:
            metrics = (await http.get(f"{self.url}/metrics")).text
        gauges = re.findall(r"^whimbrel_router_(running|waiting)_requests (\S+)$", metrics, re.MULTILINE)
        if len(gauges) != 2:
            return ["the router has no gauges"]
        return [f"the router has {value} {what} requests" for what, value in gauges if float(value)]

    def _services(self) -> list[tuple[str, str, dict[str, str]]]:
        port = free_port()
        self.proxy = FaultyProxy(self.nats.url, port=port)
        url = {"WB_NATS_URL": f"nats://127.0.0.1:{port}"}
        return [
            (name, service, environ | url if service == "router" else environ)
            for name, service, environ in super()._services()
        ]


@contextlib.asynccontextmanager
async def a_world(directory: Path) -> AsyncIterator[World]:
    shutil.rmtree(directory, ignore_errors=True)
    async with World(directory) as world, world.admin:
        await world.deploy()
        yield world


async def settle(world: World, seconds: float) -> list[str]:
    """What is left when everything has come to rest, or after this time."""
    deadline_s = time.monotonic() + seconds
    while True:
        left = await world.unrest()
        if not left or time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(0.1)
