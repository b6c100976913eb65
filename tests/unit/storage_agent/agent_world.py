"""A server in which everything may happen at any time, and what has to be true of its storage agent all the while."""

from __future__ import annotations

import asyncio
import random
import resource
from dataclasses import dataclass, field
from pathlib import Path

import ckptio
from ckptio.manifest import partition_file
from whimbrel.chassis.testing import InMemoryHub
from whimbrel.wire.codec import error_of, unpack_tokens
from whimbrel.wire.errors import Cancelled, Conflict, LoadFailed, Unavailable, WhimbrelError
from whimbrel.wire.ids import new_id
from whimbrel.wire.messages import (
    EvictModel,
    GetLoads,
    LoadEnded,
    LoadFinished,
    LoadModel,
    Message,
    ModelRemoved,
    PrefetchEnded,
    PrefetchModel,
    Tier,
)

from services.storage_agent.checkpoints import checkpoint_digest
from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.core.residency import Residency
from services.storage_agent.lending import holder_of
from services.storage_agent.ssd_tier import BEGINNING
from tests.support.checkpoints import make_checkpoint
from tests.unit.storage_agent.harness import SERVER, Harness, a_config, damage
from tests.unit.storage_agent.mortal import Life
from tests.unit.storage_agent.strict_peer import StrictPeer

CHUNK_BYTES = 16 * 1024
POOL_CHUNKS = 48
SLOTS = 2
# Seconds. Nothing takes this long but what waits for memory that instances have; then they are unloaded.
SETTLED_AFTER_S = 0.4
FLIGHTS_MAX = 8
# Every load ends in this time once nobody holds anything.
ENDS_S_MAX = 30.0
# No file may grow past this while the disk is full: journals and leases fit, weights do not.
FULL_FILE_BYTES = 24 * 1024

# What may end a load that nobody cancelled, and what must have happened then.
EXCUSES: dict[type[WhimbrelError], set[str]] = {
    Cancelled: {"cancelled", "removed"},
    LoadFailed: {"repository"},
    Unavailable: {"disk", "worker", "removed"},
    Conflict: {"worker"},
}


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """A load or prefetch that was commanded. `excuses` are what happened that may end it."""

    command: LoadModel | PrefetchModel
    slot: int | None
    began_s: float
    excuses: set[str] = field(default_factory=set)

    @property
    def model_id(self) -> str:
        return self.command.model_id


@dataclass(slots=True, kw_only=True, eq=False)
class Known:
    """A model, and what the test did to it. `kept` are the tiers in which it must stay."""

    key: CheckpointKey
    faults: set[str] = field(default_factory=set)
    pins: set[Tier] = field(default_factory=set)
    kept: set[Tier] = field(default_factory=set)
    is_removing: bool = False
    bad_offset: int | None = None


