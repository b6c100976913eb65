"""A TCP proxy on loopback that breaks connections as networks and servers do, by a script.

Each new connection takes the next fault of the script; when that is used up, connections are as they should be. What
crosses is counted, so that a test sees what was asked for twice.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

HOST = "127.0.0.1"
PIECE_BYTES = 16 * 1024
# Between a connection that is accepted and the call that tells us of it.
ACCEPT_TURNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one connection. Bytes are those of answers with their heads, or of uploads."""

    cut_after_bytes: int | None = None
    cut_upload_after_bytes: int | None = None
    stall_after_bytes: int | None = None
    #: Before anything is passed on.
    wait_s: float = 0.0
    #: Answer the first request with this status, without asking the server, and close.
    status: int | None = None
    #: Added to the Content-Length of the first answer; the body stays as it is.
    length_error_bytes: int = 0
    #: Take Range out of the first request: the server answers it with the whole file.
    hide_range: bool = False


FINE = Fault()


def random_faults(seed: int, count: int, answer_bytes: int) -> list[Fault]:
    """Some of each kind, at random places of answers of about `answer_bytes`."""
    chance = random.Random(seed)

    def one() -> Fault:
        place = chance.randrange(answer_bytes)
        match chance.randrange(6):
            case 0 | 1:
                return Fault(cut_after_bytes=place)
            case 2:
                return Fault(stall_after_bytes=place)
            case 3:
                return Fault(status=chance.choice((500, 502, 503, 429)))
            case 4:
                return Fault(wait_s=chance.uniform(0, 0.05))
            case _:
                return Fault(length_error_bytes=chance.choice((-1, 1)) * chance.randrange(1, 2000))

    return [one() for _ in range(count)]


class FaultyProxy:
    """Passes connections on to `upstream_url`. `bytes_per_s` limits all answers together, and may be changed; `port` 0
    takes a free one."""

    def __init__(self, upstream_url: str, *, bytes_per_s: float | None = None, port: int = 0) -> None:
        parts = urlsplit(upstream_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._upstream = (parts.hostname, parts.port)
        self.bytes_per_s = bytes_per_s
        #: Bytes of answers that were passed on, and of requests.
        self.answer_bytes = 0
        self.upload_bytes = 0
        self.connections = 0
        self._faults: list[Fault] = []
        self._always: Fault = FINE
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._free_at_s = 0.0
        self._changed = asyncio.Event()

    @property
    def url(self) -> str:
        assert self._port, "the proxy has not been started"
        return f"http://{HOST}:{self._port}"

    async def come(self) -> None:
        """Listen, the second time on the same port."""
        self._server = await asyncio.start_server(self._accept, HOST, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def go_away(self) -> None:
        """From now on connections are refused, and those that were there are closed."""
        assert self._server is not None
        self._server.close()
        self._server = None
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        await self.drop_connections()

    async def __aenter__(self) -> Self:
        await self.come()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.go_away()

    async def script(self, faults: Iterable[Fault], *, always: Fault = FINE) -> None:
        """From now on: these faults, one for each new connection, then `always`. Counts start at 0, old ones close."""
        self._faults = list(faults)
        self._always = always
        await self.drop_connections()
        self.answer_bytes = self.upload_bytes = self.connections = 0

    @property
    def faults_left(self) -> int:
        return len(self._faults)

    async def drop_connections(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def until(self, *, answer_bytes: int = 0, upload_bytes: int = 0, open_connections: int | None = None) -> None:
        """Returns when so many bytes have crossed, or so few connections are open."""
        while (
            self.answer_bytes < answer_bytes
            or self.upload_bytes < upload_bytes
            or (open_connections is not None and len(self._tasks) > open_connections)
        ):
            self._changed.clear()
            await self._changed.wait()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called in the same turn of the loop as the connection is made, so that none is ever unknown."""
        if self._server is None:
            writer.transport.abort()
            return
        self.connections += 1
        fault = self._faults.pop(0) if self._faults else self._always
        task = asyncio.ensure_future(self._serve(fault, reader, writer))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._forget(ended, writer))

    def _forget(self, task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        self._tasks.discard(task)
        self._changed.set()
        if not task.cancelled():
            error = task.exception()
            # A connection that ends is what this is about.
            assert error is None or isinstance(error, OSError | asyncio.IncompleteReadError), error

    async def _serve(self, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(fault.wait_s)
        if fault.status is not None:
            await _read_head(reader)
            body = b"not now"
            head = f"HTTP/1.1 {fault.status} Injected\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            return
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        up = asyncio.ensure_future(self._pass_requests(fault, reader, upstream_writer))
        down = asyncio.ensure_future(self._pass_answers(fault, upstream_reader, writer))
        try:
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (up, down):
                task.cancel()
            upstream_writer.transport.abort()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _pass_requests(self, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if fault.hide_range:
            head = await _read_head(reader)
            writer.write(re.sub(rb"(?i)\r\nrange:[^\r]*", b"", head))
        passed_bytes = 0
        while piece := await reader.read(PIECE_BYTES):
            if fault.cut_upload_after_bytes is not None:
                piece = piece[: fault.cut_upload_after_bytes - passed_bytes]
            writer.write(piece)
            await writer.drain()
            passed_bytes += len(piece)
            self.upload_bytes += len(piece)
            self._changed.set()
            if passed_bytes == fault.cut_upload_after_bytes:
                return

    async def _pass_answers(self, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Without room for bytes of its own, what is counted has left the process.
        writer.transport.set_write_buffer_limits(0)
        limits = [limit for limit in (fault.cut_after_bytes, fault.stall_after_bytes) if limit is not None]
        passed_bytes = 0
        first = await self._first_answer(fault, reader)
        while piece := first or await reader.read(PIECE_BYTES):
            first = b""
            for limit in limits:
                piece = piece[: limit - passed_bytes]
            await self._pace(len(piece))
            writer.write(piece)
            await writer.drain()
            passed_bytes += len(piece)
            self.answer_bytes += len(piece)
            self._changed.set()
            if passed_bytes == fault.stall_after_bytes:
                await asyncio.Event().wait()  # until the client has had enough
            if passed_bytes == fault.cut_after_bytes:
                writer.close()
                await writer.wait_closed()
                return

    async def _first_answer(self, fault: Fault, reader: asyncio.StreamReader) -> bytes:
        if not fault.length_error_bytes:
            return b""
        head = await _read_head(reader)
        found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if found is None:
            return head
        length = max(0, int(found.group(1)) + fault.length_error_bytes)
        return head[: found.start(1)] + str(length).encode() + head[found.end(1) :]

    async def _pace(self, size_bytes: int) -> None:
        if self.bytes_per_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self.bytes_per_s
        await asyncio.sleep(self._free_at_s - now_s)


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")
