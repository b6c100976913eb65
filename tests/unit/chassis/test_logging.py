"""Logging: JSON for machines, readable lines for people, one form for libraries too."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from whimbrel.chassis.config import ConfigError
from whimbrel.chassis.logging import configure


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def test_an_event_is_one_json_object_with_time_level_and_service() -> None:
    stream = io.StringIO()
    configure("info", service="scheduler", stream=stream)

    structlog.get_logger().info("model_loaded", model_id="m", load_s=0.25)
    structlog.get_logger().debug("too_quiet")

    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert entry.pop("timestamp").endswith("Z")
    assert entry == {"event": "model_loaded", "level": "info", "service": "scheduler", "model_id": "m", "load_s": 0.25}


def test_an_exception_is_told_with_its_traceback() -> None:
    stream = io.StringIO()
    configure("info", service="router", stream=stream)
    try:
        raise ZeroDivisionError("oops")
    except ZeroDivisionError:
        structlog.get_logger().exception("handler_failed", subject="x")

    entry = json.loads(stream.getvalue())
    assert "ZeroDivisionError: oops" in entry["exception"]
    assert entry["level"] == "error"


def test_warnings_of_libraries_take_the_same_form() -> None:
    stream = io.StringIO()
    configure("debug", service="router", stream=stream)

    logging.getLogger("some.library").warning("look at %s", "this")
    logging.getLogger("some.library").info("chatter")

    (line,) = stream.getvalue().splitlines()
    entry = json.loads(line)
    assert (entry["event"], entry["level"], entry["service"]) == ("look at this", "warning", "router")


def test_a_person_at_a_terminal_gets_readable_lines() -> None:
    stream = Terminal()
    configure("info", service="router", stream=stream)

    structlog.get_logger().info("model_loaded", model_id="m")

    assert "model_loaded" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="WB_LOG_LEVEL: 'loud' is not one of debug, info, warning, error"):
        configure("loud", service="router")
