"""Migrations between two workers over the bus: what routers and the scheduler get, and what clients never notice."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
from whimbrel.wire.codec import error_of, unpack_tokens
from whimbrel.wire.errors import InferenceLost, InstanceGone, InternalError, StaleEpoch
from whimbrel.wire.messages import (
    AbandonMigration,
    AbortInference,
    Ack,
    FinishReason,
    HandOver,
    InferenceResumed,
    Message,
    MigrateInstance,
    MigrationEnd,
    MigrationEnded,
    ResendTokens,
    ResumeInference,
    RoundCompleted,
    Sampling,
    SchedulerHeartbeat,
    SourceStopped,
    StartRound,
    TokenFrame,
    WorkerHeartbeat,
    WorkerState,
)

from services.gpu_worker import inference, service
from services.gpu_worker.core import resumptions, rounds
from services.gpu_worker.engines.echo_engine import EchoCosts, EchoEngine
from services.gpu_worker.engines.engine import Known, Precision
from services.gpu_worker.engines.transformers_engine import TransformersEngine
from tests.unit.gpu_worker.builders import Lender, a_request
from tests.unit.gpu_worker.harness import ANSWER_S_MAX, SteppedEngine, SteppedModel, long_request
from tests.unit.gpu_worker.pair import Pair, a_pair
from tests.unit.gpu_worker.tiny_models import TinyModel

ANSWER = list(range(1, 21))
NO_END = {2: -1e9}


@pytest.fixture
def model(tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models["llama"]


async def begin(pair: Pair, engine: SteppedEngine | SteppedModel, request: Any, steps: int) -> None:
    """So many tokens are said, and the next step waits."""
    await pair.source.ask(request)
    engine.allow(steps)
    await pair.source.until(lambda: len(pair.source.tokens(request.request_id)) == steps)
    await asyncio.to_thread(engine.wait_for_begun, steps + 1)


async def test_a_request_moves_and_its_client_gets_every_token_once(lender: Lender, model: TinyModel) -> None:
    """D8: rounds of tokens, a handover, and the rest of the answer from elsewhere."""
    engine = SteppedEngine()
    request = long_request()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, request, 5)
        await pair.migrate()
        first = await pair.round_completed()
        assert (first.requests, first.gap_tokens, first.round_tokens) == (1, 0, 25)
        engine.allow(3)
        await pair.source.until(lambda: len(pair.source.tokens()) == 8)
        await pair.source.tell(pair.start_round(2))
        second = await pair.round_completed(2)
        assert (second.round_tokens, second.sent_tokens) == (3, 28)
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
        stopped = await pair.stopped()
        assert [(each.request_id, each.position) for each in stopped.requests] == [("req-1", 9)]
        again = await pair.restart(request)
        assert (again.base_tokens, unpack_tokens(again.tokens)) == (28, [9])
        assert await pair.go_on(request) == ANSWER
        assert [(each.position, len(each.tokens) // 4) for each in pair.hub.rounds()] == [(0, 25), (25, 3)]
        await pair.source.until(lambda: pair.source.beat.active_requests == 0)
        assert pair.source.beat.migration_id == "m1"
        await pair.source.ask(pair.source.unload())
        await pair.source.until(lambda: pair.source.beat.state is WorkerState.EMPTY)
        assert pair.source.beat.migration_id is None
        assert pair.destination.beat.migration_id is None


async def test_routers_hear_of_the_move_before_the_scheduler(lender: Lender, model: TinyModel) -> None:
    """Their clients wait. The heartbeat, by which the instance may be unloaded, comes last."""
    engine = SteppedEngine()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, long_request(), 2)
        await pair.migrate()
        await pair.round_completed()
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
        await pair.source.until(lambda: pair.source.beat.active_requests == 0)
        heard = pair.source.heard
        kinds = [type(message) for message in heard]
        stopped_at = kinds.index(SourceStopped)
        moved_at = max(at for at, kind in enumerate(kinds) if kind is TokenFrame)
        emptied_at = max(at for at, kind in enumerate(kinds) if kind is WorkerHeartbeat)
        assert moved_at < stopped_at < emptied_at
        between = [m for m in heard[moved_at:stopped_at] if isinstance(m, WorkerHeartbeat)]
        assert all(beat.active_requests for beat in between)
        entry = pair.last()
        assert entry is not None
        assert (entry.position, unpack_tokens(entry.tokens)) == (2, [3]), "the last step's token comes with the move"


@pytest.mark.parametrize("name", ["llama", "opt", "llama-tied-bf16"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, logit_bias=NO_END),
        Sampling(temperature=1.0, seed=3, top_p=0.95, logit_bias=NO_END),
        Sampling(
            temperature=0.8,
            seed=4,
            top_k=40,
            presence_penalty=0.4,
            frequency_penalty=0.3,
            repetition_penalty=1.2,
            logit_bias=NO_END,
        ),
    ],
    ids=["greedy", "seeded", "penalised"],
)
async def test_an_answer_that_moves_at_any_token_is_the_undisturbed_one(
    name: str, sampling: Sampling, lender: Lender, tiny_models: dict[str, TinyModel]
) -> None:
    """G11, invariants 1 and 2: in float32, whatever the gap at the handover."""
    source, destination = SteppedModel(), TransformersEngine(precision=Precision.FLOAT32, threads=1)
    tokens = 12
    async with a_pair(lender, tiny_models[name], source, destination) as pair:

        def asked(request_id: str, **changes: Any) -> Any:
            return a_request(
                request_id, prompt=(11, 42, 7, 99, 123), output_tokens_max=tokens, sampling=sampling, **changes
            )

        whole = await pair.destination.answer(asked("undisturbed", instance_id="inst-2"))
        assert len(whole) == tokens
        for position in range(1, tokens):
            gap = min(position - 1, position % 4)
            request = asked(f"req-{position}")
            await begin(pair, source, request, position - 1 - gap)
            await pair.migrate()
            await pair.round_completed()
            source.allow(gap)
            await pair.source.until(lambda: len(pair.source.tokens(request.request_id)) == position - 1)  # noqa: B023
            await asyncio.to_thread(source.wait_for_begun, gap)
            await pair.source.ask(pair.hand_over())
            source.allow(1)
            stopped = await pair.stopped()
            assert stopped.requests[0].position == position
            assert await pair.go_on(request) == whole, f"moved at token {position} with a gap of {gap + 1}"
            await pair.abandon()
        assert source.decodes == sum(range(1, tokens))


@pytest.mark.parametrize("position", range(1, 20))
async def test_an_echo_that_moves_at_any_token_is_the_undisturbed_one(
    position: int, lender: Lender, model: TinyModel
) -> None:
    engine = SteppedEngine()
    request = long_request()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, request, position - 1)
        await pair.migrate()
        await pair.round_completed()
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
        assert await pair.go_on(request) == ANSWER


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

    def decode(self, sequence: Any) -> int | None:
        self.pieces.append((sequence.request_id, len(sequence.tokens)))
        return super().decode(sequence)


async def test_a_move_with_nothing_left_to_send_starts_with_the_next_token(
    lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source was in the middle of its own prefill: base_tokens is all there is."""
    monkeypatch.setattr(inference, "PREFILL_TOKENS_MAX", 8)
    engine, destination = PiecedEngine(), PiecedEngine()
    destination.allow(100)
    request = long_request()
    async with a_pair(lender, model, engine, destination) as pair:
        await pair.source.ask(request)
        await asyncio.to_thread(engine.wait_for_begun)
        await pair.migrate()
        await pair.round_completed()
        await pair.source.ask(pair.hand_over())
        engine.allow(100)
        again = await pair.restart(request)
        assert (again.base_tokens, again.tokens) == (20, b"")
        assert await pair.go_on(request) == ANSWER
        assert engine.pieces == [("req-1", 8)]
        assert destination.pieces[:4] == [("req-1", 8), ("req-1", 16), ("req-1", 19), ("req-1", 20)]


