"""Owns publishing in an object store: no manifest is there unless all that it names is there too (L1).

A store has no rename, so the manifest stands for the checkpoint: the old one goes first, the new one comes last. Every
object carries the digest of the checkpoint that it is part of, so that a repeat after a failure uploads only what is
missing. obstore tries parts again, and aborts an upload whose parts end with an error, which is how we stop one. Parts
stay behind in the store only when it can't be reached any more, or when this process dies.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import ckptio
import obstore
from ckptio.manifest import MANIFEST_FILE
from obstore.exceptions import BaseError, GenericError, PermissionDeniedError, UnauthenticatedError
from whimbrel.wire.errors import ImportFailed, Unavailable
from whimbrel.wire.ids import directory_name
from whimbrel.wire.messages import JobStage

from services.storage_agent.checkpoints import checkpoint_digest, file_sizes
from services.storage_agent.remote_responses import first_line, status_of
from services.storage_agent.remote_retries import RemoteOptions, Retries, is_passing

# Stores take at most 10,000 parts of one object.
PARTS_MAX = 10_000

# Parts on their way at once: enough to fill a network whose answers take as long as a part, and 64 MiB of memory.
PARTS_IN_FLIGHT = 4

# The name, in an object's metadata, of the digest of its checkpoint. A name that every kind of store takes.
DIGEST_NAME = "checkpoint"

# How long a caller that is cancelled waits for an upload to be ended properly.
STOP_S_MAX = 5.0

OnProgress = Callable[[int, int], None]
Cancelled = Callable[[], bool]


class RemotePublisher:
    """Publishes into one store. Calls to `uploads`, the same store, are tried again by obstore.

    `location(model_id, file)` is for messages.
    """

    def __init__(self, store: Any, uploads: Any, location: Callable[[str, str], Path], options: RemoteOptions) -> None:
        self._store = store
        self._uploads = uploads
        self._location = location
        self._options = options

    async def publish(
        self, staged: Path, model_id: str, on_progress: OnProgress | None, cancelled: Cancelled | None
    ) -> None:
        """Raises ckptio.Cancelled, Unavailable, ImportFailed, OSError; no manifest is there then."""
        manifest = ckptio.read_manifest(staged)
        digest = checkpoint_digest(manifest)
        sizes = file_sizes(manifest)
        total_bytes = sum(sizes.values())
        upload = _Upload(total_bytes, on_progress, cancelled)
        there = await self._list(model_id)
        whole = {name for name, size_bytes in sizes.items() if there.get(name) == size_bytes}
        whole = {name for name in sorted(whole) if await self._digest(model_id, name) == digest}
        if len(whole) == len(sizes) and await self._digest(model_id, MANIFEST_FILE) == digest:
            upload.advance(total_bytes)
            return
        await self._delete(model_id, [MANIFEST_FILE])
        for name in sorted(sizes):
            if name in whole:
                upload.advance(sizes[name])
            else:
                await self._put(model_id, name, staged / name, sizes[name], digest, upload)
        await self._delete(model_id, sorted(there.keys() - sizes.keys() - {MANIFEST_FILE}))
        upload.check(staged / MANIFEST_FILE)
        raw_manifest = (staged / MANIFEST_FILE).read_bytes()
        with self._translated(model_id, MANIFEST_FILE):
            await obstore.put_async(
                self._uploads, _key(model_id, MANIFEST_FILE), raw_manifest, attributes={DIGEST_NAME: digest}
            )

    async def remove(self, model_id: str) -> None:
        """Remove what is published, the manifest first; raises Unavailable and ImportFailed."""
        there = await self._list(model_id)
        await self._delete(model_id, [MANIFEST_FILE] if MANIFEST_FILE in there else [])
        await self._delete(model_id, sorted(there.keys() - {MANIFEST_FILE}))

    async def _list(self, model_id: str) -> dict[str, int]:
        """Sizes of all objects of a model, by their names in its directory."""
        directory = directory_name(model_id)

        async def ask() -> Any:
            return await obstore.list(self._store, prefix=directory).collect_async()

        objects = await self._until_it_works(model_id, "", ask)
        return {entry["path"].removeprefix(f"{directory}/"): int(entry["size"]) for entry in objects}

    async def _digest(self, model_id: str, name: str) -> str | None:
        """The digest of the checkpoint that an object was uploaded for."""

        async def ask() -> Any:
            return await obstore.get_async(self._store, _key(model_id, name), options={"head": True})

        try:
            value = (await self._until_it_works(model_id, name, ask)).attributes.get(DIGEST_NAME)
        except FileNotFoundError:
            return None
        return None if value is None else str(value)

    async def _delete(self, model_id: str, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                await self._until_it_works(
                    model_id, name, partial(obstore.delete_async, self._store, _key(model_id, name))
                )

    async def _until_it_works(self, model_id: str, name: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Ask again after a failure; only for what may be done twice."""
        retries = Retries(self._options)
        while True:
            with self._translated(model_id, name):
                try:
                    async with asyncio.timeout(self._options.stall_s):
                        return await ask()
                except (GenericError, TimeoutError) as error:
                    pause_s = retries.pause_after_failure(progressed=False, chance=random.random())
                    if pause_s is None or not is_passing(status_of(error)):
                        raise
            await asyncio.sleep(pause_s)

    async def _put(self, model_id: str, name: str, path: Path, size_bytes: int, digest: str, upload: _Upload) -> None:
        """Upload one file, whole or not at all."""
        part_size_bytes = max(self._options.part_size_bytes, -(-size_bytes // PARTS_MAX))
        with path.open("rb") as file, self._translated(model_id, name):
            parts = upload.parts(file, path, size_bytes, part_size_bytes)
            putting = asyncio.ensure_future(
                obstore.put_async(
                    self._uploads, _key(model_id, name), parts, attributes={DIGEST_NAME: digest},
                    use_multipart=size_bytes > part_size_bytes,
                    chunk_size=part_size_bytes, max_concurrency=PARTS_IN_FLIGHT,
                )
            )  # fmt: skip
            try:
                await asyncio.shield(putting)
            except asyncio.CancelledError:
                upload.stop()
                await asyncio.wait([putting], timeout=STOP_S_MAX)
                if not putting.cancel() and not putting.cancelled():
                    putting.exception()  # heard: whoever cancelled does not want to know
                raise

    @contextmanager
    def _translated(self, model_id: str, name: str) -> Iterator[None]:
        """obstore's errors as ours."""
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            reason = f"the repository refuses writing ({first_line(error)}); give the agent credentials that may write"
            raise ImportFailed(model_id=model_id, stage=JobStage.PUBLISHING, reason=reason) from error
        except (BaseError, TimeoutError) as error:
            raise Unavailable(what=f"repository file {self._location(model_id, name)} ({first_line(error)})") from error


class _Upload:
    """How far one publication is, and whether it is to go on."""

    def __init__(self, total_bytes: int, on_progress: OnProgress | None, cancelled: Cancelled | None) -> None:
        self._done_bytes = 0
        self._total_bytes = total_bytes
        self._on_progress = on_progress
        self._cancelled = cancelled
        self._is_stopped = False

    def stop(self) -> None:
        """End what is uploaded at its next part."""
        self._is_stopped = True

    def check(self, path: Path) -> None:
        """Raises ckptio.Cancelled when it is not to go on."""
        if self._is_stopped or (self._cancelled is not None and self._cancelled()):
            raise ckptio.Cancelled(path, done_bytes=self._done_bytes)

    def advance(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        if self._on_progress is not None:
            self._on_progress(self._done_bytes, self._total_bytes)

    async def parts(self, file: BinaryIO, path: Path, size_bytes: int, part_size_bytes: int) -> AsyncIterator[bytes]:
        """The parts of a file. What this raises makes obstore abort the upload, and comes out of it."""
        read_bytes = 0
        self.check(path)
        while part := await asyncio.get_running_loop().run_in_executor(None, file.read, part_size_bytes):
            yield part
            # The store has taken it, and may still be sending the last few.
            read_bytes += len(part)
            self.advance(len(part))
            self.check(path)
        if read_bytes != size_bytes:
            raise ckptio.TruncatedCheckpoint(path, expected_bytes=size_bytes, actual_bytes=read_bytes)


def _key(model_id: str, name: str) -> str:
    return f"{directory_name(model_id)}/{name}"
