"""An answer is the same whatever happens to its workers: text, log probabilities, finish reasons and usage.

Between the client and the made-up logits all is real but the transport and the threads: endpoint, choices, streams and
dispatch of the router, and the cores of two workers. Fifty random requests run undisturbed, and then again with a move,
and with a kill, at every step; frames are lost and repeated on the way. A failure names its seed, and ACCIDENTS_SEED
runs it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from whimbrel.chassis.memory_bus import InMemoryHub
from whimbrel.wire.messages import Stages, Tier

from services.router.config import RouterConfig
from services.router.core.requests import Limits
from services.router.dispatch import Dispatch
from services.router.inference import Inference
from services.router.texts import ModelText, load_text
from tests.unit.router.core_workers import Accident, CoreWorker, Plan
from tests.unit.router.model_files import write_model
from tests.unit.router.peers import a_route

LIMITS = Limits(cold_start_s=30.0, idle_s=30.0, unanswered_s=30.0, stalled_s=30.0)
ROUTES = (a_route("tiny"), a_route("tiny", "instance-2", slot=1))
REQUESTS = 50
WORDS = ["Paris", " is", " the", "日本", "😀", " é", "👩‍👧", "l, ", ".", "テキスト", "\n", "ß"]


def a_body(chance: random.Random, number: int) -> dict[str, object]:
    """Every combination of stream, greedy, chat and n comes with the number; the rest is chance."""
    text = "".join(chance.choices(WORDS, k=chance.randint(2, 5)))
    body: dict[str, object] = {"model": "tiny", "n": 1 + number // 8 % 2, "max_tokens": chance.randint(4, 12)}
    if number % 2:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if number // 2 % 2:
        body["temperature"] = 0
    else:
        body |= {"temperature": chance.uniform(0.1, 1.0), "seed": chance.randrange(2**63)}
        body |= {"frequency_penalty": chance.choice([0, 1.5]), "top_p": chance.choice([0.9, 1.0])}
    if number // 4 % 2:
        body |= {"messages": [{"role": "user", "content": text}], "max_tokens": chance.randint(8, 16)}
        if chance.random() < 0.8:
            body |= {"logprobs": True, "top_logprobs": chance.randint(0, 3)}
    else:
        body["prompt"] = text
        if chance.random() < 0.8:
            body["logprobs"] = chance.randint(0, 3)
    if chance.random() < 0.6:
        begin = chance.randrange(len(text))
        body["stop"] = [text[begin : begin + chance.randint(1, 4)] + chance.choice(["", "", "never"]), "日本 is"]
    return body


def told(body: dict[str, object], answer: str) -> dict[str, object]:
    """What the client is told, streamed or not: text, log probabilities and finish reason of each choice, and usage."""
    if not body.get("stream"):
        whole = json.loads(answer)
        choices = {
            choice["index"]: [_text_of(choice, "message"), _logprobs_of([choice]), choice["finish_reason"]]
            for choice in whole["choices"]
        }
        return {"choices": choices, "usage": whole["usage"]}
    lines = [line for line in answer.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]", answer
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    choices = {}
    for index in range(body["n"]):  # type: ignore[call-overload]
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        text = "".join(_text_of(part, "delta") for part in parts)
        choices[index] = [text, _logprobs_of(parts), parts[-1]["finish_reason"]]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    return {"choices": choices, "usage": chunks[-1]["usage"]}


def _text_of(choice: dict[str, dict[str, str]], kind: str) -> object:
    return choice[kind].get("content", "") if kind in choice else choice["text"]


def _logprobs_of(parts: list[dict[str, dict[str, list[object] | None] | None]]) -> dict[str, list[object]]:
    """Those of all parts joined; an output without tokens has none in either form."""
    joined: dict[str, list[object]] = {}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(values or [])
    return {name: values for name, values in joined.items() if values}


class Pair:
    """The router between its clients and two workers; requests begin at the first."""

    def __init__(self, dispatch: Dispatch, workers: tuple[CoreWorker, CoreWorker], text: ModelText) -> None:
        self._dispatch = dispatch
        self._workers = workers

        async def known(_model_id: str) -> ModelText:
            return text

        catalogue = SimpleNamespace(text=known)
        self._endpoints = {
            is_chat: Inference(dispatch, catalogue, LIMITS, is_chat=is_chat)  # type: ignore[arg-type]
            for is_chat in (False, True)
        }

    async def ask(self, body: dict[str, object], plan: Plan) -> str:
        """The whole body of the answer, which is no error before it begins."""
        self._set_out(plan)
        sent: list[bytes] = []
        body_data = msgspec.json.encode(body)
        arriving = iter([{"type": "http.request", "body": body_data, "more_body": False}])

        async def receive() -> dict[str, object]:
            for message in arriving:
                return message
            return await asyncio.Future()

        async def send(message: dict[str, object]) -> None:
            if message["type"] == "http.response.body":
                assert isinstance(message["body"], bytes)
                sent.append(message["body"])

        async with asyncio.timeout(20):
            await self._endpoints["messages" in body]({"type": "http", "headers": []}, receive, send)  # type: ignore[arg-type]
        beat = self._dispatch.heartbeat()
        assert (beat.active, beat.waiting_requests) == ((), 0), "nothing of it is left"
        return b"".join(sent).decode()

    def _set_out(self, plan: Plan) -> None:
        for worker in self._workers:
            worker.begin(plan)
            self._dispatch.routes.remove(worker.route.instance_id)
        for worker in self._workers[: 2 if plan.accident is Accident.KILL else 1]:
            self._dispatch.learn_route(worker.route, Stages(tier=Tier.GPU))


@asynccontextmanager
async def a_pair(text: ModelText, cache_dir: Path) -> AsyncIterator[Pair]:
    hub = InMemoryHub()
    bus = hub.bus(name="router")
    async with asyncio.TaskGroup() as group:
        config = RouterConfig(repository_url="file:///none", cache_dir=cache_dir)
        dispatch = Dispatch(bus, config, 1, group.create_task)
        await bus.subscribe(bus.subjects.tokens(config.router_id), dispatch.on_frame)
        workers = [
            CoreWorker(hub.bus(name="worker"), route, text.settings.vocabulary_tokens, dispatch.on_worker_heartbeat)
            for route in ROUTES
        ]
        workers[0].other, workers[1].other = workers[1], workers[0]
        running = [group.create_task(dispatch.notes.run())]
        for worker in workers:
            await worker.start()
            running.append(group.create_task(worker.run()))
            await worker.beat()
        yield Pair(dispatch, (workers[0], workers[1]), text)
        for task in running:
            task.cancel()
        for one in (bus, *(worker.bus for worker in workers)):
            await one.drain()


async def run(pair: Pair, body: dict[str, object], plan: Plan) -> dict[str, object]:
    return told(body, await pair.ask(body, plan))


def in_the_other_form(body: dict[str, object]) -> dict[str, object]:
    """The same request, whole instead of streamed or the other way round."""
    if "stream" in body:
        return {name: value for name, value in body.items() if not name.startswith("stream")}
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def plans(chance: random.Random, steps: int) -> Iterator[Plan]:
    """Each accident at each step, with a frame before it that is lost and one anywhere that is repeated."""
    for at in range(steps):
        for accident in Accident:
            yield Plan(
                accident=accident,
                at=at,
                lead=chance.randint(0, 3),
                lost=frozenset({chance.randrange(at)} if at else ()),
                repeated=frozenset({chance.randrange(steps)}),
            )


@pytest.mark.timeout(300)
async def test_an_accident_at_any_step_changes_nothing_that_a_client_is_told(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """G8, G10, G11: tokens, and all that is made of them."""
    seed = int(os.environ.get("ACCIDENTS_SEED", random.randrange(2**32)))
    chance = random.Random(seed)
    write_model(tmp_path / "tiny", tokenizer)
    text = load_text("tiny", tmp_path / "tiny")
    happened: Counter[str] = Counter()
    # Thousands of requests are logged otherwise.
    with capture_logs():
        async with a_pair(text, tmp_path) as pair:
            for number in range(REQUESTS):
                body = a_body(chance, number)
                where = f"seed {seed}, request {number}: {body}"
                calm = Plan()
                expected = await run(pair, body, calm)
                assert await run(pair, in_the_other_form(body), Plan()) == expected, where
                for plan in plans(chance, calm.steps):
                    assert await run(pair, body, plan) == expected, f"{plan}, {where}"
                    happened[str(plan.accident)] += plan.is_done
                    happened["resends"] += plan.resends
    print(f"ACCIDENTS_SEED={seed}: {dict(happened)}")
    assert len(happened) == 3
    assert min(happened.values()) > 100, "these were no accidents"
