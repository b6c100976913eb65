"""Owns the simulated storage agent: what it hears and says, leases and removals. Its loads are in `loads.py`."""

from __future__ import annotations

import json

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Cancelled, WhimbrelError
from whimbrel.wire.messages import (
    Ack,
    AgentHeartbeat,
    CancelImport,
    CancelLoad,
    ImportEnded,
    ImportFinished,
    ImportModel,
    LoadModel,
    Message,
    ModelRemoved,
    RemoveModel,
    ResendResidency,
    SchedulerHeartbeat,
    WorkerExited,
    WorkerHeartbeat,
)

from services.storage_agent.core.chunks import CheckpointKey, Layout
from services.storage_agent.core.news import ResidencyNews
from services.storage_agent.core.residency import DramCopy, Residency
from tests.simulation.leases import Lease
from tests.simulation.loads import Loads
from tests.simulation.network import Answer, Call, Network
from tests.simulation.peers import Peer

GB = 10**9
CHUNK_BYTES = GB // 16
SSD_BYTES = 100 * GB
SWEEP_S = 0.5
IMPORT_S = 1.0


class SimAgent(Peer):
    """A server's agent. `catalogue` has the partitions of every checkpoint that was ever published; what the SSD holds
    is given from the life before."""

    heard_by = ("scheduler",)

    def __init__(
        self,
        network: Network,
        server_id: str,
        *,
        epoch: int,
        pool_bytes: int,
        devices: dict[int, str],
        leases: dict[str, Lease],
        catalogue: dict[CheckpointKey, tuple[int, ...]],
        on_ssd: tuple[CheckpointKey, ...] = (),
    ) -> None:
        self.server_id = server_id
        self.devices = devices
        self.leases = leases
        self.catalogue = catalogue
        self.residency = Residency(chunk_count=pool_bytes // CHUNK_BYTES, ssd_size_bytes=SSD_BYTES)
        self.free_chunks = set(range(self.residency.chunk_count))
        #: What was lent: by instance, the copy and its lease; those in `attaching` have no answer yet.
        self.lent: dict[str, tuple[int, Lease]] = {}
        self.attaching: set[str] = set()
        self.errors: list[WhimbrelError] = []
        self.import_ends: dict[str, ImportFinished | ImportEnded] = {}
        self.imports: dict[str, ImportModel] = {}
        self._news = ResidencyNews()
        self._removals: dict[str, RemoveModel] = {}
        self.loads = Loads(self)
        for path in list(leases):
            # The pool of the life before has no name any more; what workers map of it stays valid.
            leases.pop(path).is_ended = True
        super().__init__(network, ("agent", server_id), epoch)
        for key in on_ssd:
            self.residency.add_ssd(key, layout=self.layout(key), size_bytes=self.layout(key).size_bytes, now=self.now)
        self.every(SWEEP_S, self.sweep)
        self.beat()

    def kill(self) -> tuple[CheckpointKey, ...]:
        """What the SSD holds for the next life."""
        self.is_alive = False
        self.network.leave(self)
        return tuple(copy.key for copy in self.residency.ssd_copies() if copy.is_whole)

    def layout(self, key: CheckpointKey) -> Layout:
        return Layout(partition_bytes=self.catalogue[key], chunk_size_bytes=CHUNK_BYTES)

    def heartbeat(self) -> AgentHeartbeat:
        news = self._news.tell(self.residency.resident())
        return AgentHeartbeat(
            server_id=self.server_id,
            epoch=self.epoch,
            resident=news.resident,
            residency_version=news.version,
            base_version=news.base_version,
            tasks=self.loads.task_ids(),
            running=self.loads.running_ids(),
            jobs=tuple(self.imports),
            attached=self.attached(),
            pool_size_bytes=self.residency.chunk_count * CHUNK_BYTES,
            pool_free_bytes=len(self.free_chunks) * CHUNK_BYTES,
            ssd_size_bytes=SSD_BYTES,
            ssd_used_bytes=self.residency.ssd_used_bytes(),
            probe_bandwidth_bytes_per_s=1e9,
        )

    # Commands.

    def hear(self, message: Message, call: Call | None) -> None:
        match message:
            case WorkerHeartbeat():
                if message.server_id == self.server_id:
                    self.sweep()
            case SchedulerHeartbeat():
                if message.epoch > self.scheduler_epoch:
                    self.scheduler_epoch = message.epoch
                    self._news.ask_whole()
                    self.beat()
            case _:
                answer: Answer
                try:
                    self._obeyed(message)
                    answer = Ack()
                except WhimbrelError as error:
                    answer = error
                if call is not None:
                    call.answer(self, answer)

    def _obeyed(self, message: Message) -> None:
        match message:
            case LoadModel():
                self.obey(message.scheduler_epoch)
                self._removals.pop(message.model_id, None)
                self.loads.begin(message)
            case CancelLoad():
                self.loads.cancel(message.task_id)
            case ImportModel():
                self.obey(message.scheduler_epoch)
                self._removals.pop(message.model_id, None)
                self._import(message)
            case CancelImport():
                self.obey(message.scheduler_epoch)
                self._end_import(message.job_id)
            case RemoveModel():
                self.obey(message.scheduler_epoch)
                self._removals[message.model_id] = message
                self.loads.stop(message.model_id)
                for job in [job for job in self.imports.values() if job.model_id == message.model_id]:
                    self._end_import(job.job_id)
                self._remove_what_can_go()
            case ResendResidency():
                self._news.ask_whole()
                self.beat()
            case _:
                raise AssertionError(f"{message} is no command to an agent")

    def worker_exited(self, slot: int, worker_epoch: int) -> None:
        """The kernel says so."""
        self.sweep()
        self.tell_scheduler(WorkerExited(server_id=self.server_id, slot=slot, worker_epoch=worker_epoch))

    # What is lent.

    def lend(self, copy: DramCopy, instance_id: str, slots: tuple[int, ...]) -> str:
        """The path of the lease."""
        path = f"{self.epoch}/{instance_id}"
        lease = self.leases[path] = Lease(slots)
        self.residency.hold(copy.copy_id, f"instance {instance_id}", now=self.now)
        self.lent[instance_id] = (copy.copy_id, lease)
        self.attaching.add(instance_id)
        return path

    def settle(self, instance_id: str) -> None:
        self.attaching.discard(instance_id)
        self.beat()

    def attached(self) -> tuple[str, ...]:
        return tuple(instance_id for instance_id in self.lent if instance_id not in self.attaching)

    def sweep(self) -> None:
        """End every lease that no worker holds any more."""
        for instance_id in self.attached():
            copy_id, lease = self.lent[instance_id]
            if lease.holder is None:
                lease.is_ended = True
                del self.leases[f"{self.epoch}/{instance_id}"]
                del self.lent[instance_id]
                self.let_go(copy_id, f"instance {instance_id}")
                self.beat()
        self._remove_what_can_go()

    def let_go(self, copy_id: int, holder: str) -> None:
        self.free_chunks.update(self.residency.let_go(copy_id, holder, now=self.now))

    # Removals and imports.

    def _remove_what_can_go(self) -> None:
        """A model whose chunks an instance maps goes when that lets go."""
        for model_id in list(self._removals):
            for copy in self.residency.ssd_copies(model_id):
                self.free_chunks.update(self.residency.evict(copy.key))
            for above in self.residency.dram_copies(model_id):
                self.free_chunks.update(self.residency.drop(above.copy_id))
            if not self.residency.dram_copies(model_id) and not self.loads.works_on(model_id):
                del self._removals[model_id]
                self.tell_scheduler(ModelRemoved(model_id=model_id, server_id=self.server_id))
                self.beat()

    def _import(self, job: ImportModel) -> None:
        if job.job_id in self.import_ends:
            self.tell_scheduler(self.import_ends[job.job_id])
        elif job.job_id not in self.imports:
            self.imports[job.job_id] = job
            self.clock.after(IMPORT_S, self, lambda: self._publish(job))
            self.beat()

    def _publish(self, job: ImportModel) -> None:
        if self.imports.pop(job.job_id, None) is None:
            return
        key = CheckpointKey(model_id=job.model_id, checkpoint_digest=f"digest-of-{job.job_id}")
        self.catalogue[key] = (GB // 4,)
        layout = self.layout(key)
        if self.residency.ssd(key) is None:
            # A life before this one may have published it already, and not been heard.
            self.residency.add_ssd(key, layout=layout, size_bytes=layout.size_bytes, now=self.now)
        manifest = {"parameter_count": 7, "architecture": "SimForCausalLM", "partitions": [{"size_bytes": GB // 4}]}
        self._say_import_ended(
            ImportFinished(
                job_id=job.job_id,
                model_id=job.model_id,
                server_id=self.server_id,
                checkpoint_digest=key.checkpoint_digest,
                size_bytes=layout.size_bytes,
                manifest=json.dumps(manifest).encode(),
                model_config=b"{}",
            )
        )

    def _end_import(self, job_id: str) -> None:
        job = self.imports.pop(job_id, None)
        if job is not None:
            error = error_reply(Cancelled(what=f"import {job_id}"))
            ended = ImportEnded(job_id=job_id, model_id=job.model_id, server_id=self.server_id, error=error)
            self._say_import_ended(ended)

    def _say_import_ended(self, end: ImportFinished | ImportEnded) -> None:
        self.import_ends[end.job_id] = end
        self.tell_scheduler(end)
        self.beat()
