"""Huge pages under a pool: asked for, seen, and done without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

import ckptio
from ckptio.huge_pages import HUGE_PAGE_BYTES, huge_pages_refusal, open_on_huge_tmpfs

POOL_BYTES = 4 * HUGE_PAGE_BYTES
CHUNK_BYTES = HUGE_PAGE_BYTES // 2


@pytest.fixture
def huge_file() -> int:
    """A file on a tmpfs of huge pages, where this process may make one."""
    descriptor = open_on_huge_tmpfs("pool")
    if descriptor is None:
        pytest.skip("this process may not mount a tmpfs")
    return descriptor


def test_a_file_on_a_tmpfs_of_huge_pages_is_seen_to_have_them(huge_file: int) -> None:
    """L2: what the kernel gave counts, not what was asked for."""
    from ckptio import _native

    os.ftruncate(huge_file, POOL_BYTES)
    with _native.Mapping.shared(huge_file, POOL_BYTES) as mapping:
        assert huge_pages_refusal(mapping).startswith("0 of")  # nothing is there before it is touched
        mapping.prefault(1)
        refusal = huge_pages_refusal(mapping)
    os.close(huge_file)
    if refusal:
        pytest.skip(f"no huge pages left on this machine: {refusal}")


def test_two_such_files_are_two_files(huge_file: int) -> None:
    other = open_on_huge_tmpfs("pool")
    assert other is not None
    os.write(other, b"x")
    assert os.fstat(huge_file).st_size == 0
    os.close(other)
    os.close(huge_file)


def test_a_pool_of_small_pages_says_so_and_what_to_do(tmpfs_path: Path) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    if not {"[never]", "[deny]"} & set(setting.split()):
        pytest.skip("shared memory gets huge pages here by itself")
    with ckptio.ChunkPool.create(tmpfs_path / "pool", POOL_BYTES, CHUNK_BYTES) as pool:
        assert not pool.report.has_huge_pages
        assert "huge=always" in pool.report.huge_pages_error


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("size_bytes", [1, 4096, CHUNK_BYTES, 3 * CHUNK_BYTES + 4097, 5 * CHUNK_BYTES - 1])
def test_direct_reads_are_right_into_pages_of_any_size(
    tmp_path: Path, tmpfs_path: Path, is_named: bool, size_bytes: int
) -> None:
    """L3: into small pages they go through a buffer of huge ones."""
    raw = os.urandom(size_bytes)
    (tmp_path / "file").write_bytes(raw)
    digests = [
        xxhash.xxh3_64_intdigest(raw[start : start + CHUNK_BYTES])
        for start in range(0, size_bytes, CHUNK_BYTES)
    ]
    path = tmpfs_path / "pool" if is_named else None
    with ckptio.ChunkPool.create(path, POOL_BYTES, CHUNK_BYTES) as pool, ckptio.Reader(3) as reader:
        chunks = pool.allocate(len(digests))
        report = reader.read(pool, tmp_path / "file", chunks, size_bytes, digests=digests, direct=True)
        read = b"".join(bytes(pool.chunk(index)) for index in chunks)[:size_bytes]
        assert read == raw
        assert report.size_bytes == size_bytes
