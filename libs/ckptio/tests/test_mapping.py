"""Chunks mapped in another process: back to back, zero copy, private."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptio
from ckptio._native import Mapping, Pin

CHUNK_BYTES = 65536


def fill(pool: ckptio.ChunkPool, indices: list[int], raw: bytes) -> None:
    for position, index in enumerate(indices):
        piece = raw[position * pool.chunk_size_bytes :][: pool.chunk_size_bytes]
        with pool.chunk(index) as chunk:
            chunk[: len(piece)] = piece


@pytest.mark.parametrize("size_bytes", [1, 4096, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES - 7])
def test_scattered_chunks_are_one_range(size_bytes: int) -> None:
    raw = random.Random(size_bytes).randbytes(size_bytes)
    with ckptio.ChunkPool.create(None, 8 * CHUNK_BYTES, CHUNK_BYTES) as pool:
        indices = [6, 1, 2, 7, 0][: pool.chunks_for(size_bytes)]
        fill(pool, indices, raw)
        with ckptio.map_chunks(pool.path, CHUNK_BYTES, indices, size_bytes) as mapping:
            assert mapping.size_bytes == -(-size_bytes // 4096) * 4096
            assert bytes(mapping)[:size_bytes] == raw


def test_a_write_to_a_mapping_never_reaches_the_pool() -> None:
    with ckptio.ChunkPool.create(None, 4 * CHUNK_BYTES, CHUNK_BYTES) as pool:
        fill(pool, [0, 1, 2, 3], b"a" * 4 * CHUNK_BYTES)
        with (
            ckptio.map_chunks(pool.path, CHUNK_BYTES, [2, 3], 2 * CHUNK_BYTES) as one,
            ckptio.map_chunks(pool.path, CHUNK_BYTES, [2, 3], 2 * CHUNK_BYTES) as two,
        ):
            with memoryview(one) as view:
                view[:] = b"b" * len(view)
            assert bytes(two) == b"a" * 2 * CHUNK_BYTES
        assert pool.path.read_bytes() == b"a" * 4 * CHUNK_BYTES


def test_bytes_that_arrive_later_are_seen() -> None:
    """L6: tensors are made while bytes move."""
    with (
        ckptio.ChunkPool.create(None, 2 * CHUNK_BYTES, CHUNK_BYTES) as pool,
        ckptio.map_chunks(pool.path, CHUNK_BYTES, [1, 0], 2 * CHUNK_BYTES) as mapping,
    ):
        assert bytes(mapping) == bytes(2 * CHUNK_BYTES)
        fill(pool, [1, 0], b"x" * CHUNK_BYTES + b"y" * CHUNK_BYTES)
        assert bytes(mapping) == b"x" * CHUNK_BYTES + b"y" * CHUNK_BYTES


def test_a_mapping_does_not_close_under_its_views() -> None:
    with ckptio.ChunkPool.create(None, CHUNK_BYTES, CHUNK_BYTES) as pool:
        mapping = ckptio.map_chunks(pool.path, CHUNK_BYTES, [0], CHUNK_BYTES)
        view = memoryview(mapping)
        with pytest.raises(BufferError, match="1 views"):
            mapping.close()
        view.release()
        pin = mapping.pin()
        with pytest.raises(BufferError, match="1 views"):
            mapping.close()
        del pin
        mapping.close()
        mapping.close()
        with pytest.raises(ValueError, match="closed"):
            memoryview(mapping)
        with pytest.raises(ValueError, match="closed"):
            mapping.pin()


@pytest.mark.parametrize(
    ("chunk_bytes", "indices", "size_bytes"),
    [
        (CHUNK_BYTES, [0], CHUNK_BYTES + 1),
        (CHUNK_BYTES, [0, 1], CHUNK_BYTES),
        (CHUNK_BYTES, [-1], CHUNK_BYTES),
        (1000, [0], 10),
    ],
)
def test_arguments_that_do_not_fit_are_refused(chunk_bytes: int, indices: list[int], size_bytes: int) -> None:
    with (
        ckptio.ChunkPool.create(None, 4 * CHUNK_BYTES, CHUNK_BYTES) as pool,
        pytest.raises(ValueError, match="chunk"),
    ):
        ckptio.map_chunks(pool.path, chunk_bytes, indices, size_bytes)


def test_a_chunk_beyond_the_pool_is_an_error_not_a_crash() -> None:
    with (
        ckptio.ChunkPool.create(None, 2 * CHUNK_BYTES, CHUNK_BYTES) as pool,
        pytest.raises(ckptio.TruncatedCheckpoint),
    ):
        ckptio.map_chunks(pool.path, CHUNK_BYTES, [2], CHUNK_BYTES)
    with pytest.raises(FileNotFoundError):
        ckptio.map_chunks("/dev/shm/ckptio-no-such-pool", CHUNK_BYTES, [0], 1)


def test_a_mapping_is_only_made_by_its_makers() -> None:
    with pytest.raises(TypeError):
        Mapping()
    with pytest.raises(TypeError):
        Pin(None)  # type: ignore[arg-type]


def test_tensors_keep_their_mapping_and_give_it_back(tmp_path: Path) -> None:
    expected = {"a": torch.randn(100, 30), "b": torch.arange(7)}
    ckptio.save(expected, tmp_path / "c", chunk_size_bytes=8192)
    index = ckptio.read_index(tmp_path / "c")
    part = index.partitions[0]
    with ckptio.ChunkPool.create(None, 1 << 20, 8192) as pool, ckptio.Reader() as reader:
        indices = pool.allocate(len(part.digests))
        mapping = ckptio.map_chunks(pool.path, 8192, indices, part.padded_bytes)
        tensors = ckptio.tensors(index, [mapping])
        assert not tensors["a"].any()
        reader.read(
            pool, tmp_path / "c" / "partition_0.bin", indices, part.padded_bytes, digests=part.digests
        )
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
        one = tensors.pop("a")
        del tensors
        gc.collect()
        with pytest.raises(BufferError):
            mapping.close()
        assert torch.equal(one, expected["a"])
        del one
        mapping.close()
        with pytest.raises(ValueError, match="0 mappings for 1 partitions"):
            ckptio.tensors(index, [])
        with (
            ckptio.map_chunks(pool.path, 8192, indices[:1], 4096) as small,
            pytest.raises(ValueError, match="mapping 0 has 4096 bytes"),
        ):
            ckptio.tensors(index, [small])


ATTACH = """
import json, sys, time
import torch, ckptio
def resident(kind):
    for line in open("/proc/self/status"):
        if line.startswith(kind + ":"):
            return int(line.split()[1]) * 1024
