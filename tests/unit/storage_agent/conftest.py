"""Where storage agents live in tests."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory in memory: conversions sync every file, which a busy disk makes slow. `tmp_path` is a real disk."""
    path = Path("/dev/shm") / f"storage-agent-test-{uuid.uuid4().hex}"
    path.mkdir()
    yield path
    shutil.rmtree(path)
