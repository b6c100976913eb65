"""Owns the model repository (tier REMOTE) as the agent sees it: reads through obstore, and publishing where it can.

Publishing has to be atomic, and only a `file://` repository is renamed into; other stores are read-only for now.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import ckptio
import obstore
from ckptio.manifest import INDEX_FILE, MANIFEST_FILE
from ckptio.publish import publishing
from obstore.exceptions import BaseError
from obstore.store import from_url
from whimbrel.chassis.config import ConfigError
from whimbrel.wire.errors import ImportFailed, LoadFailed, Unavailable
from whimbrel.wire.ids import directory_name

from services.storage_agent.checkpoints import checkpoint_digest
from services.storage_agent.core.residency import CheckpointKey

# A scheduler or a person waits for these files; a repository that takes longer is as good as away.
SMALL_FILE_S_MAX = 30.0
RANGE_S_MAX = 60.0


class Repository:
    """One repository. Raises ConfigError for a URL that obstore does not know."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        #: The repository as a directory of this machine, when it is one.
        self.directory = Path(unquote(parts.path)) if parts.scheme == "file" else None
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._store = from_url(url)
        except (BaseError, ValueError) as error:
            raise ConfigError("WB_REPOSITORY_URL", f"{url!r} can't be used: {_first_line(error)}") from error

    def location(self, model_id: str, file: str) -> Path:
        """Where a file is, for messages."""
        root = Path(self.url) if self.directory is None else self.directory
        return root / directory_name(model_id) / file

    async def read(self, model_id: str, file: str) -> bytes:
        """A small file, whole; raises Unavailable, and FileNotFoundError when there is none."""
        with self._translated(model_id, file):
            async with asyncio.timeout(SMALL_FILE_S_MAX):
                result = await obstore.get_async(self._store, self._key(model_id, file))
                return bytes(await result.bytes_async())

    async def read_range(self, model_id: str, file: str, offset_bytes: int, size_bytes: int) -> obstore.Bytes:
        """`size_bytes` of a file, or TruncatedCheckpoint when it ends before."""
        with self._translated(model_id, file):
            async with asyncio.timeout(RANGE_S_MAX):
                data = await obstore.get_range_async(
                    self._store, self._key(model_id, file), start=offset_bytes, length=size_bytes
                )
        if len(data) < size_bytes:
            raise ckptio.TruncatedCheckpoint(
                self.location(model_id, file),
                expected_bytes=offset_bytes + size_bytes,
                actual_bytes=offset_bytes + len(data),
            )
        return data

    async def size_bytes(self, model_id: str, file: str) -> int:
        with self._translated(model_id, file):
            async with asyncio.timeout(SMALL_FILE_S_MAX):
                meta = await obstore.head_async(self._store, self._key(model_id, file))
        return int(meta["size"])

    async def open(self, key: CheckpointKey) -> tuple[bytes, ckptio.Manifest, bytes]:
        """Manifest and index of a checkpoint, as bytes; raises LoadFailed when the repository holds other content."""
        try:
            raw_manifest = await self.read(key.model_id, MANIFEST_FILE)
        except FileNotFoundError as error:
            reason = f"{self.location(key.model_id, MANIFEST_FILE)} is not there; deploy the model again"
            raise LoadFailed(model_id=key.model_id, reason=reason) from error
        manifest = ckptio.Manifest.from_json(raw_manifest, self.location(key.model_id, MANIFEST_FILE))
        digest = checkpoint_digest(manifest)
        if digest != key.checkpoint_digest:
            reason = f"the repository holds {digest}, not {key.checkpoint_digest}; deploy the model again"
            raise LoadFailed(model_id=key.model_id, reason=reason)
        return raw_manifest, manifest, await self.read(key.model_id, INDEX_FILE)

    # --- publishing: blocking, only where the repository is a directory ---

    def publishing_directory(self, model_id: str) -> Path:
        """The directory that checkpoints are published in; raises ImportFailed where that can't be."""
        if self.directory is None:
            reason = f"{self.url} can't be published to; set WB_REPOSITORY_URL to a file:// URL for imports"
            raise ImportFailed(model_id=model_id, stage="queued", reason=reason)
        return self.directory

    def publish(self, staged: Path, model_id: str) -> None:
        """Move a verified checkpoint into its place, in one step, over what was there."""
        destination = self.publishing_directory(model_id) / directory_name(model_id)
        with publishing(destination, marker=MANIFEST_FILE, overwrite=True) as directory:
            for entry in sorted(staged.iterdir()):
                os.rename(entry, directory / entry.name)

    def remove_published(self, model_id: str) -> None:
        """Remove a model from the repository; nothing happens when it is not there, or not ours to publish in."""
        if self.directory is None:
            return
        path = self.directory / directory_name(model_id)
        trash = path.with_name(f".removed-{path.name}-{os.getpid()}")
        try:
            path.rename(trash)
        except FileNotFoundError:
            return
        shutil.rmtree(trash, ignore_errors=True)

    def _key(self, model_id: str, file: str) -> str:
        return f"{directory_name(model_id)}/{file}"

    @contextmanager
    def _translated(self, model_id: str, file: str) -> Iterator[None]:
        """obstore's errors and time-outs as ours."""
        try:
            yield
        except (BaseError, TimeoutError) as error:
            location = self.location(model_id, file)
            raise Unavailable(what=f"repository file {location} ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    """obstore adds pages of debug output to its messages."""
    return str(error).split("\n", 1)[0] or type(error).__name__