path, pool, chunk_bytes, indices = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
index = ckptio.read_index(path)
before = resident("RssAnon")
mapping = ckptio.map_chunks(pool, chunk_bytes, indices, index.partitions[0].padded_bytes)
tensors = ckptio.tensors(index, [mapping])
total = sum(int(tensor.sum(dtype=torch.int64)) for tensor in tensors.values())
read = resident("RssAnon") - before
next(iter(tensors.values())).fill_(0)
print(json.dumps({"sum": total, "read": read, "wrote": resident("RssAnon") - before - read}))
"""


def test_another_process_has_the_tensors_without_a_copy(
    tmp_path: Path, tmpfs_path: Path, write_model: Callable
) -> None:
    """L6: resident memory of the second process grows by what it writes, not by what it reads."""
    size_bytes = 8 * 1024 * 1024
    tensors = {
        f"w.{number}": ("uint8", (size_bytes,), random.Random(number).randbytes(size_bytes))
        for number in range(2)
    }
    ckptio.convert(write_model(tmp_path / "model", tensors), tmp_path / "c", chunk_size_bytes=1 << 20)
    part = ckptio.read_index(tmp_path / "c").partitions[0]
    with (
        ckptio.ChunkPool.create(tmpfs_path / "pool", 64 << 20, 1 << 20) as pool,
        ckptio.Reader() as reader,
    ):
        indices = pool.allocate(len(part.digests))
        file = tmp_path / "c" / "partition_0.bin"
        reader.read(pool, file, indices, part.padded_bytes, digests=part.digests)
        arguments = [str(tmp_path / "c"), str(pool.path), str(1 << 20), json.dumps(indices)]
        done = subprocess.run([sys.executable, "-c", ATTACH, *arguments], capture_output=True, text=True)
        assert done.stderr == ""
        result = json.loads(done.stdout)
        assert result["sum"] == sum(sum(raw) for _, _, raw in tensors.values())
        assert result["read"] < 4 * 1024 * 1024
        assert result["wrote"] > size_bytes * 0.9
        reader_view = ckptio.map_chunks(pool.path, 1 << 20, indices, part.padded_bytes)
        with reader_view:
            assert bytes(reader_view) == file.read_bytes()
