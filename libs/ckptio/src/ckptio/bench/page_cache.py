"""The page cache as a condition of a measurement: files dropped from it (cold), or read into it (warm)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ckptio.files import opened
from ckptio.native import require_native

TEMPERATURES = ("cold", "warm")

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_WARMING_BYTES = 8 * 1024 * 1024


def set_temperature(files: Iterable[Path], temperature: str) -> int:
    """Drops `files` from the page cache, or reads them into it; returns the bytes of them that are there."""
    files = tuple(files)
    if temperature == "warm":
        for file in files:
            _read_through(file)
        return resident_bytes(files)
    _evict(files)
    resident = resident_bytes(files)
    if resident and os.access(_DROP_CACHES, os.W_OK):
        # Only when the polite way left something: this one empties the cache of the whole machine.
        _DROP_CACHES.write_text("1\n")
        resident = resident_bytes(files)
    return resident


def resident_bytes(files: Iterable[Path]) -> int:
    """How many bytes of `files` are in the page cache."""
    total = 0
    for file in files:
        with opened(file) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes:
                total += require_native().resident_bytes(descriptor, 0, size_bytes)
    return total


def _evict(files: Iterable[Path]) -> None:
    for file in files:
        with opened(file) as descriptor:
            # Only clean pages can be dropped.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _read_through(file: Path) -> None:
    buffer = bytearray(_WARMING_BYTES)
    with opened(file) as descriptor:
        while os.readv(descriptor, [buffer]):
            pass
