"""Presence: real processes that connect, and are killed; what is no worker; sockets of the dead and of the living."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import structlog
import uvloop
from whimbrel.chassis.heartbeat import HEARTBEAT_S, HEARTBEATS_MISSED_MAX
from whimbrel.chassis.unix_sockets import ADDRESS_BYTES_MAX, connect_unix, listen_unix

from services.storage_agent import presence as presence_module
from services.storage_agent.presence import HELLO_BYTES_MAX, Presence

# Far above what anything here takes.
S_MAX = 20.0
# What it takes to notice the same by silence.
MISSED_S = HEARTBEAT_S * HEARTBEATS_MISSED_MAX

# A worker, in so far as presence is concerned: it connects to argv[1], says argv[2], and waits to be killed.
WORKER = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.connect(sys.argv[1])
connection.sendall(sys.argv[2].encode() + b"\\n")
sys.stdin.read()
"""

# An agent that listens at argv[1], says so, and waits to be killed.
AGENT = """
import asyncio, sys
from pathlib import Path
from services.storage_agent.presence import Presence

async def main():
    await Presence(Path(sys.argv[1]), on_exit=lambda slot, epoch: None).start()
    print("listening", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


class Exits:
    """Collects what `on_exit` is told, and lets a test await it."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    def __call__(self, slot: int, worker_epoch: int) -> None:
        self.news.put_nowait((slot, worker_epoch))

    async def next(self) -> tuple[int, int]:
        async with asyncio.timeout(S_MAX):
            return await self.news.get()


@pytest.fixture
def exits() -> Exits:
    return Exits()


@pytest.fixture
async def presence(home: Path, exits: Exits) -> AsyncIterator[Presence]:
    presence = Presence(home / "agent.sock", on_exit=exits)
    await presence.start()
    yield presence
    await presence.close()


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        with child:
            child.wait()


def hello(slot: int = 0, worker_epoch: int = 1, pid: int = 7) -> str:
    return json.dumps({"slot": slot, "worker_epoch": worker_epoch, "pid": pid})


