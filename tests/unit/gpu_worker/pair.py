"""Two workers on one bus, between which requests move; the bus loses, doubles and holds back what it is told to."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace
from whimbrel.chassis.testing import InMemoryHub
from whimbrel.wire.codec import decode, pack_tokens, unpack_tokens
from whimbrel.wire.messages import (
    AbandonMigration,
    Ack,
    FinishReason,
    HandOver,
    Message,
    MigrateInstance,
    MigrationEnded,
    ResumeInference,
    RoundCompleted,
    Route,
    RouteState,
    SourceStopped,
    StartInference,
    StartRound,
    TokenEntry,
)

from services.gpu_worker.engines.echo_engine import EchoCosts, EchoEngine
from services.gpu_worker.engines.engine import Decoded, Engine, Known
from tests.unit.gpu_worker.builders import Lender
from tests.unit.gpu_worker.harness import ANSWER_S_MAX, Outside, SteppedEngine, SteppedModel, a_worker
from tests.unit.gpu_worker.tiny_models import TinyModel

ANSWER = list(range(1, 21))


class PiecedEngine(EchoEngine):
    """Its prefill waits piece by piece; `pieces` are their ends."""

    def __init__(self) -> None:
        super().__init__(EchoCosts())
        self.pieces: list[tuple[str, int]] = []
        self.failure: Exception | None = None
        self._allowed = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)

    def allow(self, pieces: int = 1) -> None:
        self._allowed.release(pieces)

    def wait_for_begun(self) -> None:
        assert self._begun.acquire(timeout=ANSWER_S_MAX), "no piece was begun"

    def prefill(self, known: Known, end: int) -> None:
        self._begun.release()
        assert self._allowed.acquire(timeout=ANSWER_S_MAX), "no piece was allowed"
        if self.failure is not None:
            raise self.failure
        self.pieces.append((known.request_id, end))
        super().prefill(known, end)

    def decode(self, sequence: Any) -> Decoded:
        self.pieces.append((sequence.request_id, len(sequence.tokens)))
        return super().decode(sequence)


class MeddledHub(InMemoryHub):
    """`lose` and `double` count messages by type that are still to be lost or doubled; those of a type in `held` wait
    for `release`. `said` is everything that was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Message] = []
        self.lose: Counter[type[Message]] = Counter()
        self.double: Counter[type[Message]] = Counter()
        self.held: set[type[Message]] = set()
        self._waiting: list[tuple[str, bytes, str | None]] = []

    def route(self, subject: str, data: bytes, reply_to: str | None) -> bool:
        message = decode(data)
        kind = type(message)
        self.said.append(message)
        if kind in self.held:
            self._waiting.append((subject, data, reply_to))
            return True
        if self.lose[kind] > 0:
            self.lose[kind] -= 1
            return True
        if self.double[kind] > 0:
            self.double[kind] -= 1
            super().route(subject, data, reply_to)
        return super().route(subject, data, reply_to)

    def release(self, *, is_reversed: bool = False) -> None:
        self.held.clear()
        waiting, self._waiting = self._waiting, []
        for subject, data, reply_to in reversed(waiting) if is_reversed else waiting:
            super().route(subject, data, reply_to)

    def rounds(self) -> list[ResumeInference]:
        return [message for message in self.said if isinstance(message, ResumeInference)]


