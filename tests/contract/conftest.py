"""Contract tests run on uvloop, as the services do; each is a cluster of its own."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import uvloop


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def at_end() -> AsyncIterator[AsyncExitStack]:
    """Closes what a test opened, also when it fails."""
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def cluster() -> str:
    return f"t{uuid.uuid4().hex[:8]}"
