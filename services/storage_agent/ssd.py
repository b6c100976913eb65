"""Owns the SSD directory of a server: one directory per model, each whole or not there.

Nothing is synced. This tier is a cache that every load verifies chunk by chunk, so bytes that a power cut took are
found then and fetched again, and a fetch does not wait for the device.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ckptio
from ckptio.manifest import MANIFEST_FILE
from whimbrel.wire.errors import InvalidRequest
from whimbrel.wire.ids import directory_name, model_id_of_directory

from services.storage_agent.checkpoints import checkpoint_digest, file_sizes, footprint_bytes
from services.storage_agent.core.residency import CheckpointKey

PARTIAL_PREFIX = ".partial-"
TRASH_PREFIX = ".trash-"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A whole checkpoint that was on the SSD when the agent started. `idle_s` is since it was last used."""

    key: CheckpointKey
    size_bytes: int
    idle_s: float


class SsdDirectory:
    """All methods block on the file system; only `path_of` is free."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def path_of(self, model_id: str) -> Path:
        return self.path / directory_name(model_id)

    def scan(self) -> list[FoundCheckpoint]:
        """What is whole here. Leftovers of a former life and directories that are not what they say are removed;
        anything that was never ours stays untouched."""
        self.path.mkdir(parents=True, exist_ok=True)
        found = []
        for entry in sorted(self.path.iterdir()):
            if entry.name.startswith((PARTIAL_PREFIX, TRASH_PREFIX)):
                shutil.rmtree(entry, ignore_errors=True)
            elif (entry / MANIFEST_FILE).is_file():
                checkpoint = _inspect(entry)
                if checkpoint is None:
                    self._discard(entry)
                else:
                    found.append(checkpoint)
        return found

    def begin(self, model_id: str) -> Path:
        """An empty directory to fetch into."""
        partial = self._partial(model_id)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def publish(self, model_id: str) -> None:
        """Make what was fetched the model's copy; whatever was there is gone."""
        self.remove(model_id)
        self._partial(model_id).rename(self.path_of(model_id))

    def abandon(self, model_id: str) -> None:
        """Nothing of a fetch that was given up stays, even if that happened just after it was published."""
        shutil.rmtree(self._partial(model_id), ignore_errors=True)
        self.remove(model_id)

    def remove(self, model_id: str) -> None:
        """Remove a model's copy: out of sight in one step, so that a crash leaves none that looks whole."""
        self._discard(self.path_of(model_id))

    def touch(self, model_id: str) -> None:
        """Note on the disk that the copy was used now, for the order of eviction after a restart."""
        with suppress(FileNotFoundError):
            os.utime(self.path_of(model_id))

    def _partial(self, model_id: str) -> Path:
        return self.path / f"{PARTIAL_PREFIX}{directory_name(model_id)}"

    def _discard(self, path: Path) -> None:
        trash = path.with_name(TRASH_PREFIX + path.name)
        shutil.rmtree(trash, ignore_errors=True)
        try:
            path.rename(trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)


def _inspect(path: Path) -> FoundCheckpoint | None:
    """The checkpoint in `path` when its manifest is sound and every file has its size, else None."""
    try:
        model_id = model_id_of_directory(path.name)
        manifest = ckptio.read_manifest(path)
        if any((path / name).stat().st_size != size_bytes for name, size_bytes in file_sizes(manifest).items()):
            return None
        idle_s = max(0.0, time.time() - path.stat().st_mtime)
    except (InvalidRequest, ckptio.CkptioError, OSError):
        return None
    key = CheckpointKey(model_id=model_id, checkpoint_digest=checkpoint_digest(manifest))
    return FoundCheckpoint(key=key, size_bytes=footprint_bytes(manifest), idle_s=idle_s)
