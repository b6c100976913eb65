"""The chunk reader: every mode, every size, every way to fail."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import ckptio
from ckptio._native import CancelToken, resident_bytes

CHUNK_BYTES = 65536
CHUNKS = 24


@pytest.fixture(scope="module")
def pool() -> Iterator[ckptio.ChunkPool]:
    with ckptio.ChunkPool.create(None, CHUNKS * CHUNK_BYTES, CHUNK_BYTES) as pool:
        yield pool
        assert pool.free_chunks == CHUNKS, "a test kept chunks"


@pytest.fixture(scope="module")
def reader() -> Iterator[ckptio.Reader]:
    with ckptio.Reader(threads=3) as reader:
        yield reader


def digests_of(raw: bytes) -> list[int]:
    return [xxhash.xxh3_64_intdigest(raw[i : i + CHUNK_BYTES]) for i in range(0, len(raw), CHUNK_BYTES)]


def contents(pool: ckptio.ChunkPool, indices: tuple[int, ...], size_bytes: int) -> bytes:
    pieces = []
    for index in indices:
        with pool.chunk(index) as chunk:
            pieces.append(bytes(chunk))
    return b"".join(pieces)[:size_bytes]


def a_file(path: Path, size_bytes: int, seed: int = 3) -> bytes:
    raw = random.Random(seed).randbytes(size_bytes)
    with open(path, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return raw


def drop_cache(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def shuffled(pool: ckptio.ChunkPool, count: int) -> tuple[int, ...]:
    """Leases in random order, with gaps."""
    indices = list(pool.allocate(CHUNKS))
    random.Random(5).shuffle(indices)
    pool.free(indices[count:])
    return tuple(indices[:count])


SIZES = [0, 1, 511, 512, 513, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1]
SIZES += [3 * CHUNK_BYTES - 512, 3 * CHUNK_BYTES + 4096 + 7, 20 * CHUNK_BYTES + 886]


@pytest.mark.parametrize("direct", [None, True, False])
@pytest.mark.parametrize("size_bytes", SIZES)
def test_every_size_arrives_in_every_mode(
    size_bytes: int, direct: bool | None, any_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader
) -> None:
    """L2, L3, L4: chunks in any order, direct or buffered, on disk and tmpfs; unaligned tails included."""
    raw = a_file(any_path / "p", size_bytes)
    drop_cache(any_path / "p")
    indices = shuffled(pool, pool.chunks_for(size_bytes))
    try:
        report = reader.read(
            pool, any_path / "p", indices, size_bytes, digests=digests_of(raw), direct=direct
        )
        assert contents(pool, indices, size_bytes) == raw
    finally:
        pool.free(indices)
    assert report.size_bytes == size_bytes
    assert report.reread_chunks == 0
    assert report.direct_bytes in (0, size_bytes)


def test_a_file_in_the_page_cache_is_read_from_there(
    tmp_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader
) -> None:
    """L3, L10: the choice is made for each chunk, and reported."""
    size_bytes = 8 * CHUNK_BYTES
    raw = a_file(tmp_path / "p", size_bytes)
    indices = pool.allocate(8)
    try:
        with open(tmp_path / "p", "rb") as file:
            assert resident_bytes(file.fileno(), 0, size_bytes) == size_bytes
            warm = reader.read(pool, tmp_path / "p", indices, size_bytes, digests=digests_of(raw))
            assert not warm.direct
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if resident_bytes(file.fileno(), 0, size_bytes):
                pytest.skip("this file system keeps its pages")
            cold = reader.read(pool, tmp_path / "p", indices, size_bytes, digests=digests_of(raw))
            assert cold.direct_bytes == size_bytes
            assert resident_bytes(file.fileno(), 0, size_bytes) == 0
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            os.pread(file.fileno(), 3 * CHUNK_BYTES, 0)
            mixed = reader.read(pool, tmp_path / "p", indices, size_bytes, digests=digests_of(raw))
            assert mixed.direct_bytes == 5 * CHUNK_BYTES
        assert contents(pool, indices, size_bytes) == raw
    finally:
        pool.free(indices)


@pytest.mark.parametrize("direct", [True, False])
def test_a_bad_chunk_is_read_again_and_then_named(
    direct: bool, any_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader
) -> None:
    raw = bytearray(a_file(any_path / "p", 6 * CHUNK_BYTES))
    digests = digests_of(bytes(raw))
    raw[4 * CHUNK_BYTES + 100] ^= 1
    (any_path / "p").write_bytes(raw)
    indices = pool.allocate(6)
    try:
        with pytest.raises(ckptio.CorruptCheckpoint) as caught:
            reader.read(pool, any_path / "p", indices, len(raw), digests=digests, direct=direct)
        assert caught.value.path == any_path / "p"
        assert (caught.value.chunk_index, caught.value.offset_bytes) == (4, 4 * CHUNK_BYTES)
        unchecked = reader.read(pool, any_path / "p", indices, len(raw), direct=direct)
        assert unchecked.verify_s == 0
        assert contents(pool, indices, len(raw)) == bytes(raw)
    finally:
        pool.free(indices)


def test_a_chunk_that_is_good_the_second_time_is_reported(
    tmp_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader
) -> None:
    """Whoever spoils one chunk after another during a read makes some digest wrong; the second one fits."""
    raw = a_file(tmp_path / "p", CHUNKS * CHUNK_BYTES)
    indices = pool.allocate(CHUNKS)
    digests = digests_of(raw)
    stop = threading.Event()

    def spoil() -> None:
        chunks = [pool.chunk(index) for index in indices]
        try:
            for number in itertools.cycle(range(CHUNKS)):
                chunks[number][-1] ^= 1
                if stop.is_set():
                    return
        finally:
            for chunk in chunks:
                chunk.release()

    spoiler = threading.Thread(target=spoil)
    spoiler.start()
    reread = 0
    deadline = time.monotonic() + 60
    try:
        while not reread and time.monotonic() < deadline:
            with contextlib.suppress(ckptio.CorruptCheckpoint):  # spoiled twice in a row
                reread = reader.read(pool, tmp_path / "p", indices, len(raw), digests=digests).reread_chunks
    finally:
        stop.set()
        spoiler.join()
        pool.free(indices)
    assert reread >= 1


def test_a_short_file_is_truncated_not_padded(
    any_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader
) -> None:
    raw = a_file(any_path / "p", 2 * CHUNK_BYTES)
    os.truncate(any_path / "p", len(raw) - 1)
    indices = pool.allocate(2)
    try:
        with pytest.raises(ckptio.TruncatedCheckpoint) as caught:
            reader.read(pool, any_path / "p", indices, len(raw), digests=digests_of(raw))
    finally:
        pool.free(indices)
    assert caught.value.path == any_path / "p"
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (len(raw), len(raw) - 1)


def test_a_file_that_shrinks_during_the_read_is_truncated(
    tmp_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader
) -> None:
    """The size was right when the read began; the end of the file is found by the thread that meets it."""
    raw = a_file(tmp_path / "p", 20 * CHUNK_BYTES)
    indices = pool.allocate(20)

    def shrink(_: int) -> None:
        os.truncate(tmp_path / "p", 10)

    try:
        try:
            reader.read(pool, tmp_path / "p", indices, len(raw), direct=False, progress=shrink)
        except ckptio.TruncatedCheckpoint as error:
            assert error.actual_bytes < error.expected_bytes <= len(raw)  # noqa: PT017
        with pytest.raises(ckptio.TruncatedCheckpoint):
            reader.read(pool, tmp_path / "p", indices, len(raw))
    finally:
        pool.free(indices)


def test_system_errors_carry_the_path(tmp_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader) -> None:
    indices = pool.allocate(1)
    try:
        with pytest.raises(FileNotFoundError, match="nowhere"):
            reader.read(pool, tmp_path / "nowhere", indices, 4096)
        size_bytes = os.stat(tmp_path).st_size
        if not 0 < size_bytes <= CHUNK_BYTES:
            pytest.skip("directories have no size here")
        with pytest.raises(IsADirectoryError, match="at offset 0") as caught:
            reader.read(pool, tmp_path, indices, size_bytes)
        assert caught.value.filename == str(tmp_path)
    finally:
        pool.free(indices)


def test_progress_is_told_in_the_calling_thread(
    tmp_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader
) -> None:
    raw = a_file(tmp_path / "p", 20 * CHUNK_BYTES)
    indices = pool.allocate(20)
    seen: list[tuple[int, int]] = []
    try:
        reader.read(
            pool,
            tmp_path / "p",
            indices,
            len(raw),
            progress=lambda done: seen.append((done, threading.get_ident())),
        )
    finally:
        pool.free(indices)
    done = [bytes_done for bytes_done, _ in seen]
    assert done == sorted(set(done))
    assert done[-1] == len(raw)
    assert {thread for _, thread in seen} == {threading.get_ident()}


def test_a_progress_callback_that_raises_stops_the_read(
    tmp_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader
) -> None:
    raw = a_file(tmp_path / "p", 20 * CHUNK_BYTES)
    indices = pool.allocate(20)

    def refuse(_: int) -> None:
        raise LookupError("enough")

    try:
        with pytest.raises(LookupError, match="enough"):
            reader.read(pool, tmp_path / "p", indices, len(raw), progress=refuse)
        reader.read(pool, tmp_path / "p", indices, len(raw), digests=digests_of(raw))
    finally:
        pool.free(indices)


def test_a_cancelled_read_stops_and_the_next_one_works(
    tmp_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader
) -> None:
    raw = a_file(tmp_path / "p", 20 * CHUNK_BYTES)
    indices = pool.allocate(20)
    token = CancelToken()
    try:
        token.cancel()
        assert token.is_cancelled
        with pytest.raises(ckptio.Cancelled) as caught:
            reader.read(pool, tmp_path / "p", indices, len(raw), cancel=token)
        assert (caught.value.path, caught.value.done_bytes) == (tmp_path / "p", 0)

        midway = CancelToken()
        try:
            reader.read(
                pool, tmp_path / "p", indices, len(raw), cancel=midway, progress=lambda _: midway.cancel()
            )
        except ckptio.Cancelled as error:
            assert 0 < error.done_bytes < len(raw)  # noqa: PT017
        reader.read(pool, tmp_path / "p", indices, len(raw), digests=digests_of(raw), cancel=CancelToken())
        assert contents(pool, indices, len(raw)) == raw
    finally:
        pool.free(indices)


def test_many_threads_share_a_reader(tmp_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader) -> None:
    raws = [a_file(tmp_path / f"p{n}", 4 * CHUNK_BYTES - n, seed=n) for n in range(6)]
    leases = [pool.allocate(4) for _ in raws]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            raw = raws[number]
            for _ in range(5):
                path = tmp_path / f"p{number}"
                reader.read(pool, path, leases[number], len(raw), digests=digests_of(raw))
            assert contents(pool, leases[number], len(raw)) == raw
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(raws))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for lease in leases:
        pool.free(lease)
    assert failures == []


@given(st.integers(1, 3 * CHUNK_BYTES), st.binary(min_size=1, max_size=50))
def test_native_digests_are_those_of_the_xxhash_package(
    tmp_path_factory: pytest.TempPathFactory, size_bytes: int, seed: bytes
) -> None:
    """F7: one digest, two implementations, any length."""
    raw = (seed * (size_bytes // len(seed) + 1))[:size_bytes]
    path = tmp_path_factory.mktemp("digest") / "p"
    path.write_bytes(raw)
    with ckptio.ChunkPool.create(None, 3 * CHUNK_BYTES, CHUNK_BYTES) as pool, ckptio.Reader(1) as reader:
        indices = pool.allocate(pool.chunks_for(size_bytes))
        report = reader.read(pool, path, indices, size_bytes, digests=digests_of(raw))
        assert (report.size_bytes, report.reread_chunks) == (size_bytes, 0)


def test_arguments_that_do_not_fit_are_refused(
    tmp_path: Path, pool: ckptio.ChunkPool, reader: ckptio.Reader
) -> None:
    a_file(tmp_path / "p", CHUNK_BYTES)
    for indices, digests in [((0, 1), None), ((-1,), None), ((CHUNKS,), None), ((0,), [1, 2])]:
        with pytest.raises(ValueError, match=r"chunk"):
            reader.read(pool, tmp_path / "p", indices, CHUNK_BYTES, digests=digests)
    with pytest.raises(ValueError, match="threads"):
        ckptio.Reader(0)


def test_a_pool_cannot_be_closed_under_a_read(tmp_path: Path, reader: ckptio.Reader) -> None:
    raw = a_file(tmp_path / "p", 4 * CHUNK_BYTES)
    refused: list[str] = []
    with ckptio.ChunkPool.create(None, 4 * CHUNK_BYTES, CHUNK_BYTES) as pool:

        def close(_: int) -> None:
            try:
                pool.close()
            except BufferError as error:
                refused.append(str(error))

        reader.read(pool, tmp_path / "p", pool.allocate(4), len(raw), digests=digests_of(raw), progress=close)
    assert refused


def test_a_closed_reader_refuses_and_a_forgotten_one_warns(tmp_path: Path, pool: ckptio.ChunkPool) -> None:
    a_file(tmp_path / "p", CHUNK_BYTES)
    reader = ckptio.Reader()
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read(pool, tmp_path / "p", (0,), CHUNK_BYTES)
    forgotten = ckptio.Reader()
    with pytest.warns(ResourceWarning, match="unclosed ckptio reader"):
        del forgotten


def test_a_whole_checkpoint_is_read_and_verified(a_checkpoint: Callable, checkpoint_bytes: Callable) -> None:
    path = a_checkpoint()
    part = ckptio.read_index(path).partitions[0]
    with ckptio.ChunkPool.create(None, 1 << 20, 8192) as pool, ckptio.Reader() as reader:
        indices = pool.allocate(len(part.digests))
        report = reader.read(pool, path / "partition_0.bin", indices, part.padded_bytes, digests=part.digests)
        assert report.size_bytes == part.padded_bytes
        assert report.bandwidth_bytes_per_s > 0
        assert contents(pool, indices, part.padded_bytes) == (path / "partition_0.bin").read_bytes()
