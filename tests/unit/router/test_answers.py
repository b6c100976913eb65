"""A request's way through the whole router, warm and cold, streamed and not, between peers with the real messages."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
import pytest_asyncio
from whimbrel.wire.codec import unpack_tokens
from whimbrel.wire.events import RequestFinished
from whimbrel.wire.messages import (
    AbortInference,
    FinishReason,
    InferenceFinished,
    InferenceStarted,
    ModelState,
    PlaceModel,
    StartInference,
    Tier,
    TokenFrame,
)

from tests.unit.router.conftest import ANSWER, Bench, MakeBench
from tests.unit.router.peers import LOADED, a_model, a_route, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def bench(module_bench: Bench) -> Bench:
    await module_bench.reset()
    return module_bench


CHAT_PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def lines_of(text: str) -> list[str]:
    return [line for line in text.split("\n\n") if line]


def chunks_of(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in lines_of(text) if line.startswith("data: {")]


def text_of(chunks: list[dict]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text", choice.get("delta", {}).get("content") or "") for choice in choices)


def stages_of(header: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+);dur=([0-9.]+)", header)}


async def test_a_warm_request_goes_straight_to_its_instance(bench: Bench) -> None:
    """R1: the route table knows the instance, so nobody has to be asked."""
    await bench.scheduler.add_route(a_route("tiny"))
    response = await bench.post()
    assert response.status_code == 200
    body = response.json()
    assert body["choices"][0]["message"]["content"] == ANSWER
    assert body["choices"][0]["finish_reason"] == "stop"
    (start,) = bench.worker.heard.all(StartInference)
    assert bench.tokenizer.decode(prompt_of(start), skip_special_tokens=False) == CHAT_PROMPT
    assert body["usage"] == {
        "prompt_tokens": start.prompt_tokens,
        "completion_tokens": len(bench.worker.output(start)),
        "total_tokens": start.prompt_tokens + len(bench.worker.output(start)),
    }
    assert bench.scheduler.heard.all(PlaceModel) == []


async def test_headers_tell_who_served_it_and_where_the_time_went(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    response = await bench.post()
    assert response.headers["x-whimbrel-tier"] == "gpu"
    assert response.headers["x-whimbrel-server"] == "server-0"
    assert response.headers["x-request-id"].removeprefix("req-") == response.json()["id"].removeprefix("chatcmpl-")
    stages = stages_of(response.headers["server-timing"])
    assert stages.keys() == {"queue", "fetch", "load", "bind", "prefill", "first_token"}
    assert (stages["queue"], stages["prefill"], stages["load"]) == (1.0, 2.0, 0.0)


async def test_a_cold_request_waits_for_its_route_and_tells_its_stages(bench: Bench) -> None:
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        (place,) = await bench.scheduler.heard.wait(PlaceModel)
        assert (place.model_id, place.router_id) == ("tiny", "router-0")
        await bench.scheduler.add_route(a_route("tiny"))
    response = asking.result()
    assert response.json()["choices"][0]["message"]["content"] == ANSWER
    assert response.headers["x-whimbrel-tier"] == "ssd"
    stages = stages_of(response.headers["server-timing"])
    assert (stages["fetch"], stages["load"], stages["bind"]) == (20.0, 30.0, 4.0)
    assert stages["queue"] == pytest.approx(11.0)


async def test_a_request_after_a_cold_one_is_warm(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"), LOADED)
    assert (await bench.post()).headers["x-whimbrel-tier"] == "gpu"


async def test_an_answer_with_a_route_at_once_is_no_cold_start(bench: Bench) -> None:
    bench.scheduler.routes["tiny"] = a_route("tiny")  # the router has not heard of it
    response = await bench.post()
    assert response.headers["x-whimbrel-tier"] == "gpu"
    assert len(bench.scheduler.heard.all(PlaceModel)) == 1


async def test_deltas_join_exactly_to_the_answer_that_is_not_streamed(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    whole = (await bench.post()).json()["choices"][0]["message"]["content"]
    response = await bench.post(stream=True)
    chunks = chunks_of(response.text)
    assert text_of(chunks) == whole == ANSWER
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_stream_ends_with_its_times_and_one_done(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    response = await bench.post(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *_, times, done = lines_of(response.text)
    assert done == "data: [DONE]"
    assert times == f": server-timing {response.headers['server-timing']}"
    assert response.text.count("[DONE]") == 1


async def test_the_usage_chunk_comes_only_when_asked_for(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    response = await bench.post(stream=True, stream_options={"include_usage": True})
    *chunks, last = chunks_of(response.text)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_continues_text(bench: Bench, *, stream: bool) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    response = await bench.post("/v1/completions", model="tiny", prompt="Hello", stream=stream)
    (start,) = bench.worker.heard.all(StartInference)
    assert bench.tokenizer.decode(prompt_of(start)) == "Hello"
    assert start.output_tokens_max == 16
    text = text_of(chunks_of(response.text)) if stream else response.json()["choices"][0]["text"]
    assert text == ANSWER
    assert "text_completion" in response.text


async def test_a_prompt_of_token_ids_is_taken_as_it_is(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    await bench.post("/v1/completions", model="tiny", prompt=[5, 6, 7])
    assert unpack_tokens(bench.worker.heard.all(StartInference)[0].tokens) == [5, 6, 7]


async def test_everything_that_decides_the_next_token_travels_with_the_request(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    await bench.post(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.05, seed=11, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.2, logit_bias={"5": 3}, max_tokens=9,
    )  # fmt: skip
    (start,) = bench.worker.heard.all(StartInference)
    sampling = start.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.05)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (11, 1.0, -1.0)
    assert (sampling.repetition_penalty, sampling.logit_bias, start.output_tokens_max) == (1.2, {5: 3.0}, 9)
    assert start.stop_tokens == (bench.tokenizer.token_to_id("<|im_end|>"),)


async def test_without_a_limit_the_rest_of_the_context_is_used_and_the_seed_is_random(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    await bench.post()
    await bench.post()
    first, second = bench.worker.heard.all(StartInference)
    assert first.output_tokens_max == 512 - first.prompt_tokens
    assert first.sampling.seed != second.sampling.seed


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_output_and_the_work(bench: Bench, *, stream: bool) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    response = await bench.post(stream=stream, stop=[" capital", "nowhere"])
    text = text_of(chunks_of(response.text)) if stream else response.json()["choices"][0]["message"]["content"]
    assert text == "Paris is the"
    assert '"finish_reason":"stop"' in response.text


async def test_the_worker_is_told_when_a_stop_string_was_found(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    answer = bench.worker.output
    bench.worker.frames_before_hold = 6  # the worker goes on; nobody would tell it otherwise
    response = await bench.post(stop=" is")
    assert response.json()["choices"][0]["message"]["content"] == "Paris"
    (finished,) = await bench.scheduler.heard.wait(InferenceFinished)
    assert finished.output_tokens < len(answer(bench.worker.heard.all(StartInference)[0]))
    assert len(await bench.worker.heard.wait(AbortInference)) == 1


async def test_the_token_limit_is_a_length_finish(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.finish_reason = FinishReason.LENGTH
    assert (await bench.post()).json()["choices"][0]["finish_reason"] == "length"


async def test_an_output_without_tokens_is_an_empty_answer(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.output = lambda _request: []
    assert (await bench.post()).json()["choices"][0]["message"]["content"] == ""
    chunks = chunks_of((await bench.post(stream=True)).text)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "stop"]


async def test_starts_and_ends_are_told_to_the_scheduler(bench: Bench) -> None:
    """R5, R2: the scheduler hears when a request enters and leaves an instance, with tokens and times."""
    await bench.scheduler.add_route(a_route("tiny"))
    await bench.post()
    (started,) = await bench.scheduler.heard.wait(InferenceStarted)
    (finished,) = await bench.scheduler.heard.wait(InferenceFinished)
    assert started.request_id == finished.request_id
    assert finished.instance_id == "instance-1"
    assert finished.output_tokens == len(bench.tokenizer.encode(ANSWER).ids)
    assert finished.prompt_tokens == started.prompt_tokens > 0
    assert finished.prefill_s == 0.002, "M1: what the worker said of it"
    assert finished.token_s <= finished.duration_s


async def test_a_finished_request_is_a_public_event(bench: Bench) -> None:
    """R6: duration and processed data are metered."""
    await bench.scheduler.add_route(a_route("tiny"))
    await bench.post()
    (event,) = [event for event in bench.hub.events if isinstance(event, RequestFinished)]
    assert (event.model_id, event.server_id, event.tier, event.finish_reason) == ("tiny", "server-0", "gpu", "stop")
    assert 0 < event.first_token_s <= event.duration_s


async def test_a_draining_instance_gets_no_new_request(bench: Bench) -> None:
    route = a_route("tiny")
    await bench.scheduler.add_route(route)
    await bench.post()
    await bench.scheduler.drain_route(route)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        await bench.scheduler.heard.wait(PlaceModel)
        bench.worker.instance_id = "instance-2"
        await bench.scheduler.add_route(a_route("tiny", "instance-2"))
    assert asking.result().status_code == 200
    assert [start.instance_id for start in bench.worker.heard.all(StartInference)] == ["instance-1", "instance-2"]


async def test_fifty_requests_at_once_over_two_models_all_get_their_own_text(make_bench: MakeBench) -> None:
    async with make_bench(models=("tiny", "tiny2")) as bench:

        def echo(request: StartInference) -> list[int]:
            return prompt_of(request)

        bench.worker.output = echo
        bench.worker.tokens_per_frame = 3
        # Both models live on one fake worker here: it takes whatever instance it is asked for, and claims none.
        bench.worker.takes_any_instance = True
        bench.worker.is_mute = True

        async def ask(number: int) -> str:
            model = ("tiny", "tiny2")[number % 2]
            response = await bench.post("/v1/completions", model=model, prompt=f"Prompt {number}!", max_tokens=50)
            assert response.status_code == 200
            return str(response.json()["choices"][0]["text"])

        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(ask(number)) for number in range(50)]
            await bench.scheduler.heard.wait(PlaceModel, 50)
            await bench.scheduler.add_route(a_route("tiny"))
            await bench.scheduler.add_route(a_route("tiny2", "instance-2"))
        assert [task.result() for task in asking] == [f"Prompt {number}!" for number in range(50)]
        assert len(await bench.scheduler.heard.wait(InferenceFinished, 50)) == 50
        assert len(bench.scheduler.heard.all(InferenceStarted)) == 50


async def test_one_frame_may_carry_tokens_of_many_requests(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.is_held = True
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(bench.post()) for _ in range(3)]
        starts = await bench.worker.heard.wait(StartInference, 3)
        columns = [bench.worker.frames(start, 0) for start in starts]
        for row in zip(*columns, strict=True):
            entries = tuple(entry for frame in row for entry in frame.entries)
            frame = TokenFrame(server_id="server-0", slot=0, entries=entries)
            await bench.worker.bus.publish(bench.worker.bus.subjects.tokens("router-0"), frame)
    assert {task.result().json()["choices"][0]["message"]["content"] for task in asking} == {ANSWER}


async def test_models_are_listed_cold_and_warm_as_openai_lists_them(bench: Bench) -> None:
    bench.scheduler.models["new"] = a_model("new", state=ModelState.IMPORTING)
    body = (await bench.client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["tiny"]
    assert body["data"][0]["whimbrel"] == {
        "state": "ready",
        "size_bytes": 1000,
        "residency": {"server-0": "ssd"},
        "instances": 0,
    }


async def test_a_model_with_a_slash_in_its_id_has_a_path(bench: Bench) -> None:
    bench.scheduler.models["org/tiny"] = a_model("org/tiny")
    for path in ("/v1/models/org/tiny", "/v1/models/org%2Ftiny"):
        body = (await bench.client.get(path)).json()
        assert (body["id"], body["object"], body["created"]) == ("org/tiny", "model", 1_700_000_000)


async def test_the_tier_in_the_metrics_is_a_tier(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    await bench.post()
    metrics = (await bench.client.get("/metrics")).text
    assert 'whimbrel_router_first_token_seconds_count{tier="gpu"}' in metrics
    assert 'whimbrel_router_requests_total{outcome="finished",start="warm"}' in metrics
    assert set(re.findall(r'tier="(\w+)"', metrics)) <= set(Tier)
