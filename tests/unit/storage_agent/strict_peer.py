"""A worker that serves for life what it activated, and that can be killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import xxhash
from whimbrel.chassis.testing import InMemoryBus
from whimbrel.wire.errors import Conflict
from whimbrel.wire.messages import WorkerHello

from tests.unit.storage_agent.harness import Peer


class StrictPeer(Peer):
    """A worker that remembers what it serves, and can be killed."""

    def __init__(self, bus: InMemoryBus, slot: int) -> None:
        super().__init__(bus, slot)
        self.digests: dict[str, list[int]] = {}
        self.epoch = 1
        self._presence: asyncio.StreamWriter | None = None

    async def connect(self, path: Path) -> None:
        _, self._presence = await asyncio.open_unix_connection(path)
        hello = WorkerHello(slot=self.slot, worker_epoch=self.epoch, pid=1)
        self._presence.write(msgspec.json.encode(hello) + b"\n")

    def hang_up(self) -> None:
        if self._presence is not None:
            self._presence.close()
            self._presence = None

    def die(self) -> None:
        """The kernel drops locks, mappings and connections."""
        for instance_id in list(self._locks):
            self._release(instance_id)
        self.hang_up()
        self.epoch += 1

    def _check_bytes(self, instance_id: str) -> None:
        if instance_id not in self.attaches:
            raise Conflict(reason=f"this worker knows no instance {instance_id}")
        super()._check_bytes(instance_id)
        self.digests[instance_id] = self.digests_now(instance_id)

    def _release(self, instance_id: str) -> None:
        self.digests.pop(instance_id, None)
        super()._release(instance_id)

    def digests_now(self, instance_id: str) -> list[int]:
        found = []
        for mapping in self.mappings[instance_id]:
            with memoryview(mapping) as view:
                found.append(xxhash.xxh3_64_intdigest(view))
        return found