async def test_the_source_keeps_generating_while_the_destination_computes(lender: Lender, model: TinyModel) -> None:
    """G6: a round takes as long as it takes; the gap is what was generated meanwhile."""
    engine, destination = SteppedEngine(), PiecedEngine()
    request = long_request()
    async with a_pair(lender, model, engine, destination) as pair:
        await begin(pair, engine, request, 2)
        await pair.migrate()
        await asyncio.to_thread(destination.wait_for_begun)
        engine.allow(7)
        await pair.source.until(lambda: len(pair.source.tokens()) == 9)
        assert pair.of_this(RoundCompleted) == []
        destination.allow(10)
        assert (await pair.round_completed()).gap_tokens == 7
        await pair.source.tell(pair.start_round(2))
        await pair.round_completed(2)
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
        assert await pair.go_on(request) == ANSWER
        # The prompt and two tokens, the seven of the gap, and then the one that was still missing together with the
        # last of those before: of each round the last token is computed by the step that gives the next.
        assert destination.pieces[:3] == [("req-1", 21), ("req-1", 28), ("req-1", 30)]


async def test_the_destination_serves_another_request_meanwhile_and_both_make_progress(
    lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "PREFILL_TOKENS_MAX", 4)
    engine, destination = SteppedEngine(), PiecedEngine()
    request = long_request()
    async with a_pair(lender, model, engine, destination) as pair:
        await begin(pair, engine, request, 5)
        await pair.migrate()
        await asyncio.to_thread(destination.wait_for_begun)
        await pair.destination.ask(long_request("own", instance_id="inst-2", prompt=range(1, 4)))
        destination.allow(1000)
        await pair.round_completed()
        await pair.destination.until(lambda: pair.destination.is_finished("own"))
        assert pair.destination.tokens("own") == [1, 2, 3]
        assert [request_id for request_id, _ in destination.pieces[:8]] == ["req-1", "own"] * 4
        assert [end for request_id, end in destination.pieces if request_id == "req-1"] == [4, 8, 12, 16, 20, 24]
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
        assert await pair.go_on(request) == ANSWER


