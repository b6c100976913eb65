"""GPUs for the tests: real ones, or those of the stand-in runtime when CKPTIO_CUDA_RUNTIME names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ckptio
from ckptio.devices import RUNTIME_VARIABLE

CHUNK_BYTES = 64 * 1024


@pytest.fixture(autouse=True)
def gpus() -> int:
    """How many GPUs there are; without any the test is skipped, and says why."""
    status = ckptio.cuda_status()
    if status.device_count == 0:
        pytest.skip(f"no GPU: {status.reason}; {RUNTIME_VARIABLE} may name another runtime")
    return status.device_count


@pytest.fixture
def a_model(
    tmp_path: Path, write_model: Callable[..., Path], some_tensors: Callable[..., object]
) -> Callable[..., Path]:
    """Builder of a checkpoint of about `chunks` chunks, over `partitions` GPUs."""

    def build(chunks: int = 12, partitions: int = 1) -> Path:
        shapes = [(CHUNK_BYTES // 2 + 7 * number,) for number in range(2 * chunks)]
        source = write_model(tmp_path / "source", some_tensors(*shapes, seed=5))
        ckptio.convert(
            source,
            tmp_path / "model",
            chunk_size_bytes=CHUNK_BYTES,
            partition_of=lambda name: int(name.split(".")[1]) % partitions,
        )
        return tmp_path / "model"

    return build


@pytest.fixture
def a_pool() -> Iterator[Callable[[int], ckptio.ChunkPool]]:
    """Builder of pools, closed at the end."""
    pools: list[ckptio.ChunkPool] = []

    def build(chunks: int) -> ckptio.ChunkPool:
        pools.append(ckptio.ChunkPool.create(None, chunks * CHUNK_BYTES, chunk_size_bytes=CHUNK_BYTES))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()
