"""Names that are safe as a path, a URL and a subject."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whimbrel.wire import ids
from whimbrel.wire.errors import InvalidRequest
from whimbrel.wire.messages import CancelLoad, PlaceModel, SchedulerHeartbeat, WorkerHeartbeat, WorkerState
from whimbrel.wire.subjects import Subjects, token

GOOD = ["m", "smollm2-135m", "Qwen/Qwen3-0.6B", "a_b.c-d", "x" * 128]
BAD = [
    "",
    "../x",
    "a/../b",
    "/etc",
    "a/b/c",
    "a//b",
    "a..b",
    "a--b",
    ".hidden",
    "a/",
    "-a",
    "a b",
    "a\nb",
    "é",
    "x" * 129,
]


@pytest.mark.parametrize("model_id", GOOD)
def test_a_sensible_model_id_is_taken(model_id: str) -> None:
    assert ids.check_model_id(model_id) == model_id


@pytest.mark.parametrize("model_id", BAD)
def test_a_model_id_that_could_leave_a_directory_or_a_subject_is_refused(model_id: str) -> None:
    with pytest.raises(InvalidRequest, match="model"):
        ids.check_model_id(model_id)


@given(st.text(max_size=140))
def test_any_accepted_model_id_is_one_directory_and_one_subject_token(text: str) -> None:
    try:
        ids.check_model_id(text)
    except InvalidRequest:
        return
    name = ids.directory_name(text)
    assert "/" not in name
    assert name not in (".", "..")
    assert not name.startswith(".")
    assert ids.model_id_of_directory(name) == text
    assert not set(token(text)) & set(". */>")


@given(st.from_regex(ids._MODEL_ID, fullmatch=True), st.from_regex(ids._MODEL_ID, fullmatch=True))
def test_two_model_ids_never_share_a_directory_or_a_token(one: str, other: str) -> None:
    try:
        names = ids.directory_name(one), ids.directory_name(other)
    except InvalidRequest:
        return
    assert (names[0] == names[1]) == (one == other)
    assert (token(one) == token(other)) == (one == other)


@pytest.mark.parametrize("service_id", ["", "a.b", "a/b", "a b", "*", "x" * 65, "-"])
def test_a_service_id_that_is_no_single_token_is_refused(service_id: str) -> None:
    with pytest.raises(InvalidRequest):
        ids.check_service_id(service_id)


def test_new_ids_differ_and_carry_their_prefix() -> None:
    made = {ids.new_id("req") for _ in range(1000)}
    assert len(made) == 1000
    assert all(identifier.startswith("req-") for identifier in made)


def test_subjects_follow_the_grammar() -> None:
    subjects = Subjects("wb")
    place = PlaceModel(request_id="r", model_id="m", router_id="r1", waited_s=0)
    beat = WorkerHeartbeat(
        server_id="s0", slot=1, epoch=1, device="cpu", state=WorkerState.EMPTY, instance_id=None, model_id=None,
        active_requests=0,
    )  # fmt: skip
    assert subjects.to_scheduler(place) == "wb.cmd.scheduler.place_model"
    assert subjects.to_agent("s0", CancelLoad(task_id="t")) == "wb.cmd.agent.s0.cancel_load"
    assert subjects.to_worker("s0", 1, CancelLoad(task_id="t")) == "wb.cmd.worker.s0.1.cancel_load"
    assert subjects.heartbeat(beat) == "wb.hb.worker.s0.1"
    assert subjects.heartbeat(SchedulerHeartbeat(scheduler_id="a", epoch=1)) == "wb.hb.scheduler.a"
    assert subjects.event("model", "Qwen/Qwen3-0.6B", "deployed") == "wb.evt.model.Qwen=2FQwen3-0=2E6B.deployed"
