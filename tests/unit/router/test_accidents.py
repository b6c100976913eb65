"""An answer is the same whatever happens to its workers: text, log probabilities, finish reasons and usage.

Fifty random requests run undisturbed, and then again with a move, and with a kill, at every step; frames are lost and
repeated on the way. A failure names its seed, and
ACCIDENTS_SEED runs it again.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from services.router.texts import load_text
from tests.unit.router.core_workers import Accident, Pair, Plan, a_pair
from tests.unit.router.model_files import write_model

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
