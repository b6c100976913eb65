"""Tests of a server with GPUs, against a CUDA runtime in host memory: only in the process that has one."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptio.devices import RUNTIME_VARIABLE

collect_ignore_glob = [] if RUNTIME_VARIABLE in os.environ else ["test_*.py"]


@pytest.fixture
def home() -> Iterator[Path]:
    """A place in memory, so that no disk is part of what is timed."""
    path = Path("/dev/shm") / f"whimbrel-standin-{uuid.uuid4().hex}"
    path.mkdir()
    yield path
    shutil.rmtree(path)
