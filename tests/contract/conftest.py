"""Contract tests run on uvloop, as the services do."""

from __future__ import annotations

import uvloop


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}
