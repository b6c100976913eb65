"""Owns what all suites share: real servers on free ports, skipped with a reason where they are not installed."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from whimbrel.chassis.child_server import ChildServer, ServerMissing
from whimbrel.chassis.servers import NatsServer, RedisServer

from tests.support.cluster import ROOT
from tests.support.object_store import ObjectStore
from tests.support.web_server import WebServer

S = TypeVar("S", bound=ChildServer)

STANDIN = ROOT / "libs" / "ckptio" / "native_tests" / "cudart_standin.cpp"


@contextmanager
def running(server: S) -> Iterator[S]:
    try:
        asyncio.run(server.start())
    except ServerMissing as missing:
        pytest.skip(str(missing))
    try:
        yield server
    finally:
        asyncio.run(server.stop())


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One for the whole run; tests keep apart by cluster names. Never stop or restart it."""
    # Every cluster's stream of public events reserves its bound, and each test is a cluster.
    with running(NatsServer(tmp_path_factory.mktemp("nats"), streams_bytes_max=2**40)) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One for the whole run; tests keep apart by cluster names. Never stop or restart it."""
    with running(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """For one test, which may kill and restart it."""
    with running(NatsServer(tmp_path / "nats")) as server:
        yield server


@pytest.fixture
def own_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """For one test, which may kill and restart it."""
    with running(RedisServer(tmp_path / "redis")) as server:
        yield server


@pytest.fixture(scope="module")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with running(ObjectStore(tmp_path_factory.mktemp("s3"))) as server:
        yield server


@pytest.fixture(scope="module")
def web_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    root = tmp_path_factory.mktemp("root")
    with running(WebServer(tmp_path_factory.mktemp("nginx"), root)) as server:
        yield server


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ckptio's CUDA runtime in host memory, built; a process loads it by ckptio.devices.RUNTIME_VARIABLE."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to build the stand-in runtime with")
    library = tmp_path_factory.mktemp("standin") / "libcudart_standin.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *flags, os.fspath(STANDIN), "-o", os.fspath(library)], check=True)
    return library


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WB_")]:
        monkeypatch.delenv(name)