class Pair:
    """The scheduler and the routers of two workers: `source` has inst-1, `destination` inst-2."""

    def __init__(self, hub: MeddledHub, source: Outside, destination: Outside) -> None:
        self.hub = hub
        self.source = source
        self.destination = destination
        self._migrations = itertools.count(1)
        self.migration_id = "m0"

    # The scheduler.

    async def migrate(self, migration_id: str | None = None) -> None:
        self.migration_id = migration_id or f"m{next(self._migrations)}"
        await self.source.tell(self.migrate_instance())

    async def move(self, engine: SteppedEngine) -> None:
        """One round, then the handover, which waits for the step that runs."""
        await self.migrate()
        await self.round_completed()
        await self.source.ask(self.hand_over())
        engine.allow(1)

    def migrate_instance(self, **changes: Any) -> MigrateInstance:
        fields: dict[str, Any] = {
            "migration_id": self.migration_id,
            "instance_id": "inst-1",
            "destination": self.route,
            "scheduler_epoch": 1,
        }
        return MigrateInstance(**(fields | changes))

    @property
    def route(self) -> Route:
        config = self.destination.config
        return Route(
            instance_id="inst-2",
            model_id="m",
            server_id=config.server_id,
            slot=config.slot,
            state=RouteState.READY,
        )

    def start_round(self, number: int) -> StartRound:
        return StartRound(migration_id=self.migration_id, instance_id="inst-1", round=number, scheduler_epoch=1)

    def hand_over(self, **changes: Any) -> HandOver:
        fields: dict[str, Any] = {
            "migration_id": self.migration_id,
            "instance_id": "inst-1",
            "scheduler_epoch": 1,
        }
        return HandOver(**(fields | changes))

    async def abandon(self, *, at_destination: bool = True) -> None:
        command = AbandonMigration(migration_id=self.migration_id, scheduler_epoch=1)
        await self.source.ask(command)
        if at_destination:
            await self.destination.ask(command)

    def of_this(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.source.all(kind) if message.migration_id == self.migration_id]

    async def round_completed(self, number: int = 1) -> RoundCompleted:
        def completed() -> list[RoundCompleted]:
            return [message for message in self.of_this(RoundCompleted) if message.round == number]

        await self.source.until(lambda: bool(completed()))
        return completed()[0]

    async def stopped(self) -> SourceStopped:
        await self.source.until(lambda: bool(self.of_this(SourceStopped)))
        return self.of_this(SourceStopped)[0]  # type: ignore[no-any-return]

    async def ended(self) -> MigrationEnded:
        await self.source.until(lambda: bool(self.of_this(MigrationEnded)))
        return self.of_this(MigrationEnded)[0]  # type: ignore[no-any-return]

    # The router.

    def last(self, request_id: str = "req-1") -> TokenEntry | None:
        return next((entry for entry in self.source.entries(request_id) if entry.finish_reason is not None), None)

    async def moved(self, request_id: str = "req-1") -> TokenEntry:
        await self.source.until(lambda: self.last(request_id) is not None)
        entry = self.last(request_id)
        assert entry is not None
        assert entry.finish_reason is FinishReason.MOVED
        assert entry.moved is not None
        return entry

    async def restart(self, request: StartInference, **changes: Any) -> StartInference:
        """What a router starts at the destination when its request has moved."""
        entry = await self.moved(request.request_id)
        assert entry.moved is not None
        tokens = [*unpack_tokens(request.tokens), *self.source.tokens(request.request_id)]
        base = changes.pop("base_tokens", entry.moved.base_tokens)
        return replace(
            request,
            epoch=request.epoch + 1,
            instance_id=entry.moved.route.instance_id,
            tokens=pack_tokens(tokens[base:]),
            base_tokens=base,
            **changes,
        )

    async def go_on(self, request: StartInference) -> list[int]:
        """The whole output, when the request has moved and its end was heard."""
        again = await self.restart(request)
        assert isinstance(await self.destination.ask(again), Ack)
        return await self.rest(request)

    async def rest(self, request: StartInference) -> list[int]:
        """What the source has said, and then what the destination says, which fits exactly behind it."""
        request_id, tokens = request.request_id, self.source.tokens(request.request_id)
        await self.destination.until(lambda: self.destination.is_finished(request_id))
        for entry in self.destination.entries(request_id):
            assert entry.epoch > request.epoch
            assert entry.position <= len(tokens), f"gap before {entry.position}"
            tokens[entry.position :] = unpack_tokens(entry.tokens)
        return tokens


@asynccontextmanager
async def a_pair(
    lender: Lender,
    model: TinyModel,
    source: Engine | None = None,
    destination: Engine | None = None,
    *,
    clock: Callable[[], float] | None = None,
) -> AsyncIterator[Pair]:
    hub = MeddledHub()
    async with (
        a_worker(lender, model, source, hub=hub, clock=clock) as first,
        a_worker(lender, model, destination, hub=hub, clock=clock, server_id="server-2", slot=0) as second,
    ):
        await first.load("inst-1")
        await second.load("inst-2")
        yield Pair(hub, first, second)


async def begin(pair: Pair, engine: SteppedEngine | SteppedModel, request: Any, steps: int) -> None:
    """So many tokens are said, and the next step waits."""
    await pair.source.ask(request)
    engine.allow(steps)
    await pair.source.until(lambda: len(pair.source.tokens(request.request_id)) == steps)
    await asyncio.to_thread(engine.wait_for_begun, steps + 1)
