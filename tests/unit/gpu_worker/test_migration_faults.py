"""Migrations between two workers that are abandoned, lose their ends or their messages: no token is lost or doubled."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
from msgspec.structs import replace
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import InferenceLost, InstanceGone, InternalError, StaleEpoch
from whimbrel.wire.messages import (
    AbandonMigration,
    AbortInference,
    FinishReason,
    HandOver,
    InferenceResumed,
    Message,
    MigrateInstance,
    MigrationEnd,
    MigrationEnded,
    ResumeInference,
    RoundCompleted,
    SchedulerHeartbeat,
    SourceStopped,
    StartRound,
    WorkerState,
)

from services.gpu_worker import service
from services.gpu_worker.core import resumptions, rounds
from services.gpu_worker.engines.echo_engine import EchoCosts, EchoEngine
from tests.unit.gpu_worker.builders import Lender, a_request
from tests.unit.gpu_worker.harness import ANSWER_S_MAX, SteppedEngine, long_request
from tests.unit.gpu_worker.pair import ANSWER, Pair, PiecedEngine, a_pair, begin
from tests.unit.gpu_worker.tiny_models import TinyModel


async def test_an_abandoned_migration_changes_nothing_for_the_request(lender: Lender, model: TinyModel) -> None:
    """Invariant 6, X5."""
    engine = SteppedEngine()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, long_request(), 3)
        await pair.migrate()
        await pair.round_completed()
        await pair.abandon()
        await pair.source.until(lambda: pair.source.beat.migration_id is None)
        await pair.source.ask(pair.hand_over())
        await pair.source.ask(long_request("req-2"))
        engine.allow(100)
        await pair.source.until(lambda: pair.source.is_finished("req-2"))
        assert pair.source.tokens("req-1") == pair.source.tokens("req-2") == ANSWER
        assert pair.of_this(SourceStopped) == pair.of_this(MigrationEnded) == []
        with pytest.raises(InferenceLost):
            await pair.destination.ask(
                a_request("req-1", prompt=(), prompt_tokens=20, base_tokens=23, instance_id="inst-2")
            )


async def test_after_a_stop_that_was_abandoned_the_source_is_an_ordinary_instance(
    lender: Lender, model: TinyModel
) -> None:
    engine = SteppedEngine()
    request = long_request()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, request, 3)
        await pair.move(engine)
        await pair.stopped()
        await pair.abandon()
        # The router starts it where it came from, with everything it has.
        again = await pair.restart(request, base_tokens=0)
        await pair.source.ask(replace(again, instance_id="inst-1"))
        engine.allow(100)
        await pair.source.until(lambda: len(pair.source.tokens()) == 20)
        assert pair.source.tokens() == ANSWER


async def test_a_destination_without_the_instance_ends_the_migration(lender: Lender, model: TinyModel) -> None:
    """X4, X5: the source carries on."""
    engine = SteppedEngine()
    async with a_pair(lender, model, engine) as pair:
        await pair.destination.ask(pair.destination.unload("inst-2"))
        await begin(pair, engine, long_request(), 3)
        await pair.migrate()
        ended = await pair.ended()
        assert ended.reason is MigrationEnd.RESUME_FAILED
        assert ended.error is not None
        assert isinstance(error_of(ended.error), InstanceGone)
        engine.allow(100)
        await pair.source.until(pair.source.is_finished)
        assert pair.source.tokens() == ANSWER


async def test_a_destination_that_fails_ends_the_migration_and_lives_on(lender: Lender, model: TinyModel) -> None:
    engine, destination = SteppedEngine(), PiecedEngine()
    destination.failure = RuntimeError("out of memory")
    destination.allow(100)
    async with a_pair(lender, model, engine, destination) as pair:
        await begin(pair, engine, long_request(), 3)
        await pair.migrate()
        ended = await pair.ended()
        assert ended.reason is MigrationEnd.RESUME_FAILED
        assert ended.error is not None
        assert isinstance(error_of(ended.error), InternalError)
        destination.failure = None
        assert await pair.destination.answer(long_request("req-2", instance_id="inst-2")) == ANSWER


async def test_an_instance_that_is_unloaded_while_it_resumes_says_so_when_asked_again(
    lender: Lender, model: TinyModel
) -> None:
    engine, destination = SteppedEngine(), PiecedEngine()
    async with a_pair(lender, model, engine, destination) as pair:
        await begin(pair, engine, long_request(), 3)
        await pair.migrate()
        await asyncio.to_thread(destination.wait_for_begun)
        unloading = asyncio.create_task(pair.destination.ask(pair.destination.unload("inst-2")))
        await pair.destination.until(lambda: pair.destination.beat.state is WorkerState.DRAINING)
        destination.allow(1)
        await unloading
        assert destination.pieces == [("req-1", 22)]
        assert destination._computed == {}
        await pair.destination.tell(pair.hub.rounds()[0])
        assert (await pair.ended()).reason is MigrationEnd.RESUME_FAILED


async def test_tokens_that_the_destination_does_not_have_are_lost_and_then_all_are_sent(
    lender: Lender, model: TinyModel
) -> None:
    engine = SteppedEngine()
    request = long_request()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, request, 3)
        await pair.move(engine)
        again = await pair.restart(request)
        await pair.destination.ask(AbandonMigration(migration_id="m1", scheduler_epoch=1))
        with pytest.raises(InferenceLost, match="its first 23 tokens are not here"):
            await pair.destination.ask(again)
        await pair.destination.ask(await pair.restart(request, base_tokens=0))
        assert await pair.rest(request) == ANSWER


async def test_a_destination_that_knows_more_than_the_base_goes_on_from_all_of_it(
    lender: Lender, model: TinyModel
) -> None:
    """The source stopped before it heard the last answer."""
    engine, destination = SteppedEngine(), PiecedEngine()
    destination.allow(100)
    request = long_request()
    async with a_pair(lender, model, engine, destination) as pair:
        await begin(pair, engine, request, 3)
        await pair.migrate()
        await pair.round_completed()
        engine.allow(4)
        await pair.source.until(lambda: len(pair.source.tokens()) == 7)
        pair.hub.held = {InferenceResumed}
        await pair.source.ask(pair.start_round(2))
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
        again = await pair.restart(request)
        assert again.base_tokens == 23
        pair.hub.release()
        assert await pair.go_on(request) == ANSWER
        assert destination.pieces[:3] == [("req-1", 22), ("req-1", 26), ("req-1", 28)]


async def test_a_request_that_ends_during_the_migration_ends_as_ever(lender: Lender, model: TinyModel) -> None:
    """X1."""
    engine = SteppedEngine()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, long_request(), 15)
        await pair.migrate()
        await pair.round_completed()
        engine.allow(100)
        assert (await pair.ended()).reason is MigrationEnd.FINISHED
        assert pair.source.tokens() == ANSWER
        assert pair.source.entries()[-1].finish_reason is FinishReason.STOP
        await pair.source.until(lambda: pair.source.beat.migration_id is None)
        assert await pair.source.answer(long_request("req-2")) == ANSWER


async def test_a_request_that_is_aborted_during_the_migration_ends_it(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, long_request(), 3)
        await pair.migrate()
        await pair.round_completed()
        await pair.source.ask(pair.hand_over())
        await pair.source.ask(AbortInference(request_id="req-1", epoch=1))
        engine.allow(1)
        assert (await pair.ended()).reason is MigrationEnd.FINISHED
        assert pair.source.entries()[-1].finish_reason is FinishReason.ABORTED


async def test_a_scheduler_that_has_a_successor_migrates_nothing(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, long_request(), 3)
        beat = SchedulerHeartbeat(scheduler_id="s2", epoch=2)
        await pair.source.bus.publish(pair.source.bus.subjects.heartbeat(beat), beat)
        await pair.source.ask(pair.source.unload("inst-9", epoch=2))
        with pytest.raises(StaleEpoch):
            await pair.source.ask(pair.migrate_instance())
        assert pair.hub.rounds() == []
        await pair.source.tell(pair.migrate_instance(scheduler_epoch=2))
        await pair.round_completed()
        with pytest.raises(StaleEpoch):
            await pair.source.ask(pair.hand_over())
        engine.allow(100)
        await pair.source.until(pair.source.is_finished)
        assert pair.source.tokens() == ANSWER


async def test_what_is_kept_for_a_dead_migration_goes_away_by_itself(
    lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X3: nobody tells the destination."""
    monkeypatch.setattr(service, "WATCH_S", 0.005)
    engine, destination = SteppedEngine(), ForgettingEngine()
    async with a_pair(lender, model, engine, destination) as pair:
        await begin(pair, engine, long_request(), 3)
        await pair.migrate()
        await pair.round_completed()
        monkeypatch.setattr(resumptions, "RESUMPTION_KEEP_S", 0.05)
        await asyncio.to_thread(destination.wait_for_forgotten)
        assert destination._computed == {}


