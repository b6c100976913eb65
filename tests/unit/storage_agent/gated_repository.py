"""A web server on loopback as a repository whose weights come when a test lets them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self
from urllib.parse import unquote

HOST = "127.0.0.1"


class GatedRepository:
    """Serves `root` with ranges. An answer with weights waits until `open_gate` allowed as many."""

    def __init__(self, root: Path) -> None:
        self.root = root
        #: Of weights: model directory and offset of each range that was answered.
        self.answered: list[tuple[str, int]] = []
        self._allowed = asyncio.Semaphore(0)
        self._waiting = 0
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    def open_gate(self, ranges: int = 100_000) -> None:
        for _ in range(ranges):
            self._allowed.release()

    async def until_waiting(self, ranges: int) -> None:
        """So many ranges were asked for that may not be answered yet."""
        while self._waiting < ranges:
            self._changed.clear()
            await self._changed.wait()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, target, _ = head[0].split()
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            await self._answer(writer, method, self.root / unquote(target).lstrip("/"), headers.get("range"))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # whoever asked went away
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, method: str, path: Path, asked: str | None) -> None:
        if not path.is_file():
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        data, size_bytes, status = path.read_bytes(), path.stat().st_size, "200 OK"
        extra = ""
        if asked is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(size_bytes, int(last) + 1 if last else size_bytes)
            data, status = data[start:end], "206 Partial Content"
            extra = f"Content-Range: bytes {start}-{end - 1}/{size_bytes}\r\n"
            if path.suffix == ".bin":
                await self._wait_at_gate()
                self.answered.append((path.parent.name, start))
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n{extra}Accept-Ranges: bytes\r\n"
            f"Connection: close\r\n\r\n".encode()
        )
        if method != "HEAD":
            writer.write(data)

    async def _wait_at_gate(self) -> None:
        self._waiting += 1
        self._changed.set()
        try:
            await self._allowed.acquire()
        finally:
            self._waiting -= 1
