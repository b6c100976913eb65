"""Owns import jobs: which one runs, which wait, how they ended, and that the scheduler hears of it (F1).

One job runs at a time; `import_work` is what it does. What a scheduler hears of is whole in the repository, and what it
does not hear of is not there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

import ckptio
import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Cancelled, ImportFailed, InternalError, QueueFull, WhimbrelError
from whimbrel.wire.ids import check_model_id
from whimbrel.wire.messages import ImportEnded, ImportFinished, ImportModel, ImportProgressed, JobStage
from whimbrel.wire.sources import redacted

from services.storage_agent import metrics
from services.storage_agent.import_work import ImportWork, Job
from services.storage_agent.outcomes import Outcomes
from services.storage_agent.repository import Repository
from services.storage_agent.threads import Threads

log = structlog.get_logger()

# Deploying is done by people; more waiting jobs than this on one agent is a mistake.
JOBS_MAX = 32
# A scheduler answers when it has made the outcome durable: milliseconds. One that is being replaced takes seconds;
# until then the outcome is said again and again.
ANSWER_S_MAX = 1.0
REPEAT_S = 0.5

Outcome = ImportFinished | ImportEnded


class ImportJobs:
    """The import jobs of one agent. `on_change` is called when `job_ids` changes."""

    def __init__(
        self,
        *,
        server_id: str,
        bus: Bus,
        repository: Repository,
        chunk_size_bytes: int,
        staging_dir: Path,
        on_change: Callable[[], None],
    ) -> None:
        self._server_id = server_id
        self._bus = bus
        self._on_change = on_change
        self._jobs: deque[Job] = deque()  # running first
        self._running: Job | None = None
        self._outcomes: Outcomes[Outcome] = Outcomes()
        self._unheard: dict[str, Outcome] = {}
        # Jobs that were cancelled before they were heard of: the cancel was faster, or they are of a former life.
        self._revoked: Outcomes[bool] = Outcomes()
        self._has_jobs = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._thread = Threads(1, "agent-import")
        self._work = ImportWork(
            server_id=server_id,
            repository=repository,
            staging_dir=staging_dir,
            chunk_size_bytes=chunk_size_bytes,
            threads=self._thread,
        )

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
        job = Job(job_id=command.job_id, model_id=command.model_id, source=command.source)
        if self._revoked.get(job.job_id):
            self._end(job, self._ended(job, _cancelled(job)))
            return
        if len(self._jobs) >= JOBS_MAX:
            raise QueueFull(queue="the import queue", limit=JOBS_MAX)
        self._jobs.append(job)
        self._has_jobs.set()
        self._on_change()

    def cancel(self, job_id: str) -> None:
        """End a job that waits now, one that runs at its next chunk; one that is over is told of again."""
        job = next((job for job in self._jobs if job.job_id == job_id), None)
        outcome = self._outcomes.get(job_id)
        if job is not None:
            self._cancel(job)
        elif outcome is not None:
            self._say_end(outcome)
        else:
            self._revoked.remember(job_id, True)

    def stop(self, model_id: str) -> None:
        """Cancel the jobs of a model."""
        for job in [job for job in self._jobs if job.model_id == model_id]:
            self._cancel(job)

    async def stopped(self, model_id: str) -> None:
        """Returns when no job of a model that was stopped runs any more, and nothing is left of former ones."""
        for job in [job for job in self._jobs if job.model_id == model_id and job.cancelled.is_set()]:
            await job.ended.wait()
        if not any(job.model_id == model_id for job in self._jobs):
            await asyncio.to_thread(self._work.remove_downloads, model_id)

    async def run(self) -> None:
        """Run jobs until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                while True:
                    await self._has_jobs.wait()
                    self._has_jobs.clear()
                    while self._jobs:
                        await self._run_next()
        finally:
            self._group = None

    def close(self) -> None:
        """Wait for what runs. It is not said to have ended, so that another agent takes it."""
        self._thread.close()

    def remove_leftovers(self) -> None:
        """Remove what a former life of this agent left and nobody will go on with. Blocking."""
        self._work.remove_leftovers()

    async def _run_next(self) -> None:
        job = self._running = self._jobs[0]
        log.info("import_started", job_id=job.job_id, model_id=job.model_id, source=redacted(job.source))
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(job.progress.tell(lambda *latest: self._tell_progress(job, *latest)))
            outcome = await self._import(job)
            telling.cancel()
        self._jobs.popleft()
        self._running = None
        self._end(job, outcome)

    def _cancel(self, job: Job) -> None:
        job.cancel()
        if job is not self._running:
            self._jobs.remove(job)
            self._end(job, self._ended(job, _cancelled(job)))

    def _end(self, job: Job, outcome: Outcome) -> None:
        self._outcomes.remember(job.job_id, outcome)
        job.ended.set()
        self._say_end(outcome)

    async def _import(self, job: Job) -> Outcome:
        try:
            finished = await self._work.run(job)
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

    def _ended(self, job: Job, error: WhimbrelError) -> ImportEnded:
        metrics.IMPORTS.labels("cancelled" if isinstance(error, Cancelled) else "failed").inc()
        log.warning("import_ended", job_id=job.job_id, model_id=job.model_id, code=error.code, reason=str(error))
        return ImportEnded(
            job_id=job.job_id, model_id=job.model_id, server_id=self._server_id, error=error_reply(error)
        )

    # --- what is said ---

    async def _tell_progress(self, job: Job, stage: JobStage, done_bytes: int, total_bytes: int) -> None:
        message = ImportProgressed(
            job_id=job.job_id,
            server_id=self._server_id,
            stage=stage,
            done_bytes=done_bytes,
            total_bytes=total_bytes,
        )
        await self._bus.publish(self._bus.subjects.to_scheduler(message), message)

    def _say_end(self, outcome: Outcome) -> None:
        if outcome.job_id not in self._unheard and self._group is not None:
            self._unheard[outcome.job_id] = outcome
            self._group.create_task(self._tell_end(outcome))
        self._on_change()

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


def _cancelled(job: Job) -> Cancelled:
    return Cancelled(what=f"import {job.job_id} of {job.model_id}")
