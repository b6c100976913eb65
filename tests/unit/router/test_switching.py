"""Requests that go on elsewhere, by failover or migration: the client sees a pause, and not one token more or less."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable

import pytest
import pytest_asyncio
from whimbrel.chassis import telemetry
from whimbrel.wire.codec import pack_tokens, unpack_tokens
from whimbrel.wire.errors import InstanceGone, LoadFailed, QueueFull, Unavailable
from whimbrel.wire.events import RequestFinished, RequestSwitched
from whimbrel.wire.messages import (
    AbortInference,
    CancelPlacement,
    FinishReason,
    InferenceFinished,
    InferenceStarted,
    Moved,
    PlaceModel,
    PlaceModelReply,
    RouteAdded,
    RouterHeartbeat,
    StartInference,
    TokenEntry,
    TokenFrame,
)

from services.router.core.requests import LOSSES_MAX
from tests.unit.router.conftest import ANSWER, Bench, MakeBench
from tests.unit.router.peers import LOADED, a_route, position_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUTE, OTHER = a_route("tiny"), a_route("tiny", "instance-2", slot=1)
Frames = list[TokenFrame]


@pytest_asyncio.fixture(loop_scope="module")
async def bench(module_bench: Bench) -> Bench:
    await module_bench.reset()
    return module_bench


def ending_at(position: int, finish: FinishReason, moved: Moved | None = None) -> Callable[[Frames], Frames]:
    """An instance that says everything before this position, and then the end of the request there."""

    def mangle(frames: Frames) -> Frames:
        first = frames[0].entries[0]
        end = TokenEntry(
            request_id=first.request_id,
            epoch=first.epoch,
            position=max(position, first.position),
            tokens=b"",
            finish_reason=finish,
            moved=moved,
        )
        kept = [frame for frame in frames if frame.entries[0].position < position]
        return [*kept, TokenFrame(server_id=frames[0].server_id, slot=frames[0].slot, entries=(end,))]

    return mangle


def moving_at(bench: Bench, position: int, behind_tokens: int = 0) -> Callable[[Frames], Frames]:
    """The worker hands over at this position to the other one, which has computed all but so many of the tokens."""

    def mangle(frames: Frames) -> Frames:
        request = bench.worker.requests[frames[0].entries[0].request_id]
        base_tokens = max(0, request.prompt_tokens + position - behind_tokens)
        bench.other.resumed[request.request_id] = base_tokens
        return ending_at(position, FinishReason.MOVED, Moved(route=OTHER, base_tokens=base_tokens))(frames)

    return mangle


async def told(bench: Bench, **body: object) -> tuple[str, object, object]:
    """What a client is told: text, finish reason, usage."""
    response = await bench.post(**body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        choice = response.json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"], response.json()["usage"]
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]", response.text
    chunks = [json.loads(line) for line in lines]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, choices[-1]["finish_reason"], chunks[-1]["usage"]


def switches(kind: str, outcome: str) -> float:
    labels = {"kind": kind, "outcome": outcome}
    return telemetry.REGISTRY.get_sample_value("whimbrel_router_switches_total", labels) or 0.0


def pauses(kind: str) -> float:
    return telemetry.REGISTRY.get_sample_value("whimbrel_migration_pause_seconds_count", {"kind": kind}) or 0.0


BODIES: list[dict[str, object]] = [
    {},
    {"stop": ["l, 日"]},
    {"stop": ["本 😀", "Paris is not"]},
    {"stop": ["nothing of the kind", "😀."]},
    {"max_tokens": 9},
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body))
async def test_a_failover_at_any_token_gives_the_answer_of_the_undisturbed_run(
    bench: Bench, body: dict[str, object], *, stream: bool
) -> None:
    """G11: text, stop strings, characters split over tokens, and usage."""
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = bench.tokenizer.encode(ANSWER).ids
    if "max_tokens" in body:
        answer = answer[:9]
    bench.worker.output = bench.other.output = lambda _request: answer
    await bench.scheduler.add_route(ROUTE)
    expected = await told(bench, **body, **more)
    await bench.scheduler.to_router(RouteAdded(route=OTHER, stages=LOADED))
    for position in range(len(answer)):
        for worker in (bench.worker, bench.other):
            worker.mangle = first_start_only(ending_at(position, FinishReason.ABORTED))
            worker.heard.clear()
        assert await told(bench, **body, **more) == expected, f"lost at token {position}"
        starts = [*bench.worker.heard.all(StartInference), *bench.other.heard.all(StartInference)]
        assert {position_of(start) for start in starts if start.epoch > 1} <= {position}


@pytest.mark.parametrize("behind_tokens", [0, 1, 3, 10_000])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: str(body))
async def test_a_handover_at_any_token_gives_the_answer_of_the_undisturbed_run(
    bench: Bench, body: dict[str, object], behind_tokens: int
) -> None:
    """G8, G10, G11: and only what the destination has not computed is sent."""
    answer = bench.tokenizer.encode(ANSWER).ids
    if "max_tokens" in body:
        answer = answer[:9]
    bench.worker.output = bench.other.output = lambda _request: answer
    await bench.scheduler.add_route(ROUTE)
    expected = await told(bench, **body)
    for position in range(len(answer)):
        bench.worker.mangle = moving_at(bench, position, behind_tokens)
        bench.other.heard.clear()
        assert await told(bench, **body) == expected, f"handed over at token {position}"
        for start in bench.other.heard.all(StartInference):
            assert position_of(start) == position
            # One at least, even to a destination that has computed them all.
            sent_tokens = len(unpack_tokens(start.tokens))
            assert sent_tokens == min(max(behind_tokens, 1), start.prompt_tokens + position)


async def test_the_seed_and_the_parameters_are_those_of_the_first_start(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    bench.worker.mangle = moving_at(bench, 4)
    await bench.post(temperature=1.0, max_tokens=40)
    (first,), (second,) = bench.worker.heard.all(StartInference), bench.other.heard.all(StartInference)
    assert second.sampling == first.sampling
    assert (second.output_tokens_max, second.prompt_tokens) == (first.output_tokens_max, first.prompt_tokens)
    assert (first.epoch, second.epoch) == (1, 2)


async def test_two_failovers_in_a_row_cost_no_token(quick: None, bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    await bench.scheduler.to_router(RouteAdded(route=OTHER, stages=LOADED))
    bench.worker.mangle = once(ending_at(3, FinishReason.ABORTED), then=list)
    bench.other.mangle = once(ending_at(6, FinishReason.ABORTED), then=list)
    assert (await told(bench))[0] == ANSWER
    starts = [*bench.worker.heard.all(StartInference), *bench.other.heard.all(StartInference)]
    assert sorted((start.epoch, position_of(start)) for start in starts) == [(1, 0), (2, 3), (3, 6)]


async def test_an_instance_lost_before_it_has_said_anything_after_a_switch_is_one_more_switch(
    quick: None, bench: Bench
) -> None:
    await bench.scheduler.add_route(ROUTE)
    await bench.scheduler.to_router(RouteAdded(route=OTHER, stages=LOADED))
    bench.worker.mangle = once(ending_at(3, FinishReason.ABORTED), then=list)
    bench.other.mangle = once(ending_at(0, FinishReason.ABORTED), then=list)
    assert (await told(bench))[0] == ANSWER
    (event,) = [event for event in bench.hub.events if isinstance(event, RequestSwitched)]
    assert (event.output_tokens, event.reason) == (3, "failover: the worker ended the request")


async def test_a_worker_that_is_restarted_or_silent_costs_no_token(quick: None, make_bench: MakeBench) -> None:
    async with make_bench() as bench:
        await bench.scheduler.add_route(ROUTE)
        bench.worker.frames_before_hold = 2

        async def restart() -> None:
            bench.worker.epoch += 1

        async def fall_silent() -> None:
            bench.worker.is_mute = True

        for happen in (restart, fall_silent):
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(told(bench))
                await begun(bench)
                await happen()
                await bench.scheduler.heard.wait(PlaceModel)
                await bench.scheduler.add_route(OTHER)
            assert asking.result()[0] == ANSWER
            await bench.scheduler.remove_route(OTHER)
            await bench.scheduler.add_route(ROUTE)
            bench.scheduler.heard.clear()


async def test_a_request_that_keeps_losing_its_instance_after_tokens_ends(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    await bench.scheduler.to_router(RouteAdded(route=OTHER, stages=LOADED))
    bench.worker.takes_any_instance = True
    instances = iter(range(100))

    def place(_message: PlaceModel) -> PlaceModelReply:
        return PlaceModelReply(route=a_route("tiny", f"instance-of-poison-{next(instances)}"), stages=LOADED)

    bench.scheduler.place = place
    bench.worker.mangle = dying_after_one
    bench.other.mangle = dying_after_one
    before = switches("failover", "failed")
    response = await bench.post()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "inference_lost")
    assert f"the last of {LOSSES_MAX}" in response.json()["error"]["message"]
    starts = [*bench.worker.heard.all(StartInference), *bench.other.heard.all(StartInference)]
    assert len(starts) == LOSSES_MAX
    assert switches("failover", "failed") == before, "it ended while it streamed"
    bench.scheduler.place, bench.worker.takes_any_instance = None, False


async def test_a_worker_that_stands_still_is_left_and_told_so(make_bench: MakeBench) -> None:
    async with make_bench(stalled_s_max=0.3) as bench:
        await bench.scheduler.add_route(ROUTE)
        await bench.scheduler.to_router(RouteAdded(route=OTHER, stages=LOADED))
        bench.worker.frames_before_hold = 2
        assert (await told(bench))[0] == ANSWER
        (abort,) = await bench.worker.heard.wait(AbortInference)
        assert abort.epoch == 1
        (event,) = [event for event in bench.hub.events if isinstance(event, RequestSwitched)]
        assert event.reason == "failover: its worker sent no token for 0.3 s"
        assert event.pause_s > 0.2


async def test_without_failover_a_stream_that_stands_still_waits_for_the_idle_limit(make_bench: MakeBench) -> None:
    async with make_bench(stalled_s_max=0.1, idle_s_max=0.6) as bench:
        await bench.scheduler.add_route(ROUTE)
        await bench.scheduler.to_router(RouteAdded(route=OTHER, stages=LOADED))
        bench.worker.frames_before_hold = 2
        response = await bench.post(failover=False)
        assert response.json()["error"]["code"] == "request_timeout"
        assert not bench.other.heard.all(StartInference)


async def test_without_failover_a_handover_is_followed_all_the_same(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    bench.worker.mangle = moving_at(bench, 4)
    assert (await told(bench, failover=False))[0] == ANSWER


@pytest.mark.parametrize("seed", range(3))
async def test_a_handover_with_frames_lost_doubled_and_reordered_gives_the_exact_answer(
    quick: None, bench: Bench, seed: int
) -> None:
    """G11: on both sides, the entry that hands over included."""
    chance = random.Random(seed)

    def through_the_network(send: Callable[[Frames], Frames]) -> Callable[[Frames], Frames]:
        def mangle(frames: Frames) -> Frames:
            network = [frame for frame in send(frames) for _ in range(chance.choice([0, 1, 1, 2]))]
            if chance.random() < 0.5:
                chance.shuffle(network)
            return network

        return mangle

    await bench.scheduler.add_route(ROUTE)
    for position in (0, 4, 9):
        bench.worker.mangle = through_the_network(moving_at(bench, position, chance.randint(0, 5)))
        bench.other.mangle = through_the_network(list)
        answers = await asyncio.gather(*(told(bench) for _ in range(5)))
        assert {answer[0] for answer in answers} == {ANSWER}, f"seed {seed}"


async def test_late_frames_of_the_source_count_for_nothing_and_it_is_told_to_stop(bench: Bench) -> None:
    """Invariant 5: after the handover nothing of the source's epoch reaches a client."""
    await bench.scheduler.add_route(ROUTE)
    bench.worker.frames_before_hold = 2
    bench.other.is_held = True
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(told(bench))
        (start,) = await bench.worker.heard.wait(StartInference)
        await begun(bench)
        await bench.worker.hand_over(start.request_id, 2, Moved(route=OTHER, base_tokens=0), tokens=1)
        await bench.other.heard.wait(StartInference)
        await bench.worker.hand_over(start.request_id, 2, Moved(route=OTHER, base_tokens=0))
        wrong = TokenEntry(request_id=start.request_id, epoch=1, position=2, tokens=pack_tokens([65, 66, 67]))
        await bench.worker.send(start, wrong)
        (abort,) = await bench.worker.heard.wait(AbortInference)
        await bench.other.release()
    assert asking.result()[0] == ANSWER
    assert (abort.request_id, abort.epoch) == (start.request_id, 1)
    assert len(bench.other.heard.all(StartInference)) == 1