class ForgettingEngine(EchoEngine):
    def __init__(self) -> None:
        super().__init__(EchoCosts())
        self._forgotten = threading.Event()

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._forgotten.set()

    def wait_for_forgotten(self) -> None:
        assert self._forgotten.wait(ANSWER_S_MAX), "nothing was forgotten"


async def test_an_aborted_request_that_was_resumed_here_leaves_no_kv_cache(lender: Lender, model: TinyModel) -> None:
    engine, destination = SteppedEngine(), SteppedEngine()
    request = long_request()
    async with a_pair(lender, model, engine, destination) as pair:
        await begin(pair, engine, request, 3)
        await pair.move(engine)
        # It has to wait there.
        await pair.destination.ask(long_request("own", instance_id="inst-2"))
        await pair.destination.ask(await pair.restart(request))
        await pair.destination.ask(AbortInference(request_id="req-1", epoch=2))
        destination.allow(100)
        await pair.destination.until(lambda: pair.destination.is_finished("own"))
        await pair.destination.ask(long_request("next", instance_id="inst-2"))
        await pair.destination.until(lambda: pair.destination.is_finished("next"))
        await pair.destination.until(lambda: pair.destination.beat.active_requests == 0)
        assert "req-1" not in destination._computed


COMMANDS: list[type[Message]] = [
    MigrateInstance, StartRound, HandOver, ResumeInference, InferenceResumed, RoundCompleted, SourceStopped,
]  # fmt: skip


