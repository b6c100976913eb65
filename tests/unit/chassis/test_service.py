"""The life of a service: inside a running loop, and as a process that gets signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs
from whimbrel.chassis.config import ConfigError
from whimbrel.chassis.servers import free_port
from whimbrel.chassis.service import serve

PATIENCE_S = 20.0
ROOT = Path(__file__).resolve().parents[3]


class Recorded:
    """A service that writes down what its chassis asks of it."""

    name = "recorded"

    def __init__(self) -> None:
        self.told: list[str] = []
        self.started = asyncio.Event()
        self.not_ready: str | None = None
        self.work = self._run
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.start_blocks = False

    async def start(self, group: asyncio.TaskGroup) -> None:
        self.told.append("start")
        if self.start_blocks:
            self.started.set()
            await asyncio.Event().wait()
        group.create_task(self.work())
        self.started.set()

    async def drain(self) -> None:
        self.told.append("drain")
        await self.may_end.wait()
        self.told.append("drained")

    async def close(self) -> None:
        self.told.append("close")

    def readiness(self) -> str | None:
        return self.not_ready

    async def _run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.told.append("loop ended")


@asynccontextmanager
async def serving(service: Recorded, **options: float) -> AsyncIterator[asyncio.Event]:
    stop = asyncio.Event()
    task = asyncio.ensure_future(serve(service, stop, **options))  # type: ignore[arg-type]
    await asyncio.wait_for(service.started.wait(), PATIENCE_S)
    try:
        yield stop
        await asyncio.wait_for(task, PATIENCE_S)
    finally:
        task.cancel()
        await asyncio.wait({task})


def client_of(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")


async def test_a_service_is_drained_then_its_loops_end_then_it_is_closed() -> None:
    service = Recorded()
    async with serving(service) as stop:
        stop.set()
    assert service.told == ["start", "drain", "drained", "loop ended", "close"]


async def test_a_drain_that_takes_too_long_is_cut_off() -> None:
    service = Recorded()
    service.may_end.clear()
    with capture_logs() as logs:
        async with serving(service, drain_s_max=0.05) as stop:
            stop.set()
    assert service.told == ["start", "drain", "loop ended", "close"]
    assert "service_not_drained" in [entry["event"] for entry in logs]


async def test_a_service_can_be_stopped_while_it_still_starts() -> None:
    """A service whose NATS is away waits in start, and SIGTERM must end it all the same."""
    service = Recorded()
    service.start_blocks = True
    async with serving(service) as stop:
        stop.set()
    assert service.told == ["start", "close"]


async def test_a_task_that_crashes_ends_the_service_with_its_error() -> None:
    service = Recorded()

    async def crash() -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError("oops")

    service.work = crash
    with pytest.RaisesGroup(ZeroDivisionError):
        await asyncio.wait_for(serve(service, asyncio.Event()), PATIENCE_S)
    assert service.told == ["start", "close"]


async def test_a_start_that_fails_ends_the_service_with_its_error() -> None:
    class Broken(Recorded):
        async def start(self, group: asyncio.TaskGroup) -> None:
            raise ConfigError("WB_NATS_URL", "is wrong")

    service = Broken()
    with pytest.RaisesGroup(ConfigError, flatten_subgroups=True):
        await asyncio.wait_for(serve(service, asyncio.Event()), PATIENCE_S)
    assert service.told == ["close"]


async def test_health_readiness_and_metrics_can_be_read() -> None:
    service, port = Recorded(), free_port()
    async with (
        serving(service, metrics_port=port) as stop,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        health, ready, metrics = [await client.get(path) for path in ("/healthz", "/readyz", "/metrics")]
        service.not_ready = "the oldest waiter is 31 s old"
        not_ready, unknown = await client.get("/readyz"), await client.get("/other")
        stop.set()

    assert (health.status_code, ready.status_code, ready.text) == (200, 200, "ready\n")
    assert "whimbrel_event_loop_lag_seconds" in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert (not_ready.status_code, not_ready.text) == (503, "the oldest waiter is 31 s old\n")
    assert unknown.status_code == 404


async def test_readiness_is_red_while_starting_and_while_draining() -> None:
    service, port = Recorded(), free_port()
    service.start_blocks = True
    async with (
        serving(service, metrics_port=port) as stop,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        starting, alive = await client.get("/readyz"), await client.get("/healthz")
        stop.set()
    assert (starting.status_code, starting.text, alive.status_code) == (503, "the service is starting\n", 200)

    service, port = Recorded(), free_port()
    service.may_end.clear()
    async with serving(service, metrics_port=port) as stop, client_of(port) as client:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            while "drain" not in service.told:  # noqa: ASYNC110  the service tells nobody else
                await asyncio.sleep(0.001)
        draining = await client.get("/readyz")
        service.may_end.set()
    assert (draining.status_code, draining.text) == (503, "the service is stopping\n")


async def test_a_metrics_port_that_is_taken_is_an_error_that_names_the_setting() -> None:
    service = Recorded()
    taken = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=f"WB_METRICS_PORT: cannot listen on 127.0.0.1:{port}")):
        await asyncio.wait_for(serve(service, asyncio.Event(), metrics_port=port), PATIENCE_S)
    taken.close()
    assert service.told == ["close"]


# --- as a process ---

PROGRAM = """
import asyncio, sys, time
from whimbrel.chassis.service import main

class Program:
    name = "program"

    async def start(self, group):
        if "crash" in sys.argv:
            async def crash():
                raise ZeroDivisionError("oops")
            group.create_task(crash())
        if "away" in sys.argv:
            print("started", flush=True)
            await asyncio.Event().wait()
        print("started", flush=True)

    async def drain(self):
        print("drain", flush=True)
        if "hang" in sys.argv:
            await asyncio.Event().wait()

    async def close(self):
        print("close", flush=True)

    def readiness(self):
        return None

main(Program(), log_level="info", metrics_port=0)
"""


async def run_program(mode: str, *signals: signal.Signals) -> tuple[int, list[str], str]:
    """Exit status, lines of standard output, log; each signal is sent after one more line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        mode,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "libs")},
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            for signum in signals:
                lines.append((await process.stdout.readline()).decode().strip())
                process.send_signal(signum)
            out, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, lines + out.decode().split(), log.decode()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=["sigterm", "sigint"])
async def test_a_signal_drains_and_ends_with_status_0(signum: signal.Signals) -> None:
    status, lines, log = await run_program("", signum)
    assert (status, lines) == (0, ["started", "drain", "close"])
    assert "Traceback" not in log


async def test_a_second_signal_ends_at_once() -> None:
    status, lines, log = await run_program("hang", signal.SIGTERM, signal.SIGTERM)
    assert (status, lines) == (128 + signal.SIGTERM, ["started", "drain"])
    assert "service_killed" in log


async def test_a_signal_ends_a_process_that_still_starts() -> None:
    status, lines, _ = await run_program("away", signal.SIGTERM)
    assert (status, lines) == (0, ["started", "close"])


async def test_a_crash_ends_the_process_with_status_1_and_is_logged() -> None:
    status, lines, log = await run_program("crash")
    assert (status, lines[-1]) == (1, "close")
    assert '"event": "service_failed"' in log
    assert "ZeroDivisionError: oops" in log