@pytest.mark.parametrize("refusal", [InstanceGone(instance_id="instance-2"), Unavailable(what="it")], ids=str)
async def test_a_destination_that_refuses_is_failed_over_from(quick: None, bench: Bench, refusal: Exception) -> None:
    await bench.scheduler.add_route(ROUTE)
    bench.worker.mangle = once(moving_at(bench, 4), then=list)
    bench.other.refusal = refusal  # type: ignore[assignment]
    before = switches("migration", "failed_over"), switches("failover", "resumed")
    assert (await told(bench))[0] == ANSWER
    assert [(start.epoch, position_of(start)) for start in bench.worker.heard.all(StartInference)] == [(1, 0), (3, 4)]
    assert (switches("migration", "failed_over"), switches("failover", "resumed")) == (before[0] + 1, before[1] + 1)


async def test_a_destination_without_the_tokens_is_told_all_of_them(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    bench.worker.mangle = ending_at(4, FinishReason.MOVED, Moved(route=OTHER, base_tokens=6))
    assert (await told(bench))[0] == ANSWER
    starts = bench.other.heard.all(StartInference)
    assert [(start.epoch, start.base_tokens, position_of(start)) for start in starts] == [(2, 6, 4), (2, 0, 4)]
    (finished,) = [f for f in await bench.scheduler.heard.wait(InferenceFinished, 2) if f.instance_id == "instance-2"]
    assert finished.prefill_s is None, "it is no prefill of a prompt"


async def test_a_handover_without_a_place_to_go_is_a_loss(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    await bench.scheduler.to_router(RouteAdded(route=OTHER, stages=LOADED))
    bench.worker.mangle = ending_at(4, FinishReason.MOVED)
    assert (await told(bench))[0] == ANSWER


async def test_the_loss_of_a_destination_that_nobody_announced_reaches_the_request(
    quick: None, make_bench: MakeBench
) -> None:
    """The destination is in no route table yet: neither its silence nor its restart may be missed."""
    async with make_bench() as bench:
        await bench.scheduler.add_route(ROUTE)

        async def restart() -> None:
            bench.other.epoch += 1

        async def fall_silent() -> None:
            bench.other.is_mute = True

        async def forget() -> None:
            bench.other.forgets_requests, bench.other.instance_id = True, None

        for happen in (restart, fall_silent, forget):
            bench.worker.mangle = once(moving_at(bench, 4), then=list)
            bench.other.is_held = True
            bench.other.heard.clear()
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(told(bench))
                await bench.other.heard.wait(StartInference)
                await happen()
            assert asking.result()[0] == ANSWER, happen.__name__


async def test_nobody_else_is_sent_to_a_destination_before_the_scheduler_says_so(bench: Bench) -> None:
    """M2: but what runs there is counted there."""
    await bench.scheduler.add_route(ROUTE)
    bench.worker.mangle = moving_at(bench, 4)
    bench.other.is_held = True
    async with asyncio.TaskGroup() as group:
        first = group.create_task(told(bench))
        await bench.other.heard.wait(StartInference)
        await bench.scheduler.remove_route(ROUTE)
        second = group.create_task(told(bench))
        await bench.scheduler.heard.wait(PlaceModel)
        beat = await a_heartbeat(bench, lambda beat: beat.waiting_requests == 1)
        assert [(activity.instance_id, activity.requests) for activity in beat.active] == [("instance-2", 1)]
        assert len(bench.other.heard.all(StartInference)) == 1
        bench.other.is_held = False
        await bench.scheduler.add_route(OTHER)
        await bench.other.release()
    assert first.result()[0] == second.result()[0] == ANSWER


async def test_a_client_that_leaves_after_a_handover_ends_its_inference_at_the_destination(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    bench.worker.mangle = moving_at(bench, 4)
    bench.other.is_held = True
    before = switches("migration", "cancelled")
    await leave(bench, lambda: bench.other.heard.wait(StartInference))
    (abort,) = await bench.other.heard.wait(AbortInference)
    assert abort.epoch == 2
    assert not bench.worker.heard.all(AbortInference)
    finished = await bench.scheduler.heard.wait(InferenceFinished, 2)
    assert [(f.instance_id, f.output_tokens) for f in finished] == [("instance-1", 4), ("instance-2", 0)]
    assert switches("migration", "cancelled") == before + 1


async def test_a_client_that_leaves_while_nobody_can_go_on_cancels_its_placement(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    bench.worker.frames_before_hold = 2

    async def lost() -> None:
        await begun(bench)
        bench.worker.forgets_requests = True
        await bench.scheduler.remove_route(ROUTE)
        await bench.scheduler.heard.wait(PlaceModel)

    await leave(bench, lost)
    (cancel,) = await bench.scheduler.heard.wait(CancelPlacement)
    assert cancel.request_id == bench.scheduler.heard.all(PlaceModel)[0].request_id
    assert not bench.other.heard.all(AbortInference)


async def test_a_request_that_needs_an_instance_again_says_since_when(bench: Bench) -> None:
    """It is no older than its loss, however long it had been running."""
    await bench.scheduler.add_route(ROUTE)
    bench.worker.frames_before_hold = 2
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(told(bench))
        await begun(bench)
        await asyncio.sleep(0.5)
        bench.worker.forgets_requests = True
        lost_s = time.monotonic()
        await bench.scheduler.remove_route(ROUTE)
        (place,) = await bench.scheduler.heard.wait(PlaceModel)
        assert place.waited_s <= time.monotonic() - lost_s
        beat = await a_heartbeat(bench, lambda beat: beat.waiting_requests == 1)
        assert beat.oldest_wait_s <= time.monotonic() - lost_s
        await bench.scheduler.add_route(OTHER)
    assert asking.result()[0] == ANSWER
    assert not beat.active


async def test_a_switch_that_finds_nobody_ends_after_the_limit_of_a_cold_start(make_bench: MakeBench) -> None:
    async with make_bench(cold_start_s_max=0.6) as bench:
        await bench.scheduler.add_route(ROUTE)
        bench.worker.frames_before_hold = 2
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(bench.post(stream=True))
            await begun(bench)
            bench.worker.forgets_requests = True
            await bench.scheduler.remove_route(ROUTE)
        error = json.loads(asking.result().text.split("data: ")[-1])["error"]
        assert error["code"] == "inference_lost"
        assert "nobody could go on with it for 1 s; stage: loading; free a slot" in error["message"]
        assert await bench.scheduler.heard.wait(CancelPlacement)


@pytest.mark.parametrize("error", [QueueFull(queue="q", limit=1), LoadFailed(model_id="tiny", reason="x")], ids=str)
async def test_a_placement_that_is_refused_for_now_is_asked_for_again(
    quick: None, bench: Bench, error: QueueFull | LoadFailed
) -> None:
    await bench.scheduler.add_route(ROUTE)
    bench.worker.frames_before_hold = 2
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(told(bench))
        await begun(bench)
        bench.worker.forgets_requests = True
        bench.scheduler.errors[PlaceModel] = error
        await bench.scheduler.remove_route(ROUTE)
        await bench.scheduler.heard.wait(CancelPlacement)
        del bench.scheduler.errors[PlaceModel]
        await bench.scheduler.add_route(OTHER)
    assert asking.result()[0] == ANSWER


async def test_a_worker_that_is_full_is_no_end_of_a_stream(quick: None, bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    await bench.scheduler.to_router(RouteAdded(route=OTHER, stages=LOADED))
    bench.worker.mangle = once(ending_at(4, FinishReason.ABORTED), then=list)
    bench.other.refusal = QueueFull(queue="the worker", limit=8)
    assert (await told(bench))[0] == ANSWER
    assert [position_of(start) for start in bench.worker.heard.all(StartInference)] == [0, 4]


async def test_what_is_told_of_a_migrated_request_adds_up(bench: Bench) -> None:
    """R5, M3: each instance tells of its own tokens; the client is told of the first token alone."""
    await bench.scheduler.add_route(ROUTE)
    bench.worker.mangle = moving_at(bench, 4, behind_tokens=2)
    before = switches("migration", "resumed"), pauses("migration")
    response = await bench.post()
    assert response.json()["choices"][0]["message"]["content"] == ANSWER
    assert response.headers["x-whimbrel-server"] == "server-0"
    count = len(bench.tokenizer.encode(ANSWER).ids)
    started = await bench.scheduler.heard.wait(InferenceStarted, 2)
    finished = await bench.scheduler.heard.wait(InferenceFinished, 2)
    assert [s.instance_id for s in started] == [f.instance_id for f in finished] == ["instance-1", "instance-2"]
    assert [f.output_tokens for f in finished] == [4, count - 4]
    assert [f.prefill_s for f in finished] == [0.002, None], "two tokens are no prompt"
    assert all(f.token_s <= f.duration_s for f in finished)
    (switched,) = [event for event in bench.hub.events if isinstance(event, RequestSwitched)]
    assert (switched.output_tokens, switched.reason) == (4, "migration: from server-0/0 to server-0/1")
    assert switched.pause_s >= 0.0
    (event,) = [event for event in bench.hub.events if isinstance(event, RequestFinished)]
    assert event.output_tokens == count
    assert (switches("migration", "resumed"), pauses("migration")) == (before[0] + 1, before[1] + 1)


async def test_a_request_handed_over_before_its_first_token_had_no_pause(bench: Bench) -> None:
    await bench.scheduler.add_route(ROUTE)
    bench.worker.mangle = ending_at(0, FinishReason.MOVED, Moved(route=OTHER, base_tokens=0))
    before = pauses("migration")
    assert (await told(bench))[0] == ANSWER
    finished = await bench.scheduler.heard.wait(InferenceFinished, 2)
    assert [f.prefill_s for f in finished] == [None, 0.002]
    (event,) = [event for event in bench.hub.events if isinstance(event, RequestSwitched)]
    assert (event.output_tokens, event.pause_s) == (0, 0.0)
    assert pauses("migration") == before


async def test_a_first_token_that_comes_with_the_handover_has_its_server(bench: Bench) -> None:
    """The instance may be gone before the client's task has seen that there is a token."""
    await bench.scheduler.add_route(ROUTE)
    bench.worker.is_held = bench.other.is_held = True
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        (start,) = await bench.worker.heard.wait(StartInference)
        bench.other.refusal = InstanceGone(instance_id="instance-2")
        await bench.scheduler.remove_route(ROUTE)
        await bench.worker.hand_over(start.request_id, 1, Moved(route=OTHER, base_tokens=0), tokens=1)
        await bench.other.heard.wait(StartInference)
        bench.other.refusal, bench.other.is_held = None, False
        await bench.scheduler.add_route(OTHER)
    assert asking.result().headers["x-whimbrel-server"] == "server-0"
    assert asking.result().json()["choices"][0]["message"]["content"] == ANSWER


# Helpers.


def once(first: Callable[[Frames], Frames], *, then: Callable[[Frames], Frames]) -> Callable[[Frames], Frames]:
    """Frames go through `first` the first time, through `then` from there on."""
    steps = [first]
    return lambda frames: steps.pop()(frames) if steps else then(frames)


def first_start_only(mangle: Callable[[Frames], Frames]) -> Callable[[Frames], Frames]:
    return lambda frames: mangle(frames) if frames[0].entries[0].epoch == 1 else frames


def dying_after_one(frames: Frames) -> Frames:
    return ending_at(frames[0].entries[0].position + 1, FinishReason.ABORTED)(frames)


async def begun(bench: Bench) -> None:
    """The first start is known to the scheduler, and its first tokens are here."""
    await bench.worker.heard.wait(StartInference)
    await bench.scheduler.heard.wait(InferenceStarted)


async def leave(bench: Bench, until: Callable[[], Awaitable[object]]) -> None:
    """Ask, and hang up once `until` has happened."""
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(bench.post())
        await until()
        asking.cancel()


async def a_heartbeat(bench: Bench, is_it: Callable[[RouterHeartbeat], bool]) -> RouterHeartbeat:
    """The next one of the router that is like that."""
    found: asyncio.Future[RouterHeartbeat] = asyncio.get_running_loop().create_future()

    async def on_heartbeat(received: object) -> None:
        message = received.message  # type: ignore[attr-defined]
        if isinstance(message, RouterHeartbeat) and is_it(message) and not found.done():
            found.set_result(message)

    await bench.scheduler.bus.subscribe(bench.scheduler.bus.subjects.all_heartbeats("router"), on_heartbeat)
    async with asyncio.timeout(10):
        return await found
