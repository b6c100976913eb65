"""What leaves over HTTP: statuses, error objects, OpenAI's bodies, Server-Timing, deployments."""

from __future__ import annotations

import pytest
from whimbrel.wire import errors
from whimbrel.wire.errors import ERRORS, WhimbrelError
from whimbrel.wire.messages import DeployModel, ScaleModel, Scaling, Stages, Tier

from services.router.core.deployments import read_deployment
from services.router.core.openai import Answer, Choice, Usage
from services.router.core.scalings import read_scale
from services.router.core.statuses import STATUSES, error_object, retry_after_s, status_of
from services.router.core.timings import stage_times
from services.router.openapi import DOCUMENT

EXAMPLES: list[tuple[WhimbrelError, int, str, str | None]] = [
    (errors.InvalidRequest(field="stop", reason="no"), 400, "invalid_request_error", "stop"),
    (errors.UnsupportedParameter(field="tools"), 400, "invalid_request_error", "tools"),
    (
        errors.ContextLengthExceeded(context_tokens=1, prompt_tokens=2, output_tokens=3),
        400,
        "invalid_request_error",
        None,
    ),
    (errors.ModelNotFound(model_id="x"), 404, "not_found_error", "model"),
    (errors.JobNotFound(job_id="x"), 404, "not_found_error", None),
    (errors.ServerNotFound(server_id="x", known="server-0"), 404, "not_found_error", None),
    (errors.Conflict(reason="busy"), 409, "invalid_request_error", None),
    (errors.Cancelled(what="it"), 409, "invalid_request_error", None),
    (errors.PayloadTooLarge(size_bytes=2, limit_bytes=1), 413, "invalid_request_error", None),
    (errors.ModelTooLarge(model_id="x", need_bytes=2, capacity_bytes=1), 422, "invalid_request_error", "model"),
    (errors.ImportFailed(model_id="x", stage="converting", reason="no"), 422, "invalid_request_error", None),
    (errors.QueueFull(queue="q", limit=1, retry_after_s=7), 429, "rate_limit_error", None),
    (errors.InternalError(service="x"), 500, "server_error", None),
    (errors.ProtocolError(size_bytes=1, reason="no"), 500, "server_error", None),
    (errors.LoadFailed(model_id="x", reason="partition_0.bin at 4096"), 500, "server_error", None),
    (errors.Unavailable(what="NATS"), 503, "server_error", None),
    (errors.InferenceLost(reason="no", output_tokens=1), 503, "server_error", None),
    (errors.InstanceGone(instance_id="x"), 503, "server_error", None),
    (errors.StaleEpoch(epoch=1, current_epoch=2), 503, "server_error", None),
    (errors.ColdStartTimeout(model_id="x", waited_s=1, stage="loading"), 504, "server_error", None),
    (errors.RequestTimeout(waited_s=1), 504, "server_error", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "parameter"), EXAMPLES, ids=[each[0].code for each in EXAMPLES])
def test_every_error_has_its_status_and_openai_s_object(
    error: WhimbrelError, status: int, kind: str, parameter: str | None
) -> None:
    assert status_of(error) == status
    assert error_object(error).body() == {
        "error": {"message": str(error), "type": kind, "param": parameter, "code": error.code}
    }


def test_the_table_of_statuses_is_complete_and_the_examples_are() -> None:
    assert STATUSES.keys() == ERRORS.keys()
    assert {error.code for error, *_ in EXAMPLES} == ERRORS.keys()


def test_what_may_be_tried_again_says_when() -> None:
    times = {error.code: retry_after_s(error) for error, *_ in EXAMPLES}
    assert {code for code, seconds in times.items() if seconds is not None} == {
        "queue_full",
        "unavailable",
        "inference_lost",
        "instance_gone",
        "stale_epoch",
    }
    assert times["queue_full"] == 7


USAGE = Usage(prompt_tokens=3, output_tokens=2)
SHARED = {"id": "chatcmpl-1", "created": 5, "model": "tiny"}


def an_answer(*, is_chat: bool = True, is_usage_included: bool = False) -> Answer:
    return Answer(
        answer_id="chatcmpl-1", created_s=5, model_id="tiny", is_chat=is_chat, is_usage_included=is_usage_included
    )


def test_a_whole_chat_answer() -> None:
    assert an_answer().whole([Choice(text="Hi", finish_reason="stop")], USAGE) == {
        **SHARED,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_a_whole_completion() -> None:
    body = an_answer(is_chat=False).whole([Choice(text="Hi", finish_reason="length")], USAGE)
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "length"}]


def test_the_chunks_of_a_chat() -> None:
    answer = an_answer()
    first = answer.first_chunk(0)
    assert first is not None
    assert first["object"] == "chat.completion.chunk"
    choices = [first["choices"], answer.text_chunk(0, "Hi")["choices"], answer.last_chunk(0, "stop")["choices"]]
    assert choices == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "Hi"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    ]
    assert "usage" not in first


