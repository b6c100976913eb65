"""A hub and a web server on loopback: what a hub's client asks for, files with ranges, cuts, stalls and refusals."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Files from this size on are stored as the hub stores large files: with their SHA-256.
LARGE_BYTES = 10_000
BLOCK_BYTES = 16 * 1024
# Where a body stands still while it may not go on: some of it has been read by then.
HELD_AFTER_BYTES = 300_000


@dataclass
class HubServer:
    """Models by `org/name`, each a directory at one commit with the branch `main`; `root` is served as files."""

    url: str = ""
    root: Path | None = None
    models: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    #: Cut the connection after so many bytes of a body, so many times; only of files at least this large.
    cut_after_bytes: int = 0
    cuts: int = 0
    #: Refuse so many requests for files with this status first.
    refusals: int = 0
    refusal_status: int = 503
    ignores_ranges: bool = False
    user_password: str | None = None
    #: Cleared to let bodies stand still after so many bytes.
    may_go_on: threading.Event = field(default_factory=threading.Event)
    held_after_bytes: int = HELD_AFTER_BYTES
    #: Set when a body stands still.
    stands_still: threading.Event = field(default_factory=threading.Event)
    flipped: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        self.may_go_on.set()

    def asked(self, name: str) -> list[str | None]:
        """The ranges that were asked of a file, in order."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(f"/{name}")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("range")))
        if self.hub.user_password is not None and self.headers.get("authorization") != self.hub.user_password:
            return self._refuse(401)
        if path.startswith("/api/models/"):
            return self._model(path.removeprefix("/api/models/"))
        if self.hub.refusals > 0:
            self.hub.refusals -= 1
            return self._refuse(self.hub.refusal_status)
        file = self._file(path)
        if file is None or not file.is_file():
            return self._refuse(404)
        return self._send(file, with_body=with_body)

    def _model(self, rest: str) -> None:
        name, _, revision = rest.partition("/revision/")
        directory = self.hub.models.get(name)
        if directory is None:
            return self._refuse(401, "RepoNotFound")
        if name in self.hub.gated:
            return self._refuse(401, "GatedRepo")
        if revision not in ("", "main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        siblings = []
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                content = path.read_bytes()
                sibling: dict[str, Any] = {
                    "rfilename": path.relative_to(directory).as_posix(),
                    "size": len(content),
                    "blobId": hashlib.sha1(content).hexdigest(),
                }
                if len(content) >= LARGE_BYTES:
                    sha256 = hashlib.sha256(content).hexdigest()
                    sibling["lfs"] = {"size": len(content), "sha256": sha256, "pointerSize": 130}
                siblings.append(sibling)
        body = json.dumps({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def _file(self, path: str) -> Path | None:
        head, resolve, rest = path.partition("/resolve/")
        if not resolve:
            return None if self.hub.root is None else self.hub.root / path.lstrip("/")
        directory = self.hub.models.get(head.lstrip("/"))
        return None if directory is None else directory / rest.partition("/")[2]

    def _send(self, file: Path, *, with_body: bool) -> None:
        content = file.read_bytes()
        if file.name in self.hub.flipped:
            content = bytes([content[0] ^ 0xFF]) + content[1:]
        start = 0
        span = self.headers.get("range")
        if span and not self.hub.ignores_ranges:
            start = int(span.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("content-range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("content-length", str(len(content) - start))
        self.send_header("etag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.end_headers()
        if with_body:
            self._body(content[start:])

    def _body(self, content: bytes) -> None:
        hub = self.hub
        is_cut = hub.cuts > 0 and len(content) >= LARGE_BYTES
        limit = hub.cut_after_bytes if is_cut else len(content)
        hub.cuts -= is_cut
        for start in range(0, limit, BLOCK_BYTES):
            block = content[start : min(start + BLOCK_BYTES, limit)]
            if start >= hub.held_after_bytes and not hub.may_go_on.is_set():
                hub.stands_still.set()
                if not hub.may_go_on.wait(30):
                    break
            self.wfile.write(block)
            hub.sent_bytes += len(block)
        if is_cut:
            self.close_connection = True

    def _refuse(self, status: int, code: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("x-error-code", code)
        if status == 401 and not code:
            self.send_header("www-authenticate", "Basic")
        self.send_header("content-length", "0")
        self.end_headers()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what these tests are about."""


@contextmanager
def running_hub() -> Iterator[HubServer]:
    hub = HubServer()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.may_go_on.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
