"""Supervised children: restarted when they die, gone when asked to, gone when we are."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from whimbrel.cli.processes import Child

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]

# Starts one child, says its pid, and waits to be killed.
PARENT = """
import asyncio, os, sys
from pathlib import Path
from whimbrel.cli.processes import Child

async def main():
    argv = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = Child("child", argv, os.environ, Path(sys.argv[1]), lambda *change: None)
    await child.start()
    print(child.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


class Changes:
    """Collects what a child reports and lets a test await the n-th start."""

    def __init__(self) -> None:
        self.starts: asyncio.Queue[str] = asyncio.Queue()

    def __call__(self, name: str, what: str) -> None:
        if what.startswith("started"):
            self.starts.put_nowait(what)


def a_child(tmp_path: Path, argv: list[str], changes: Changes) -> Child:
    return Child("sleeper", argv, os.environ, tmp_path / "log", changes)


async def test_a_killed_child_is_started_again(tmp_path: Path) -> None:
    changes = Changes()
    child = a_child(tmp_path, SLEEPER, changes)
    await child.start()
    first = child.pid
    await changes.starts.get()
    child.signal(signal.SIGKILL)
    async with asyncio.timeout(10):
        await changes.starts.get()
    assert child.pid not in (None, first)
    assert child.restarts == 1
    await child.stop()
    assert child.pid is None


async def test_a_stopped_child_stays_stopped(tmp_path: Path) -> None:
    changes = Changes()
    child = a_child(tmp_path, SLEEPER, changes)
    await child.start()
    pid = child.pid
    await child.stop()
    await child.stop()
    assert child.pid is None
    assert child.restarts == 0
    assert not Path(f"/proc/{pid}").exists()


async def test_a_child_that_dies_at_once_is_retried_with_pauses_not_in_a_loop(tmp_path: Path) -> None:
    changes = Changes()
    child = a_child(tmp_path, [sys.executable, "-S", "-c", "raise SystemExit(3)"], changes)
    await child.start()
    async with asyncio.timeout(20):
        for _ in range(3):
            await changes.starts.get()
    await child.stop()
    assert 2 <= child.restarts <= 4


def test_children_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """A supervisor that is killed with SIGKILL must not leave services behind."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    pidfd = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)  # a pidfd becomes readable when its process ends
    loop.run_until_complete(asyncio.wait_for(ended.wait(), 10))
    loop.remove_reader(pidfd)
    loop.close()
    os.close(pidfd)
