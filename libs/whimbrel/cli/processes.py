"""Owns child processes of a local cluster: started with a log, restarted when they die, gone when we are."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from whimbrel.chassis.servers import leashed

# A child that dies at once again is started again after these pauses: a fault that stays must not burn a core.
RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0)
# A life of this length counts as healthy: the next restart is immediate again.
HEALTHY_S = 30.0
# So many short lives in a row are no accident: whoever watches is told where to look.
CRASH_LOOP_LIVES = 3
STOP_S_MAX = 20.0


class Child:
    """One supervised process. `on_change(name, what)` is told of every start and death, the moment it happens.

    `restarts` counts the lives after the first.
    """

    def __init__(
        self,
        name: str,
        argv: list[str],
        environ: Mapping[str, str],
        log_path: Path,
        on_change: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.restarts = 0
        self._argv = argv
        self._environ = dict(environ)
        self._log_path = log_path
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        self._stopping = False
        await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(), name=f"supervise {self.name}")

    async def stop(self) -> None:
        """SIGTERM, wait, SIGKILL if it must be; no restart. Idempotent."""
        self._stopping = True
        self.signal(signal.SIGTERM)
        if self._process is not None:
            try:
                async with asyncio.timeout(STOP_S_MAX):
                    await self._process.wait()
            except TimeoutError:
                self.signal(signal.SIGKILL)
                await self._process.wait()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
            self._supervisor = None

    def signal(self, number: int) -> None:
        """Send a signal if the process lives."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _spawn(self) -> None:
        # The kernel ends the child when we die, even by SIGKILL: nothing is left behind.
        argv = leashed(self._argv, parent_pid=os.getpid(), signum=signal.SIGTERM)
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                env=self._environ, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        again = f", restart {self.restarts}" if self.restarts else ""
        self._on_change(self.name, f"started (pid {self._process.pid}{again})")

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        quick_deaths = 0
        while True:
            assert self._process is not None
            born = loop.time()
            status = await self._process.wait()
            if self._stopping:
                return
            quick_deaths = 0 if loop.time() - born > HEALTHY_S else quick_deaths + 1
            pause = RESTART_PAUSES_S[min(max(quick_deaths - 1, 0), len(RESTART_PAUSES_S) - 1)]
            self._on_change(self.name, self._obituary(status, loop.time() - born, quick_deaths, pause))
            await asyncio.sleep(pause)
            self.restarts += 1
            await self._spawn()

    def _obituary(self, status: int, lived_s: float, quick_deaths: int, pause_s: float) -> str:
        said = f"{_cause(status)} after {lived_s:.1f} s; starting it again in {pause_s:g} s"
        if quick_deaths < CRASH_LOOP_LIVES:
            return f"{said} (log: {self._log_path})"
        loop = f"it has ended {quick_deaths} times in a row soon after its start"
        return f"{said}: {loop}, and the end of {self._log_path} says why"


def _cause(status: int) -> str:
    """What a process ended by, from the status that its parent is given."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def service_argv(service: str) -> list[str]:
    return [sys.executable, "-m", f"services.{service}"]


def base_environ() -> dict[str, str]:
    """Our environment without what would configure a service by accident."""
    return {name: value for name, value in os.environ.items() if not name.startswith("WB_")}
