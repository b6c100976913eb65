"""Owns the download of a published model into a directory: resumed from the byte it reached, checked, never half.

A file is written under a hidden name and renamed when it is whole. What a former try, or a former life of the agent,
fetched is used again as long as the origin says that the file is the same.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import structlog
from whimbrel.wire.errors import ImportFailed
from whimbrel.wire.messages import MODEL_CONFIG_BYTES_MAX, JobStage

from services.storage_agent.import_files import CONFIG_FILE, is_weights
from services.storage_agent.import_space import check_free, no_space
from services.storage_agent.threads import Threads

log = structlog.get_logger()

# A few files at once hide the latency of their origin; more only make the disk seek.
FILES_IN_FLIGHT = 4
# Tries in a row that bring no new byte. With the pauses between them this bears an outage of half a minute.
TRIES_MAX = 6
RETRY_S, RETRY_S_MAX = 0.25, 15.0
# An origin that says nothing for so long is tried again on another connection.
STALL_S_MAX = 20.0
# Read at once to check a file's digest: so a cancelled job ends in milliseconds.
HASHED_BYTES = 4 * 1024 * 1024
JOURNAL_FILE = ".downloads.json"


class OriginFailed(Exception):
    """An origin did not give what was asked for; `is_final` when asking again will not help."""

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_final = is_final


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of an origin. `identity` changes with its content, as far as the origin can tell; `sha256` is of all."""

    name: str
    size_bytes: int
    identity: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Bytes of a file from `offset_bytes` on, which is less than was asked for where an origin can't start later."""

    offset_bytes: int
    chunks: AsyncIterator[bytes]


class Origin(Protocol):
    """Where a model is published. `name` and `revision` are recorded with the checkpoint and have no secrets.

    Methods raise OriginFailed.
    """

    name: str
    revision: str | None

    async def files(self) -> list[RemoteFile]: ...

    def local(self, files: list[RemoteFile]) -> Path | None:
        """A directory of this server that has all of these files already. Blocking, milliseconds."""
        ...

    def open(self, file: RemoteFile, offset_bytes: int) -> AbstractAsyncContextManager[Body]: ...


