"""Owns the process's metrics: one Prometheus registry, and instruments that are created once per name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics import MetricWrapperBase

M = TypeVar("M", bound=MetricWrapperBase)

REGISTRY = CollectorRegistry(auto_describe=True)
CONTENT_TYPE = CONTENT_TYPE_LATEST

# From a warm route lookup (100 µs) to a cold start from a slow repository (minutes), about two steps per decade.
SECONDS_BUCKETS = (
    0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

# whimbrel_<service>_<what>_<unit>; the chassis itself leaves <service> out because every service has these.
_NAME = re.compile(r"whimbrel(_[a-z0-9]+){2,}")

_instruments: dict[str, MetricWrapperBase] = {}

ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)


def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
    """The counter of that name; asking again gives the same one."""
    return _once(Counter, name, help, labels)


def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
    """The gauge of that name; asking again gives the same one."""
    return _once(Gauge, name, help, labels)


def histogram(
    name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS_BUCKETS
) -> Histogram:
    """The histogram of that name; asking again gives the same one. The default buckets are seconds."""
    return _once(Histogram, name, help, labels, buckets=buckets)


def render() -> bytes:
    """Every metric of this process in the Prometheus text format."""
    return generate_latest(REGISTRY)


def _once(kind: type[M], name: str, help: str, labels: Sequence[str], **options: Sequence[float]) -> M:
    assert _NAME.fullmatch(name), f"{name} is not whimbrel_<service>_<what>_<unit>"
    known = _instruments.get(name)
    if known is None:
        known = _instruments[name] = kind(name, help, labelnames=labels, registry=REGISTRY, **options)  # type: ignore[arg-type]
    assert isinstance(known, kind), f"{name} is already a {type(known).__name__}"
    return known