async def carry_out(pair: Pair, engine: SteppedEngine, request: Any) -> None:
    """As the scheduler does it: two rounds, then the handover; what is not answered is asked again."""
    await begin(pair, engine, request, 3)
    await pair.migrate("m1")
    await asked_again(pair, pair.migrate_instance(), lambda: pair.of_this(RoundCompleted))
    engine.allow(2)
    await pair.source.until(lambda: len(pair.source.tokens()) == 5)
    await asked_again(pair, pair.start_round(2), lambda: [m for m in pair.of_this(RoundCompleted) if m.round == 2])
    await asked_again(pair, pair.hand_over(), lambda: pair.of_this(SourceStopped), lambda: engine.allow(1))


async def asked_again(pair: Pair, command: Message, heard: Any, meanwhile: Any = lambda: None) -> None:
    while not heard():
        await pair.source.tell(command)
        meanwhile()
        try:
            async with asyncio.timeout(0.05):
                await pair.source.until(lambda: bool(heard()))
        except TimeoutError:
            pass


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("fault", ["lost", "doubled"])
async def test_any_message_of_a_migration_may_be_lost_or_come_twice(
    kind: type[Message], fault: str, lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WATCH_S", 0.005)
    monkeypatch.setattr(rounds, "REPEAT_S", 0.02)
    engine = SteppedEngine()
    request = long_request()
    async with a_pair(lender, model, engine) as pair:
        (pair.hub.lose if fault == "lost" else pair.hub.double)[kind] = 1
        await carry_out(pair, engine, request)
        assert await pair.go_on(request) == ANSWER
        assert len(pair.destination.entries()) == 21 - pair.of_this(SourceStopped)[0].requests[0].position


@pytest.mark.parametrize("seed", range(8))
async def test_messages_that_come_in_any_order_harm_no_token(
    seed: int, lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that was ever said of the migration is said again, to anybody, at random moments."""
    monkeypatch.setattr(service, "WATCH_S", 0.005)
    monkeypatch.setattr(rounds, "REPEAT_S", 0.02)
    chance = random.Random(seed)
    engine = SteppedEngine()
    request = long_request()

    async with a_pair(lender, model, engine) as pair:
        commands = (MigrateInstance, StartRound, HandOver, ResumeInference, InferenceResumed)

        async def repeat() -> None:
            late = [m for m in pair.hub.said if isinstance(m, commands)]
            for message in chance.sample(late, min(4, len(late))):
                to = pair.destination if isinstance(message, ResumeInference) else pair.source
                await to.tell(message)

        await begin(pair, engine, request, 3)
        await pair.migrate("m0")
        await pair.round_completed()
        await pair.abandon()
        await repeat()
        await pair.migrate("m1")
        await repeat()
        await pair.round_completed()
        await repeat()
        engine.allow(2)
        await asked_again(pair, pair.start_round(2), lambda: [m for m in pair.of_this(RoundCompleted) if m.round == 2])
        await repeat()
        await asked_again(pair, pair.hand_over(), lambda: pair.of_this(SourceStopped), lambda: engine.allow(1))
        await repeat()
        again = await pair.restart(request)
        await repeat()
        await pair.destination.ask(again)
        await repeat()
        assert await pair.rest(request) == ANSWER, f"seed {seed}"
        await repeat()
        assert await pair.destination.answer(long_request("req-2", instance_id="inst-2")) == ANSWER
