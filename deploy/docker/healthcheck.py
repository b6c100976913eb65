"""Exits 0 when http://127.0.0.1:<port>/<path> answers 200: the health check of every image, which need no curl.

python3 -S healthcheck.py <port> [<path>]
"""

from __future__ import annotations

import http.client
import sys

ANSWER_S_MAX = 3.0

port, path = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "healthz"
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S_MAX)
try:
    connection.request("GET", f"/{path}")
    answer = connection.getresponse()
    reason = answer.read(500).decode(errors="replace").strip()
except OSError as error:
    sys.exit(f"nobody answers on port {port}: {error}")
if answer.status != 200:
    sys.exit(f"/{path} answers {answer.status}: {reason}")
