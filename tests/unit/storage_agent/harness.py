"""A storage agent on an in-memory bus with a real pool on tmpfs, a scheduler that listens, and a worker that maps."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import ckptio
import xxhash
from ckptio.manifest import MANIFEST_FILE
from ckptio.plan import plan_chunks
from whimbrel.chassis.bus import Received
from whimbrel.chassis.service import serve
from whimbrel.chassis.testing import InMemoryBus, InMemoryHub
from whimbrel.wire.codec import error_of, unpack_tokens
from whimbrel.wire.errors import WhimbrelError
from whimbrel.wire.ids import directory_name, new_id
from whimbrel.wire.messages import (
    Ack,
    ActivateInstance,
    AgentHeartbeat,
    AttachInstance,
    AttachInstanceReply,
    CancelLoad,
    DetachInstance,
    ImportEnded,
    ImportFinished,
    ImportModel,
    LoadEnded,
    LoadFinished,
    LoadModel,
    Message,
    ModelRemoved,
    RemoveModel,
    WorkerHeartbeat,
    WorkerState,
)

from services.storage_agent.checkpoints import checkpoint_digest
from services.storage_agent.config import AgentConfig
from services.storage_agent.repository import Repository
from services.storage_agent.service import StorageAgentService
from tests.support.checkpoints import make_checkpoint

SERVER = "server-0"
CHUNK_BYTES = 64 * 1024
# Anything that is awaited here takes milliseconds; only a hang takes this long.
PATIENCE_S = 30.0

M = TypeVar("M", bound=Message)


class Peer:
    """A worker of `slot`: attaches by locking and mapping for real, and activates only when every byte is right."""

    def __init__(self, bus: InMemoryBus, slot: int = 0) -> None:
        self.bus = bus
        self.slot = slot
        self.asked: list[Message] = []
        self.mappings: dict[str, list[ckptio.Mapping]] = {}
        self.attaches: dict[str, AttachInstance] = {}
        self.refusal: WhimbrelError | None = None
        self.may_attach = True
        self.device = "cpu"
        self.active_requests = 0
        self._locks: dict[str, int] = {}
        self._held: list[tuple[AttachInstance, str | None]] = []

    async def serve(self) -> None:
        await self.bus.subscribe(self.bus.subjects.all_to_worker(SERVER, self.slot), self._on_command)
        await self.bus.subscribe(self.bus.subjects.all_heartbeats("agent"), self._on_agent)

    async def _on_agent(self, received: Received) -> None:
        """An agent is there, or there again: it wants to know what this slot is."""
        await self.beat()

    async def unload(self, instance_id: str) -> None:
        """What a real worker does: drop, unlock, heartbeat."""
        self._release(instance_id)
        await self.beat()

    async def beat(self) -> None:
        heartbeat = WorkerHeartbeat(
            server_id=SERVER, slot=self.slot, epoch=1, device=self.device, state=WorkerState.EMPTY,
            instance_id=None, model_id=None, active_requests=self.active_requests,
        )  # fmt: skip
        await self.bus.publish(self.bus.subjects.heartbeat(heartbeat), heartbeat)

    def close(self) -> None:
        for instance_id in list(self._locks):
            self._release(instance_id)

    async def _on_command(self, received: Received) -> None:
        self.asked.append(received.message)
        reply: Message = Ack()
        match received.message:
            case AttachInstance() as attach:
                if self.refusal is not None:
                    raise self.refusal
                if not self.may_attach:
                    self._held.append((attach, received.reply_to))
                    return
                reply = self._attach(attach)
            case ActivateInstance(instance_id=instance_id):
                self._check_bytes(instance_id)
            case DetachInstance(instance_id=instance_id):
                self._held = [held for held in self._held if held[0].instance_id != instance_id]
                self._release(instance_id)
        await self.bus.reply(received.reply_to, reply)

    def hold_attaches(self) -> None:
        """From now on no attach is answered: the worker is still building its skeleton."""
        self.may_attach = False

    async def answer_attaches(self) -> None:
        """Answer what was held, and everything from now on."""
        self.may_attach = True
        held, self._held = self._held, []
        for attach, reply_to in held:
            await self.bus.reply(reply_to, self._attach(attach))

    def _attach(self, attach: AttachInstance) -> AttachInstanceReply:
        if attach.instance_id not in self.attaches:
            self._take_lease(attach)
            self.mappings[attach.instance_id] = [
                ckptio.map_chunks(
                    attach.pool_path, attach.chunk_size_bytes, unpack_tokens(part.chunks), part.size_bytes
                )
                for part in attach.partitions
            ]
        return AttachInstanceReply()

    def _take_lease(self, attach: AttachInstance) -> None:
        descriptor = os.open(attach.lease_path, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        assert os.fstat(descriptor).st_nlink == 1, "the lease was over already"
        self._locks[attach.instance_id] = descriptor
        self.attaches[attach.instance_id] = attach

    def _check_bytes(self, instance_id: str) -> None:
        attach = self.attaches[instance_id]
        index = ckptio.read_index(attach.checkpoint_path)
        for part, mapping in zip(index.partitions, self.mappings[instance_id], strict=True):
            with memoryview(mapping) as view:
                for number, chunk in enumerate(plan_chunks(part.padded_bytes, attach.chunk_size_bytes)):
                    end = chunk.offset_bytes + chunk.size_bytes
                    digest = xxhash.xxh3_64_intdigest(view[chunk.offset_bytes : end])
                    assert digest == part.digests[number], f"chunk {number} is wrong"

    def _release(self, instance_id: str) -> None:
        self.attaches.pop(instance_id, None)
        for mapping in self.mappings.pop(instance_id, []):
            mapping.close()
        descriptor = self._locks.pop(instance_id, None)
        if descriptor is not None:
            os.close(descriptor)


@dataclass
class Harness:
    """An agent that runs, its peer, and a scheduler that remembers what it was told."""

    hub: InMemoryHub
    bus: InMemoryBus
    config: AgentConfig
    peer: Peer
    service: StorageAgentService
    heard: list[Message] = field(default_factory=list)
    #: Cleared to let the scheduler answer nothing.
    may_answer: bool = True
    _heard_one: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        subjects = self.bus.subjects
        await self.bus.subscribe(subjects.all_to_scheduler(), self._on_message)
        await self.bus.subscribe(subjects.all_heartbeats("agent"), self._on_message)

    async def _on_message(self, received: Received) -> None:
        self.heard.append(received.message)
        self._heard_one.set()
        if self.may_answer and isinstance(received.message, ImportFinished | ImportEnded):
            await self.bus.reply(received.reply_to, Ack())

    async def until(self, kind: type[M], condition: Callable[[M], bool] = lambda _: True) -> M:
        """The first message of this kind, heard or still to come, for which `condition` holds."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self._heard_one.clear()
                for message in self.heard:
                    if isinstance(message, kind) and condition(message):
                        return message
                await self._heard_one.wait()

    async def heartbeat_with(self, condition: Callable[[AgentHeartbeat], bool]) -> AgentHeartbeat:
        """The first heartbeat from now on for which `condition` holds."""
        self.heard = [message for message in self.heard if not isinstance(message, AgentHeartbeat)]
        return await self.until(AgentHeartbeat, condition)

    async def stored(self) -> AgentHeartbeat:
        """Every copy is whole on the SSD, for which a load does not wait. A heartbeat of before it came is none."""
        residency = self.service.tiers.residency

        def is_stored(beat: AgentHeartbeat) -> bool:
            told = {model.model_id for model in beat.resident}
            is_whole = all(model.ssd_bytes == model.size_bytes for model in beat.resident)
            return is_whole and bool(told) and told >= {model.model_id for model in residency.resident()}

        return await self.heartbeat_with(is_stored)

    async def send(self, message: Message) -> None:
        await self.bus.publish(self.bus.subjects.to_agent(SERVER, message), message)

    async def start_load(
        self,
        model_id: str,
        digest: str,
        *,
        instance_id: str | None = None,
        task_id: str | None = None,
        size_bytes: int = 1,
        slot: int | None = None,
        slots: tuple[int, ...] = (),
    ) -> LoadModel:
        command = LoadModel(
            task_id=task_id or new_id("task"),
            instance_id=instance_id or new_id("inst"),
            model_id=model_id,
            checkpoint_digest=digest,
            size_bytes=size_bytes,
            slots=slots or (self.peer.slot if slot is None else slot,),
            scheduler_epoch=1,
        )
        await self.send(command)
        return command

    async def end_of(self, command: LoadModel) -> LoadFinished | LoadEnded:
        return await self.until(LoadFinished | LoadEnded, lambda end: end.task_id == command.task_id)  # type: ignore[arg-type]

    async def load(self, model_id: str, digest: str, **options: Any) -> LoadFinished:
        """Load and expect it to finish."""
        end = await self.end_of(await self.start_load(model_id, digest, **options))
        assert isinstance(end, LoadFinished), error_of(end.error)
        return end

    async def failed_load(self, model_id: str, digest: str) -> WhimbrelError:
        """Load and expect it to fail; what it failed with."""
        end = await self.end_of(await self.start_load(model_id, digest))
        assert isinstance(end, LoadEnded)
        return error_of(end.error)

    async def cancel(self, command: LoadModel) -> None:
        await self.send(CancelLoad(task_id=command.task_id))

    async def start_import(self, model_id: str, source: Path | str, *, job_id: str | None = None) -> ImportModel:
        command = ImportModel(job_id=job_id or new_id("job"), model_id=model_id, source=str(source), scheduler_epoch=1)
        await self.send(command)
        return command

    async def end_of_import(self, command: ImportModel) -> ImportFinished | ImportEnded:
        return await self.until(ImportFinished | ImportEnded, lambda end: end.job_id == command.job_id)  # type: ignore[arg-type]

    async def import_model(self, model_id: str, source: Path) -> str:
        """Import and expect it to finish; the digest."""
        end = await self.end_of_import(await self.start_import(model_id, source))
        assert isinstance(end, ImportFinished), error_of(end.error)
        return end.checkpoint_digest

    async def failed_import(self, model_id: str, source: Path | str) -> WhimbrelError:
        end = await self.end_of_import(await self.start_import(model_id, source))
        assert isinstance(end, ImportEnded)
        return error_of(end.error)

    async def remove(self, model_id: str, *, everywhere: bool = False) -> None:
        await self.send(RemoveModel(model_id=model_id, remove_from_repository=everywhere, scheduler_epoch=1))

    async def removed(self, model_id: str) -> ModelRemoved:
        return await self.until(ModelRemoved, lambda message: message.model_id == model_id)

    def check(self) -> None:
        """The account and the pool agree, whatever happened."""
        residency, pool = self.service.tiers.residency, self.service.tiers.pool
        residency.check()
        assert residency.used_chunks() == pool.chunk_count - pool.free_chunks

    def ssd_entries(self) -> list[str]:
        """What the SSD directory holds besides what is always there."""
        return sorted(
            path.name
            for path in self.config.ssd_dir.iterdir()
            if path.name not in (".agent.lock", ".pinned", ".staging")
        )

    @property
    def repository(self) -> Path:
        return Path(self.config.repository_url.removeprefix("file://"))

    def published(self, model_id: str) -> Path:
        return self.repository / directory_name(model_id)

    def on_ssd(self, model_id: str) -> Path:
        return self.config.ssd_dir / directory_name(model_id)


