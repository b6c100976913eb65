"""Owns import jobs: a published checkpoint on this machine becomes one of ours in the repository (F1).

One job runs at a time. It is converted into a directory beside its destination, verified there, and moved into its
place in one step, so that what a scheduler hears of is whole, and what it does not hear of is not there.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import ckptio
import structlog
from ckptio.manifest import MANIFEST_FILE
from whimbrel.chassis.bus import Bus
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import (
    Cancelled,
    ImportFailed,
    InternalError,
    QueueFull,
    WhimbrelError,
)
from whimbrel.wire.ids import check_model_id, directory_name
from whimbrel.wire.messages import (
    MODEL_CONFIG_BYTES_MAX,
    ImportEnded,
    ImportFinished,
    ImportModel,
    ImportProgressed,
    JobStage,
)

from services.storage_agent import metrics
from services.storage_agent.checkpoints import checkpoint_digest
from services.storage_agent.outcomes import Outcomes
from services.storage_agent.progress import Progress
from services.storage_agent.repository import Repository
from services.storage_agent.threads import Threads

log = structlog.get_logger()

CONFIG_FILE = "config.json"

# Deploying is done by people; more waiting jobs than this on one agent is a mistake.
JOBS_MAX = 32
# A scheduler answers when it has made the outcome durable: milliseconds. One that is being replaced takes seconds;
# until then the outcome is said again and again.
ANSWER_S_MAX = 1.0
REPEAT_S = 0.5

Outcome = ImportFinished | ImportEnded


@dataclass(slots=True, kw_only=True)
class _Job:
    """One import. `cancelled` is read by the thread that converts."""

    job_id: str
    model_id: str
    source: str
    progress: Progress[JobStage] = field(default_factory=lambda: Progress(JobStage.QUEUED))
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class ImportJobs:
    """The import jobs of one agent. `on_change` is called when `job_ids` changes."""

    def __init__(
        self,
        *,
        server_id: str,
        bus: Bus,
        repository: Repository,
        chunk_size_bytes: int,
        on_change: Callable[[], None],
    ) -> None:
        self._server_id = server_id
        self._bus = bus
        self._repository = repository
        self._chunk_size_bytes = chunk_size_bytes
        self._on_change = on_change
        self._jobs: deque[_Job] = deque()  # running first
        self._outcomes: Outcomes[Outcome] = Outcomes()
        self._unheard: dict[str, Outcome] = {}
        self._work = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._thread = Threads(1, "agent-import")

    def job_ids(self) -> tuple[str, ...]:
        """Queued and running jobs in order, then those whose end the scheduler has not heard of."""
        waiting = tuple(job.job_id for job in self._jobs)
        return waiting + tuple(self._unheard)

    def submit(self, command: ImportModel) -> None:
        """Queue a job, or say again how it ended. Raises InvalidRequest and QueueFull."""
        if any(job.job_id == command.job_id for job in self._jobs):
            return
        outcome = self._outcomes.get(command.job_id)
        if outcome is not None:
            self._say_end(outcome)
            return
        check_model_id(command.model_id)
        if len(self._jobs) >= JOBS_MAX:
            raise QueueFull(queue="the import queue", limit=JOBS_MAX)
        self._jobs.append(_Job(job_id=command.job_id, model_id=command.model_id, source=command.source))
        self._work.set()
        self._on_change()

    def stop(self, model_id: str) -> None:
        """Cancel the jobs of a model, at their next chunk."""
        for job in self._jobs:
            if job.model_id == model_id:
                job.cancelled.set()

    async def stopped(self, model_id: str) -> None:
        """Returns when no job of a model that was stopped runs any more."""
        for job in [job for job in self._jobs if job.model_id == model_id and job.cancelled.is_set()]:
            await job.ended.wait()

    async def run(self) -> None:
        """Run jobs until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                while True:
                    await self._work.wait()
                    self._work.clear()
                    while self._jobs:
                        await self._run_next()
        finally:
            self._group = None

    def close(self) -> None:
        """Wait for what runs. It is not said to have ended, so that another agent takes it."""
        self._thread.close()

    def remove_leftovers(self) -> None:
        """Remove what a former life of this agent was converting. Blocking."""
        if self._repository.directory is not None:
            mark = f".import-{self._server_id}-"
            for path in self._repository.directory.iterdir():
                # With one more dot in front: where ckptio was writing it, and its lock.
                if path.name.startswith(f".{mark}") and path.is_file():
                    path.unlink(missing_ok=True)
                elif path.name.startswith((mark, f".{mark}")):
                    shutil.rmtree(path, ignore_errors=True)

    async def _run_next(self) -> None:
        job = self._jobs[0]
        log.info("import_started", job_id=job.job_id, model_id=job.model_id, source=job.source)
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(job.progress.tell(lambda *latest: self._tell_progress(job, *latest)))
            outcome = await self._import(job)
            telling.cancel()
        self._outcomes.remember(job.job_id, outcome)
        self._jobs.popleft()
        job.ended.set()
        self._say_end(outcome)

    async def _import(self, job: _Job) -> Outcome:
        try:
            finished = await self._thread.run_until(job.cancelled.set, self._convert, job)
        except ckptio.Cancelled:
            return self._ended(job, Cancelled(what=f"import {job.job_id} of {job.model_id}"))
        except WhimbrelError as error:
            return self._ended(job, error)
        except (ckptio.CkptioError, OSError) as error:
            stage = job.progress.stage
            return self._ended(job, ImportFailed(model_id=job.model_id, stage=stage, reason=str(error)))
        except Exception:  # the top of a task: whatever a source contains, the agent lives on
            log.exception("import_crashed", job_id=job.job_id, model_id=job.model_id)
            return self._ended(job, InternalError(service=f"storage agent {self._server_id}"))
        metrics.IMPORTS.labels("finished").inc()
        log.info("import_finished", job_id=job.job_id, model_id=job.model_id, digest=finished.checkpoint_digest)
        return finished

    def _ended(self, job: _Job, error: WhimbrelError) -> ImportEnded:
        metrics.IMPORTS.labels("cancelled" if isinstance(error, Cancelled) else "failed").inc()
        log.warning("import_ended", job_id=job.job_id, model_id=job.model_id, code=error.code, reason=str(error))
        return ImportEnded(
            job_id=job.job_id, model_id=job.model_id, server_id=self._server_id, error=error_reply(error)
        )

    # --- in the thread ---

    def _convert(self, job: _Job) -> ImportFinished:
        """Convert, verify, publish; raises ckptio's errors, OSError and ImportFailed."""
        job.progress.set(JobStage.CONVERTING)
        root = self._repository.publishing_directory(job.model_id)
        source = source_directory(job.model_id, job.source)
        _check_config(job.model_id, source)
        staged = root / f".import-{self._server_id}-{directory_name(job.model_id)}"
        shutil.rmtree(staged, ignore_errors=True)
        try:
            manifest = ckptio.convert(
                source,
                staged,
                chunk_size_bytes=self._chunk_size_bytes,
                progress=lambda p: job.progress.set(JobStage.CONVERTING, p.done_bytes, p.total_bytes),
                cancelled=job.cancelled.is_set,
            )
            self._verify(job, staged)
            return self._publish(job, staged, manifest)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def _verify(self, job: _Job, staged: Path) -> None:
        def progress(latest: ckptio.Progress) -> None:
            job.progress.set(JobStage.VERIFYING, latest.done_bytes, latest.total_bytes)
            if job.cancelled.is_set():
                raise ckptio.Cancelled(staged, done_bytes=latest.done_bytes)

        ckptio.verify(staged, progress=progress)

    def _publish(self, job: _Job, staged: Path, manifest: ckptio.Manifest) -> ImportFinished:
        """Publish, also over the same content: it may have been damaged where it lies, and copies of it stay valid."""
        finished = ImportFinished(
            job_id=job.job_id,
            model_id=job.model_id,
            server_id=self._server_id,
            checkpoint_digest=checkpoint_digest(manifest),
            size_bytes=manifest.total_bytes,
            manifest=(staged / MANIFEST_FILE).read_bytes(),
            model_config=(staged / CONFIG_FILE).read_bytes(),
        )
        self._repository.publish(staged, job.model_id)
        return finished

    # --- what is said ---

    async def _tell_progress(self, job: _Job, stage: JobStage, done_bytes: int, total_bytes: int) -> None:
        message = ImportProgressed(
            job_id=job.job_id,
            server_id=self._server_id,
            stage=stage,
            done_bytes=done_bytes,
            total_bytes=total_bytes,
        )
        await self._bus.publish(self._bus.subjects.to_scheduler(message), message)

    def _say_end(self, outcome: Outcome) -> None:
        self._on_change()
        if outcome.job_id not in self._unheard and self._group is not None:
            self._unheard[outcome.job_id] = outcome
            self._group.create_task(self._tell_end(outcome))

    async def _tell_end(self, outcome: Outcome) -> None:
        """Say how a job ended until the scheduler has acknowledged it."""
        subject = self._bus.subjects.to_scheduler(outcome)
        while outcome.job_id in self._unheard:
            try:
                await self._bus.request(subject, outcome, timeout_s=ANSWER_S_MAX)
                del self._unheard[outcome.job_id]
                self._on_change()
            except WhimbrelError as error:
                log.info("import_end_unheard", job_id=outcome.job_id, code=error.code, reason=str(error))
                await asyncio.sleep(REPEAT_S)


