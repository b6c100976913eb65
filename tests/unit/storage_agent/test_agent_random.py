"""Random operations on a real agent, with real files, a real pool and workers that check every byte."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import ckptio
import pytest
import structlog
from ckptio.plan import plan_chunks
from whimbrel.wire.errors import Conflict
from whimbrel.wire.ids import new_id
from whimbrel.wire.messages import CancelLoad, EvictModel, LoadFinished, PinModel, PrefetchModel, Tier, UnpinModel

from services.storage_agent.ssd import SsdDirectory
from tests.unit.storage_agent.agent_world import (
    CHUNK_BYTES,
    ENDS_S_MAX,
    FLIGHTS_MAX,
    SETTLED_AFTER_S,
    SLOTS,
    World,
)
from tests.unit.storage_agent.mortal import Life

STEPS = 200
SEEDS = range(1, 9)
# How likely the disk has room and the repository is right again before a step.
HEALED = 0.15
CACHES = (Tier.SSD, Tier.DRAM)


@pytest.fixture
def quiet() -> Iterator[None]:
    """The log of a random run is long, and files may not grow while the disk is full."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


class Chaos:
    """One seeded run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.chance: random.Random = world.chance
        self.said: list[str] = []

    # --- operations ---

    async def load(self) -> None:
        if len(self.world.flights) < FLIGHTS_MAX:
            await self.world.load(self.model(), self.chance.randrange(SLOTS))

    async def prefetch(self) -> None:
        known = self.world.models[self.model()]
        command = PrefetchModel(
            task_id=new_id("task"),
            model_id=known.key.model_id,
            checkpoint_digest=known.key.checkpoint_digest,
            tier=self.chance.choice(CACHES),
        )
        self.world.fly(command, None)
        assert await self.world.ask(command) is None

    async def cancel(self) -> None:
        if self.world.flights:
            flight = self.chance.choice(list(self.world.flights.values()))
            flight.excuses.add("cancelled")
            await self.world.harness.send(CancelLoad(task_id=flight.command.task_id))

    async def unload(self) -> None:
        peer = self.chance.choice(self.world.peers)
        if peer.digests:
            await peer.unload(self.chance.choice(list(peer.digests)))

    async def evict(self) -> None:
        command = EvictModel(model_id=self.model(), tier=self.chance.choice(CACHES))
        might = self.world.may_conflict(command)
        error = await self.world.ask(command)
        assert error is None or isinstance(error, Conflict)
        assert error is None or might or self.world.may_conflict(command), f"{command}: {error}"

    async def pin(self) -> None:
        command = PinModel(model_id=self.model(), tier=self.chance.choice(CACHES))
        self.world.models[command.model_id].pins.add(command.tier)
        assert await self.world.ask(command) is None

    async def unpin(self) -> None:
        command = UnpinModel(model_id=self.model(), tier=self.chance.choice(CACHES))
        await self.let_leave(command.model_id, command.tier)

    async def let_leave(self, model_id: str, tier: Tier) -> None:
        known = self.world.models[model_id]
        known.pins.discard(tier)
        known.kept.discard(tier)
        if not known.pins:
            known.kept.clear()
        assert await self.world.ask(UnpinModel(model_id=model_id, tier=tier)) is None

    async def remove(self) -> None:
        known = self.world.models[self.model()]
        self.world.fault("removed", [known.key.model_id])
        known.is_removing = True
        await self.world.harness.remove(known.key.model_id)

    async def kill_worker(self) -> None:
        peer = self.chance.choice(self.world.peers)
        for flight in self.world.flights.values():
            if flight.slot == peer.slot:
                flight.excuses.add("worker")
        peer.die()
        await asyncio.sleep(0)
        await peer.connect(self.world.life.service._parts.presence.path)
        await peer.beat()

    async def kill_agent(self) -> None:
        self.world.set_disk_full(is_full=False)
        kept = [
            copy.key.model_id
            for copy in self.world.residency.ssd_copies()
            if copy.is_whole
            and Tier.SSD in self.world.models[copy.key.model_id].pins
            and not self.world.models[copy.key.model_id].is_removing
        ]
        await self.world.life.kill()
        pins = self.pins_on_disk()
        assert all(pins[model_id] for model_id in kept), "a pin on the SSD outlives the agent"
        await self.begin_next_life(pins)

    async def restart(self) -> None:
        self.world.set_disk_full(is_full=False)
        await self.settle()
        pins = {model_id: known.pins & {Tier.SSD} for model_id, known in self.world.models.items()}
        removing = [model_id for model_id, known in self.world.models.items() if known.is_removing]
        await self.world.life.stop()
        on_disk = self.pins_on_disk()
        await self.begin_next_life(pins | {model_id: on_disk[model_id] for model_id in removing})

    def pins_on_disk(self) -> dict[str, set[Tier]]:
        directory = self.world.config.ssd_dir
        return {
            model_id: {Tier.SSD} if model_id in SsdDirectory(directory).read_pins() else set()
            for model_id in self.world.models
        }

    async def begin_next_life(self, pins: dict[str, set[Tier]]) -> None:
        self.world.forget_lives(pins)
        await self.world.begin_life(Life(self.world.config, self.world.hub))

    async def fill_disk(self) -> None:
        self.world.set_disk_full(is_full=True)

    def heal(self) -> None:
        self.world.set_disk_full(is_full=False)
        for model_id, known in self.world.models.items():
            if known.bad_offset is not None:
                self.world.corrupt_repository(model_id, 0)

    async def corrupt_ssd(self) -> None:
        path = self.world.config.ssd_dir / self.model()
        with contextlib.suppress(FileNotFoundError, ckptio.CkptioError):
            partition, offset_bytes = self.chance.choice(stored_chunks(ckptio.read_index(path)))
            self.world.damage(path / f"partition_{partition}.bin", offset_bytes)

    async def corrupt_repository(self) -> None:
        self.world.corrupt_repository(self.model(), self.chance.randrange(20))

    # --- the run ---

    def model(self) -> str:
        return self.chance.choice(list(self.world.models))

    async def step(self) -> None:
        operations: dict[Callable[[], Awaitable[None]], int] = {
            self.load: 36, self.prefetch: 10, self.cancel: 10, self.unload: 16, self.evict: 8, self.pin: 4,
            self.unpin: 5, self.remove: 4, self.kill_worker: 4, self.kill_agent: 3, self.restart: 1,
            self.fill_disk: 4, self.corrupt_ssd: 6, self.corrupt_repository: 4,
        }  # fmt: skip
        if self.chance.random() < HEALED:
            self.heal()
        (operation,) = self.chance.choices(list(operations), weights=list(operations.values()))
        self.said.append(operation.__name__)
        await operation()
        self.world.check()
        # Whatever is under way gets on a little, or a good deal.
        for _ in range(self.chance.choice((0, 1, 5, 20))):
            await asyncio.sleep(0)
        await asyncio.sleep(self.chance.choice((0.0, 0.0, 0.002, 0.01)))
        self.world.check()
        now = asyncio.get_running_loop().time()
        if any(now - flight.began_s > SETTLED_AFTER_S for flight in self.world.flights.values()):
            await self.settle()

    async def settle(self) -> None:
        """Nobody holds anything any more, so every load ends."""
        async with asyncio.timeout(ENDS_S_MAX):
            while self.world.flights:
                for peer in self.world.peers:
                    for instance_id in list(peer.digests):
                        await peer.unload(instance_id)
                for model_id in self.world.models:
                    if Tier.DRAM in self.world.models[model_id].pins:
                        await self.let_leave(model_id, Tier.DRAM)
                await asyncio.sleep(0.002)
                self.world.check()

    async def finish(self) -> None:
        """All is well again: every model loads, its SSD copy is right or repaired, and everything can go."""
        world = self.world
        self.heal()
        await self.settle()
        for model_id in world.models:
            for tier in CACHES:
                await self.let_leave(model_id, tier)
            await self.until_evicted(EvictModel(model_id=model_id, tier=Tier.DRAM))
        world.check()
        for model_id, known in world.models.items():
            command = await world.load(model_id, 0)
            assert isinstance(await world.harness.end_of(command), LoadFinished)
            await world.peers[0].unload(command.instance_id)
            await world.harness.heartbeat_with(
                lambda beat: not beat.attached and not world.life.service._parts.fillings.find(known.key)  # noqa: B023
            )
            ckptio.verify(world.config.ssd_dir / model_id)
        world.flights.clear()
        for model_id in world.models:
            await self.until_evicted(EvictModel(model_id=model_id, tier=Tier.SSD))
        world.check()
        assert world.residency.used_chunks() == world.residency.ssd_used_bytes() == 0
        assert world.harness.ssd_entries() == []

    async def until_evicted(self, command: EvictModel) -> None:
        """Storing what was fetched may still go on, and leases are noticed within a second."""
        async with asyncio.timeout(ENDS_S_MAX):
            while isinstance(await self.world.ask(command), Conflict):
                for peer in self.world.peers:
                    for instance_id in list(peer.attaches):
                        await peer.unload(instance_id)
                await asyncio.sleep(0.002)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("seed", SEEDS)
async def test_two_hundred_random_operations_leave_every_account_right_and_every_load_ended(
    home: Path, seed: int
) -> None:
    """E4, L2, P1: used chunks are the sum of the residents after every step, nothing locks up, every load ends."""
    world = World(home, seed)
    chaos = Chaos(world)
    await world.start()
    try:
        for _ in range(STEPS):
            await chaos.step()
        await chaos.finish()
    except BaseException:
        print(f"seed {seed}, after {len(chaos.said)} operations: {' '.join(chaos.said[-30:])}")
        raise
    finally:
        await world.close()
    print(f"seed {seed}: {world.ended}")
    assert world.ended["finished"] > 10


def stored_chunks(index: ckptio.Index) -> list[tuple[int, int]]:
    """Partition and offset of every chunk."""
    return [
        (number, chunk.offset_bytes)
        for number, part in enumerate(index.partitions)
        for chunk in plan_chunks(part.padded_bytes, CHUNK_BYTES)
    ]
