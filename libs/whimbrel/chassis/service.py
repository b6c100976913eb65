"""Owns the life of a service process: start, serve, drain with a deadline on SIGTERM, close."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

import structlog
import uvloop

from whimbrel.chassis import telemetry
from whimbrel.chassis.config import ConfigError, from_env
from whimbrel.chassis.logging import configure
from whimbrel.chassis.status_page import StatusPage

log = structlog.get_logger()

# A running inference may need this long to end; longer than that, its client is told to come again.
DRAIN_S_MAX = 30.0
# Releasing connections and files takes milliseconds; whoever needs longer hangs.
CLOSE_S_MAX = 10.0
# After a signal the process ends in this time whatever blocks: the event loop, or a thread that never returns.
END_S_MAX = DRAIN_S_MAX + CLOSE_S_MAX + 5.0
# How often the event loop is asked whether it comes round in time.
LAG_PROBE_S = 0.25
# Python looks for cycles after so many new objects, and looks at all objects after so many such rounds. A busy
# scheduler makes thousands of objects in a step, none of them in cycles: with Python's own 700 it spends a tenth of its
# time looking.
GC_THRESHOLDS = (20_000, 20, 20)
# A loop that is late by this much delays every heartbeat and token of its process.
LAG_LOGGED_S = 0.5

EVENT_LOOP_LAG = telemetry.gauge(
    "whimbrel_event_loop_lag_seconds",
    "How late the event loop was at the last probe; blocking work shows here.",
)


class Service(Protocol):
    """What a service's shell offers to its chassis."""

    name: str

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Connect, subscribe, spawn loops in the group; returns when serving."""

    async def drain(self) -> None:
        """Stop intake and let running work end; cancelled after DRAIN_S_MAX."""

    async def close(self) -> None:
        """Called last, whatever happened before; release everything."""

    def readiness(self) -> str | None:
        """None when ready, else one sentence why not."""
        ...


class _Stopped(Exception):
    """Ends the task group of a service that was asked to stop."""


class ProcessConfig(Protocol):
    """What every service's configuration has for its process."""

    @property
    def log_level(self) -> str: ...

    @property
    def metrics_port(self) -> int: ...

    @property
    def metrics_host(self) -> str: ...


C = TypeVar("C", bound=ProcessConfig)


def start(config_class: type[C], make_service: Callable[[C], Service]) -> NoReturn:
    """Configure a service from the environment and run it as this process; a wrong variable ends it by name."""
    try:
        config = from_env(config_class, os.environ)
    except ConfigError as error:
        sys.exit(str(error))
    main(
        make_service(config),
        log_level=config.log_level,
        metrics_port=config.metrics_port,
        metrics_host=config.metrics_host,
    )


def main(service: Service, *, log_level: str, metrics_port: int, metrics_host: str = "127.0.0.1") -> NoReturn:
    """Run `service` as this process. Exits with 0 after SIGTERM or SIGINT, with 1 when any of its tasks failed.

    A second signal ends the process at once. `metrics_port` 0 means no metrics and no health endpoints.
    """
    configure(log_level, service=service.name)
    # What was imported stays for as long as the process does.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(_run(service, metrics_port=metrics_port, metrics_host=metrics_host)))


async def serve(
    service: Service,
    stop: asyncio.Event,
    *,
    metrics_port: int = 0,
    metrics_host: str = "127.0.0.1",
    drain_s_max: float = DRAIN_S_MAX,
) -> None:
    """Run `service` inside a running loop until `stop` is set; raises the ExceptionGroup of whatever failed in it."""
    try:
        async with asyncio.TaskGroup() as group:
            page = StatusPage(service.readiness)
            if metrics_port:
                await page.listen(metrics_host, metrics_port)
            group.create_task(_probe_lag(), name="event_loop_lag")
            try:
                await _live(service, group, stop, page, drain_s_max)
            finally:
                await page.close()
            raise _Stopped
    except* _Stopped:
        log.info("service_stopped")
    finally:
        await _close(service)


async def _live(
    service: Service, group: asyncio.TaskGroup, stop: asyncio.Event, page: StatusPage, drain_s_max: float
) -> None:
    if not await _unless(stop, service.start(group)):
        log.info("service_stopped_while_starting")
        return
    page.has_started = True
    log.info("service_started", pid=os.getpid())
    await stop.wait()
    page.is_draining = True
    started_at = time.monotonic()
    try:
        async with asyncio.timeout(drain_s_max):
            await service.drain()
        log.info("service_drained", drain_s=round(time.monotonic() - started_at, 3))
    except TimeoutError:
        log.warning("service_not_drained", drain_s_max=drain_s_max)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Await `work`, or cancel it when `stop` is set first; says whether it was done."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(work)
        stopping = group.create_task(stop.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        is_done = working.done()
        working.cancel()
        stopping.cancel()
    return is_done


async def _close(service: Service) -> None:
    try:
        async with asyncio.timeout(CLOSE_S_MAX):
            await service.close()
    except TimeoutError:
        log.error("service_not_closed", close_s_max=CLOSE_S_MAX)


async def _probe_lag() -> None:
    while True:
        due_at = time.monotonic() + LAG_PROBE_S
        await asyncio.sleep(LAG_PROBE_S)
        lag_s = max(0.0, time.monotonic() - due_at)
        EVENT_LOOP_LAG.set(lag_s)
        if lag_s > LAG_LOGGED_S:
            log.warning("event_loop_lagged", lag_s=round(lag_s, 3))


async def _run(service: Service, *, metrics_port: int, metrics_host: str) -> int:
    stop = asyncio.Event()

    def on_signal(signum: signal.Signals) -> None:
        if stop.is_set():
            log.warning("service_killed", signal=signum.name)
            os._exit(128 + signum)
        log.info("service_stopping", signal=signum.name)
        stop.set()
        watchdog = threading.Timer(END_S_MAX, os._exit, args=(1,))
        watchdog.daemon = True
        watchdog.start()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal, signum)
    try:
        await serve(service, stop, metrics_port=metrics_port, metrics_host=metrics_host)
    except Exception as failure:  # the top of the process
        for cause in _leaves(failure):
            log.error("service_failed", reason=str(cause), exc_info=cause)
        return 1
    return 0


def _leaves(failure: BaseException) -> list[BaseException]:
    if isinstance(failure, BaseExceptionGroup):
        return [leaf for part in failure.exceptions for leaf in _leaves(part)]
    return [failure]