def test_the_chunks_of_a_completion_have_no_role() -> None:
    answer = an_answer(is_chat=False)
    assert answer.first_chunk(0) is None
    assert answer.text_chunk(0, "Hi")["choices"] == [
        {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": None}
    ]


def test_usage_is_null_in_every_chunk_but_the_last_when_it_was_asked_for() -> None:
    answer = an_answer(is_usage_included=True)
    assert answer.text_chunk(0, "Hi")["usage"] is None
    last = answer.usage_chunk(USAGE)
    assert (last["choices"], last["usage"]) == ([], USAGE.body())


def test_server_timing_is_in_milliseconds() -> None:
    stages = Stages(tier=Tier.SSD, queue_s=0.5, fetch_s=1.0, load_s=0.25, bind_s=0.001)
    times = stage_times(stages, worker_queue_s=0.25, prefill_s=0.0625, first_token_s=2.0)
    assert times.header() == (
        "tier;desc=ssd, queue;dur=750.0, fetch;dur=1000.0, load;dur=250.0, bind;dur=1.0, prefill;dur=62.5, "
        "first_token;dur=2000.0"
    )


def test_a_deployment_is_read() -> None:
    body = {"model": "org/tiny", "source": "/models/tiny", "keep_alive_s": 5}
    assert read_deployment(body) == DeployModel(model_id="org/tiny", source="/models/tiny", keep_alive_s=5.0)


@pytest.mark.parametrize(
    "source",
    [
        "/models/tiny", "file:///models/tiny", "hf://org/tiny", "hf://org/tiny@v1.0", "hf://gpt2", "s3://bucket/a/b",
        "gs://bucket/a", "https://user:password@host:8080/models/tiny/",
    ],
)  # fmt: skip
def test_every_kind_of_source_can_be_deployed(source: str) -> None:
    assert read_deployment({"model": "tiny", "source": source}).source == source


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "../x"}, "model"),
        ({"model": None}, "model"),
        ({"source": "relative"}, "source"),
        ({"source": "ftp://host/model"}, "source"),
        ({"source": "hf://a/b/c"}, "source"),
        ({"source": "s3://key:secret@bucket/model"}, "source"),
        ({"source": "https://host/model.safetensors"}, "source"),
        ({"source": "https://host/model/?token=secret"}, "source"),
        ({"source": "/a\0b"}, "source"),
        ({"source": None}, "source"),
        ({"keep_alive_s": -1}, "keep_alive_s"),
        ({"keep_alive_s": "5"}, "keep_alive_s"),
        ({"extra": 1}, "extra"),
        ({"scaling": 1}, "scaling"),
        ({"scaling": {"max_instances": "2"}}, "scaling.max_instances"),
        ({"scaling": {"min_instances": 3, "max_instances": 2}}, "scaling.min_instances"),
    ],
    ids=str,
)
def test_a_bad_deployment_is_refused_by_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        read_deployment({"model": "tiny", "source": "/models/tiny", **change})
    assert caught.value.field == field
    assert "secret" not in str(caught.value)


def test_a_scaling_is_read_and_a_minimum_raises_the_maximum() -> None:
    """R6"""
    body: dict[str, object] = {"model": "tiny", "source": "/models/tiny"}
    assert read_deployment(body).scaling is None
    assert read_deployment({**body, "scaling": None}).scaling is None
    assert read_deployment({**body, "scaling": {}}).scaling == Scaling()
    assert read_deployment({**body, "scaling": {"min_instances": 3}}).scaling == Scaling(
        min_instances=3, max_instances=3
    )


def test_a_change_of_scaling_names_only_what_changes() -> None:
    body = {"scaling": {"min_instances": 0, "target_concurrency": 2}, "keep_alive_s": 5}
    assert read_scale("tiny", body) == ScaleModel(
        model_id="tiny", min_instances=0, target_concurrency=2, keep_alive_s=5.0
    )
    assert read_scale("tiny", {"keep_alive_s": 0}) == ScaleModel(model_id="tiny", keep_alive_s=0.0)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body"),
        ({"scaling": {}}, "body"),
        ([], "body"),
        ({"source": "/elsewhere"}, "source"),
        ({"keep_alive_s": -1}, "keep_alive_s"),
        ({"keep_alive_s": None}, "keep_alive_s"),
        ({"scaling": None}, "scaling"),
        ({"scaling": {"min_instances": -1}}, "scaling.min_instances"),
        ({"scaling": {"max_instances": 0}}, "scaling.max_instances"),
        ({"scaling": {"target_concurrency": 0.5}}, "scaling.target_concurrency"),
        ({"scaling": {"min_instances": True}}, "scaling.min_instances"),
        ({"scaling": {"replicas": 1}}, "scaling.replicas"),
    ],
    ids=str,
)
def test_a_bad_change_of_scaling_is_refused_by_field(body: object, field: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        read_scale("tiny", body)
    assert caught.value.field == field


def test_the_openapi_document_names_the_paths() -> None:
    paths = DOCUMENT["paths"]
    assert isinstance(paths, dict)
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/admin/models", "/admin/cluster"} < set(paths)
