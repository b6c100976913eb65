"""Starts the fresh process of each measurement, waits for its answer, and never leaves one behind."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from ckptio.errors import CkptioError

# A load of a few GB takes seconds, on a slow disk minutes: ten of them mean that something hangs.
ANSWER_S_MAX = 600

# How long a process that was told to end may take before it is killed.
END_S_MAX = 30

_ERROR_LINES = 12

# No library is to look anything up on a network, or to draw on the terminal.
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


class MeasurementFailed(CkptioError):
    """The process of a measurement gave no answer; `reason` is the end of what it said."""

    def __init__(self, task: str, reason: str) -> None:
        self.task = task
        self.reason = reason
        super().__init__(f"{task}: {reason}")


def measure(task: str, request: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Any:
    """The answer of a fresh process to one request; raises `MeasurementFailed`."""
    with answering(task, request, environment) as answer:
        return answer


@contextmanager
def answering(
    task: str, request: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """The answer of a fresh process that stays until the end of the block, when its input is closed."""
    command = [sys.executable, "-m", "ckptio.bench.child", json.dumps({"task": task, **request})]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **_QUIET, **(environment or {})},
        )
        try:
            yield _read_answer(task, process, errors)
        finally:
            _end(process)


def _read_answer(task: str, process: subprocess.Popen[bytes], errors: IO[bytes]) -> Any:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], ANSWER_S_MAX)
    if not ready:
        raise MeasurementFailed(task, f"no answer within {ANSWER_S_MAX} s")
    line = process.stdout.readline()
    if not line:
        _end(process)
        raise MeasurementFailed(task, _last_words(process, errors))
    return json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(END_S_MAX)
    except BaseException as error:
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    finally:
        process.stdout.close()


def _last_words(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()[-_ERROR_LINES:]
    ending = (
        f"killed by signal {-process.returncode}" if process.returncode < 0 else "ended without an answer"
    )
    return lines[-1] if lines and process.returncode > 0 else " / ".join([ending, *lines])
