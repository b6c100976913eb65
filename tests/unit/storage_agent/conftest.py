"""Where storage agents live in tests."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.storage_agent.held_imports import HeldImports


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory in memory: conversions sync every file, which a busy disk makes slow. `tmp_path` is a real disk."""
    path = Path("/dev/shm") / f"storage-agent-test-{uuid.uuid4().hex}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def held_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldImports]:
    """Imports stand still half way, until the test lets them go on."""
    held = HeldImports()
    held.hold(monkeypatch)
    yield held
    held.go_on()
