"""Random migrations under a bad network, on virtual time: real cores of three workers, requests that move all the time,
and messages that are lost, doubled, late and out of order. A failure names its seed."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from whimbrel.wire.codec import pack_tokens, unpack_tokens
from whimbrel.wire.errors import InferenceLost, WhimbrelError
from whimbrel.wire.messages import (
    AbandonMigration,
    FinishReason,
    HandOver,
    Message,
    MigrateInstance,
    MigrationEnded,
    ResendTokens,
    RoundCompleted,
    Route,
    RouterHeartbeat,
    RouteState,
    Sampling,
    SourceStopped,
    StartInference,
    StartRound,
    TokenEntry,
    TokenFrame,
)

from services.gpu_worker.core.instance import Instance, State
from services.gpu_worker.core.instance_events import (
    BytesVerified,
    ChunksMapped,
    ConfigArrived,
    ModelActivated,
    SkeletonBuilt,
    TensorsBound,
)
from tests.simulation.clock import Clock
from tests.simulation.inferences import token_of
from tests.simulation.network import NO_FAULTS, Call, Faults, Listener, Network
from tests.simulation.workers import SimWorker

FAULTS = Faults(lost=0.08, doubled=0.1, late=0.12)
SLOTS = 3
REQUESTS = 6
PROMPT = tuple(range(1, 30))
OUTPUT_TOKENS = 150
TOKEN_S = 0.02


class Stream:
    """A request as a router sees it: every position once; `epoch` counts the starts."""

    def __init__(self, world: World, request_id: str) -> None:
        self.world = world
        self.request_id = request_id
        self.tokens: list[int] = []
        self.epoch = 0
        self.slot = 0
        self.is_over = False
        self.base_tokens = 0
        self.starts_with_base = 0

    def start(self, slot: int, base_tokens: int = 0) -> None:
        self.slot, self.epoch, self.base_tokens = slot, self.epoch + 1, base_tokens
        self.starts_with_base += base_tokens > 0
        self.world.spawn(self._start(self.epoch))

    async def _start(self, epoch: int) -> None:
        world = self.world
        tokens = [*PROMPT, *self.tokens]
        message = StartInference(
            request_id=self.request_id,
            epoch=epoch,
            router_id="r",
            router_epoch=1,
            instance_id=instance_of(self.slot),
            model_id="m",
            tokens=pack_tokens(tokens[self.base_tokens :]),
            prompt_tokens=len(PROMPT),
            output_tokens_max=OUTPUT_TOKENS,
            stop_tokens=(),
            sampling=Sampling(temperature=0.0),
            base_tokens=self.base_tokens,
        )
        while self.epoch == epoch:
            try:
                await world.network.request(world, worker_of(self.slot), message, 0.3)
            except InferenceLost:
                self._start_again(epoch, self.slot)
            except WhimbrelError as error:
                # Unanswered is repeated; refused goes elsewhere.
                if error.code == "instance_gone":
                    await world.clock.sleep(0.05)
                    self._start_again(epoch, world.chance.randrange(SLOTS))
            else:
                return

    def _start_again(self, epoch: int, slot: int) -> None:
        if self.epoch == epoch:
            self.start(slot)

    def on_entry(self, entry: TokenEntry) -> None:
        if entry.epoch != self.epoch or self.is_over or entry.position > len(self.tokens):
            return
        for token in unpack_tokens(entry.tokens)[len(self.tokens) - entry.position :]:
            assert token == token_of(self.request_id, len(self.tokens)), f"{self.request_id} at {len(self.tokens)}"
            self.tokens.append(token)
        if entry.finish_reason is FinishReason.MOVED:
            assert entry.moved is not None
            self.start(entry.moved.route.slot, entry.moved.base_tokens)
        elif entry.finish_reason is not None:
            assert entry.finish_reason is FinishReason.LENGTH, entry.finish_reason
            assert len(self.tokens) == OUTPUT_TOKENS
            self.is_over = True

    def tick(self) -> None:
        if not self.is_over and self.epoch:
            resend = ResendTokens(request_id=self.request_id, epoch=self.epoch, position=len(self.tokens))
            self.world.network.send(self.world, worker_of(self.slot), resend)


def instance_of(slot: int) -> str:
    return f"inst-{slot}"


def worker_of(slot: int) -> tuple[str | int, ...]:
    return ("worker", "s", slot)


class World(Listener):
    """The scheduler and the router in one process, which migrate as chance has it."""

    def __init__(self, seed: int) -> None:
        clock = Clock(seed)
        super().__init__(clock, ("leader",))
        self.chance = random.Random(f"migrations {seed}")
        self.network = Network(clock)
        self.network.join(self)
        self.network.listeners["router", "r"] = self
        self.workers = [self._worker(slot) for slot in range(SLOTS)]
        self.streams = {f"q{n}": Stream(self, f"q{n}") for n in range(REQUESTS)}
        self.migrations = itertools.count(1)
        self.current: dict[int, MigrateInstance] = {}
        self.rounds: dict[str, int] = {}
        self.stopped = 0
        self.every(0.5, self._beat)
        self.every(0.2, lambda: [stream.tick() for stream in self.streams.values()] and None)

    def _worker(self, slot: int) -> SimWorker:
        worker = SimWorker(
            self.network, "s", slot, epoch=1, device="cpu", memory_bytes=0, leases={}, token_s=lambda _: TOKEN_S
        )
        instance = worker.instance = Instance(instance_of(slot), "m")
        events: list[Any] = [
            ConfigArrived(), SkeletonBuilt(), ChunksMapped(), TensorsBound(), BytesVerified(), ModelActivated(),
        ]  # fmt: skip
        for event in events:
            instance.on(event, 0.0)
        assert instance.state is State.READY
        return worker

    def _beat(self) -> None:
        beat = RouterHeartbeat(router_id="r", epoch=1, active=(), waiting_requests=0, oldest_wait_s=0.0)
        self.network.broadcast(self, ("worker",), beat)

    def hear(self, message: Message, call: Call | None) -> None:
        match message:
            case TokenFrame():
                for entry in message.entries:
                    self.streams[entry.request_id].on_entry(entry)
            case RoundCompleted():
                self.rounds[message.migration_id] = message.round
                self._go_on(message.migration_id, may_hand_over=True)
            case SourceStopped():
                self.stopped += 1
                self._end(message.migration_id)
            case MigrationEnded():
                self._end(message.migration_id)
            case _:
                pass

    def _slot_of(self, migration_id: str) -> int | None:
        return next((slot for slot, each in self.current.items() if each.migration_id == migration_id), None)

    def _go_on(self, migration_id: str, *, may_hand_over: bool) -> None:
        slot = self._slot_of(migration_id)
        if slot is None:
            return
        command = self.current[slot]
        number = self.rounds.get(migration_id, 0)
        ids = {"migration_id": migration_id, "instance_id": command.instance_id, "scheduler_epoch": 1}
        if number == 0:
            self.network.send(self, worker_of(slot), command)
        elif may_hand_over and self.chance.random() < 0.5:
            self.network.send(self, worker_of(slot), HandOver(**ids))
        else:
            self.network.send(self, worker_of(slot), StartRound(round=number + 1, **ids))

    def _end(self, migration_id: str) -> None:
        """The source takes requests again, which an unloaded instance would never do."""
        slot = self._slot_of(migration_id)
        if slot is not None:
            del self.current[slot]
            self.spawn(self._release(slot, migration_id))

    async def _release(self, slot: int, migration_id: str) -> None:
        await self.clock.sleep(self.chance.choice([0.0, 0.3]))
        for _ in range(4):
            abandon = AbandonMigration(migration_id=migration_id, scheduler_epoch=1)
            self.network.send(self, worker_of(slot), abandon)
            await self.clock.sleep(0.1)

    def trouble(self) -> None:
        """Begin, repeat or give up a migration."""
        source, destination = self.chance.sample(range(SLOTS), 2)
        command = self.current.get(source)
        if command is None:
            route = Route(
                instance_id=instance_of(destination), model_id="m", server_id="s", slot=destination,
                state=RouteState.READY,
            )  # fmt: skip
            self.current[source] = MigrateInstance(
                migration_id=f"m{next(self.migrations)}", instance_id=instance_of(source), destination=route,
                scheduler_epoch=1,
            )  # fmt: skip
            self._go_on(self.current[source].migration_id, may_hand_over=False)
        elif self.chance.random() < 0.2:
            abandon = AbandonMigration(migration_id=command.migration_id, scheduler_epoch=1)
            self.network.send(self, worker_of(command.destination.slot), abandon)
            self._end(command.migration_id)
        else:
            self._go_on(command.migration_id, may_hand_over=True)

    def restore_order(self) -> None:
        self.network.faults = NO_FAULTS
        for migration in list(self.current.values()):
            self._end(migration.migration_id)
        for worker in self.workers:
            if worker.inferences.rounds.migration_id is not None:
                abandon = AbandonMigration(migration_id=worker.inferences.rounds.migration_id, scheduler_epoch=1)
                self.network.send(self, worker.name, abandon)


@pytest.mark.parametrize("seed", range(25))
def test_requests_that_move_all_the_time_get_every_token_once(seed: int) -> None:
    """G11, X6: whatever is lost, doubled, late or out of order; KV caches are those of the tokens they stand for."""
    world = World(seed)
    for stream in world.streams.values():
        stream.start(world.chance.randrange(SLOTS))
    world.network.faults = FAULTS
    for _ in range(400):
        world.trouble()
        world.clock.run(world.chance.choice([0.001, 0.02, 0.1]))
    for _ in range(30):
        world.restore_order()
        world.clock.run(2.0)
    for stream in world.streams.values():
        assert stream.is_over, f"seed {seed}: {stream.request_id} has {len(stream.tokens)} tokens at {stream.slot}"
    world.clock.run(40.0)
    for worker in world.workers:
        assert (worker.inferences.active, len(worker.inferences.resumptions)) == (0, 0)
        assert worker.inferences.kv_caches._tokens == {}, "nothing is kept of what is over"
    print(f"seed {seed}: {world.stopped} handovers, {sum(s.starts_with_base for s in world.streams.values())} resumed")
