"""Builders and places for the tests of ckptio."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import ckptio
from ckptio.dtypes import DTYPES
from ckptio.plan import size_of
from ckptio.stock import encode_header

settings.register_profile(
    "ckptio",
    deadline=None,
    max_examples=40,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("ckptio")

# Small, so that a few kB already are several chunks.
SMALL_CHUNK_BYTES = 8192

Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]


@pytest.fixture
def tmpfs_path() -> Iterator[Path]:
    """A directory on tmpfs, gone after the test."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    path = Path(tempfile.mkdtemp(prefix="ckptio-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["disk", "tmpfs"])
def any_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory on the disk, then one on tmpfs."""
    return tmp_path if request.param == "disk" else request.getfixturevalue("tmpfs_path")


@pytest.fixture
def some_tensors() -> Callable[..., Tensors]:
    """Builder of tensors with random bytes: name -> (dtype, shape, bytes)."""

    def build(*shapes: tuple[int, ...], dtype: str = "uint8", seed: int = 1, prefix: str = "t") -> Tensors:
        generator = random.Random(seed)
        return {
            f"{prefix}.{number}": (dtype, shape, generator.randbytes(size_of(dtype, shape)))
            for number, shape in enumerate(shapes)
        }

    return build


@pytest.fixture
def write_stock() -> Callable[..., Path]:
    """Writer of a safetensors file."""

    def write(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        header = encode_header(
            ((name, dtype, shape) for name, (dtype, shape, _) in tensors.items()),
            metadata or {"format": "pt"},
        )
        path.write_bytes(header + b"".join(raw for _, _, raw in tensors.values()))
        return path

    return write


@pytest.fixture
def write_model(write_stock: Callable[..., Path]) -> Callable[..., Path]:
    """Writer of a model directory: config, tokenizer, and one or more shards of weights."""

    def write(directory: Path, tensors: Tensors, shards: int = 1) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (directory / "tokenizer.json").write_text('{"version": "1.0"}')
        if shards == 1:
            write_stock(directory / "model.safetensors", tensors)
            return directory
        weight_map = {}
        for number in range(shards):
            name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = dict(list(tensors.items())[number::shards])
            write_stock(directory / name, part)
            weight_map |= dict.fromkeys(part, name)
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        return directory

    return write


@pytest.fixture
def a_checkpoint(
    tmp_path: Path, write_model: Callable[..., Path], some_tensors: Callable[..., Tensors]
) -> Callable[..., Path]:
    """Builder of a converted checkpoint with chunks of `SMALL_CHUNK_BYTES`."""

    def build(*shapes: tuple[int, ...], directory: Path = tmp_path) -> Path:
        source = write_model(directory / "source", some_tensors(*(shapes or ((3000,), (20000,), (7, 11)))))
        ckptio.convert(source, directory / "checkpoint", chunk_size_bytes=SMALL_CHUNK_BYTES)
        return directory / "checkpoint"

    return build


@pytest.fixture
def checkpoint_bytes() -> Callable[[Path], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """Reader of all contiguous tensors of a checkpoint, by nothing but its index."""

    def read(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        index = ckptio.read_index(path)
        files = [(path / f"partition_{number}.bin").read_bytes() for number in range(len(index.partitions))]
        return {
            entry.name: (
                entry.dtype,
                entry.shape,
                files[entry.partition][entry.offset_bytes : entry.offset_bytes + entry.size_bytes],
            )
            for entry in index.values()
        }

    return read


@pytest.fixture
def pool() -> Iterator[ckptio.ChunkPool]:
    """Ten small chunks."""
    with ckptio.ChunkPool.create(None, 10 * SMALL_CHUNK_BYTES, chunk_size_bytes=SMALL_CHUNK_BYTES) as pool:
        yield pool


@pytest.fixture
def loader(pool: ckptio.ChunkPool) -> Iterator[ckptio.Loader]:
    """A loader into that pool."""
    with ckptio.Loader(pool, threads=2) as loader:
        yield loader


@pytest.fixture
def every_dtype() -> list[str]:
    """Names of all dtypes."""
    return list(DTYPES)
