"""nginx as a process of its own, with its own configuration, serving one directory on a free port."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from pathlib import Path

from whimbrel.chassis.child_server import HOST, ChildServer, ServerMissing

OURS_PATH = "/-/ours"


class WebServer(ChildServer):
    """Serves `root`; `directory` is for its own files. It runs as whoever runs the tests."""

    program = shutil.which("nginx") or "/usr/sbin/nginx"

    def __init__(self, directory: Path, root: Path, port: int = 0) -> None:
        super().__init__(directory, port)
        self.root = root
        self._name = uuid.uuid4().hex

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        if shutil.which(self.program) is None:
            raise ServerMissing("nginx is not installed; run: apt-get install nginx")
        await super().start()

    @property
    def _log_path(self) -> Path:
        return self.directory / "web_server.log"

    def _command(self) -> list[str]:
        own = json.dumps(str(self.directory.resolve()))[1:-1]
        temporary = "".join(
            f'  {kind}_temp_path "{own}/{kind}";\n' for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        path = self.directory / "nginx.conf"
        # One process: the usual workers would change to a user that may not read the tests' directories.
        path.write_text(
            f'daemon off;\nmaster_process off;\npid "{own}/nginx.pid";\nerror_log stderr warn;\n'
            "events { worker_connections 256; }\n"
            "http {\n  access_log off;\n  sendfile on;\n"
            f"{temporary}"
            f"  server {{\n    listen {HOST}:{self.port};\n    root {json.dumps(str(self.root.resolve()))};\n"
            f'    location = {OURS_PATH} {{ return 200 "{self._name}"; }}\n'
            "  }\n}\n"
        )
        return [self.program, "-c", str(path.resolve()), "-p", str(self.directory.resolve()), "-e", "stderr"]

    async def _is_ours(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(f"GET {OURS_PATH} HTTP/1.0\r\n\r\n".encode())
        await writer.drain()
        return (await reader.read()).endswith(self._name.encode())
