"""Supervised children: restarted when they die, gone when asked to, gone when we are."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from whimbrel.cli import processes
from whimbrel.cli.cluster import ClusterOptions
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
    """Collects what a child reports and lets a test await the n-th start, or death."""

    def __init__(self) -> None:
        self.starts: asyncio.Queue[str] = asyncio.Queue()
        self.deaths: asyncio.Queue[str] = asyncio.Queue()

    def __call__(self, name: str, what: str) -> None:
        (self.starts if what.startswith("started") else self.deaths).put_nowait(what)


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


async def test_a_killed_child_is_noticed_at_once_and_its_restarts_are_counted(tmp_path: Path) -> None:
    changes = Changes()
    child = a_child(tmp_path, SLEEPER, changes)
    await child.start()
    assert "restart" not in await changes.starts.get()
    noticed_s = []
    for number in (1, 2):
        killed_at = time.monotonic()
        child.signal(signal.SIGKILL)
        async with asyncio.timeout(10):
            death = await changes.deaths.get()
        noticed_s.append(time.monotonic() - killed_at)
        assert death.startswith("was killed by SIGKILL after ")
        assert str(tmp_path / "log") in death
        async with asyncio.timeout(10):
            start = await changes.starts.get()
        assert start == f"started (pid {child.pid}, restart {number})"
        assert child.restarts == number
    assert min(noticed_s) < 1.0
    await child.stop()


async def test_a_crash_loop_says_that_it_is_one_and_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "RESTART_PAUSES_S", (0.001,))
    changes = Changes()
    child = a_child(tmp_path, [sys.executable, "-S", "-c", "raise SystemExit('no such setting')"], changes)
    await child.start()
    deaths = []
    async with asyncio.timeout(60):
        for _ in range(processes.CRASH_LOOP_LIVES):
            deaths.append(await changes.deaths.get())
    await child.stop()
    assert all(death.startswith("ended with status 1 after ") for death in deaths)
    assert not any("in a row" in death for death in deaths[:-1])
    assert f"ended {processes.CRASH_LOOP_LIVES} times in a row soon after its start" in deaths[-1]
    assert f"the end of {tmp_path / 'log'} says why" in deaths[-1]
    assert "no such setting" in (tmp_path / "log").read_text()


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


def test_devices_are_given_to_slots_in_turn(tmp_path: Path) -> None:
    options = ClusterOptions(directory=tmp_path, servers=2, slots=2, devices=("cuda:0", "cuda:1", "cuda:2"))
    assert [options.device_of(server, slot) for server in range(2) for slot in range(2)] == [
        "cuda:0", "cuda:1", "cuda:2", "cuda:0",
    ]  # fmt: skip
    assert ClusterOptions(directory=tmp_path).device_of(1, 0) == "cpu"
    with pytest.raises(ValueError, match="1 to 8 schedulers"):
        ClusterOptions(directory=tmp_path, schedulers=0)
    with pytest.raises(ValueError, match="needs a device"):
        ClusterOptions(directory=tmp_path, devices=())
