"""Owns logging: structlog to stderr, one JSON object a line, or readable key=value lines when a person watches."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from whimbrel.chassis.config import ConfigError

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str, *, service: str, stream: TextIO | None = None) -> None:
    """Set up logging of this process. `level` is one of LEVELS; raises ConfigError otherwise.

    Lines of libraries that use the standard library's logging take the same form, from warnings upwards.
    """
    if level not in LEVELS:
        raise ConfigError("WB_LOG_LEVEL", f"{level!r} is not one of {', '.join(LEVELS)}")
    stream = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _naming(service),
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, _renderer(stream)],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _renderer(stream),
            ],
        )
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def _naming(service: str) -> Processor:
    def add_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    return add_service


def _renderer(stream: TextIO) -> Processor:
    if stream.isatty():
        return structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    return structlog.processors.JSONRenderer()
