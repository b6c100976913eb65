"""Several choices from one request: each an inference of its own, one answer, one usage, one end."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

import pytest
import pytest_asyncio
from whimbrel.chassis import telemetry
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import InferenceLost, QueueFull
from whimbrel.wire.events import RequestFailed, RequestFinished
from whimbrel.wire.messages import (
    AbortInference,
    CancelPlacement,
    FinishReason,
    InferenceFinished,
    InferenceStarted,
    PlaceModel,
    StartInference,
    TokenEntry,
)

from tests.unit.router.conftest import ANSWER, Bench, MakeBench
from tests.unit.router.peers import a_route
from tests.unit.router.test_answers import chunks_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE = a_route("tiny")


@pytest_asyncio.fixture(loop_scope="module")
async def bench(module_bench: Bench) -> Bench:
    await module_bench.reset()
    return module_bench


def saying_the_seed(bench: Bench) -> None:
    """Each seed has an answer of its own."""
    bench.worker.output = lambda start: bench.tokenizer.encode(f"Seed {start.sampling.seed % 1000}.").ids


async def test_each_choice_has_a_seed_of_its_own_and_the_first_is_that_of_one_alone(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    saying_the_seed(bench)
    alone = (await bench.post(seed=41)).json()
    body = (await bench.post(seed=41, n=3)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == ["Seed 41.", "Seed 42.", "Seed 43."]
    assert body["choices"][0] == alone["choices"][0]
    starts = bench.worker.heard.all(StartInference)[1:]
    first = starts[0].request_id
    assert [start.request_id for start in starts] == [first, f"{first}-1", f"{first}-2"]
    assert body["id"] == first.replace("req", "chatcmpl", 1)


async def test_the_largest_seed_has_a_next_one(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    await bench.post(seed=2**63 - 1, n=2)
    assert [start.sampling.seed for start in bench.worker.heard.all(StartInference)] == [2**63 - 1, 0]


async def test_usage_counts_the_prompt_once_and_the_output_of_all(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    alone = (await bench.post()).json()["usage"]
    prompt, output = alone["prompt_tokens"], alone["completion_tokens"]
    expected = {"prompt_tokens": prompt, "completion_tokens": 3 * output, "total_tokens": prompt + 3 * output}
    assert (await bench.post(n=3)).json()["usage"] == expected
    response = await bench.post(n=3, stream=True, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks_of(response.text) if chunk["usage"]] == [expected]


async def test_chunks_carry_the_index_of_their_choice_and_one_done_ends_them_all(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    saying_the_seed(bench)
    response = await bench.post(seed=7, n=2, stream=True)
    assert response.text.count("data: [DONE]") == 1
    assert response.text.endswith("data: [DONE]\n\n")
    by_index = defaultdict(list)
    for chunk in chunks_of(response.text):
        (choice,) = chunk["choices"]
        by_index[choice["index"]].append(choice)
    assert sorted(by_index) == [0, 1]
    for index, choices in by_index.items():
        first, *middle, last = choices
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"]["content"] for choice in middle) == f"Seed {7 + index}."
        assert (last["delta"], last["finish_reason"]) == ({}, "stop")


async def test_completions_have_choices_too(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    response = await bench.client.post("/v1/completions", json={"model": "tiny", "prompt": "x", "n": 2})
    assert [(c["index"], c["text"]) for c in response.json()["choices"]] == [(0, ANSWER), (1, ANSWER)]


async def test_each_choice_ends_for_its_own_reason(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    saying_the_seed(bench)
    body = (await bench.post(seed=1, n=2, stop=["d 1"])).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["See", "Seed 2."]
    bench.worker.finish_reason = FinishReason.LENGTH
    body = (await bench.post(seed=1, n=2, stop=["d 1"])).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]


async def test_the_headers_tell_of_the_choice_that_began_first(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    for body in ({"n": 2}, {"n": 2, "stream": True}):
        response = await bench.post(**body)
        assert response.headers["x-whimbrel-server"] == "server-0"
        assert response.headers["x-whimbrel-tier"] == "gpu"
        assert "first_token" in response.headers.get("server-timing", response.text)


async def test_each_choice_is_told_of_as_an_inference_of_its_own(bench: Bench) -> None:
    """R2, R5: what runs on an instance is counted there, and each ends when it ends."""
    await bench.scheduler.add_route(ROUTE)
    before = finished_requests()
    await bench.post(n=2)
    started = await bench.scheduler.heard.wait(InferenceStarted, 2)
    finished = await bench.scheduler.heard.wait(InferenceFinished, 2)
    ids = {message.request_id for message in started}
    assert len(ids) == 2
    assert {message.request_id for message in finished} == ids
    told = [event for event in bench.hub.events if isinstance(event, RequestFinished)]
    assert {event.request_id for event in told} == ids
    assert finished_requests() == before + 2


async def test_a_choice_that_ends_early_is_over_before_the_others(bench: Bench) -> None:
    """R2: how long it took is not how long the slowest took."""
    await bench.scheduler.add_route(ROUTE)
    bench.worker.mangle = lambda frames: [] if frames[0].entries[0].request_id.endswith("-1") else frames
    began_at = time.monotonic()
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post(n=2))
        await bench.worker.heard.wait(StartInference, 2)
        await asyncio.sleep(0.3)
        bench.worker.mangle = list
        last = next(start for name, start in bench.worker.requests.items() if name.endswith("-1"))
        await bench.worker.say(last, 0)
    assert asking.result().status_code == 200
    took_s = time.monotonic() - began_at
    first, second = (event for event in bench.hub.events if isinstance(event, RequestFinished))
    assert first.duration_s < 0.25 < second.duration_s <= took_s


def a_sign(start: StartInference) -> TokenEntry:
    """What a worker says of a request that waits its turn."""
    return TokenEntry(request_id=start.request_id, epoch=start.epoch, position=0, tokens=b"")


async def test_a_choice_has_no_cold_start_while_another_has_its_turn(make_bench: MakeBench) -> None:
    """A worker computes one after the other: the second may wait longer for the first than for any load."""
    async with make_bench(cold_start_s_max=0.6) as bench:
        await bench.scheduler.add_route(ROUTE)
        bench.worker.is_held = True
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(bench.post(n=2))
            first, second = await bench.worker.heard.wait(StartInference, 2)
            for frame in bench.worker.frames(first, 0):
                await bench.worker.send(first, frame.entries[0])
                await bench.worker.send(second, a_sign(second))
                await asyncio.sleep(0.1)
            await bench.worker.say(second, 0)
        assert [choice["message"]["content"] for choice in asking.result().json()["choices"]] == [ANSWER] * 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_ends_all_choices(bench: Bench, *, stream: bool) -> None:
    await bench.scheduler.add_route(ROUTE)
    bench.worker.is_held = True
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post(n=3, stream=stream))
        starts = await bench.worker.heard.wait(StartInference, 3)
        asking.cancel()
    aborts = await bench.worker.heard.wait(AbortInference, 3)
    assert {abort.request_id for abort in aborts} == {start.request_id for start in starts}


async def test_a_client_that_leaves_cancels_the_placement_of_all_choices(bench: Bench) -> None:
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post(n=2))
        placed = await bench.scheduler.heard.wait(PlaceModel, 2)
        asking.cancel()
    cancelled = await bench.scheduler.heard.wait(CancelPlacement, 2)
    assert {message.request_id for message in cancelled} == {message.request_id for message in placed}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_choice_that_fails_ends_the_others(bench: Bench, *, stream: bool) -> None:
    await bench.scheduler.add_route(ROUTE)
    bench.worker.is_held = True
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post(n=3, stream=stream))
        starts = await bench.worker.heard.wait(StartInference, 3)
        bench.worker.is_held = False
        bench.worker.finish_reason = FinishReason.FAILED
        bench.worker.error = error_reply(InferenceLost(reason="nan", output_tokens=0))
        await bench.worker.say(starts[1], 0)
    assert '"inference_lost"' in asking.result().text
    assert "[DONE]" not in asking.result().text
    aborts = await bench.worker.heard.wait(AbortInference, 3)
    assert {abort.request_id for abort in aborts} == {start.request_id for start in starts}
    codes = {event.request_id: event.code for event in bench.hub.events if isinstance(event, RequestFailed)}
    assert [codes[start.request_id] for start in starts] == ["cancelled", "inference_lost", "cancelled"]


async def test_a_choice_that_finds_no_place_ends_the_others(bench: Bench) -> None:
    """All or nothing: a queue that takes one of them only takes none."""
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post(n=2))
        placed = await bench.scheduler.heard.wait(PlaceModel, 2)
        full = QueueFull(queue="the scheduler", limit=1)
        await bench.scheduler.fail_placement("tiny", [placed[1].request_id], full)
    assert asking.result().status_code == 429
    cancelled = await bench.scheduler.heard.wait(CancelPlacement, 2)
    assert {message.request_id for message in cancelled} == {message.request_id for message in placed}


async def test_choices_are_admitted_all_or_none(make_bench: MakeBench) -> None:
    async with make_bench(requests_max=3) as bench:
        await bench.scheduler.add_route(ROUTE)
        refused = await bench.post(n=4)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert not bench.worker.heard.all(StartInference)
        bench.worker.is_held = True
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(bench.post(n=2))
            await bench.worker.heard.wait(StartInference, 2)
            assert (await bench.post(n=2)).status_code == 429
            assert len(bench.worker.heard.all(StartInference)) == 2
            await bench.worker.release()
        assert asking.result().status_code == 200
        assert (await bench.post(n=3)).status_code == 200, "places were given back"


def finished_requests() -> float:
    labels = {"outcome": "finished", "start": "warm"}
    return telemetry.REGISTRY.get_sample_value("whimbrel_router_requests_total", labels) or 0.0
