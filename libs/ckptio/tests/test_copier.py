"""Chunks that arrive in any order, from any tier, and go on to devices."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import xxhash

import ckptio
from ckptio import faults
from ckptio.plan import plan_chunks
from ckptio.reader import order_chunks

from .conftest import SMALL_CHUNK_BYTES

SIZE_BYTES = 10 * SMALL_CHUNK_BYTES + 4096


@pytest.fixture
def checkpoint(tmp_path: Path, write_stock: Callable[..., Path], some_tensors: Callable[..., object]) -> Path:
    """Two partitions of several chunks each."""
    write_stock(
        tmp_path / "in" / "model.safetensors", some_tensors((30_000,), (25_000,), (9_000,), (40_000,))
    )
    out = tmp_path / "out"
    ckptio.convert(
        tmp_path / "in", out, chunk_size_bytes=SMALL_CHUNK_BYTES, partition_of=lambda name: int(name[-1]) % 2
    )
    return out


def filled(pool: ckptio.ChunkPool, checkpoint: Path) -> list[tuple[int, ...]]:
    """The checkpoint in the pool: chunks by partition."""
    layout = ckptio.read_layout(checkpoint)
    chunks = []
    with ckptio.Reader(2) as reader:
        for path, part in zip(layout.files, layout.index.partitions, strict=True):
            chunks.append(pool.allocate(pool.chunks_for(part.padded_bytes)))
            reader.read(pool, path, chunks[-1], part.padded_bytes, digests=part.digests)
    return chunks


def test_chunks_in_any_order_reach_their_places_on_every_device(checkpoint: Path) -> None:
    """L4, L5: chunk indices are what one tier hands to the next."""
    layout = ckptio.read_layout(checkpoint)
    with ckptio.ChunkPool.create(None, 64 * SMALL_CHUNK_BYTES, SMALL_CHUNK_BYTES) as pool:
        chunks = filled(pool, checkpoint)
        buffers = [ckptio.DeviceBuffer.allocate("host", part.size_bytes) for part in layout.index.partitions]
        copier = ckptio.ChunkCopier(pool, layout.index, buffers)
        todo = [(k, n, index) for k, part in enumerate(chunks) for n, index in enumerate(part)]
        random.Random(7).shuffle(todo)
        for item in todo:
            copier.deliver(*item)
        report = copier.finish()
        assert report.size_bytes == copier.size_bytes == sum(p.size_bytes for p in layout.index.partitions)
        for buffer, part, path in zip(buffers, layout.index.partitions, layout.files, strict=True):
            assert bytes(buffer.read()) == path.read_bytes()[: part.size_bytes]
            buffer.close()


def test_a_chunk_is_delivered_once_and_all_of_them_before_the_end(checkpoint: Path) -> None:
    layout = ckptio.read_layout(checkpoint)
    with ckptio.ChunkPool.create(None, 64 * SMALL_CHUNK_BYTES, SMALL_CHUNK_BYTES) as pool:
        chunks = filled(pool, checkpoint)
        buffers = [ckptio.DeviceBuffer.allocate("host", part.size_bytes) for part in layout.index.partitions]
        copier = ckptio.ChunkCopier(pool, layout.index, buffers)
        copier.deliver(0, 0, chunks[0][0])
        with pytest.raises(ValueError, match="before"):
            copier.deliver(0, 0, chunks[0][0])
        with pytest.raises(ValueError, match="not of this"):
            copier.deliver(0, 999, 0)
        with pytest.raises(ValueError, match="mapping"):
            copier.deliver(1, 0, pool.chunk_count)
        with pytest.raises(ValueError, match="never delivered"):
            copier.finish()
        copier.abandon()
        with pytest.raises(ValueError, match="finished"):
            copier.deliver(1, 0, chunks[1][0])
        for buffer in buffers:
            buffer.close()
        with pytest.raises(ValueError, match="buffer"):
            ckptio.ChunkCopier(pool, layout.index, [])


@pytest.mark.parametrize("bad", [None, 0, 3, 10])
def test_a_read_tells_every_chunk_that_is_good_whatever_becomes_of_the_rest(
    tmp_path: Path, bad: int | None
) -> None:
    """L4: what has arrived is kept by whoever reads, also when a later chunk is corrupt."""
    data = random.Random(3).randbytes(SIZE_BYTES)
    path = tmp_path / "partition_0.bin"
    path.write_bytes(data)
    chunks = plan_chunks(SIZE_BYTES, SMALL_CHUNK_BYTES)
    digests = [xxhash.xxh3_64_intdigest(data[c.offset_bytes : c.offset_bytes + c.size_bytes]) for c in chunks]
    if bad is not None:
        digests[bad] ^= 1
    heard: list[int] = []

    def hear(numbers: Sequence[int]) -> None:
        heard.extend(numbers)

    with (
        ckptio.ChunkPool.create(None, 64 * SMALL_CHUNK_BYTES, SMALL_CHUNK_BYTES) as pool,
        ckptio.Reader(3) as reader,
    ):
        indices = pool.allocate(len(chunks))
        orders = order_chunks(chunks, [index * SMALL_CHUNK_BYTES for index in indices], digests)
        if bad is None:
            reader.run(pool.mapping, [path], orders, is_verified=True, arrived=hear)
            assert sorted(heard) == list(range(len(chunks)))
        else:
            with pytest.raises(ckptio.CorruptCheckpoint) as caught:
                reader.run(pool.mapping, [path], orders, is_verified=True, arrived=hear)
            assert caught.value.chunk_index == bad
        assert bad not in heard
        assert len(heard) == len(set(heard))
        for number in heard:
            place, chunk = indices[number] * SMALL_CHUNK_BYTES, chunks[number]
            with memoryview(pool.mapping) as view:
                good = data[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes]
                assert view[place : place + chunk.size_bytes] == good


def test_a_copy_that_fails_is_a_typed_error_and_the_next_one_works(checkpoint: Path) -> None:
    layout = ckptio.read_layout(checkpoint)
    with ckptio.ChunkPool.create(None, 64 * SMALL_CHUNK_BYTES, SMALL_CHUNK_BYTES) as pool:
        chunks = filled(pool, checkpoint)
        for is_faulty in (True, False):
            buffers = [
                ckptio.DeviceBuffer.allocate("host", part.size_bytes) for part in layout.index.partitions
            ]
            with faults.injected(copy_error=700 if is_faulty else 0, copy_error_after=2):
                copier = ckptio.ChunkCopier(pool, layout.index, buffers)
                for k, part in enumerate(chunks):
                    for number, index in enumerate(part):
                        copier.deliver(k, number, index)
                if is_faulty:
                    with pytest.raises(ckptio.DeviceError):
                        copier.finish()
                else:
                    copier.finish()
            for buffer in buffers:
                buffer.close()
