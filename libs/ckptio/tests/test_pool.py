"""The chunk pool: leases, ownership of its file, and what it says about itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptio

CHUNK_BYTES = 4096


def a_pool(chunks: int, path: Path | None = None) -> ckptio.ChunkPool:
    return ckptio.ChunkPool.create(path, chunks * CHUNK_BYTES, CHUNK_BYTES)


def test_chunks_are_lent_and_taken_back() -> None:
    """L2: application-controlled allocation by chunk."""
    with a_pool(8) as pool:
        assert (pool.chunk_count, pool.free_chunks, pool.size_bytes) == (8, 8, 8 * CHUNK_BYTES)
        first = pool.allocate(3)
        second = pool.allocate(5)
        assert sorted(first + second) == list(range(8))
        with pytest.raises(ckptio.PoolExhausted) as caught:
            pool.allocate(1)
        assert (caught.value.requested_chunks, caught.value.free_chunks) == (1, 0)
        pool.free(first)
        assert pool.free_chunks == 3
        assert pool.allocate(3) == first
        assert pool.allocate(0) == ()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30))
def test_no_chunk_is_ever_lent_twice(steps: list[tuple[bool, int]]) -> None:
    with a_pool(16) as pool:
        lent: list[tuple[int, ...]] = []
        for is_allocation, number in steps:
            if is_allocation:
                if number <= pool.free_chunks:
                    lent.append(pool.allocate(number))
            elif lent:
                pool.free(lent.pop(number % len(lent)))
            flat = [index for indices in lent for index in indices]
            assert len(set(flat)) == len(flat)
            assert pool.free_chunks == 16 - len(flat)


@pytest.mark.parametrize("wrong", [(0, 0), (0, 7), (-1,), (99,)])
def test_freeing_what_is_not_lent_changes_nothing(wrong: tuple[int, ...]) -> None:
    with a_pool(8) as pool:
        pool.allocate(2)
        with pytest.raises(ValueError, match="not all lent"):
            pool.free(wrong)
        assert pool.free_chunks == 6


def test_a_chunk_is_writable_memory_of_the_file(tmpfs_path: Path) -> None:
    with a_pool(4, tmpfs_path / "pool") as pool:
        with pool.chunk(2) as chunk:
            chunk[:5] = b"hello"
            with pytest.raises(BufferError, match="alive"):
                pool.close()
        assert (tmpfs_path / "pool").read_bytes()[2 * CHUNK_BYTES :][:5] == b"hello"
        assert os.stat(tmpfs_path / "pool").st_mode & 0o777 == 0o600
        with pytest.raises(ValueError, match="chunk 4 of 4"):
            pool.chunk(4)


def test_closing_removes_the_file_and_may_be_repeated(tmpfs_path: Path) -> None:
    pool = a_pool(4, tmpfs_path / "pool")
    pool.close()
    pool.close()
    assert list(tmpfs_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        pool.chunk(0)


def test_a_memfd_pool_can_be_opened_by_its_path() -> None:
    with a_pool(2) as pool:
        with pool.chunk(0) as chunk:
            chunk[:2] = b"hi"
        assert pool.path.read_bytes()[:2] == b"hi"


def test_every_page_has_memory_from_the_start() -> None:
    """L2: page faults are paid once, when the pool is made."""
    with a_pool(64) as pool:
        assert os.stat(pool.path).st_blocks * 512 >= pool.size_bytes
        assert pool.report.prefault_s > 0
        assert pool.report.is_locked == (not pool.report.lock_error)
        assert pool.report.has_huge_pages == (not pool.report.huge_pages_error)


@pytest.mark.parametrize("where", ["tmpfs", "memfd"])
def test_a_pool_larger_than_memory_is_refused_before_it_takes_any(where: str, tmpfs_path: Path) -> None:
    """Taking it would not fail: it would make the kernel end a process."""
    path = tmpfs_path / "pool" if where == "tmpfs" else None
    with pytest.raises(ckptio.InsufficientSpace) as caught:
        ckptio.ChunkPool.create(path, 2**50)
    assert 0 < caught.value.available_bytes < caught.value.required_bytes == 2**50
    assert list(tmpfs_path.iterdir()) == []


@pytest.mark.parametrize(("size_bytes", "chunk_bytes"), [(0, 4096), (4095, 4096), (8192, 1000), (8192, 0)])
def test_impossible_sizes_are_refused(size_bytes: int, chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="chunk"):
        ckptio.ChunkPool.create(None, size_bytes, chunk_bytes)


def test_a_living_pool_is_not_taken_over_but_a_dead_one_is(tmpfs_path: Path) -> None:
    path = tmpfs_path / "pool"
    script = f"""
import ckptio, sys
pool = ckptio.ChunkPool.create({str(path)!r}, 65536, 4096)
print("ready", flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdin is not None
    owner.stdout.readline()
    with pytest.raises(FileExistsError, match="living process"):
        a_pool(4, path)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    assert path.exists()
    with a_pool(4, path) as pool:
        assert pool.path.stat().st_size == 4 * CHUNK_BYTES


def test_a_forked_child_does_not_remove_the_pool(tmpfs_path: Path) -> None:
    with a_pool(4, tmpfs_path / "pool") as pool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # hypothesis and torch may have threads
            child = os.fork()
        if child == 0:
            pool.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert (tmpfs_path / "pool").exists()


def test_a_forgotten_pool_warns_and_cleans_up(tmpfs_path: Path) -> None:
    pool = a_pool(4, tmpfs_path / "pool")
    with pytest.warns(ResourceWarning, match="unclosed chunk pool"):
        del pool
    assert list(tmpfs_path.iterdir()) == []
