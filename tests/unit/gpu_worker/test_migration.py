"""Migrations between two workers over the bus: what routers and the scheduler get, and what clients never notice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from whimbrel.wire.codec import pack_tokens, unpack_tokens
from whimbrel.wire.errors import InstanceGone
from whimbrel.wire.messages import (
    AbandonMigration,
    Ack,
    FinishReason,
    ResendTokens,
    RoundCompleted,
    Sampling,
    SourceStopped,
    TokenFrame,
    WorkerHeartbeat,
    WorkerState,
)

from services.gpu_worker import inference
from services.gpu_worker.engines.engine import Precision
from services.gpu_worker.engines.transformers_engine import TransformersEngine
from tests.unit.gpu_worker.builders import Lender, a_request
from tests.unit.gpu_worker.harness import SteppedEngine, SteppedModel, long_request
from tests.unit.gpu_worker.pair import ANSWER, Pair, PiecedEngine, a_pair, begin
from tests.unit.gpu_worker.tiny_models import TinyModel


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


NO_END = {2: -1e9}


async def test_routers_hear_of_the_move_before_the_scheduler(lender: Lender, model: TinyModel) -> None:
    """Their clients wait; a heartbeat that has no requests any more may have the instance unloaded."""
    engine = SteppedEngine()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, long_request(), 2)
        await pair.move(engine)
        await pair.source.until(lambda: pair.source.beat.active_requests == 0)
        # As it was sent; it is heard by several tasks.
        said = pair.hub.said
        moved_at = next(at for at, m in enumerate(said) if isinstance(m, TokenFrame) and m.entries[0].moved)
        stopped_at = next(at for at, m in enumerate(said) if isinstance(m, SourceStopped))
        assert moved_at < stopped_at
        before = [m for m in said[:moved_at] if isinstance(m, WorkerHeartbeat) and m.instance_id == "inst-1"]
        assert before[-1].active_requests
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
        await pair.move(engine)
        assert await pair.go_on(request) == ANSWER


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


async def test_an_instance_that_drains_moves_and_leaves(lender: Lender, model: TinyModel) -> None:
    """A drain is one reason to migrate."""
    engine = SteppedEngine()
    request = long_request()
    async with a_pair(lender, model, engine) as pair:
        await begin(pair, engine, request, 3)
        await pair.source.ask(pair.source.unload(drain=True))
        await pair.move(engine)
        await pair.source.until(lambda: pair.source.beat.state is WorkerState.EMPTY)
        assert len(pair.of_this(SourceStopped)) == 1
        assert pair.source.has_ended("inst-1")
        assert await pair.go_on(request) == ANSWER
        await pair.source.ask(pair.hand_over())
        await pair.source.until(lambda: len(pair.of_this(SourceStopped)) == 2)


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
                destination=replace(pair.route, instance_id="inst-1", server_id="server-1", slot=3),
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
        await pair.source.ask(long_request(epoch=3, prompt=ANSWER, tokens=pack_tokens(tokens[26:]), base_tokens=26))
        first.allow(100)
        await pair.source.until(lambda: pair.source.entries()[-1].finish_reason is FinishReason.STOP)
        last = [e for e in pair.source.entries() if e.epoch == 3]
        assert [t for e in last for t in unpack_tokens(e.tokens)] == ANSWER[7:]