async def test_the_handover_waits_for_no_more_than_the_step_that_runs(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, long_request(), 3)
        await pair.migrate()
        await pair.round_completed()
        await pair.source.ask(pair.hand_over())
        assert pair.of_this(SourceStopped) == []
        engine.allow(50)
        await pair.stopped()
        await pair.source.ask(AbandonMigration(migration_id="m1", scheduler_epoch=1))
        assert engine.decodes == 4


async def test_requests_that_wait_move_without_having_cost_anything(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    requests = [long_request(f"req-{number}") for number in (1, 2, 3)]
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, requests[0], 3)
        for request in requests[1:]:
            await pair.source.ask(request)
        await pair.migrate()
        assert (await pair.round_completed()).requests == 3
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
        stopped = await pair.stopped()
        assert [each.position for each in stopped.requests] == [4, 0, 0]
        assert {message.request_id for message in pair.hub.rounds()} == {"req-1"}
        bases = [entry.moved.base_tokens for r in requests if (entry := pair.last(r.request_id)) and entry.moved]
        assert bases == [23, 0, 0]
        answers = await asyncio.gather(*(pair.go_on(request) for request in requests))
        assert answers == [ANSWER] * 3


async def test_while_it_migrates_nothing_new_starts_and_repetitions_are_answered(
    lender: Lender, model: TinyModel
) -> None:
    engine = SteppedEngine()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, long_request(), 3)
        await pair.migrate()
        await pair.round_completed()
        with pytest.raises(InstanceGone, match="inst-1"):
            await pair.source.ask(long_request("req-2"))
        assert isinstance(await pair.source.ask(long_request()), Ack)
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
        await pair.stopped()
        assert isinstance(await pair.source.ask(long_request()), Ack)
        with pytest.raises(InstanceGone):
            await pair.source.ask(long_request("req-2"))
        said = len(pair.source.entries())
        await pair.source.ask(ResendTokens(request_id="req-1", epoch=1, position=0))
        await pair.source.until(lambda: len(pair.source.entries()) > said)
        entry = pair.source.entries()[-1]
        assert (unpack_tokens(entry.tokens), entry.finish_reason) == ([1, 2, 3, 4], FinishReason.MOVED)
        assert entry.moved == (await pair.moved()).moved


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
        await pair.migrate()
        await pair.round_completed()
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
        await pair.stopped()
        await pair.abandon()
        # The router starts it where it came from, with everything it has.
        again = await pair.restart(request, base_tokens=0)
        fields = {name: getattr(again, name) for name in again.__struct_fields__} | {"instance_id": "inst-1"}
        await pair.source.ask(type(again)(**fields))
        engine.allow(100)
        await pair.source.until(lambda: len(pair.source.tokens()) == 20)
        assert pair.source.tokens() == ANSWER


