"""What the worker's tests share: a chunk pool that lends, and tiny real models in the project's format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import ckptio
import pytest

from tests.unit.gpu_worker.builders import Lender
from tests.unit.gpu_worker.tiny_models import CHUNK_BYTES, TinyModel, make_tiny_models

# Before torch is imported anywhere in this process: see `services/gpu_worker/__main__.py`.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

POOL_BYTES = 16 * 1024 * 1024


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[Lender]:
    with ckptio.ChunkPool.create(None, POOL_BYTES, CHUNK_BYTES) as pool, ckptio.Reader(1) as reader:
        yield Lender(pool=pool, directory=tmp_path, reader=reader)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """By name; made once for the whole run and never changed."""
    return make_tiny_models(tmp_path_factory.mktemp("tiny-models"))


@pytest.fixture
def model(tiny_models: dict[str, TinyModel]) -> TinyModel:
    """The one that most tests load."""
    return tiny_models["llama"]
