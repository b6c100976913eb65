"""A cluster as a user starts it: `whimbrel up --detach`, real processes, real NATS and Redis, on free ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
COMMAND_S_MAX = 240.0


def whimbrel(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the command line tool as a user would; raises with its output when it fails and `check` is set."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("WB_", "WHIMBREL_"))}
    done = subprocess.run(
        [sys.executable, "-m", "whimbrel.cli.main", *arguments],
        capture_output=True, text=True, timeout=COMMAND_S_MAX, env=environ,
    )  # fmt: skip
    if check and done.returncode:
        raise AssertionError(
            f"whimbrel {' '.join(arguments)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done


@dataclass
class Cluster:
    """A running cluster and what a test asks of it."""

    directory: Path

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.directory / "cluster.json").read_text())
        return state

    @property
    def url(self) -> str:
        return str(self.state["url"])

    def pid(self, service: str) -> int | None:
        pid: int | None = self.state["services"].get(service)
        return pid

    def signal(self, service: str, number: signal.Signals) -> int:
        """Send a signal to a service that runs; the answer is the process it went to."""
        pid = self.pid(service)
        assert pid is not None, f"{service} does not run: {self.state['services']}"
        os.kill(pid, number)
        return pid

    def kill(self, service: str) -> None:
        """kill -9, and return when the supervisor has started a new life of it."""
        old = self.signal(service, signal.SIGKILL)
        wait_until(lambda: self.pid(service) not in (None, old), f"{service} was not started again")

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=30).raise_for_status().json()

    def slots(self) -> dict[str, str | None]:
        """Model on each live slot, by `server/slot`."""
        return {
            f"{server['server_id']}/{slot['slot']}": slot["model_id"]
            for server in self.get("/admin/cluster")["servers"]
            for slot in server["slots"]
            if slot["is_alive"]
        }

    def leases(self) -> list[Path]:
        """Lease files of this cluster: one per instance that maps chunks."""
        mark = f"whimbrel-{self.directory.stat().st_ino:x}-"
        return [path for path in Path("/dev/shm").iterdir() if path.name.startswith(mark) and ".lease." in path.name]

    def logs(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.directory.glob("logs/*.log"))
        )


def wait_until(condition: Any, otherwise: str, seconds: float = 60.0) -> None:
    """Poll a condition of another process; fails with `otherwise` when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """True while the process runs; one that has ended and waits to be reaped by its parent is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def running_cluster(directory: Path, *options: str) -> Iterator[Cluster]:
    """Up, then down; fails when anything is left behind."""
    whimbrel("up", "--detach", "--dir", str(directory), "--port", "0", *options)
    cluster = Cluster(directory)
    state = cluster.state
    try:
        yield cluster
    finally:
        pids = [*cluster.state["services"].values(), state["pid"]]
        whimbrel("down", "--dir", str(directory))
    left = [pid for pid in pids if pid and is_alive(pid)]
    assert not left, f"processes were left behind: {left}"
    assert not list(Path("/dev/shm").glob(f"whimbrel-{directory.stat().st_ino:x}-*")), "shared memory was left behind"