async def test_an_instance_that_drains_moves_and_leaves(lender: Lender, model: TinyModel) -> None:
    """A drain is one reason to migrate."""
    engine = SteppedEngine()
    request = long_request()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, request, 3)
        await pair.source.ask(pair.source.unload(drain=True))
        await pair.migrate()
        await pair.round_completed()
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
        await pair.source.until(lambda: pair.source.beat.state is WorkerState.EMPTY)
        assert len(pair.of_this(SourceStopped)) == 1
        assert pair.source.has_ended("inst-1")
        assert await pair.go_on(request) == ANSWER
        await pair.source.ask(pair.hand_over())
        await pair.source.until(lambda: len(pair.of_this(SourceStopped)) == 2)


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
        await pair.migrate()
        await pair.round_completed()
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
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
    monkeypatch.setattr(resumptions, "RESUMPTION_KEEP_S", 0.05)
    engine, destination = SteppedEngine(), ForgettingEngine()
    async with a_pair(lender, model, engine, destination) as pair:
        await begin(pair, engine, long_request(), 3)
        await pair.migrate()
        await pair.round_completed()
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
        await pair.migrate()
        await pair.round_completed()
        await pair.source.ask(pair.hand_over())
        engine.allow(1)
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


async def test_a_request_may_move_there_and_back(lender: Lender, model: TinyModel) -> None:
    """What a worker kept of an earlier stay is not what it goes on from."""
    first, second = SteppedEngine(), SteppedEngine()
    request = long_request()
    async with a_pair(lender, model, first, second) as pair:
        await begin(pair, first, request, 3)
        await pair.migrate("m1")
        await pair.round_completed()
        await pair.source.ask(pair.hand_over())
        first.allow(1)
        await pair.stopped()
        again = await pair.restart(request)
        await pair.abandon(at_destination=False)
        await pair.destination.ask(again)
        second.allow(2)
        await pair.destination.until(lambda: len(pair.destination.entries()) == 2)
        back = Pair(pair.hub, pair.destination, pair.source)
        back.migration_id = "m2"
        await back.source.tell(
            back.migrate_instance(
                instance_id="inst-2",
                destination=type(pair.route)(
                    instance_id="inst-1", model_id="m", server_id="server-1", slot=3, state=pair.route.state
                ),
            )
        )
        await back.round_completed()
        await back.source.ask(back.hand_over(instance_id="inst-2"))
        second.allow(1)
        await back.stopped()
        entry = await back.moved()
        assert entry.moved is not None
        assert (entry.position, entry.moved.base_tokens) == (6, 26)
        tokens = ANSWER + ANSWER[:7]
        await pair.source.ask(
            long_request(epoch=3, prompt=ANSWER, tokens=again.tokens[:0] + _packed(tokens[26:]), base_tokens=26)
        )
        first.allow(100)
        await pair.source.until(lambda: pair.source.entries()[-1].finish_reason is FinishReason.STOP)
        last = [e for e in pair.source.entries() if e.epoch == 3]
        assert [t for e in last for t in unpack_tokens(e.tokens)] == ANSWER[7:]


def _packed(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)
