"""A worker of a GPU slot for tests: it allocates what it is asked to, and activates only right bytes."""

from __future__ import annotations

from pathlib import Path

import ckptio
import xxhash
from ckptio.manifest import partition_file
from whimbrel.chassis.testing import InMemoryBus
from whimbrel.wire.ids import directory_name
from whimbrel.wire.messages import AttachInstance, AttachInstanceReply

from tests.support.gpu_memory import GpuMemory
from tests.unit.storage_agent.harness import Peer


class GpuPeer(Peer):
    """The slot's device is the GPU of its number; `repository` has what was published."""

    def __init__(self, bus: InMemoryBus, memory: GpuMemory, repository: Path, slot: int = 0) -> None:
        super().__init__(bus, slot)
        self.device = f"cuda:{slot}"
        self._memory = memory
        self._repository = repository

    def _attach(self, attach: AttachInstance) -> AttachInstanceReply:
        assert attach.instance_id not in self.attaches, "attached twice"
        self._take_lease(attach)
        parts = ckptio.read_index(attach.checkpoint_path).partitions
        wanted = [(lent.device, part.size_bytes) for lent, part in zip(attach.partitions, parts, strict=True)]
        return AttachInstanceReply(handles=tuple(self._memory.allocate(attach.instance_id, wanted)))

    def _check_bytes(self, instance_id: str) -> None:
        path = self._repository / directory_name(self.attaches[instance_id].model_id)
        expected = []
        for number, part in enumerate(ckptio.read_index(path).partitions):
            with (path / partition_file(number)).open("rb") as file:
                expected.append(xxhash.xxh3_64_intdigest(file.read(part.size_bytes)))
        assert self._memory.digests(instance_id) == expected, "the device has other bytes than were published"

    def _release(self, instance_id: str) -> None:
        super()._release(instance_id)
        self._memory.free(instance_id)
