"""Owns the probe of a server's SSD: how fast it fills the pool, and whether direct reads are the faster way there.

Direct reads skip the page cache and its copy, and their time is predictable (L3, L9). But a pool of small pages cuts a
direct read into as many pieces as the device takes segments, and some devices are then slower than through the cache.
So it is measured, with the reader and into the pool that loads will use.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import ckptio
from whimbrel.wire.errors import Unavailable

from services.storage_agent.ssd import PARTIAL_PREFIX

MIB = 1024 * 1024
# Each way is tried so often, in turns, and its best counts: another's work can only make a read slower.
ROUNDS = 2
# Buffered reads have to be this much faster before predictability is given up.
BUFFERED_GAIN_MIN = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What reading the SSD gave, both ways; the better one is how loads read. Zero when nothing was measured."""

    direct_bytes_per_s: float = 0.0
    buffered_bytes_per_s: float = 0.0
    is_direct: bool = True

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The device's ceiling as loads can reach it: a first guess until loads have been observed (E6)."""
        return self.direct_bytes_per_s if self.is_direct else self.buffered_bytes_per_s


def probe_ssd(directory: Path, pool: ckptio.ChunkPool, chunk_size_bytes: int, threads: int, size_bytes: int) -> Probe:
    """Write a file of about `size_bytes` to `directory`, read it into free chunks of `pool` both ways, remove it."""
    chunk_count = min(max(1, size_bytes // chunk_size_bytes), pool.free_chunks)
    if not chunk_count:
        raise Unavailable(what="a measurement of the SSD (every chunk of the pool is in use)")
    size_bytes = chunk_count * chunk_size_bytes
    path = directory / f"{PARTIAL_PREFIX}probe"
    chunks = pool.allocate(chunk_count)
    try:
        _write(path, size_bytes)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        with ckptio.Reader(threads) as reader:
            for _ in range(ROUNDS):
                for is_direct in (True, False):
                    _forget(path)
                    started_s = time.perf_counter()
                    reader.read(pool, path, chunks, size_bytes, digests=None, direct=is_direct)
                    seconds[is_direct].append(max(time.perf_counter() - started_s, 1e-9))
    finally:
        pool.free(chunks)
        path.unlink(missing_ok=True)
    return choose(size_bytes, direct_s=min(seconds[True]), buffered_s=min(seconds[False]))


def choose(size_bytes: int, *, direct_s: float, buffered_s: float) -> Probe:
    """Direct reads, unless buffered ones are faster by more than BUFFERED_GAIN_MIN."""
    is_direct = direct_s < buffered_s * BUFFERED_GAIN_MIN
    return Probe(
        direct_bytes_per_s=size_bytes / direct_s, buffered_bytes_per_s=size_bytes / buffered_s, is_direct=is_direct
    )


def _write(path: Path, size_bytes: int) -> None:
    block = os.urandom(MIB)
    with path.open("wb", buffering=0) as file:
        for start in range(0, size_bytes, len(block)):
            file.write(block[: size_bytes - start])
        os.fsync(file.fileno())


def _forget(path: Path) -> None:
    """Ask the page cache to drop the file, so that the device answers."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