class World:
    """The agent, its workers and its scheduler. Every step ends with `check`."""

    def __init__(self, home: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.config = a_config(
            home,
            chunk_size_bytes=CHUNK_BYTES,
            pool_bytes=POOL_CHUNKS * CHUNK_BYTES,
            ssd_bytes=56 * CHUNK_BYTES,
            probe_bytes=4 * CHUNK_BYTES,
        )
        self.models = {name: self._publish(home, name, number) for number, name in enumerate("abcd")}
        self.flights: dict[str, Flight] = {}
        self.instances: dict[str, str] = {}
        self.ended: dict[str, int] = {}
        self.is_disk_full = False
        self.hub = InMemoryHub()

    def _publish(self, home: Path, name: str, number: int) -> Known:
        source = make_checkpoint(home / f"source-{name}", seed=number, padding_bytes=number * 3 * CHUNK_BYTES)
        directory = home / "repository" / name
        manifest = ckptio.convert(source, directory, chunk_size_bytes=CHUNK_BYTES, partitioning=1 + number % 2)
        return Known(key=CheckpointKey(model_id=name, checkpoint_digest=checkpoint_digest(manifest)))

    async def start(self) -> None:
        self.peers = [StrictPeer(self.hub.bus(name=f"worker {slot}"), slot) for slot in range(SLOTS)]
        bus = self.hub.bus(name="scheduler")
        self.life = Life(self.config, self.hub)
        self.harness = Harness(hub=self.hub, bus=bus, config=self.config, peer=self.peers[0], service=self.life.service)
        await self.harness.listen()
        for peer in self.peers:
            await peer.serve()
        await self.begin_life(self.life)

    async def begin_life(self, life: Life) -> None:
        self.life, self.harness.service = life, life.service
        await life.start()
        for peer in self.peers:
            await peer.connect(life.service._parts.presence.path)
            await peer.beat()

    async def close(self) -> None:
        self.set_disk_full(is_full=False)
        for peer in self.peers:
            peer.close()
            peer.hang_up()
        await self.life.stop()
        for bus in (self.harness.bus, *(peer.bus for peer in self.peers)):
            await bus.drain()
        self.config.pool_path.unlink(missing_ok=True)

    @property
    def residency(self) -> Residency:
        return self.life.service.tiers.residency

    # --- what happens ---

    def fly(self, command: LoadModel | PrefetchModel, slot: int | None) -> None:
        known = self.models[command.model_id]
        flight = Flight(command=command, slot=slot, began_s=asyncio.get_running_loop().time())
        flight.excuses |= known.faults | ({"removed"} if known.is_removing else set())
        self.flights[command.task_id] = flight

    async def load(self, model_id: str, slot: int) -> LoadModel:
        known = self.models[model_id]
        self.harness.peer = self.peers[slot]
        instance_id = new_id("inst")
        self.instances[instance_id] = model_id
        command = await self.harness.start_load(
            model_id, known.key.checkpoint_digest, instance_id=instance_id, size_bytes=CHUNK_BYTES
        )
        if known.is_removing:
            # The load counts more than a removal that has not begun; commands are heard in order.
            assert await self.ask(GetLoads()) is None
            known.is_removing, known.pins = False, self.residency.pinned(model_id)
        self.fly(command, slot)
        return command

    async def ask(self, message: Message) -> WhimbrelError | None:
        """Command the agent; the error that it answers."""
        bus = self.harness.bus
        try:
            await bus.request(bus.subjects.to_agent(SERVER, message), message, timeout_s=ENDS_S_MAX)
        except WhimbrelError as error:
            return error
        return None

    def fault(self, name: str, model_ids: list[str]) -> None:
        """From now on, and for whoever joins what is under way now, this is an excuse."""
        for model_id in model_ids:
            self.models[model_id].faults.add(name)
        for flight in self.flights.values():
            if flight.model_id in model_ids:
                flight.excuses.add(name)

    def set_disk_full(self, *, is_full: bool) -> None:
        self.is_disk_full = is_full
        limit_files(FULL_FILE_BYTES if is_full else None)
        if is_full:
            self.fault("disk", list(self.models))

    def damage(self, path: Path, offset_bytes: int) -> None:
        """Flip a byte; a full disk is no hindrance."""
        limit_files(None)
        try:
            damage(path, offset_bytes)
        finally:
            limit_files(FULL_FILE_BYTES if self.is_disk_full else None)

    def corrupt_repository(self, model_id: str, chunk: int) -> None:
        """Flip a byte there, or flip it back."""
        known = self.models[model_id]
        path = self.config.ssd_dir.parent / "repository" / model_id / partition_file(0)
        if known.bad_offset is None:
            known.bad_offset = chunk * CHUNK_BYTES % path.stat().st_size
            self.fault("repository", [model_id])
            self.damage(path, known.bad_offset)
        else:
            self.damage(path, known.bad_offset)
            known.bad_offset = None

    def forget_lives(self, pins_kept: dict[str, set[Tier]]) -> None:
        """The agent was killed or stopped: what it did not say will never be said."""
        for flight in self.flights.values():
            if isinstance(flight.command, LoadModel) and flight.slot is not None:
                peer = self.peers[flight.slot]
                if flight.command.instance_id not in peer.digests:
                    peer._release(flight.command.instance_id)
        self.flights.clear()
        for peer in self.peers:
            peer.hang_up()
        for model_id, known in self.models.items():
            copy = self.residency.ssd(known.key)
            # A pin outlives the agent, with or without a copy; what it keeps is a copy that was there.
            known.pins, known.is_removing = pins_kept[model_id], False
            known.kept = known.pins & ({Tier.SSD} if copy is not None else set())
            known.faults.clear()

    # --- what must be true ---

    def check(self) -> None:
        self.life.check_alive()
        self.harness.check()
        self._check_instances()
        self._check_pins()
        self._check_ends()
        for model_id, known in self.models.items():
            if self.life.service._parts.fillings.find(known.key) is None:
                known.faults = {"disk"} if self.is_disk_full else set()
                if self.models[model_id].bad_offset is not None:
                    known.faults.add("repository")

    def _check_instances(self) -> None:
        """Nothing held is evicted, and the bytes of an instance stay what they were."""
        for peer in self.peers:
            for instance_id, attach in peer.attaches.items():
                if attach.agent_epoch == self.life.service._epoch:
                    (copy,) = [c for c in self.residency.dram_copies() if holder_of(instance_id) in c.holders]
                    mapped = [unpack_tokens(part.chunks) for part in attach.partitions]
                    assert [list(part) for part in copy.partitions()] == mapped
            for instance_id, digests in peer.digests.items():
                assert peer.digests_now(instance_id) == digests, f"the bytes of {instance_id} changed"

    def _check_pins(self) -> None:
        for model_id, known in self.models.items():
            pinned = self.residency.pinned(model_id)
            if known.is_removing:  # at any time from now on the pins go with the model
                assert pinned <= known.pins
                known.pins, known.kept = pinned, set()
            assert pinned == known.pins
            dram = self.residency.find(known.key)
            here = set()
            ssd = self.residency.ssd(known.key)
            if ssd is not None and BEGINNING not in ssd.users:
                here.add(Tier.SSD)
            if dram is not None and dram.is_whole:
                here.add(Tier.DRAM)
            assert known.kept <= here, f"{model_id} is pinned in {known.kept} and is in {here}"
            known.kept = known.pins & here

    def _check_ends(self) -> None:
        heard, self.harness.heard = self.harness.heard, []
        for message in heard:
            if isinstance(message, ModelRemoved):
                self.models[message.model_id].is_removing = False
            if isinstance(message, LoadFinished | LoadEnded | PrefetchEnded):
                flight = self.flights.pop(message.task_id, None)
                if flight is not None:
                    self._check_end(flight, message)

    def _check_end(self, flight: Flight, end: LoadFinished | LoadEnded | PrefetchEnded) -> None:
        error = None if isinstance(end, LoadFinished) or end.error is None else error_of(end.error)
        outcome = "finished" if error is None else error.code
        self.ended[outcome] = self.ended.get(outcome, 0) + 1
        if error is None:
            return
        if isinstance(error, Unavailable) and (error.what.startswith("SSD space") or "it is pinned by" in error.what):
            return  # everything is in use or pinned: it can be tried again
        allowed = EXCUSES.get(type(error), set())
        assert allowed & flight.excuses, f"{flight.command} ended by {error!r}; there was only {flight.excuses}"

    def may_conflict(self, command: EvictModel) -> bool:
        """Whether somebody uses what should be evicted, or it is pinned."""
        known = self.models[command.model_id]
        users = {self.instances.get(instance_id) for instance_id in self.life.service.tiers.lending.attached()}
        flying = {flight.model_id for flight in self.flights.values()}
        is_filled = self.life.service._parts.fillings.find(known.key) is not None
        return bool(known.pins) or command.model_id in users | flying or is_filled


def limit_files(size_bytes: int | None) -> None:
    """No file of this process may grow past this size: to whoever writes that is a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size_bytes is None else size_bytes, hard))
