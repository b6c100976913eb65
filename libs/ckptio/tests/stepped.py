"""Conversions in a process of their own that go on step by step, so that a kill comes before their end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Tells each chunk, and waits for a line; whoever gives it no input gets all of it at once.
CONVERT_AND_TELL = """
import json, sys
import ckptio
def tell(progress):
    print(progress.done_bytes, flush=True)
    sys.stdin.readline()
ckptio.convert(sys.argv[1], sys.argv[2], progress=tell, **json.loads(sys.argv[3]))
print("published", flush=True)
"""


def converter(
    source: Path, destination: Path, *, is_stepped: bool = True, **options: object
) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", CONVERT_AND_TELL, str(source), str(destination), json.dumps(options)]
    stdin = subprocess.PIPE if is_stepped else subprocess.DEVNULL
    return subprocess.Popen(arguments, stdin=stdin, stdout=subprocess.PIPE, text=True)


def kill_after(process: subprocess.Popen[str], steps: int) -> None:
    """kill -9 somewhere in what follows that many chunks, which is one more chunk at most."""
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(steps):
        if process.stdout.readline() in ("", "published\n"):
            break
        process.stdin.write("\n")
        process.stdin.flush()
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
