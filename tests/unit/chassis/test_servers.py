"""Server processes: started on free ports, killed and restarted, gone when we are gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from whimbrel.chassis.child_server import ChildServer, ServerFailed, ServerMissing, free_port, leashed
from whimbrel.chassis.servers import NatsServer, RedisServer

PATIENCE_S = 20.0


def needs(server: ChildServer) -> ChildServer:
    if shutil.which(server.program) is None:
        pytest.skip(f"{server.program} is not installed")
    return server


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("kind", [NatsServer, RedisServer])
async def test_a_server_answers_inside_its_context_and_is_gone_after_it(
    kind: type[ChildServer], tmp_path: Path
) -> None:
    async with needs(kind(tmp_path / "data")) as server:
        assert is_listening(server.port)
        assert server.url.endswith((f"127.0.0.1:{server.port}", f"127.0.0.1:{server.port}/0"))
        assert Path(f"/proc/{server.pid}/comm").read_text().strip() == server.program
    assert not is_listening(server.port)
    assert not server.is_running


@pytest.mark.parametrize("kind", [NatsServer, RedisServer])
async def test_a_killed_server_comes_back_on_its_port(kind: type[ChildServer], tmp_path: Path) -> None:
    async with needs(kind(tmp_path)) as server:
        port, pid = server.port, server.pid
        await server.kill()
        assert not is_listening(port)
        await server.restart()
        assert is_listening(port)
        assert (server.port, server.pid != pid) == (port, True)


async def test_two_servers_of_one_kind_run_side_by_side(tmp_path: Path) -> None:
    async with needs(RedisServer(tmp_path / "a")) as one, RedisServer(tmp_path / "b") as other:
        assert one.port != other.port


async def test_a_chosen_port_that_is_taken_is_an_error_with_the_servers_own_words(tmp_path: Path) -> None:
    async with needs(RedisServer(tmp_path / "a")) as first:
        with pytest.raises(ServerFailed, match="Address already in use"):
            await RedisServer(tmp_path / "b", port=first.port).start()


async def test_a_free_port_that_was_taken_meanwhile_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr("whimbrel.chassis.child_server.free_port", lambda: next(ports))
        async with needs(RedisServer(tmp_path)) as server:
            assert server.port != taken.getsockname()[1]
            assert is_listening(server.port)


async def test_a_missing_program_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerMissing, match="apt-get install nats-server redis-server"):
        await NatsServer(tmp_path).start()


def test_free_ports_lie_outside_those_of_outgoing_connections() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(10_000 <= free_port() < low for _ in range(20))


async def read_lines(process: asyncio.subprocess.Process, count: int) -> list[str]:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        return [(await process.stdout.readline()).decode().strip() for _ in range(count)]


async def test_a_server_dies_with_its_parent(tmp_path: Path) -> None:
    """A supervisor that is killed leaves nothing behind."""
    needs(RedisServer(tmp_path))
    program = (
        "import asyncio\n"
        "from whimbrel.chassis.servers import RedisServer\n"
        "async def main():\n"
        f"    async with RedisServer({str(tmp_path)!r}) as server:\n"
        "        print(server.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    libs = str(Path(__file__).resolve().parents[3] / "libs")
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": libs}
    )
    try:
        while not (line := (await read_lines(parent, 1))[0]).isdigit():
            assert line  # log lines come before
    finally:
        parent.kill()
        await parent.wait()

    async with asyncio.timeout(PATIENCE_S):
        while _is_alive(int(line)):  # noqa: ASYNC110  it is nobody's child any more: no other way to see it end
            await asyncio.sleep(0.01)


async def test_a_leash_held_by_somebody_else_starts_nothing() -> None:
    """The parent may end before the child has asked to end with it."""
    command = leashed(["/bin/echo", "ran"], parent_pid=os.getppid(), signum=signal.SIGTERM)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert out == b""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