class Download:
    """The files of one origin on their way into `directory`. Cancelling it stops it at once; a repeat goes on."""

    def __init__(
        self,
        model_id: str,
        origin: Origin,
        directory: Path,
        threads: Threads,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._model_id = model_id
        self._origin = origin
        self._directory = directory
        self._threads = threads
        self._on_progress = on_progress
        self._journal: dict[str, str] = {}
        self._done: dict[str, int] = {}
        self._total_bytes = 0
        self._slots = asyncio.Semaphore(FILES_IN_FLIGHT)

    async def run(self, converted_in: Path) -> Path:
        """The directory that has all of them; raises ImportFailed, also when here and in `converted_in` there is no
        room for what is to come."""
        files = await self._listed()
        local = await self._threads.run(self._origin.local, files)
        if local is not None:
            return local
        self._total_bytes = sum(file.size_bytes for file in files)
        await self._threads.run(self._take_up, files)
        self._tell()
        missing_bytes = self._total_bytes - sum(self._done.values())
        weights_bytes = sum(file.size_bytes for file in files if is_weights(file.name))
        check_free(
            self._model_id, JobStage.DOWNLOADING, [(self._directory, missing_bytes), (converted_in, weights_bytes)]
        )
        try:
            async with asyncio.TaskGroup() as group:
                for file in sorted(files, key=lambda file: (is_weights(file.name), file.name)):
                    group.create_task(self._fetch(file))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return self._directory

    async def _listed(self) -> list[RemoteFile]:
        tries = 0
        while True:
            try:
                files = await self._origin.files()
                break
            except OriginFailed as error:
                tries += 1
                await self._pause(error, tries, self._origin.name)
        config = next((file for file in files if file.name == CONFIG_FILE), None)
        if config is None:
            raise self._failed(f"{self._origin.name} has no {CONFIG_FILE}; a model's directory has one")
        if config.size_bytes > MODEL_CONFIG_BYTES_MAX:
            reason = f"has {config.size_bytes} bytes, at most {MODEL_CONFIG_BYTES_MAX} are allowed"
            raise self._failed(f"{self._origin.name}/{CONFIG_FILE} {reason}")
        if not any(is_weights(file.name) for file in files):
            raise self._failed(f"{self._origin.name} has no weights (model.safetensors, or shards with their index)")
        return files

    # --- one file ---

    async def _fetch(self, file: RemoteFile) -> None:
        async with self._slots:
            tries = 0
            while not self._is_complete(file):
                before = self._done[file.name]
                try:
                    await self._stream(file)
                    await self._check_digest(file)
                except OriginFailed as error:
                    tries = 0 if self._done[file.name] > before else tries + 1
                    await self._pause(error, max(1, tries), f"{self._origin.name}/{file.name}", self._done[file.name])
                except OSError as error:
                    if error.errno == errno.ENOSPC:
                        need_bytes = self._total_bytes - sum(self._done.values())
                        raise no_space(self._model_id, JobStage.DOWNLOADING, self._directory, need_bytes) from error
                    raise
                else:
                    self._part(file).rename(self._directory / file.name)

    async def _stream(self, file: RemoteFile) -> None:
        """Append what the origin sends; raises OriginFailed when that is not all."""
        if self._done[file.name] == file.size_bytes and file.size_bytes:
            return
        try:
            async with asyncio.timeout(STALL_S_MAX) as patience:
                async with self._origin.open(file, self._done[file.name]) as body:
                    with self._opened(file, body.offset_bytes) as target:
                        async for chunk in body.chunks:
                            await self._write(file, target, chunk)
                            patience.reschedule(asyncio.get_running_loop().time() + STALL_S_MAX)
        except TimeoutError as error:
            raise OriginFailed(f"it sent nothing for {STALL_S_MAX:g} s") from error
        if self._done[file.name] < file.size_bytes:
            raise OriginFailed(f"it ended after {self._done[file.name]} of {file.size_bytes} bytes")

    def _opened(self, file: RemoteFile, offset_bytes: int) -> IO[bytes]:
        target = self._part(file).open("r+b" if offset_bytes else "wb", buffering=0)
        target.truncate(offset_bytes)
        target.seek(offset_bytes)
        self._done[file.name] = offset_bytes
        return target

    async def _write(self, file: RemoteFile, target: IO[bytes], chunk: bytes) -> None:
        view = memoryview(chunk)
        if self._done[file.name] + view.nbytes > file.size_bytes:
            reason = f"it sent more than the {file.size_bytes} bytes that it said the file has"
            raise OriginFailed(reason, is_final=True)
        while view.nbytes:
            written = await self._threads.run(target.write, view)
            self._done[file.name] += written
            view = view[written:]
        self._tell()

    async def _check_digest(self, file: RemoteFile) -> None:
        if file.sha256 is None:
            return
        digest = hashlib.sha256()
        with self._part(file).open("rb") as content:
            while block := await self._threads.run(content.read, HASHED_BYTES):
                await self._threads.run(digest.update, block)
        if digest.hexdigest() != file.sha256:
            self._part(file).unlink()
            self._done[file.name] = 0
            raise OriginFailed("what it sent has another digest than it should; nothing of it is used", is_final=True)

    async def _pause(self, error: OriginFailed, tries: int, what: str, offset_bytes: int = 0) -> None:
        """Before the next try; raises ImportFailed when there is none."""
        if error.is_final or tries >= TRIES_MAX:
            place = f" at byte {offset_bytes}" if offset_bytes else ""
            raise self._failed(f"{what}{place}: {error.reason}") from error
        log.info("download_interrupted", what=what, offset_bytes=offset_bytes, tries=tries, reason=error.reason)
        await asyncio.sleep(min(RETRY_S_MAX, RETRY_S * 2**tries))

    # --- what is here already: blocking, small ---

    def _take_up(self, files: list[RemoteFile]) -> None:
        """Keep what former tries fetched of these files, remove everything else."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            known = json.loads((self._directory / JOURNAL_FILE).read_bytes())
        except (FileNotFoundError, ValueError):
            known = {}
        self._journal = {file.name: f"{file.size_bytes} {file.identity}" for file in files}
        kept = {JOURNAL_FILE}
        for file in files:
            if isinstance(known, dict) and known.get(file.name) == self._journal[file.name]:
                kept |= {file.name, self._part(file).name}
        for path in list(self._directory.iterdir()):
            if path.name not in kept:
                path.unlink()
        (self._directory / JOURNAL_FILE).write_text(json.dumps(self._journal))
        for file in files:
            self._done[file.name] = self._size_here(file)

    def _size_here(self, file: RemoteFile) -> int:
        for path in (self._directory / file.name, self._part(file)):
            if path.exists():
                size_bytes = path.stat().st_size
                if size_bytes <= file.size_bytes:
                    return size_bytes
                path.unlink()
        return 0

    def _is_complete(self, file: RemoteFile) -> bool:
        path = self._directory / file.name
        return path.exists() and path.stat().st_size == file.size_bytes

    def _part(self, file: RemoteFile) -> Path:
        return self._directory / f".{file.name}.part"

    def _tell(self) -> None:
        self._on_progress(sum(self._done.values()), self._total_bytes)

    def _failed(self, reason: str) -> ImportFailed:
        return ImportFailed(model_id=self._model_id, stage=JobStage.DOWNLOADING, reason=reason)
