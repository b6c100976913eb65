"""Owns the SSD directory of a server: one directory per model, whole or on its way.

A copy that is on its way has all its small files, its partition files in full length, and a journal of the chunks that
are stored; it is whole when the journal is removed, in one step. Nothing is synced. This tier is a cache that every
load verifies chunk by chunk, so bytes that a power cut took are found then and fetched again, and a fetch does not wait
for the device. One agent owns a directory: it holds a lock there for its life.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ckptio
from ckptio.manifest import MANIFEST_FILE, digest_of, partition_file
from whimbrel.wire.errors import InvalidRequest
from whimbrel.wire.ids import check_model_id, directory_name, model_id_of_directory

from services.storage_agent.checkpoints import Checkpoint, file_sizes, footprint_bytes, layout_of, open_checkpoint
from services.storage_agent.core.chunks import CheckpointKey, ChunkId, Layout

JOURNAL_FILE = ".fetching"
PINS_FILE = ".pinned"
LOCK_FILE = ".agent.lock"
PARTIAL_PREFIX = ".partial-"
TRASH_PREFIX = ".trash-"

_ENTRY = struct.Struct("<II")  # partition, chunk number


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A copy that was on the SSD when the agent started, with what it lacks. `idle_s` is since it was last used."""

    key: CheckpointKey
    layout: Layout
    size_bytes: int
    missing: frozenset[ChunkId]
    idle_s: float


class SsdDirectory:
    """All methods block on the file system; only `path_of` is free."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None
        self._trashed = itertools.count()

    def path_of(self, model_id: str) -> Path:
        return self.path / directory_name(model_id)

    def lock(self) -> None:
        """Make this directory ours for our life. Raises FileExistsError when another agent that lives has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            reason = "another storage agent uses this directory; give each agent its own WB_SSD_DIR"
            raise FileExistsError(errno.EEXIST, reason, os.fspath(self.path)) from None
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def free_bytes(self) -> int:
        """What the file system has left for us."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def scan(self) -> list[FoundCheckpoint]:
        """What is here, whole or in part. Leftovers of a former life and directories that are not what they say are
        removed; anything that was never ours stays untouched."""
        found = []
        for entry in sorted(self.path.iterdir()):
            if entry.name.startswith((PARTIAL_PREFIX, TRASH_PREFIX)):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.is_dir() and ((entry / MANIFEST_FILE).is_file() or (entry / JOURNAL_FILE).is_file()):
                checkpoint = _inspect(entry)
                if checkpoint is None:
                    self._discard(entry)
                else:
                    found.append(checkpoint)
        return found

    def begin(self, key: CheckpointKey, manifest: ckptio.Manifest, files: dict[str, bytes]) -> None:
        """A new copy with its small `files` and no chunk; all its space is taken now, so that a full disk shows now.

        Whatever was there of the model is gone. Raises OSError, leaving nothing.
        """
        self.remove(key.model_id)
        path = self.path_of(key.model_id)
        path.mkdir()
        try:
            (path / JOURNAL_FILE).touch()
            for number, part in enumerate(manifest.partitions):
                _allocate(path / partition_file(number), part.padded_bytes)
            for name, data in files.items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(data)
        except BaseException:
            self.remove(key.model_id)
            raise

    def publish(self, model_id: str) -> None:
        """Every chunk is stored: the copy is whole."""
        (self.path_of(model_id) / JOURNAL_FILE).unlink(missing_ok=True)

    def demote(self, model_id: str, stored: Iterable[ChunkId]) -> None:
        """The copy turned out to lack chunks: only `stored` are good."""
        journal = self.path_of(model_id) / JOURNAL_FILE
        draft = journal.with_name(f"{JOURNAL_FILE}.new")
        draft.write_bytes(b"".join(_ENTRY.pack(*chunk) for chunk in stored))
        draft.replace(journal)

    def remove(self, model_id: str) -> None:
        """Remove a model's copy: out of sight in one step, so that a crash leaves none that looks whole."""
        self._discard(self.path_of(model_id))

    def touch(self, model_id: str) -> None:
        """Note on the disk that the copy was used now, for the order of eviction after a restart."""
        with suppress(FileNotFoundError):
            os.utime(self.path_of(model_id))

    def read_pins(self) -> list[str]:
        """The models that are pinned here, whether or not there is a copy; none where the file is no such list."""
        with suppress(FileNotFoundError, UnicodeDecodeError, InvalidRequest):
            return [check_model_id(line) for line in (self.path / PINS_FILE).read_text().splitlines()]
        return []

    def write_pins(self, model_ids: Iterable[str]) -> None:
        """So that the next life of the agent knows them; the old list or the new one, never a half."""
        draft = self.path / f"{PINS_FILE}.new"
        draft.write_text("".join(f"{model_id}\n" for model_id in sorted(model_ids)))
        draft.replace(self.path / PINS_FILE)

    def _discard(self, path: Path) -> None:
        # Another thread may still be removing what was there before.
        trash = path.with_name(f"{TRASH_PREFIX}{path.name}-{next(self._trashed)}")
        shutil.rmtree(trash, ignore_errors=True)
        try:
            path.rename(trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)


