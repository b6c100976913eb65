"""Owns presence: how the agent knows at once, by the word of the kernel, that the process of a worker is gone.

A worker connects to a Unix socket of its server's agent, says who it is in one line of JSON (`WorkerHello`), and never
closes. The kernel closes the connection with the process, however that ended, and that is what is listened for here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import structlog
from whimbrel.chassis.unix_sockets import listen_unix
from whimbrel.wire.messages import WorkerHello

log = structlog.get_logger()

# The line is some sixty bytes. Whoever sends more, or nothing for so long, is no worker.
HELLO_BYTES_MAX = 1024
HELLO_S_MAX = 5.0
# Far more than a server has slots; what is over it is not served, so that nobody can use up our descriptors.
CONNECTIONS_MAX = 1024


class Presence:
    """The socket at `path`. `on_exit(slot, worker_epoch)` is called in the event loop when that worker is gone.

    A life of a worker that connected twice is gone when its last connection is. Closing the presence is nobody's exit.
    """

    def __init__(self, path: Path, *, on_exit: Callable[[int, int], None]) -> None:
        self.path = path
        self._on_exit = on_exit
        self._server: asyncio.Server | None = None
        self._inode = 0
        self._connections: set[_Connection] = set()
        # Connections by slot and worker epoch.
        self._lives: Counter[tuple[int, int]] = Counter()

    async def start(self) -> None:
        """Listen. Raises FileExistsError when another agent does so at this path, and OSError with the path."""
        assert self._server is None
        listener = await asyncio.to_thread(listen_unix, self.path)
        self._inode = self.path.stat().st_ino
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), sock=listener)

    async def close(self) -> None:
        """Stop listening and hang up; workers find their next agent by its heartbeat."""
        server, self._server = self._server, None
        if server is None:
            return
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        server.close()
        for connection in tuple(self._connections):
            connection.hang_up()
        await server.wait_closed()

    def connected(self) -> dict[int, int]:
        """The workers that live: slot → worker epoch, the newest where a life is ending and the next has begun."""
        return dict(sorted(self._lives))

    def _opened(self, connection: _Connection) -> bool:
        if self._server is None:
            return False
        if len(self._connections) >= CONNECTIONS_MAX:
            log.warning("presence_refused", path=os.fspath(self.path), connections=len(self._connections))
            return False
        self._connections.add(connection)
        return True

    def _said_hello(self, hello: WorkerHello) -> None:
        self._lives[hello.slot, hello.worker_epoch] += 1
        log.info("worker_present", slot=hello.slot, worker_epoch=hello.worker_epoch, pid=hello.pid)

    def _closed(self, connection: _Connection, hello: WorkerHello | None) -> None:
        self._connections.discard(connection)
        if hello is None:
            return
        life = hello.slot, hello.worker_epoch
        self._lives[life] -= 1
        if self._lives[life] > 0:
            return
        del self._lives[life]
        if self._server is not None:
            log.info("worker_gone", slot=hello.slot, worker_epoch=hello.worker_epoch, pid=hello.pid)
            self._on_exit(*life)


class _Connection(asyncio.Protocol):
    """One worker: a line, then silence until its end."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._transport: asyncio.Transport | None = None
        self._line = bytearray()
        self._hello: WorkerHello | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._presence._opened(self):
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(HELLO_S_MAX, self._refuse, f"it said nothing for {HELLO_S_MAX:g} s")
        else:
            self.hang_up()

    def data_received(self, data: bytes) -> None:
        if self._hello is not None or self._is_closing:
            return  # nothing more is expected, and what comes is not kept
        self._line += data
        line, end, _ = self._line.partition(b"\n")
        if len(line) > HELLO_BYTES_MAX:
            self._refuse(f"its first line is over {HELLO_BYTES_MAX} bytes")
        elif end:
            self._take(bytes(line))

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_waiting()
        self._presence._closed(self, self._hello)

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def _is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _take(self, line: bytes) -> None:
        try:
            hello = msgspec.json.decode(line, type=WorkerHello)
        except msgspec.MsgspecError as error:
            self._refuse(str(error))
            return
        self._stop_waiting()
        self._line.clear()
        self._hello = hello
        self._presence._said_hello(hello)

    def _refuse(self, reason: str) -> None:
        log.warning("presence_ignored", path=os.fspath(self._presence.path), reason=reason)
        self.hang_up()

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def presence_path(pool_path: Path) -> Path:
    """Beside the pool: what an agent and its workers share."""
    return pool_path.with_name(f"{pool_path.name}.workers")
