"""Owns child processes: how one is started on a free port, dies with its parent, and is killed and restarted."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

log = structlog.get_logger()

HOST = "127.0.0.1"
# A server that starts takes 10 to 100 ms; a loaded machine, or an append-only file to read back, gets patience.
READY_S_MAX = 20.0
READY_GAP_S = 0.02
# Somebody else may hold the port, and say nothing.
PROBE_S_MAX = 0.5
STOP_S_MAX = 10.0
PORT_TRIES_MAX = 50
START_TRIES_MAX = 5
LOG_TAIL_BYTES = 2000

# Becomes the command it is given, after asking the kernel to end it together with its parent, and after checking that
# the parent is still there. A separate program, because running Python between fork and exec can deadlock.
_LEASH = """
import ctypes, os, sys
PR_SET_PDEATHSIG = 1
signum, parent_pid, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
    sys.exit("the kernel refused PR_SET_PDEATHSIG")
if os.getppid() == parent_pid:
    os.execvp(command[0], command)
"""


class ServerMissing(Exception):
    """A program that the embedded cluster needs is not installed."""


class ServerFailed(Exception):
    """A server did not come up; the text has the end of its log."""


def leashed(command: Sequence[str], *, parent_pid: int, signum: int = signal.SIGKILL) -> list[str]:
    """The command to run so that the kernel sends `signum` to it when its parent (really: that thread of it) ends."""
    return [sys.executable, "-I", "-S", "-c", _LEASH, str(int(signum)), str(parent_pid), *command]


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on, outside the range that the kernel hands to outgoing connections.

    Inside that range a port can be taken while its server restarts, even by a client that connects to itself.
    """
    low, high = 10_000, _ephemeral_ports_start() - 1
    for _ in range(PORT_TRIES_MAX):
        port = random.randint(low, high)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as cause:
                if cause.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
            return port
    raise ServerFailed(f"no free port found between {low} and {high} on {host}")


class ChildServer(ABC):
    """A server process with its data under `directory`; it dies with us. Use as an async context manager."""

    program: str

    def __init__(self, directory: Path | str, port: int = 0) -> None:
        """`port` 0 picks a free one."""
        self.directory = Path(directory)
        self._is_port_ours = port == 0
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        assert self._port, "the server has not been started"
        return self._port

    @property
    @abstractmethod
    def url(self) -> str: ...

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Returns when the server answers. Raises ServerMissing or ServerFailed."""
        if shutil.which(self.program) is None:
            raise ServerMissing(f"{self.program} is not installed; run: apt-get install nats-server redis-server")
        self.directory.mkdir(parents=True, exist_ok=True)
        for tries_left in reversed(range(START_TRIES_MAX)):
            if self._is_port_ours and not self._port:
                self._port = free_port()
            try:
                await self._start_once()
                return
            except ServerFailed:
                if not (self._is_port_ours and tries_left and self._is_port_taken()):
                    raise
                self._port = 0

    async def kill(self) -> None:
        """SIGKILL, as a crash would; returns when the process is gone."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL when that does not help."""
        await self._end(signal.SIGTERM)

    async def restart(self) -> None:
        """Start again on the same port with the same data; stops it first when it still runs."""
        await self.stop()
        await self._start_once()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @abstractmethod
    def _command(self) -> list[str]:
        """The command line; writes the server's configuration first."""

    @abstractmethod
    async def _is_ours(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the server behind this fresh connection is ready and is our process."""

    async def _start_once(self) -> None:
        self._spawn()
        try:
            async with asyncio.timeout(READY_S_MAX):
                while not await self._is_ready():
                    if not self.is_running:
                        raise ServerFailed(f"{self.program} ended at once; the end of its log:\n{self._log_tail()}")
                    await asyncio.sleep(READY_GAP_S)
        except BaseException as cause:
            await self.kill()
            if isinstance(cause, TimeoutError):
                what = f"{self.program} did not answer in {READY_S_MAX:g} s; the end of its log:\n{self._log_tail()}"
                raise ServerFailed(what) from None
            raise
        log.debug("server_started", program=self.program, pid=self.pid, port=self.port)

    def _spawn(self) -> None:
        command = leashed(self._command(), parent_pid=os.getpid())
        with self._log_path.open("ab") as output:
            # A session of its own, so that Ctrl-C reaches us first and services can end before their servers do.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def _is_ready(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_S_MAX):
                reader, writer = await asyncio.open_connection(HOST, self.port)
                try:
                    return await self._is_ours(reader, writer)
                finally:
                    writer.close()
        except (OSError, asyncio.IncompleteReadError, ValueError):  # a time-out is an OSError, too
            return False

    async def _end(self, signum: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        process.send_signal(signum)
        try:
            await asyncio.to_thread(process.wait, STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)

    @property
    def _log_path(self) -> Path:
        return self.directory / f"{self.program}.log"

    def _log_tail(self) -> str:
        return self._log_path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def _is_port_taken(self) -> bool:
        return "address already in use" in self._log_tail().lower()


def _ephemeral_ports_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32_768
