"""A small S3 server as a process of its own: moto's, on a free port, with its objects in memory."""

from __future__ import annotations

import asyncio
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
from whimbrel.chassis.child_server import HOST, ChildServer

REQUEST_S_MAX = 10.0
REGION = "us-east-1"
BUCKET = "models"
# Answered by our process itself, so that a starting test does not take somebody else's server for its own.
PID_PATH = "/-/pid"


class ObjectStore(ChildServer):
    """Path-style S3 at `url`, with one bucket. Every credential is good."""

    program = sys.executable

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        await super().start()
        async with httpx.AsyncClient(timeout=REQUEST_S_MAX, trust_env=False) as client:
            (await client.put(f"{self.url}/{BUCKET}")).raise_for_status()

    async def unfinished_uploads(self) -> list[str]:
        """Keys of multipart uploads that were neither completed nor aborted."""
        async with httpx.AsyncClient(timeout=REQUEST_S_MAX, trust_env=False) as client:
            answer = (await client.get(f"{self.url}/{BUCKET}?uploads")).raise_for_status()
        root = ElementTree.fromstring(answer.text)
        return [element.text or "" for element in root.iter() if element.tag.endswith("Key")]

    def environ(self, endpoint: str | None = None) -> dict[str, str]:
        """What an agent needs in its environment; `endpoint` is another way to the server, through a proxy."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.url,
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def _log_path(self) -> Path:
        return self.directory / "object_store.log"

    def _command(self) -> list[str]:
        return [sys.executable, "-P", str(Path(__file__).resolve()), str(self.port)]

    async def _is_ours(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(f"GET {PID_PATH} HTTP/1.0\r\n\r\n".encode())
        await writer.drain()
        return f"pid {self.pid}.".encode() in await reader.read()


def _with_pid(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != PID_PATH:
            return app(environ, start_response)
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [f"pid {os.getpid()}.".encode()]

    return answer


def _serve(port: int) -> None:
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    class Handler(MotoRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept, as a real store does

    make_server(HOST, port, _with_pid(create_backend_app("s3")), threaded=True, request_handler=Handler).serve_forever()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
