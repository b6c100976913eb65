"""What goes wrong around a request: it ends with all its tokens or with one typed error, and nobody works on for it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable

import httpx
import pytest
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import (
    Conflict,
    InstanceGone,
    InternalError,
    LoadFailed,
    ModelTooLarge,
    QueueFull,
    Unavailable,
    WhimbrelError,
)
from whimbrel.wire.events import RequestFailed
from whimbrel.wire.messages import (
    AbortInference,
    Ack,
    CancelPlacement,
    ErrorReply,
    FinishReason,
    InferenceFinished,
    PlaceModel,
    PlaceModelReply,
    ResendTokens,
    RouterHeartbeat,
    StartInference,
    TokenFrame,
)

from services.router import outputs, service
from services.router.core.requests import LOSSES_MAX
from tests.unit.router.conftest import ANSWER, Bench, MakeBench
from tests.unit.router.peers import LOADED, a_route


def content_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def last_event(text: str) -> dict:
    """The last event of a stream, which has to be its end as well."""
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1].startswith("data: ")
    return json.loads(lines[-1][6:])


def without(*positions: int) -> Callable[[list[TokenFrame]], list[TokenFrame]]:
    """Lose the frames of these positions, the first time only."""
    lost = set(positions)

    def mangle(frames: list[TokenFrame]) -> list[TokenFrame]:
        kept = [frame for frame in frames if frame.entries[0].position not in lost]
        lost.clear()
        return kept

    return mangle


async def test_a_gap_is_asked_for_and_repaired(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.mangle = without(3)
    assert content_of(await bench.post()) == ANSWER
    (resend,) = bench.worker.heard.all(ResendTokens)
    assert resend.position == 3


async def test_lost_last_frames_are_asked_for_after_a_silence(quick: None, bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    count = len(bench.tokenizer.encode(ANSWER).ids)
    bench.worker.mangle = without(count - 1, count - 2)
    assert content_of(await bench.post()) == ANSWER
    assert bench.worker.heard.all(ResendTokens)[0].position == count - 2


async def test_any_loss_doubling_and_reordering_of_frames_gives_the_exact_answer(quick: None, bench: Bench) -> None:
    chance = random.Random(1)

    def mangle(frames: list[TokenFrame]) -> list[TokenFrame]:
        network = [frame for frame in frames for _ in range(chance.choice([0, 1, 1, 2]))]
        if chance.random() < 0.5:
            chance.shuffle(network)
        return network

    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.mangle = mangle
    responses = await asyncio.gather(*(bench.post() for _ in range(20)))
    assert {content_of(response) for response in responses} == {ANSWER}


async def test_frames_of_an_older_start_are_dropped(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.is_held = True
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        (start,) = await bench.worker.heard.wait(StartInference)
        old = StartInference(**{**{name: getattr(start, name) for name in start.__struct_fields__}, "epoch": 0})
        await bench.worker.say(old, 0)
        await bench.worker.release()
    assert content_of(asking.result()) == ANSWER


async def test_an_instance_that_is_gone_sends_the_request_back_to_placement(quick: None, bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny", "instance-0"))
    bench.scheduler.routes["tiny"] = a_route("tiny", "instance-1")
    bench.worker.refusal = InstanceGone(instance_id="instance-0")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        await bench.worker.heard.wait(StartInference)
        bench.worker.refusal = None
    assert content_of(asking.result()) == ANSWER
    starts = bench.worker.heard.all(StartInference)
    assert [(start.instance_id, start.epoch) for start in starts] == [("instance-0", 1), ("instance-1", 2)]


async def test_a_worker_that_does_not_answer_is_not_the_end(quick: None, bench: Bench) -> None:
    """The route stands but nobody listens there: the request waits until the scheduler names another instance."""
    await bench.scheduler.add_route(a_route("tiny", slot=7))
    bench.scheduler.routes["tiny"] = a_route("tiny", "instance-1")
    assert content_of(await bench.post()) == ANSWER


async def test_an_instance_lost_before_the_first_token_is_replaced_unseen(bench: Bench) -> None:
    route = a_route("tiny")
    await bench.scheduler.add_route(route)
    bench.worker.is_held = True
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        await bench.worker.heard.wait(StartInference)
        bench.worker.forgets_requests = True
        await bench.scheduler.remove_route(route)
        await bench.scheduler.heard.wait(PlaceModel)
        bench.worker.is_held, bench.worker.instance_id = False, "instance-2"
        await bench.scheduler.add_route(a_route("tiny", "instance-2"))
    assert content_of(asking.result()) == ANSWER
    assert [start.epoch for start in bench.worker.heard.all(StartInference)] == [1, 2]
    assert len(await bench.scheduler.heard.wait(InferenceFinished, 2)) == 2


async def test_a_removed_route_does_not_end_a_request_that_its_worker_still_runs(bench: Bench) -> None:
    route = a_route("tiny")
    await bench.scheduler.add_route(route)
    bench.worker.is_held = True
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        await bench.worker.heard.wait(StartInference)
        await bench.scheduler.remove_route(route)
        await bench.worker.heard.wait(ResendTokens)
        await bench.worker.release()
    assert content_of(asking.result()) == ANSWER


async def lose_after_two_frames(bench: Bench, **body: object) -> httpx.Response:
    route = a_route("tiny")
    await bench.scheduler.add_route(route)
    bench.worker.frames_before_hold = 2
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post(**body))
        await bench.worker.heard.wait(StartInference)
        bench.worker.forgets_requests = True
        await bench.scheduler.remove_route(route)
    return asking.result()


async def test_without_failover_an_instance_lost_in_mid_stream_is_a_typed_event_and_the_end(bench: Bench) -> None:
    response = await lose_after_two_frames(bench, stream=True, failover=False)
    assert response.status_code == 200
    error = last_event(response.text)["error"]
    assert (error["code"], error["type"], error["param"]) == ("inference_lost", "server_error", None)
    assert "after 2 tokens" in error["message"]
    assert "[DONE]" not in response.text


async def test_without_failover_an_instance_lost_in_mid_answer_is_a_503(bench: Bench) -> None:
    response = await lose_after_two_frames(bench, failover=False)
    assert error_of(response) == (503, "inference_lost")
    assert response.headers["retry-after"] == "1"
    (event,) = [event for event in bench.hub.events if isinstance(event, RequestFailed)]
    assert (event.code, event.output_tokens) == ("inference_lost", 2)


async def test_a_restarted_worker_has_lost_what_ran_there(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.frames_before_hold = 2
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post(failover=False))
        await bench.worker.heard.wait(StartInference)
        await bench.worker.beat()
        bench.worker.epoch += 1
        await bench.worker.beat()
    assert error_of(asking.result()) == (503, "inference_lost")
    assert "restarted" in asking.result().json()["error"]["message"]


async def test_a_silent_worker_is_given_up(quick: None, bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.frames_before_hold = 2
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post(failover=False))
        await bench.worker.heard.wait(StartInference)
        bench.worker.is_mute = True
    assert error_of(asking.result()) == (503, "inference_lost")
    assert "silent" in asking.result().json()["error"]["message"]


async def test_no_worker_is_given_up_because_the_router_itself_stood_still(quick: None, bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.frames_before_hold = 2
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post(failover=False))
        await bench.worker.heard.wait(StartInference)
        time.sleep(1.0)  # noqa: ASYNC251 (nobody here runs meanwhile, as when the process is stopped)
        await asyncio.sleep(0.1)
        await bench.worker.release()
    assert asking.result().status_code == 200


async def test_a_request_that_keeps_losing_its_instance_ends(bench: Bench) -> None:
    bench.worker.finish_reason = FinishReason.ABORTED
    bench.worker.output = lambda _request: []
    bench.worker.takes_any_instance = True
    bench.worker.is_mute = True
    instances = iter(range(100))

    def place(_message: PlaceModel) -> PlaceModelReply:
        return PlaceModelReply(route=a_route("tiny", f"instance-{next(instances)}"), stages=LOADED)

    bench.scheduler.place = place
    assert error_of(await bench.post()) == (503, "inference_lost")
    assert len(bench.worker.heard.all(StartInference)) == LOSSES_MAX


async def test_a_failure_of_the_engine_reaches_the_client_as_it_is(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.finish_reason = FinishReason.FAILED
    bench.worker.error = error_reply(InternalError(service="gpu_worker"))
    assert error_of(await bench.post()) == (500, "internal_error")
    assert last_event((await bench.post(stream=True)).text)["error"]["code"] == "internal_error"


async def test_a_failure_that_cannot_be_understood_ends_the_request_too(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.finish_reason = FinishReason.FAILED
    assert error_of(await bench.post()) == (500, "internal_error")
    bench.worker.error = ErrorReply(code="of_the_future", fields={})
    assert error_of(await bench.post()) == (500, "protocol_error")


async def test_a_placement_that_is_refused_has_the_status_of_its_error(bench: Bench) -> None:
    errors: list[tuple[WhimbrelError, int]] = [
        (ModelTooLarge(model_id="tiny", need_bytes=9, capacity_bytes=5), 422),
        (QueueFull(queue="the load queue", limit=5, retry_after_s=4), 429),
        (Conflict(reason="being deleted"), 409),
        (LoadFailed(model_id="tiny", reason="partition_0.bin at offset 4096 is corrupt"), 500),
    ]
    for error, status in errors:
        bench.scheduler.errors[PlaceModel] = error
        response = await bench.post(stream=True)
        assert error_of(response) == (status, error.code)
        assert response.json()["error"]["message"] == str(error)
        assert response.headers.get("retry-after") == ("4" if status == 429 else None)
    del bench.scheduler.errors[PlaceModel]
    await bench.scheduler.add_route(a_route("tiny"))
    assert content_of(await bench.post()) == ANSWER


async def test_a_placement_that_fails_later_ends_those_who_wait_for_it(bench: Bench) -> None:
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        (place,) = await bench.scheduler.heard.wait(PlaceModel)
        error = LoadFailed(model_id="tiny", reason="partition_0.bin at offset 4096 is corrupt")
        await bench.scheduler.fail_placement("tiny", ["req-unknown", place.request_id], error)
    assert error_of(asking.result()) == (500, "load_failed")


async def test_a_full_worker_is_a_429(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.refusal = QueueFull(queue="the worker", limit=8)
    response = await bench.post()
    assert error_of(response) == (429, "queue_full")
    assert response.headers["retry-after"] == "1"


async def test_a_cold_start_has_a_limit(make_bench: MakeBench) -> None:
    async with make_bench(cold_start_s_max=0.3) as bench:
        response = await bench.post()
        assert error_of(response) == (504, "cold_start_timeout")
        assert "stage: loading" in response.json()["error"]["message"]
        assert len(await bench.scheduler.heard.wait(CancelPlacement)) == 1


async def test_a_stream_has_an_idle_limit(make_bench: MakeBench) -> None:
    async with make_bench(idle_s_max=0.3) as bench:
        await bench.scheduler.add_route(a_route("tiny"))
        bench.worker.frames_before_hold = 2
        response = await bench.post(stream=True)
        assert last_event(response.text)["error"]["code"] == "request_timeout"
        assert len(await bench.worker.heard.wait(AbortInference)) == 1


async def test_a_silent_scheduler_is_a_503_after_a_while(make_bench: MakeBench) -> None:
    async with make_bench(unanswered_s_max=0.3) as bench:
        await bench.post("/v1/completions", model="tiny", prompt="x" * 5000)  # the tokenizer is loaded
        bench.scheduler.is_mute = True
        response = await bench.post()
        assert error_of(response) == (503, "unavailable")
        assert response.headers["retry-after"] == "1"


async def test_warm_requests_go_on_without_a_scheduler(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    assert content_of(await bench.post()) == ANSWER
    bench.scheduler.is_mute = True
    assert content_of(await bench.post()) == ANSWER


async def test_a_new_scheduler_is_asked_again_at_once_and_for_its_routes(bench: Bench) -> None:
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        await bench.scheduler.heard.wait(PlaceModel)
        bench.scheduler.routes["tiny"] = a_route("tiny")
        bench.scheduler.epoch += 1
        await bench.scheduler.beat()
    assert content_of(asking.result()) == ANSWER


async def test_a_bus_that_was_away_costs_no_token(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.is_held = True
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        await bench.worker.heard.wait(StartInference)
        bench.hub.go_down()
        bench.worker.is_held = False
        bench.hub.come_back()
    assert content_of(asking.result()) == ANSWER


async def leave(bench: Bench, until: Callable[[], object], **body: object) -> None:
    """Ask, and hang up once `until` has happened."""
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post(**body))
        await until()  # type: ignore[misc]
        asking.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_inference(bench: Bench, *, stream: bool) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.frames_before_hold = 2
    await leave(bench, lambda: bench.worker.heard.wait(StartInference), stream=stream)
    (abort,) = await bench.worker.heard.wait(AbortInference)
    (finished,) = await bench.scheduler.heard.wait(InferenceFinished)
    assert abort.request_id == finished.request_id
    (event,) = [event for event in bench.hub.events if isinstance(event, RequestFailed)]
    assert event.code == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_waits_cancels_its_placement(bench: Bench, *, stream: bool) -> None:
    await leave(bench, lambda: bench.scheduler.heard.wait(PlaceModel), stream=stream)
    (cancel,) = await bench.scheduler.heard.wait(CancelPlacement)
    assert cancel.request_id == bench.scheduler.heard.all(PlaceModel)[0].request_id


async def test_a_worker_that_did_not_hear_the_abort_is_told_again(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.frames_before_hold = 2
    await leave(bench, lambda: bench.worker.heard.wait(StartInference))
    await bench.worker.heard.wait(AbortInference)
    (start,) = bench.worker.heard.all(StartInference)
    for _ in range(5):
        await bench.worker.say(start, 2, count=1)
    assert len(await bench.worker.heard.wait(AbortInference, 2)) == 2


async def test_too_many_requests_are_refused_with_a_429(make_bench: MakeBench) -> None:
    async with make_bench(requests_max=2) as bench:
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(bench.post()) for _ in range(2)]
            await bench.scheduler.heard.wait(PlaceModel, 2)
            response = await bench.post()
            assert error_of(response) == (429, "queue_full")
            assert response.headers["retry-after"] == "1"
            await bench.scheduler.add_route(a_route("tiny"))
        assert [content_of(task.result()) for task in waiting] == [ANSWER, ANSWER]
        assert content_of(await bench.post()) == ANSWER


async def test_a_long_wait_shows_itself_to_a_stream_and_its_errors_become_events(quick: None, bench: Bench) -> None:
    async with bench.client.stream("POST", "/v1/chat/completions", json=bench.chat(stream=True)) as response:
        assert response.status_code == 200
        assert "server-timing" not in response.headers
        parts = response.aiter_text()
        assert await anext(parts) == ": waiting (loading, about 1.5 s left)\n\n"
        request_id = bench.scheduler.heard.all(PlaceModel)[0].request_id
        await bench.scheduler.fail_placement("tiny", [request_id], Unavailable(what="the tier"))
        rest = "".join([part async for part in parts])
    assert last_event(rest)["error"]["code"] == "unavailable"


async def test_a_long_wait_ends_with_the_answer_and_all_its_times(quick: None, bench: Bench) -> None:
    async with bench.client.stream("POST", "/v1/chat/completions", json=bench.chat(stream=True)) as response:
        parts = response.aiter_text()
        await anext(parts)
        await bench.scheduler.add_route(a_route("tiny"))
        rest = "".join([part async for part in parts])
    assert rest.endswith("data: [DONE]\n\n")
    assert (
        ": server-timing tier;desc=ssd, queue;dur=11.0, fetch;dur=20.0, load;dur=30.0, bind;dur=4.0, prefill;dur=2.0"
        in rest
    )


async def test_a_slow_stream_shows_signs_between_its_tokens(
    quick: None, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    monkeypatch.setattr(outputs, "SIGN_EVERY_S", 0.1)
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.is_held = True
    async with bench.client.stream("POST", "/v1/chat/completions", json=bench.chat(stream=True)) as response:
        parts = response.aiter_text()
        text = await anext(parts)
        assert text.startswith(": waiting (first token)\n\n"), "and more of them, where this process was away"
        (start,) = bench.worker.heard.all(StartInference)
        await bench.worker.say(start, 0, count=2)
        while "waiting (next token)" not in text:
            text += await anext(parts)
        await bench.worker.release()
        text += "".join([part async for part in parts])
    assert text.endswith("data: [DONE]\n\n")


async def test_a_router_that_stops_lets_its_requests_end(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.is_held = True
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        await bench.worker.heard.wait(StartInference)
        stopping = group.create_task(bench.service.drain())
        await bench.worker.release()
        await stopping
    assert content_of(asking.result()) == ANSWER


async def test_a_router_that_must_stop_tells_those_who_wait(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    monkeypatch.setattr(service, "DRAIN_S_MAX", service.FAREWELL_S + 0.1)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        await bench.scheduler.heard.wait(PlaceModel)
        await bench.service.drain()
    assert error_of(asking.result()) == (503, "unavailable")
    assert "stopping" in asking.result().json()["error"]["message"]
    assert len(await bench.scheduler.heard.wait(CancelPlacement)) == 1


async def test_messages_that_are_not_for_a_router_are_dropped(bench: Bench) -> None:
    await bench.scheduler.to_router(Ack())
    bus = bench.worker.bus
    await bus.publish(bus.subjects.tokens("router-0"), Ack())
    await bench.scheduler.add_route(a_route("tiny"))
    assert content_of(await bench.post()) == ANSWER


async def test_the_heartbeat_tells_what_runs(bench: Bench) -> None:
    """M2, M3: with the sums that the cost of moving it is made of."""
    heard: list[RouterHeartbeat] = []
    arrived = asyncio.Event()

    async def on_heartbeat(received: object) -> None:
        heard.append(received.message)  # type: ignore[attr-defined]
        arrived.set()

    await bench.scheduler.bus.subscribe(bench.scheduler.bus.subjects.all_heartbeats("router"), on_heartbeat)
    await bench.scheduler.add_route(a_route("tiny"))
    bench.worker.frames_before_hold = 2
    async with asyncio.TaskGroup() as group, asyncio.timeout(10):
        running = group.create_task(bench.post())
        (start,) = await bench.worker.heard.wait(StartInference)
        while not heard or not any(activity.running_s for activity in heard[-1].active):
            arrived.clear()
            await arrived.wait()
        await bench.worker.release()
        await running
        while heard[-1].active:
            arrived.clear()
            await arrived.wait()
    (activity,) = [beat.active for beat in heard if beat.active][-1]
    assert (activity.instance_id, activity.requests) == ("instance-1", 1)
    assert activity.prompt_tokens == start.prompt_tokens > 0
    assert 0.0 < activity.running_s < 10.0


async def test_readiness_says_why_not_and_warm_requests_are_served_all_the_same(make_bench: MakeBench) -> None:
    async with make_bench(oldest_wait_s_max=0.1) as bench:
        assert (await bench.client.get("/readyz")).status_code == 200
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(bench.post())
            await bench.scheduler.heard.wait(PlaceModel)
            await asyncio.sleep(0.15)
            response = await bench.client.get("/readyz")
            assert response.status_code == 503
            assert "waited" in response.text
            await bench.scheduler.add_route(a_route("tiny"))
        assert content_of(asking.result()) == ANSWER
        bench.hub.go_down()
        response = await bench.client.get("/readyz")
        assert (response.status_code, response.text) == (503, "NATS is not connected\n")
        bench.hub.come_back()
        assert (await bench.client.get("/healthz")).text == "alive\n"
