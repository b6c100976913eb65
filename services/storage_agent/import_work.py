"""Owns the work of one import: obtain what is published, convert it, verify it, and publish it in the repository (F1).

A checkpoint is staged under a hidden name and published when it is whole. A job that fails leaves its downloads, for
the next try; one that is cancelled leaves nothing; what a killed agent left is resumed, or removed when it is old.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import ckptio
from ckptio.manifest import MANIFEST_FILE
from whimbrel.wire.errors import Cancelled, ImportFailed
from whimbrel.wire.ids import directory_name
from whimbrel.wire.messages import ImportFinished, JobStage
from whimbrel.wire.sources import Source, SourceKind, parse_source

from services.storage_agent.checkpoints import checkpoint_digest
from services.storage_agent.import_directory import Published, check_directory, source_directory
from services.storage_agent.import_downloads import Download, Origin, OriginFailed
from services.storage_agent.import_files import CONFIG_FILE
from services.storage_agent.import_hub import HubOrigin
from services.storage_agent.import_space import no_space
from services.storage_agent.import_stores import StoreOrigin
from services.storage_agent.progress import Progress
from services.storage_agent.repository import Repository
from services.storage_agent.threads import Threads

# A person who deploys again after a failure does so within a day; then the disk is worth more than the download.
LEFTOVER_S_MAX = 24 * 3600.0


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One import. `cancelled` is also read by the thread that converts."""

    job_id: str
    model_id: str
    source: str
    progress: Progress[JobStage] = field(default_factory=lambda: Progress(JobStage.QUEUED))
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    download: asyncio.Task[Path] | None = None

    def cancel(self) -> None:
        """At once while it downloads, at the next chunk while it converts or uploads."""
        self.cancelled.set()
        if self.download is not None:
            self.download.cancel()

    def check(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled(what=f"import {self.job_id} of {self.model_id}")


class ImportWork:
    """What jobs of one agent do, one at a time. `threads` has one thread for all that blocks."""

    def __init__(
        self, *, server_id: str, repository: Repository, staging_dir: Path, chunk_size_bytes: int, threads: Threads
    ) -> None:
        self._server_id = server_id
        self._repository = repository
        self._staging_dir = staging_dir / server_id
        self._chunk_size_bytes = chunk_size_bytes
        self._threads = threads
        # '@' is in no id, so no server's mark is the beginning of another one's.
        self._mark = f".import-{server_id}@"

    async def run(self, job: Job) -> ImportFinished:
        """Raises Cancelled, ImportFailed and other typed errors, ckptio's errors, OSError."""
        self._repository.check_publishable(job.model_id)
        source = parse_source(job.source)
        job.check()
        await self._threads.run(self._remove_old)
        staged = await self._threads.run(self._staging_root) / f"{self._mark}{directory_name(job.model_id)}"
        downloads = self._downloads(job)
        try:
            published = await self._obtain(job, source, downloads, staged.parent)
            finished = await self._threads.run_until(job.cancelled.set, self._convert, job, published, staged)
            job.progress.set(JobStage.PUBLISHING)
            job.check()
            await self._repository.publish(
                staged, job.model_id, self._progress(job, JobStage.PUBLISHING), job.cancelled.is_set
            )
        except ckptio.Cancelled as error:
            await self._threads.run(_remove, downloads)
            raise Cancelled(what=f"import {job.job_id} of {job.model_id}") from error
        except Cancelled:
            await self._threads.run(_remove, downloads)
            raise
        finally:
            await self._threads.run(self._remove_staged, staged)
        await self._threads.run(_remove, downloads)
        return finished

    def remove_leftovers(self) -> None:
        """Of a former life of this agent: whole checkpoints go, what can be resumed stays for a day. Blocking."""
        for root in {self._staging_dir, self._repository.staging_root() or self._staging_dir}:
            if root.is_dir():
                for path in list(root.iterdir()):
                    is_lock = path.name.startswith(f".{self._mark}") and path.is_file()
                    if is_lock or path.name.startswith(self._mark):
                        _remove(path)
        self._remove_old()

    def remove_downloads(self, model_id: str) -> None:
        """Of a model that is removed: nobody will resume them. Blocking."""
        name = re.compile(re.escape(f"{directory_name(model_id)}@") + "[0-9a-f]+")
        if self._staging_dir.is_dir():
            for path in list(self._staging_dir.iterdir()):
                if name.fullmatch(path.name):
                    _remove(path)

    # --- obtaining ---

    async def _obtain(self, job: Job, source: Source, downloads: Path, converted_in: Path) -> Published:
        if source.kind is SourceKind.DIRECTORY:
            published = await self._threads.run(source_directory, job.model_id, source.location)
        else:
            try:
                published = await self._fetch(job, source, downloads, converted_in)
            except OriginFailed as error:
                reason = f"{source.location}: {error.reason}"
                raise ImportFailed(model_id=job.model_id, stage=JobStage.DOWNLOADING, reason=reason) from error
        await self._threads.run(check_directory, job.model_id, published.path)
        job.check()
        return published

    async def _fetch(self, job: Job, source: Source, downloads: Path, converted_in: Path) -> Published:
        origin: Origin
        if source.kind is SourceKind.HUB:
            origin = HubOrigin(source.location, source.revision, self._threads)
            snapshot = await origin.offline(job.model_id)
            if snapshot is not None:
                return Published(path=snapshot, name=origin.name, revision=origin.revision)
        else:
            origin = StoreOrigin(source)
        progress = self._progress(job, JobStage.DOWNLOADING)
        progress(0, 0)
        download = Download(job.model_id, origin, downloads, self._threads, progress)
        path = await self._until_cancelled(job, download.run(converted_in))
        return Published(path=path, name=origin.name, revision=origin.revision)

    async def _until_cancelled(self, job: Job, work: Coroutine[None, None, Path]) -> Path:
        """A download ends at once when its job is cancelled; when the agent stops, that goes on as ever."""
        job.check()
        job.download = asyncio.ensure_future(work)
        try:
            return await job.download
        except asyncio.CancelledError:
            job.download.cancel()
            with suppress(asyncio.CancelledError):
                await job.download
            job.check()
            raise
        finally:
            job.download = None

    def _downloads(self, job: Job) -> Path:
        """The same for every try of a source, so that a try goes on where the last one ended."""
        digest = hashlib.sha256(job.source.encode()).hexdigest()[:16]
        return self._staging_dir / f"{directory_name(job.model_id)}@{digest}"

    # --- in the thread ---

    def _convert(self, job: Job, published: Published, staged: Path) -> ImportFinished:
        """Convert and verify."""
        _remove(staged)
        job.progress.set(JobStage.CONVERTING)
        progress = self._progress(job, JobStage.CONVERTING)
        try:
            manifest = ckptio.convert(
                published.path,
                staged,
                source_name=published.name,
                revision=published.revision,
                chunk_size_bytes=self._chunk_size_bytes,
                resume=True,
                progress=lambda latest: progress(latest.done_bytes, latest.total_bytes),
                cancelled=job.cancelled.is_set,
            )
        except ckptio.InsufficientSpace as error:
            raise no_space(job.model_id, JobStage.CONVERTING, staged.parent, error.required_bytes) from error
        self._verify(job, staged)
        return ImportFinished(
            job_id=job.job_id,
            model_id=job.model_id,
            server_id=self._server_id,
            checkpoint_digest=checkpoint_digest(manifest),
            size_bytes=manifest.total_bytes,
            manifest=(staged / MANIFEST_FILE).read_bytes(),
            model_config=(staged / CONFIG_FILE).read_bytes(),
        )

    def _verify(self, job: Job, staged: Path) -> None:
        def progress(latest: ckptio.Progress) -> None:
            job.progress.set(JobStage.VERIFYING, latest.done_bytes, latest.total_bytes)
            if job.cancelled.is_set():
                raise ckptio.Cancelled(staged, done_bytes=latest.done_bytes)

        ckptio.verify(staged, progress=progress)

    def _staging_root(self) -> Path:
        self._staging_dir.mkdir(parents=True, exist_ok=True)
        return self._repository.staging_root() or self._staging_dir

    def _remove_staged(self, staged: Path) -> None:
        """The staged checkpoint, and what a conversion that did not end left beside it."""
        _remove(staged)
        for path in list(staged.parent.glob(f".{staged.name}.ckptio-tmp-*")):
            _remove(path)

    def _remove_old(self) -> None:
        """Downloads and half conversions of this agent that nobody went on with."""
        horizon_s = time.time() - LEFTOVER_S_MAX
        root = self._repository.staging_root()
        kept = [] if root is None else [path for path in root.iterdir() if path.name.startswith(f".{self._mark}")]
        if self._staging_dir.is_dir():
            kept += list(self._staging_dir.iterdir())
        for path in kept:
            if _touched_s(path) < horizon_s:
                _remove(path)

    def _progress(self, job: Job, stage: JobStage) -> Callable[[int, int], None]:
        def tell(done_bytes: int, total_bytes: int) -> None:
            job.progress.set(stage, done_bytes, total_bytes)

        return tell


def _touched_s(path: Path) -> float:
    """When something was last written there; now, when it goes away meanwhile."""
    try:
        inside = [entry.lstat().st_mtime for entry in path.iterdir()] if path.is_dir() else []
        return max([path.lstat().st_mtime, *inside])
    except FileNotFoundError:
        return time.time()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
