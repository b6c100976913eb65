"""Requests over the bus: what routers get, in which order, and what happens when somebody leaves."""

from __future__ import annotations

import asyncio

import pytest
from whimbrel.chassis.memory_bus import MAX_PAYLOAD_BYTES
from whimbrel.wire.codec import error_of, unpack_tokens
from whimbrel.wire.errors import (
    ContextLengthExceeded,
    InferenceLost,
    InstanceGone,
    InvalidRequest,
    QueueFull,
    StaleEpoch,
)
from whimbrel.wire.messages import AbortInference, Ack, FinishReason, ResendTokens, TokenFrame, WorkerHeartbeat

from services.gpu_worker import inference, service
from services.gpu_worker.engines.engine import Precision
from services.gpu_worker.engines.transformers_engine import TransformersEngine
from tests.unit.gpu_worker.builders import Lender, a_request
from tests.unit.gpu_worker.harness import Outside, SteppedEngine, a_worker, long_request
from tests.unit.gpu_worker.tiny_models import TinyModel

ANSWER = list(range(1, 21))


def steps(outside: Outside, request_id: str = "req-1") -> int:
    """How many output tokens have been said."""
    return len(outside.tokens(request_id))


async def test_every_token_is_said_once_in_order_in_its_own_frame(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        await outside.load()
        assert await outside.answer(long_request()) == ANSWER
        entries = outside.entries()
        assert [entry.position for entry in entries] == list(range(21))
        assert [len(unpack_tokens(entry.tokens)) for entry in entries] == [1] * 20 + [0]
        assert [entry.finish_reason for entry in entries] == [None] * 20 + [FinishReason.STOP]
        assert entries[0].queue_s is not None
        assert entries[0].prefill_s is not None
        assert {(frame.server_id, frame.slot) for frame in outside.all(TokenFrame)} == {("server-1", 3)}


async def test_requests_run_one_after_another(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        await outside.load()
        answers = await asyncio.gather(*(outside.answer(long_request(f"req-{n}")) for n in range(10)))
        assert answers == [ANSWER] * 10
        order = [entry.request_id for frame in outside.all(TokenFrame) for entry in frame.entries]
        assert order == sorted(order, key=lambda name: int(name.removeprefix("req-")))
        await outside.until(lambda: outside.beat.active_requests == 0)


async def test_the_heartbeat_counts_running_and_waiting_requests(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        for number in range(3):
            await outside.ask(long_request(f"req-{number}"))
        await outside.until(lambda: outside.beat.active_requests == 3)
        engine.allow(100)
        await outside.until(lambda: outside.beat.active_requests == 0)
        assert max(beat.active_requests for beat in outside.all(WorkerHeartbeat)) == 3


async def test_starting_twice_is_starting_once(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        await outside.ask(long_request())
        engine.allow(5)
        await outside.until(lambda: steps(outside) == 5)
        assert isinstance(await outside.ask(long_request()), Ack)
        engine.allow(100)
        await outside.until(outside.is_finished)
        assert isinstance(await outside.ask(long_request()), Ack)
        assert await outside.answer(long_request("req-2")) == ANSWER
        assert [entry.position for entry in outside.entries()] == list(range(21))


async def test_a_request_that_is_started_again_speaks_in_its_new_epoch_only(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        await outside.ask(long_request())
        engine.allow(3)
        await outside.until(lambda: steps(outside) == 3)
        await outside.ask(long_request(epoch=2, prompt=ANSWER, output=ANSWER[:3]))
        engine.allow(100)
        await outside.until(outside.is_finished)
        assert [entry.epoch for entry in outside.entries()] == [1] * 3 + [2] * 18
        assert outside.entries()[3].position == 3
        assert outside.tokens() == ANSWER
        with pytest.raises(StaleEpoch):
            await outside.ask(long_request(epoch=1))


async def test_a_request_that_came_with_all_its_tokens_only_hears_its_end(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        await outside.load()
        await outside.ask(a_request(output=(40, 41), output_tokens_max=2))
        await outside.until(outside.is_finished)
        (entry,) = outside.entries()
        assert (entry.position, entry.tokens, entry.finish_reason) == (2, b"", FinishReason.LENGTH)


async def test_an_instance_that_is_not_here_or_not_ready_is_gone(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        with pytest.raises(InstanceGone):
            await outside.ask(a_request())
        await outside.ask(outside.prepare())
        with pytest.raises(InstanceGone, match="inst-1"):
            await outside.ask(a_request())
        await outside.ask(outside.unload())
        await outside.load("inst-2")
        with pytest.raises(InstanceGone, match="inst-1"):
            await outside.ask(a_request())
        assert await outside.answer(a_request(instance_id="inst-2")) == [5, 6, 7]


async def test_what_the_model_cannot_compute_is_refused_and_the_next_request_works(
    lender: Lender, model: TinyModel
) -> None:
    async with a_worker(lender, model) as outside:
        await outside.load()
        with pytest.raises(InvalidRequest, match="token 160 is not in the model's vocabulary of 160"):
            await outside.ask(a_request(prompt=(5, 160)))
        with pytest.raises(ContextLengthExceeded, match="context is 128 tokens"):
            await outside.ask(a_request(output_tokens_max=126))
        assert await outside.answer(a_request()) == [5, 6, 7]


async def test_a_full_queue_refuses_and_takes_again_when_there_is_room(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine, requests_max=2) as outside:
        await outside.load()
        await outside.ask(long_request("req-1"))
        await outside.ask(long_request("req-2"))
        with pytest.raises(QueueFull, match="worker server-1/3 already holds 2"):
            await outside.ask(long_request("req-3"))
        engine.allow(1000)
        await outside.until(lambda: outside.is_finished("req-1"))
        assert await outside.answer(long_request("req-3")) == ANSWER


async def test_a_running_request_is_aborted_within_a_step(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        await outside.ask(long_request("req-1"))
        await outside.ask(long_request("req-2"))
        engine.allow(4)
        await outside.until(lambda: steps(outside) == 4)
        await outside.ask(AbortInference(request_id="req-1", epoch=1))
        assert outside.entries()[-1].finish_reason is FinishReason.ABORTED
        # The one step it was in, and then those of the next request.
        engine.allow(1 + 21)
        await outside.until(lambda: outside.is_finished("req-2"))
        assert steps(outside) == 4
        assert outside.tokens("req-2") == ANSWER


async def test_a_waiting_request_is_aborted_before_it_costs_anything(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        await outside.ask(long_request("req-1"))
        await outside.ask(long_request("req-2"))
        await outside.ask(AbortInference(request_id="req-2", epoch=1))
        await outside.ask(AbortInference(request_id="req-9", epoch=1))
        await outside.until(lambda: outside.beat.active_requests == 1)
        engine.allow(21)
        await outside.until(outside.is_finished)
        assert outside.tokens("req-2") == []


async def test_a_long_prefill_is_aborted_between_its_pieces(
    lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "PREFILL_TOKENS_MAX", 4)
    begun, go_on = asyncio.Event(), SteppedEngine()
    loop = asyncio.get_running_loop()

    class Slow(SteppedEngine):
        pieces = 0

        def prefill(self, sequence, end):  # type: ignore[no-untyped-def]
            self.pieces += 1
            loop.call_soon_threadsafe(begun.set)
            assert go_on._allowed.acquire(timeout=20)
            super().prefill(sequence, end)

    engine = Slow()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        await outside.ask(long_request())
        await begun.wait()
        await outside.ask(AbortInference(request_id="req-1", epoch=1))
        go_on.allow(100)
        engine.allow(100)
        assert await outside.answer(a_request("req-2")) == [5, 6, 7]
        assert engine.pieces == 1


async def test_lost_tokens_are_said_again_from_any_position(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        await outside.ask(long_request())
        assert isinstance(await outside.ask(ResendTokens(request_id="req-1", epoch=1, position=0)), Ack)
        assert outside.entries() == []
        engine.allow(100)
        await outside.until(outside.is_finished)
        await outside.ask(outside.unload())
        for position in (0, 7, 20):
            said = len(outside.entries())
            await outside.ask(ResendTokens(request_id="req-1", epoch=1, position=position))
            await outside.until(lambda said=said: len(outside.entries()) > said)
            entry = outside.entries()[-1]
            assert (entry.position, unpack_tokens(entry.tokens)) == (position, ANSWER[position:])
            assert entry.finish_reason is FinishReason.STOP


async def test_a_router_that_asks_for_a_request_behind_another_one_hears_that_the_worker_is_at_work(
    lender: Lender, model: TinyModel
) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        await outside.ask(long_request())
        await outside.ask(long_request("req-2"))
        for count in range(1, 4):
            engine.allow(1)
            await outside.until(lambda count=count: steps(outside) >= count)
            await outside.ask(ResendTokens(request_id="req-2", epoch=1, position=0))
            await outside.until(lambda count=count: len(outside.entries("req-2")) == count)
        await outside.ask(ResendTokens(request_id="req-2", epoch=1, position=0))
        assert [entry.tokens for entry in outside.entries("req-2")] == [b""] * 3, "without a step it says nothing"
        engine.allow(100)


async def test_tokens_of_an_unknown_request_are_lost_and_not_waited_for(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model) as outside:
        with pytest.raises(InferenceLost, match="after 3 tokens"):
            await outside.ask(ResendTokens(request_id="req-1", epoch=1, position=3))


async def test_frames_that_could_not_be_sent_are_repaired_by_a_resend(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        await outside.ask(long_request())
        engine.allow(5)
        await outside.until(lambda: steps(outside) == 5)
        # Too small for any frame: those of the next steps are lost.
        outside.hub.max_payload_bytes = 1
        engine.allow(100)
        await asyncio.to_thread(engine.wait_for_steps, 21)
        outside.hub.max_payload_bytes = MAX_PAYLOAD_BYTES
        assert not outside.is_finished()
        await outside.ask(ResendTokens(request_id="req-1", epoch=1, position=5))
        await outside.until(outside.is_finished)
        assert outside.tokens() == ANSWER


async def test_a_router_that_is_restarted_gets_its_old_requests_aborted(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        await outside.ask(long_request("req-1"))
        await outside.ask(long_request("req-2"))
        await outside.ask(long_request("req-3", router_id="router-b"))
        await outside.beat_as_router("router-a", 11)
        await outside.until(lambda: outside.beat.active_requests == 2)
        await outside.ask(long_request("req-4", router_epoch=11))
        with pytest.raises(StaleEpoch):
            await outside.ask(long_request("req-5", router_epoch=10))
        engine.allow(1000)
        await outside.until(lambda: outside.is_finished("req-4"))
        assert (outside.tokens("req-3"), outside.tokens("req-4")) == (ANSWER, ANSWER)
        reasons = [outside.entries(name)[-1].finish_reason for name in ("req-1", "req-2")]
        assert reasons == [FinishReason.ABORTED, FinishReason.ABORTED]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_the_requests_of_a_lost_router_are_aborted(
    lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WATCH_S", 0.005)
    engine, clock = SteppedEngine(), Clock()
    async with a_worker(lender, model, engine, clock=clock) as outside:
        await outside.load()
        await outside.ask(long_request("req-1"))
        await outside.ask(long_request("req-2", router_id="router-b"))
        for _ in range(1000):
            clock.now += 1.0
            await outside.beat_as_router("router-b", 10)
            # Until the watch has looked, which may take several rounds on a busy machine.
            await asyncio.sleep(0.01)
            if outside.is_finished("req-1"):
                break
        engine.allow(1000)
        await outside.until(lambda: outside.is_finished("req-2"))
        assert outside.tokens("req-1") == []
        assert outside.tokens("req-2") == ANSWER


async def test_nobody_is_lost_while_nats_is_away(
    lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WATCH_S", 0.005)
    engine, clock = SteppedEngine(), Clock()
    async with a_worker(lender, model, engine, clock=clock) as outside:
        await outside.load()
        await outside.ask(long_request())
        engine.allow(5)
        await outside.until(lambda: steps(outside) == 5)
        outside.hub.go_down()
        engine.allow(5)
        for _ in range(10):
            clock.now += 1.0
            await asyncio.sleep(0.01)
        outside.hub.come_back()
        await outside.ask(ResendTokens(request_id="req-1", epoch=1, position=5))
        engine.allow(100)
        await outside.until(outside.is_finished)
        assert outside.tokens() == ANSWER


async def test_a_model_that_fails_fails_its_request_and_serves_the_next(lender: Lender, model: TinyModel) -> None:
    engine = SteppedEngine()
    async with a_worker(lender, model, engine) as outside:
        await outside.load()
        engine.failure = RuntimeError("out of numbers")
        await outside.ask(long_request("req-1"))
        engine.allow(1)
        await outside.until(outside.is_finished)
        entry = outside.entries()[-1]
        assert entry.finish_reason is FinishReason.FAILED
        assert entry.error is not None
        error = error_of(entry.error)
        assert isinstance(error, InferenceLost)
        assert "RuntimeError: out of numbers" in str(error)
        engine.failure = None
        engine.allow(100)
        assert await outside.answer(a_request("req-2")) == [5, 6, 7]


async def test_a_real_model_answers_over_the_bus_and_leaves(lender: Lender, tiny_models: dict[str, TinyModel]) -> None:
    engine = TransformersEngine(precision=Precision.FLOAT32, threads=1)
    async with a_worker(lender, tiny_models["llama-tied-bf16"], engine, prewarm=True) as outside:
        await outside.load()
        request = a_request(output_tokens_max=6)
        first = await outside.answer(request)
        await outside.ask(outside.unload())
        await outside.load("inst-2")
        assert await outside.answer(a_request("req-2", output_tokens_max=6, instance_id="inst-2")) == first
        assert len(first) == 6
        assert len(outside.all(WorkerHeartbeat)) < 60