class SsdWriter:
    """Stores chunks of one copy that is on its way. Thread-safe: every call is a system call or two of its own."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._layout = layout
        self._path = path
        self._files: list[int] = []
        flags = os.O_WRONLY | os.O_CLOEXEC
        try:
            for number in range(len(layout.partition_bytes)):
                self._files.append(os.open(path / partition_file(number), flags))
            self._journal = os.open(path / JOURNAL_FILE, flags | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError:
            self._close_files()
            raise
        # What follows an entry that was cut off would be read in the wrong places.
        os.ftruncate(self._journal, os.fstat(self._journal).st_size // _ENTRY.size * _ENTRY.size)

    def store(self, chunk: ChunkId, data: memoryview) -> None:
        """Write a chunk, then note that it is there."""
        offset_bytes, done_bytes = self._layout.offset_bytes(chunk), 0
        while done_bytes < len(data):
            done_bytes += os.pwrite(self._files[chunk.partition], data[done_bytes:], offset_bytes + done_bytes)
        os.write(self._journal, _ENTRY.pack(*chunk))

    def close(self) -> None:
        self._close_files()
        os.close(self._journal)

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())


def _allocate(path: Path, size_bytes: int) -> None:
    """A new file that has all its blocks already."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if size_bytes:
            os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    finally:
        os.close(descriptor)


def _inspect(path: Path) -> FoundCheckpoint | None:
    """The copy in `path` when its small files are sound and every file has its size, else None."""
    try:
        checkpoint = open_checkpoint(path, model_id_of_directory(path.name))
        sizes = file_sizes(checkpoint.manifest)
        if any((path / name).stat().st_size != size_bytes for name, size_bytes in sizes.items()):
            return None
        if any(digest_of((path / file.name).read_bytes()) != file.digest for file in checkpoint.manifest.files):
            return None
        idle_s = max(0.0, time.time() - path.stat().st_mtime)
        missing = _missing(path, checkpoint)
    except (InvalidRequest, ckptio.CkptioError, OSError):
        return None
    return FoundCheckpoint(
        key=checkpoint.key,
        layout=layout_of(checkpoint.index),
        size_bytes=footprint_bytes(checkpoint.manifest),
        missing=missing,
        idle_s=idle_s,
    )


def _missing(path: Path, checkpoint: Checkpoint) -> frozenset[ChunkId]:
    """What the journal does not name; nothing where there is none. A last entry that was cut off does not count."""
    try:
        journal = (path / JOURNAL_FILE).read_bytes()
    except FileNotFoundError:
        return frozenset()
    whole_bytes = len(journal) - len(journal) % _ENTRY.size
    stored = {ChunkId(*entry) for entry in _ENTRY.iter_unpack(journal[:whole_bytes])}
    return frozenset(layout_of(checkpoint.index).chunks()) - stored