def source_directory(model_id: str, source: str) -> Path:
    """The directory that an import reads; raises ImportFailed when it is none of this machine."""
    parts = urlsplit(source)
    path = Path(unquote(parts.path) if parts.scheme == "file" else source)
    if parts.scheme not in ("", "file") or not path.is_absolute():
        reason = f"{source} is no absolute path; give a directory that every agent can read"
    elif not path.exists():
        reason = f"{path} does not exist on this server; give a directory that every agent can read"
    elif not path.is_dir():
        reason = f"{path} is not a directory; give the one that holds {CONFIG_FILE} and the safetensors files"
    else:
        return path
    raise ImportFailed(model_id=model_id, stage=JobStage.QUEUED, reason=reason)


def _check_config(model_id: str, source: Path) -> None:
    """A model without a config can be converted but never served; say so before reading gigabytes."""
    path = source / CONFIG_FILE
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError as error:
        reason = f"{path} is missing; a model's directory has one"
        raise ImportFailed(model_id=model_id, stage=JobStage.QUEUED, reason=reason) from error
    if size_bytes > MODEL_CONFIG_BYTES_MAX:
        reason = f"{path} has {size_bytes} bytes, at most {MODEL_CONFIG_BYTES_MAX} are allowed"
        raise ImportFailed(model_id=model_id, stage=JobStage.QUEUED, reason=reason)
