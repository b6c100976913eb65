"""Owns a whole cluster on one machine: nats-server, redis-server, router, scheduler, servers of agent and workers.

All state lies under one directory. Used by `whimbrel up`, the demo, the benchmarks and the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from whimbrel.chassis.child_server import ChildServer
from whimbrel.chassis.servers import NatsServer, RedisServer, ServerFailed, free_port
from whimbrel.cli.processes import Child, base_environ, service_argv
from whimbrel.client import AdminClient

STATE_FILE = "cluster.json"
DEFAULT_PORT = 8343
MIB = 1024 * 1024
# A quarter of memory for all pools together leaves room for the workers' own memory and the page cache.
POOL_SHARE_OF_MEMORY = 0.25
POOL_BYTES_MAX = 2048 * MIB
SSD_BYTES = 20 * 1024 * MIB
# Workers import torch on start, one after another on a small machine.
READY_S_MAX = 180.0
READY_POLL_S = 0.1
SERVER_WATCH_S = 0.2


class AlreadyRunning(Exception):
    """A cluster already runs in this directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What a local cluster looks like. `environ` is added to every service's environment, after ours.

    `devices` ("cpu", "cuda:0", …) are given to the slots in turn, those of the first server first.
    """

    directory: Path
    servers: int = 2
    slots: int = 1
    schedulers: int = 1
    port: int = DEFAULT_PORT
    host: str = "127.0.0.1"
    engine: str = "transformers"
    devices: tuple[str, ...] = ("cpu",)
    pool_bytes: int | None = None
    ssd_bytes: int = SSD_BYTES
    cluster: str = "wb"
    log_level: str = "info"
    environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (1 <= self.servers <= 64 and 1 <= self.slots <= 16 and 1 <= self.schedulers <= 8):
            raise ValueError("a local cluster has 1 to 64 servers of 1 to 16 slots, and 1 to 8 schedulers")
        if not self.devices:
            raise ValueError("a local cluster needs a device for its slots, such as cpu or cuda:0")

    def device_of(self, server: int, slot: int) -> str:
        """The device of a slot, both counted from 0."""
        return self.devices[(server * self.slots + slot) % len(self.devices)]

    @property
    def torch_threads_per_worker(self) -> int:
        """The workers share this machine's processors: threads that fight for one make both requests slower."""
        return max(1, len(os.sched_getaffinity(0)) // (self.servers * self.slots))

    @property
    def pool_bytes_per_server(self) -> int:
        if self.pool_bytes is not None:
            return self.pool_bytes
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        share = int(memory * POOL_SHARE_OF_MEMORY / self.servers)
        return max(256 * MIB, min(POOL_BYTES_MAX, share) // (16 * MIB) * 16 * MIB)


class LocalCluster:
    """`async with LocalCluster(options) as cluster:` starts everything and waits until it can serve."""

    def __init__(self, options: ClusterOptions, say: Callable[[str], None] = lambda line: None) -> None:
        self.options = options
        self.directory = options.directory.resolve()
        self.children: dict[str, Child] = {}
        self._say = say
        self._nats: NatsServer | None = None
        self._redis: RedisServer | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._port = options.port or free_port()

    @property
    def url(self) -> str:
        return f"http://{self.options.host}:{self._port}"

    @property
    def nats(self) -> NatsServer:
        assert self._nats is not None, "the cluster is not started"
        return self._nats

    @property
    def redis(self) -> RedisServer:
        assert self._redis is not None, "the cluster is not started"
        return self._redis

    @property
    def repository(self) -> Path:
        return self.directory / "repository"

    async def __aenter__(self) -> Self:
        try:
            await self.start()
            await self.wait_ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start every process; raises AlreadyRunning when another cluster owns the directory."""
        if read_state(self.directory) is not None:
            raise AlreadyRunning(f"a cluster already runs in {self.directory}; stop it with: whimbrel down")
        for name in ("logs", "repository", "cache", "nats", "redis"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        self._write_state()
        self._nats = NatsServer(self.directory / "nats")
        self._redis = RedisServer(self.directory / "redis")
        await asyncio.gather(self._nats.__aenter__(), self._redis.__aenter__())
        self._say(f"nats-server {self._nats.url}, redis-server {self._redis.url}")
        for name, server in (("nats-server", self._nats), ("redis-server", self._redis)):
            self._watches.append(asyncio.create_task(self._watch(name, server), name=f"watch {name}"))
        for name, service, environ in self._services():
            log = self.directory / "logs" / f"{name}.log"
            child = Child(name, service_argv(service), {**base_environ(), **environ}, log, self._on_change)
            self.children[name] = child
            await child.start()
        self._write_state()

    async def wait_ready(self) -> None:
        """Return when the router is ready and every slot is there; raises TimeoutError with what is missing."""
        missing = "the router"
        async with AdminClient(self.url) as client:
            try:
                async with asyncio.timeout(READY_S_MAX):
                    while missing:
                        missing = await self._missing(client)
                        if missing:
                            await asyncio.sleep(READY_POLL_S)
            except TimeoutError:
                logs = self.directory / "logs"
                raise TimeoutError(f"not ready after {READY_S_MAX:.0f} s, missing: {missing}; see {logs}") from None

    async def _missing(self, client: AdminClient) -> str:
        if not await client.is_ready():
            return "the router"
        try:
            cluster = await client.cluster()
        except Exception as error:
            return f"the scheduler ({error})"
        alive = {
            (server["server_id"], slot["slot"])
            for server in cluster["servers"]
            if server["is_alive"]
            for slot in server["slots"]
            if slot["is_alive"]
        }
        wanted = {(f"s{n}", slot) for n in range(self.options.servers) for slot in range(self.options.slots)}
        return ", ".join(f"{server}/{slot}" for server, slot in sorted(wanted - alive))

    async def stop(self) -> None:
        """Stop everything, clients' side first; leaves the directory with its data and no process."""
        order = ["router", *(n for n in self.children if n.startswith("worker"))]
        order += [name for name in reversed(self.children) if name.startswith("scheduler")]
        order += [name for name in self.children if name.startswith("agent")]
        for group in (order[:1], order[1:]):
            await asyncio.gather(*(self.children[name].stop() for name in group if name in self.children))
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for server in (self._redis, self._nats):
            if server is not None:
                await server.stop()
        for server_id in (f"s{n}" for n in range(self.options.servers)):
            pool = self._pool_path(server_id)
            for leftover in pool.parent.glob(pool.name + "*"):
                leftover.unlink(missing_ok=True)
        (self.directory / STATE_FILE).unlink(missing_ok=True)

    async def _watch(self, name: str, server: ChildServer) -> None:
        """Start a server again, on its port and with its data, when it dies."""
        while True:
            await asyncio.sleep(SERVER_WATCH_S)
            if not server.is_running:
                self._on_change(name, "ended; starting it again")
                with contextlib.suppress(ServerFailed):
                    await server.restart()
                    self._on_change(name, f"started (pid {server.pid})")

    def _services(self) -> list[tuple[str, str, dict[str, str]]]:
        """Name, module and environment of every service."""
        options, common = self.options, self._common_environ()
        repository = {"WB_REPOSITORY_URL": self.repository.as_uri()}
        router = {
            "WB_ROUTER_ID": "router-0", "WB_HTTP_HOST": options.host, "WB_HTTP_PORT": str(self._port),
            "WB_CACHE_DIR": str(self.directory / "cache"),
        }  # fmt: skip
        scheduler = {"WB_REDIS_URL": self.redis.url}
        # The first is "scheduler" for short; whichever comes first leads.
        names = ["scheduler", *(f"scheduler-{number}" for number in range(1, options.schedulers))]
        services = [
            (name, "scheduler", {**common, **scheduler, "WB_SCHEDULER_ID": f"scheduler-{n}", **options.environ})
            for n, name in enumerate(names)
        ]
        services.append(("router", "router", {**common, **repository, **router, **options.environ}))
        for number in range(options.servers):
            server_id = f"s{number}"
            agent = {
                "WB_SERVER_ID": server_id, "WB_SSD_DIR": str(self.directory / "servers" / server_id / "ssd"),
                "WB_SSD_BYTES": str(options.ssd_bytes), "WB_POOL_PATH": str(self._pool_path(server_id)),
                "WB_POOL_BYTES": str(options.pool_bytes_per_server),
            }  # fmt: skip
            services.append(
                (f"agent-{server_id}", "storage_agent", {**common, **repository, **agent, **options.environ})
            )
            for slot in range(options.slots):
                worker = {
                    "WB_SERVER_ID": server_id, "WB_SLOT": str(slot), "WB_ENGINE": options.engine,
                    "WB_DEVICE": options.device_of(number, slot),
                    "WB_TORCH_THREADS": str(options.torch_threads_per_worker),
                }  # fmt: skip
                services.append((f"worker-{server_id}-{slot}", "gpu_worker", {**common, **worker, **options.environ}))
        return services

    def _common_environ(self) -> dict[str, str]:
        return {
            "WB_NATS_URL": self.nats.url,
            "WB_CLUSTER": self.options.cluster,
            "WB_LOG_LEVEL": self.options.log_level,
            # Services are started from anywhere; they must not import from the directory they happen to be in.
            "PYTHONSAFEPATH": "1",
        }

    def _pool_path(self, server_id: str) -> Path:
        # Two clusters on one machine must not meet in shared memory, so the directory is part of the name.
        mark = f"{os.stat(self.directory).st_ino:x}"
        return Path("/dev/shm") / f"whimbrel-{mark}-{server_id}.pool"

    def _on_change(self, name: str, what: str) -> None:
        self._say(f"{name} {what}")
        if self._nats is not None:
            self._write_state()

    def _pids(self) -> dict[str, int | None]:
        servers = (("nats-server", self._nats), ("redis-server", self._redis))
        pids: dict[str, int | None] = {name: server.pid for name, server in servers if server and server.is_running}
        return pids | {name: child.pid for name, child in self.children.items()}

    def _write_state(self) -> None:
        state: dict[str, Any] = {
            "pid": os.getpid(),
            "url": self.url,
            "nats_url": self._nats.url if self._nats is not None else "",
            "redis_url": self._redis.url if self._redis is not None else "",
            "cluster": self.options.cluster,
            "services": self._pids(),
            "restarts": {name: child.restarts for name, child in self.children.items()},
        }
        path = self.directory / STATE_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, indent=2))
        temporary.replace(path)


def read_state(directory: Path) -> dict[str, Any] | None:
    """The state of the cluster that runs in this directory; None when none does (a dead one's file is ignored)."""
    with contextlib.suppress(OSError, ValueError):
        state: dict[str, Any] = json.loads((directory / STATE_FILE).read_text())
        if is_python(state["pid"]):
            return state
    return None


def is_python(pid: int) -> bool:
    """True when that process lives and is Python: a number may have been given to another program since."""
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
