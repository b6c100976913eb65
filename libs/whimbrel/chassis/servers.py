"""Owns the servers of the embedded cluster and of tests: real nats-server and redis-server on free ports."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path

from whimbrel.chassis.child_server import HOST, ChildServer, ServerFailed, ServerMissing, free_port, leashed

__all__ = ["NatsServer", "RedisServer", "ServerFailed", "ServerMissing", "free_port", "leashed"]

# The same as deploy/nats: a prompt of a million tokens is 4 MB.
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
# JetStream reserves the whole bound of a stream; that of public events takes a quarter of this.
STREAMS_BYTES_MAX = 1024 * 1024 * 1024


class NatsServer(ChildServer):
    """nats-server with JetStream and the payload limit that Whimbrel is made for."""

    program = "nats-server"

    def __init__(
        self,
        directory: Path | str,
        port: int = 0,
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        streams_bytes_max: int = STREAMS_BYTES_MAX,
    ) -> None:
        super().__init__(directory, port)
        self.max_payload_bytes = max_payload_bytes
        self.streams_bytes_max = streams_bytes_max
        self._name = f"whimbrel-{uuid.uuid4().hex[:12]}"

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    def configure(self) -> Path:
        """Write the configuration; a running server reads it again on SIGHUP."""
        path = self.directory / "nats.conf"
        path.write_text(
            f"server_name: {self._name}\n"
            f"host: {HOST}\n"
            f"port: {self.port}\n"
            f"max_payload: {self.max_payload_bytes}\n"
            "jetstream {\n"
            f"  store_dir: {json.dumps(str(self.directory.resolve() / 'jetstream'))}\n"
            f"  max_file_store: {self.streams_bytes_max}\n"
            "}\n"
        )
        return path

    def _command(self) -> list[str]:
        return [self.program, "--config", str(self.configure())]

    async def _is_ours(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        greeting = await reader.readline()
        return f'"server_name":"{self._name}"'.encode() in greeting


class RedisServer(ChildServer):
    """redis-server that has every write on disk before it answers."""

    program = "redis-server"

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def _command(self) -> list[str]:
        options = {
            "bind": HOST,
            "port": str(self.port),
            "dir": str(self.directory.resolve()),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "daemonize": "no",
        }
        return [self.program, *(part for name, value in options.items() for part in (f"--{name}", value))]

    async def _is_ours(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"INFO server\r\n")
        await writer.drain()
        header = await reader.readline()
        if not header.startswith(b"$"):  # an error: it is still loading its data
            return False
        server = await reader.readexactly(int(header[1:]))
        return f"process_id:{self.pid}\r\n".encode() in server