def a_config(directory: Path, **changes: Any) -> AgentConfig:
    values: dict[str, Any] = {
        "server_id": SERVER,
        "repository_url": f"file://{directory / 'repository'}",
        "ssd_dir": directory / "ssd",
        "pool_path": Path("/dev/shm") / f"whimbrel-test-{uuid.uuid4().hex}.pool",
        "ssd_bytes": 1024**3,
        "pool_bytes": 64 * CHUNK_BYTES,
        "chunk_size_bytes": CHUNK_BYTES,
        "probe_bytes": 1024 * 1024,
        "attach_s_max": 3.0,
    }
    return AgentConfig(**(values | changes))


@asynccontextmanager
async def an_agent(
    config: AgentConfig,
    hub: InMemoryHub | None = None,
    peer: Peer | None = None,
    repository: Repository | None = None,
) -> AsyncIterator[Harness]:
    """A running agent; it is stopped, and the account checked, at the end. `peer` may be one that serves already."""
    hub = hub or InMemoryHub()
    service = StorageAgentService(config, bus=hub.bus(name="agent"), repository=repository)
    bus = hub.bus(name="scheduler")
    if peer is None:
        peer = Peer(hub.bus(name="worker"))
        await peer.serve()
    harness = Harness(hub=hub, bus=bus, config=config, peer=peer, service=service)
    stop = asyncio.Event()
    await harness.listen()
    serving = asyncio.create_task(serve(service, stop))
    try:
        await harness.until(AgentHeartbeat)
        assert service.readiness() is None
        yield harness
        harness.check()
    finally:
        stop.set()
        await asyncio.wait([serving], timeout=PATIENCE_S)
        peer.close()
        for each in (bus, peer.bus):
            await each.drain()
        with contextlib.suppress(FileNotFoundError):
            config.pool_path.unlink()
    serving.result()


def publish(config: AgentConfig, model_id: str, *, seed: int = 0, size_bytes: int = 0) -> str:
    """Put a model into the repository as an import would; its digest."""
    repository = Path(config.repository_url.removeprefix("file://"))
    source = make_checkpoint(repository.parent / f"source-{uuid.uuid4().hex}", seed=seed, padding_bytes=size_bytes)
    destination = repository / directory_name(model_id)
    manifest = ckptio.convert(source, destination, chunk_size_bytes=config.chunk_size_bytes, overwrite=True)
    return checkpoint_digest(manifest)


def damage(path: Path, offset_bytes: int) -> None:
    """Flip one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 0xFF]))


def truncate(path: Path, size_bytes: int) -> None:
    os.truncate(path, size_bytes)


def redigest(path: Path) -> None:
    """Drop the manifest of a directory, as if its writer had been killed."""
    (path / MANIFEST_FILE).unlink()
