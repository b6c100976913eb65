"""The journal of a conversion: what was written so far, so that an interrupted one goes on where it stopped.

A line that names what is being converted (its fingerprint), then the digest of every chunk in the order of
writing, 8 bytes each. It is a hint and no proof: whoever goes on reads the chunks again and keeps those that
match, up to the first that does not.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import xxhash

from ckptio.files import naming, opened, write_exactly

JOURNAL_FILE = ".ckptio-journal"

_RECORD = struct.Struct("<Q")
_HEADER_BYTES = 33  # 128 bits in hexadecimal, and a line end

# Digests of 16 MiB chunks: this many bytes are the journal of the largest checkpoint anybody has, many times.
_JOURNAL_BYTES_MAX = 64 * 1024 * 1024


def fingerprint_of(description: Mapping[str, object]) -> str:
    """One short name for all that decides the bytes of a conversion."""
    raw = json.dumps(description, sort_keys=True, separators=(",", ":")).encode()
    return xxhash.xxh3_128_hexdigest(raw)


class Journal:
    """The journal of the conversion that fills one directory."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        """Reads the journal of `directory`, if there is one of this content."""
        self._directory = directory
        self._fingerprint = fingerprint
        self.path = directory / JOURNAL_FILE
        self._noted = _read_digests(self.path, fingerprint)
        self._confirmed = 0
        self._next = 0
        self.kept_bytes = sum(file.stat().st_size for file in directory.glob("partition_*.bin"))

    def start(self) -> None:
        """Removes all that is in the way of going on in the directory, and begins or repairs the journal."""
        _remove_others(self._directory)
        with opened(self.path, os.O_WRONLY | os.O_CREAT) as descriptor:
            write_exactly(descriptor, memoryview(f"{self._fingerprint}\n".encode()))
            os.ftruncate(descriptor, _HEADER_BYTES + len(self._noted) * _RECORD.size)

    def next_kept(self) -> int | None:
        """The digest that the next chunk in order was written with, if it was."""
        if self._next >= len(self._noted):
            return None
        digest = self._noted[self._next]
        self._next += 1
        return digest

    def confirm(self) -> None:
        """The chunk asked for last is still as it was."""
        self._confirmed += 1

    def forget_rest(self) -> None:
        """Whatever was noted after the confirmed chunks counts no more."""
        if len(self._noted) > self._confirmed:
            self._noted = self._noted[: self._confirmed]
            with naming(self.path):
                os.truncate(self.path, _HEADER_BYTES + self._confirmed * _RECORD.size)
        self._next = len(self._noted)

    def append(self, digest: int) -> None:
        """Notes one more chunk, after it was written."""
        with opened(self.path, os.O_WRONLY | os.O_APPEND) as descriptor:
            write_exactly(descriptor, memoryview(_RECORD.pack(digest)))

    def remove(self) -> None:
        """The conversion is complete: nothing is left to go on with."""
        self.path.unlink()


def is_resumable(directory: Path, fingerprint: str) -> bool:
    """Whether `directory` has chunks of the conversion that `fingerprint` names."""
    return bool(_read_digests(directory / JOURNAL_FILE, fingerprint))


def _read_digests(path: Path, fingerprint: str) -> tuple[int, ...]:
    """The digests noted in a journal; none when it is not there, or is of something else."""
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW) as descriptor:
            raw = os.pread(descriptor, _JOURNAL_BYTES_MAX, 0)
    except OSError:
        return ()
    if raw[:_HEADER_BYTES] != f"{fingerprint}\n".encode():
        return ()
    count = (len(raw) - _HEADER_BYTES) // _RECORD.size
    return struct.unpack_from(f"<{count}Q", raw, _HEADER_BYTES)


def _remove_others(directory: Path) -> None:
    """Copied files, an index, a manifest: quick to write again, and then surely whole."""
    for entry in list(os.scandir(directory)):
        if entry.name == JOURNAL_FILE or (entry.name.startswith("partition_") and entry.is_file()):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
