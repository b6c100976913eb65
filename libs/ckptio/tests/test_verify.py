"""Verification finds every damage, and names file and place."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptio

CHUNK_BYTES = 8192


def flip(path: Path, offset_bytes: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset_bytes)
        value = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([value ^ 0x10]))


def test_a_flipped_bit_anywhere_is_found_and_placed(a_checkpoint: Callable) -> None:
    path = a_checkpoint()
    partition = path / "partition_0.bin"
    size_bytes = partition.stat().st_size
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    places = [0, size_bytes - 1, *random.Random(seed).sample(range(size_bytes), 10)]
    for offset_bytes in places:
        flip(partition, offset_bytes)
        with pytest.raises(ckptio.CorruptCheckpoint) as caught:
            ckptio.verify(path)
        assert caught.value.path == partition
        assert caught.value.offset_bytes == offset_bytes // CHUNK_BYTES * CHUNK_BYTES
        assert caught.value.chunk_index == offset_bytes // CHUNK_BYTES
        flip(partition, offset_bytes)
    ckptio.verify(path)


@pytest.mark.parametrize("name", ["partition_0.bin", "index.msgpack", "config.json"])
@pytest.mark.parametrize("missing_bytes", [1, 20])
def test_a_file_that_lost_its_end_is_truncated(name: str, missing_bytes: int, a_checkpoint: Callable) -> None:
    path = a_checkpoint()
    size_bytes = (path / name).stat().st_size
    os.truncate(path / name, size_bytes - missing_bytes)
    with pytest.raises(ckptio.TruncatedCheckpoint) as caught:
        ckptio.verify(path)
    assert caught.value.path == path / name
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (
        size_bytes,
        size_bytes - missing_bytes,
    )


def test_a_zeroed_tail_is_found(a_checkpoint: Callable) -> None:
    path = a_checkpoint()
    partition = path / "partition_0.bin"
    size_bytes = partition.stat().st_size
    os.truncate(partition, size_bytes - 5000)
    os.truncate(partition, size_bytes)
    with pytest.raises(ckptio.CorruptCheckpoint) as caught:
        ckptio.verify(path)
    assert caught.value.offset_bytes == (size_bytes - 5000) // CHUNK_BYTES * CHUNK_BYTES


@pytest.mark.parametrize("name", ["partition_0.bin", "index.msgpack", "tokenizer.json"])
def test_a_longer_or_missing_file_is_found(name: str, a_checkpoint: Callable) -> None:
    path = a_checkpoint()
    size_bytes = (path / name).stat().st_size
    os.truncate(path / name, size_bytes + 1)
    with pytest.raises(ckptio.CorruptCheckpoint, match="1 bytes more") as caught:
        ckptio.verify(path)
    assert caught.value.offset_bytes == size_bytes
    (path / name).unlink()
    with pytest.raises(ckptio.MissingFile) as missing:
        ckptio.verify(path)
    assert missing.value.path == path / name


@pytest.mark.parametrize("name", ["index.msgpack", "tokenizer.json"])
def test_a_changed_small_file_is_found(name: str, a_checkpoint: Callable) -> None:
    path = a_checkpoint()
    flip(path / name, 5)
    with pytest.raises(ckptio.CorruptCheckpoint, match="digest in the manifest") as caught:
        ckptio.verify(path)
    assert caught.value.path == path / name


def test_files_that_a_user_added_are_no_damage(a_checkpoint: Callable) -> None:
    path = a_checkpoint()
    (path / "notes.txt").write_text("mine")
    ckptio.verify(path)


def test_verification_reports_its_progress(a_checkpoint: Callable) -> None:
    path = a_checkpoint()
    seen: list[ckptio.Progress] = []
    ckptio.verify(path, progress=seen.append)
    manifest = ckptio.read_manifest(path)
    total_bytes = manifest.padded_bytes + sum(file.size_bytes for file in manifest.files)
    assert seen[-1].done_bytes == seen[-1].total_bytes == total_bytes