def a_worker(children: list[subprocess.Popen[str]], path: Path, line: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-S", "-c", WORKER, os.fspath(path), line]
    children.append(subprocess.Popen(argv, stdin=subprocess.PIPE, text=True))
    return children[-1]


def an_agent(children: list[subprocess.Popen[str]], path: Path) -> subprocess.Popen[str]:
    """Returns when it listens."""
    argv = [sys.executable, "-c", AGENT, os.fspath(path)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    children.append(child)
    assert child.stdout is not None
    assert child.stdout.readline() == "listening\n"
    return child


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(S_MAX):
        while not claim():  # noqa: ASYNC110  the agent asks who is there, and is told only of ends
            await asyncio.sleep(0.001)


async def until_connected(presence: Presence, expected: dict[int, int]) -> None:
    await until(lambda: presence.connected() == expected)


async def test_a_killed_worker_is_known_at_once(
    presence: Presence, exits: Exits, children: list[subprocess.Popen[str]]
) -> None:
    worker = a_worker(children, presence.path, hello(slot=3, worker_epoch=41))
    other = a_worker(children, presence.path, hello(slot=4, worker_epoch=42))
    await until_connected(presence, {3: 41, 4: 42})
    killed_at = time.monotonic()
    worker.send_signal(signal.SIGKILL)
    assert await exits.next() == (3, 41)
    assert time.monotonic() - killed_at < MISSED_S, "before its heartbeats are missed"
    assert presence.connected() == {4: 42}
    other.send_signal(signal.SIGKILL)
    assert await exits.next() == (4, 42)


async def test_a_worker_that_is_restarted_before_its_end_is_noticed_is_two_lives(
    presence: Presence, exits: Exits, children: list[subprocess.Popen[str]]
) -> None:
    old = a_worker(children, presence.path, hello(slot=3, worker_epoch=41))
    await until_connected(presence, {3: 41})
    a_worker(children, presence.path, hello(slot=3, worker_epoch=55))
    await until_connected(presence, {3: 55})
    old.send_signal(signal.SIGKILL)
    assert await exits.next() == (3, 41)
    assert presence.connected() == {3: 55}


async def test_a_life_that_connected_twice_is_gone_when_its_last_connection_is(
    presence: Presence, exits: Exits
) -> None:
    first, second = connect_unix(presence.path), connect_unix(presence.path)
    for connection in (first, second):
        connection.send(hello(slot=2, worker_epoch=9).encode() + b"\n")
    await until(lambda: presence._lives[2, 9] == 2)
    first.close()
    await until(lambda: presence._lives[2, 9] == 1)
    assert exits.news.empty()
    assert presence.connected() == {2: 9}
    second.close()
    assert await exits.next() == (2, 9)


@pytest.mark.parametrize(
    "said",
    [
        b"what is this\n",
        b"{}\n",
        b"\n",
        b'{"slot": -1, "worker_epoch": 1, "pid": 7}\n',
        b'{"slot": "3", "worker_epoch": 1, "pid": 7}\n',
        b'{"slot": 3, "worker_epoch": 1, "pid": 7, "more": 1}\n',
        b"\xff\xfe\n",
        b"x" * (HELLO_BYTES_MAX + 1),
    ],
    ids=["text", "empty object", "empty line", "negative", "string", "unknown field", "no utf-8", "too long"],
)
async def test_what_is_no_hello_is_ignored_and_logged(presence: Presence, exits: Exits, said: bytes) -> None:
    with structlog.testing.capture_logs() as logs:
        reader, writer = await asyncio.open_unix_connection(sock=connect_unix(presence.path))
        writer.write(said)
        async with asyncio.timeout(S_MAX):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
    (entry,) = [entry for entry in logs if entry["event"] == "presence_ignored"]
    assert entry["reason"]
    assert exits.news.empty()
    assert presence.connected() == {}


async def test_a_hello_that_comes_byte_by_byte_is_one(presence: Presence, exits: Exits) -> None:
    connection = connect_unix(presence.path)
    for byte in hello(slot=6, worker_epoch=2).encode() + b"\n":
        connection.send(bytes([byte]))
        await asyncio.sleep(0)
    await until_connected(presence, {6: 2})
    connection.send(b"whatever else is said\n" * 100)
    connection.close()
    assert await exits.next() == (6, 2)


async def test_whoever_says_nothing_is_not_waited_for(
    presence: Presence, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence_module, "HELLO_S_MAX", 0.05)
    reader, writer = await asyncio.open_unix_connection(sock=connect_unix(presence.path))
    writer.write(b'{"slot"')
    async with asyncio.timeout(S_MAX):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    assert exits.news.empty()


async def test_connections_over_the_limit_are_refused_and_those_that_are_there_stay(
    presence: Presence, exits: Exits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence_module, "CONNECTIONS_MAX", 1)
    first = connect_unix(presence.path)
    first.send(hello(slot=1, worker_epoch=5).encode() + b"\n")
    await until_connected(presence, {1: 5})
    reader, writer = await asyncio.open_unix_connection(sock=connect_unix(presence.path))
    async with asyncio.timeout(S_MAX):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    assert presence.connected() == {1: 5}
    first.close()
    assert await exits.next() == (1, 5)


async def test_an_agent_that_stops_takes_nobody_for_dead_and_leaves_no_file(home: Path, exits: Exits) -> None:
    presence = Presence(home / "agent.sock", on_exit=exits)
    await presence.start()
    reader, writer = await asyncio.open_unix_connection(sock=connect_unix(presence.path))
    writer.write(hello().encode() + b"\n")
    await until_connected(presence, {0: 1})
    await presence.close()
    await presence.close()
    async with asyncio.timeout(S_MAX):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    await asyncio.sleep(0)
    assert exits.news.empty()
    assert not presence.path.exists()


async def test_the_socket_of_a_killed_agent_is_replaced(
    home: Path, exits: Exits, children: list[subprocess.Popen[str]]
) -> None:
    path = home / "agent.sock"
    old = an_agent(children, path)
    old.kill()
    old.wait()
    assert path.is_socket()
    presence = Presence(path, on_exit=exits)
    await presence.start()
    connection = connect_unix(path)
    connection.send(hello(slot=8).encode() + b"\n")
    await until_connected(presence, {8: 1})
    connection.close()
    await presence.close()


async def test_the_socket_of_a_living_agent_is_not_taken(
    home: Path, exits: Exits, children: list[subprocess.Popen[str]]
) -> None:
    path = home / "agent.sock"
    an_agent(children, path)
    second = Presence(path, on_exit=exits)
    with pytest.raises(FileExistsError, match=r"another process listens here.*agent\.sock"):
        await second.start()
    await second.close()
    assert path.is_socket()
    connect_unix(path).close()


async def test_a_file_that_is_no_socket_is_left_alone(home: Path, exits: Exits) -> None:
    path = home / "agent.sock"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="no socket"):
        await Presence(path, on_exit=exits).start()
    assert path.read_text() == "precious"


async def test_a_path_that_is_too_long_for_the_kernel_works_all_the_same(home: Path, exits: Exits) -> None:
    directory = home / ("long-" * 20) / ("deep-" * 20)
    directory.mkdir(parents=True)
    path = directory / "agent.sock"
    assert len(os.fspath(path)) > ADDRESS_BYTES_MAX
    for _ in range(2):
        presence = Presence(path, on_exit=exits)
        await presence.start()
        connection = connect_unix(path)
        connection.send(hello(slot=5, worker_epoch=6).encode() + b"\n")
        await until_connected(presence, {5: 6})
        connection.close()
        assert await exits.next() == (5, 6)
        await presence.close()
        assert not path.exists()


@pytest.mark.parametrize("length", [ADDRESS_BYTES_MAX - 1, ADDRESS_BYTES_MAX, ADDRESS_BYTES_MAX + 1])
def test_paths_around_the_limit_of_the_kernel_are_all_bound(home: Path, length: int) -> None:
    directory = home / ("d" * (length - len(os.fspath(home)) - len("/x/s")) + "x")
    directory.mkdir()
    path = directory / "s"
    assert len(os.fspath(path)) in (length - 1, length)
    with listen_unix(path), connect_unix(path):
        pass


def test_a_name_that_no_detour_makes_short_enough_is_an_error_that_names_it(home: Path) -> None:
    path = home / ("n" * 150)
    for use in (listen_unix, connect_unix):
        with pytest.raises(OSError, match=r"too long; choose a shorter one.*nnnn"):
            use(path)


def test_errors_of_sockets_name_the_path(home: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone\.sock"):
        connect_unix(home / "gone.sock")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        listen_unix(home / "nowhere" / "agent.sock")


def test_of_many_agents_that_replace_a_dead_one_at_once_one_listens(
    home: Path, children: list[subprocess.Popen[str]]
) -> None:
    path = home / "agent.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
    starter = (
        "import sys; from pathlib import Path; from whimbrel.chassis.unix_sockets import listen_unix\n"
        "sys.stdin.readline()\n"
        "try: listener = listen_unix(Path(sys.argv[1]))\n"
        "except FileExistsError: print('refused', flush=True)\n"
        "else: print('listens', flush=True)\n"
        "sys.stdin.readline()"
    )
    for _ in range(6):
        argv = [sys.executable, "-c", starter, os.fspath(path)]
        children.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    outcomes = []
    for child in children:
        assert child.stdout is not None
        outcomes.append(child.stdout.readline().strip())
    assert sorted(outcomes) == ["listens"] + ["refused"] * 5
    connect_unix(path).close()


def test_it_works_in_the_loop_that_services_run_in(home: Path) -> None:
    async def live_and_die() -> tuple[int, int]:
        exits = Exits()
        presence = Presence(home / "agent.sock", on_exit=exits)
        await presence.start()
        connection = connect_unix(presence.path)
        connection.send(hello(slot=1, worker_epoch=2).encode() + b"\n")
        await until_connected(presence, {1: 2})
        connection.close()
        gone = await exits.next()
        await presence.close()
        assert not presence.path.exists()
        return gone

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(live_and_die()) == (1, 2)
