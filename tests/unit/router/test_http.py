"""The HTTP surface: bad requests, the admin paths, and stock OpenAI clients on a real port."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
import pytest_asyncio
from whimbrel.chassis.config import ConfigError
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Conflict, ImportFailed
from whimbrel.wire.messages import (
    CancelJob,
    DeleteModel,
    DeployModel,
    JobStage,
    JobStatus,
    ModelState,
    PlaceModel,
    StartInference,
)

from services.router import outputs
from tests.unit.router.conftest import ANSWER, Bench, MakeBench
from tests.unit.router.peers import a_model, a_route

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def bench(module_bench: Bench) -> Bench:
    await module_bench.reset()
    return module_bench


@pytest.fixture
def quick_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life after tenths of a second where the shipped router has seconds."""
    monkeypatch.setattr(outputs, "HEADERS_HELD_S", 0.2)


CHAT = "/v1/chat/completions"


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, code and parameter; the body has to be OpenAI's error object and nothing else."""
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert "Traceback" not in error["message"]
    return response.status_code, error["code"], error["param"]


LONG = {"role": "user", "content": "word " * 5000}
NO_OBJECTS = [
    b"", b"{", b"nonsense", b"[" * 100_000, b'{"model": "\xff"}', b'{"a": "\\ud800"}', b"null", b"[]", b'"x"', b"1e999",
]  # fmt: skip


async def test_a_body_that_is_no_json_object_is_a_400(bench: Bench) -> None:
    for path in (CHAT, "/v1/completions", "/admin/models"):
        for content in NO_OBJECTS:
            response = await bench.client.post(path, content=content)
            assert error_of(response) == (400, "invalid_request", "body"), (path, content[:20])


async def test_a_bad_request_leaves_the_next_good_one_alone(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    bad = [
        (bench.chat(tools=[{"type": "function"}]), (400, "unsupported_parameter", "tools")),
        (bench.chat(best_of=2), (400, "unsupported_parameter", "best_of")),
        (bench.chat(n=9), (400, "invalid_request", "n")),
        (bench.chat(whatever=1), (400, "unsupported_parameter", "whatever")),
        (bench.chat(temperature="hot"), (400, "invalid_request", "temperature")),
        (bench.chat(model="../x"), (400, "invalid_request", "model")),
        (bench.chat(model="absent"), (404, "model_not_found", "model")),
        (bench.chat(messages=[]), (400, "invalid_request", "messages")),
        (bench.chat(logit_bias={"100000": 1}), (400, "invalid_request", "logit_bias")),
        (bench.chat(max_tokens=512), (400, "context_length_exceeded", None)),
        (bench.chat(messages=[LONG]), (400, "context_length_exceeded", None)),
    ]  # fmt: skip
    for body, expected in bad:
        assert error_of(await bench.client.post(CHAT, json=body)) == expected
        response = await bench.post()
        assert response.json()["choices"][0]["message"]["content"] == ANSWER
    assert len(bench.worker.heard.all(StartInference)) == len(bad)
    assert bench.scheduler.heard.all(PlaceModel) == []


async def test_a_bad_prompt_is_a_400(bench: Bench) -> None:
    for prompt in ([99_999], "", ["a", "b"]):
        response = await bench.client.post("/v1/completions", json={"model": "tiny", "prompt": prompt})
        assert error_of(response) == (400, "invalid_request", "prompt"), prompt
    response = await bench.client.post("/v1/completions", json={"model": "tiny", "prompt": "word " * 5000})
    assert error_of(response) == (400, "context_length_exceeded", None)


async def test_a_chat_with_a_model_without_template_is_a_400(make_bench: MakeBench) -> None:
    async with make_bench(models=("no-template",)) as bench:
        response = await bench.client.post(CHAT, json=bench.chat(model="no-template"))
        assert error_of(response) == (400, "invalid_request", "messages")
        assert "no chat template" in response.text


async def test_a_model_that_is_being_imported_is_a_409_that_names_its_job(bench: Bench) -> None:
    bench.scheduler.models["new"] = a_model("new", state=ModelState.IMPORTING)
    response = await bench.client.post(CHAT, json=bench.chat(model="new"))
    assert error_of(response) == (409, "conflict", None)
    assert "job-1" in response.text
    bench.scheduler.models["new"] = a_model("new", state=ModelState.FAILED)
    assert "failed" in (await bench.client.post(CHAT, json=bench.chat(model="new"))).text


async def test_a_model_without_files_in_the_repository_is_a_typed_error(bench: Bench) -> None:
    bench.scheduler.models["bare"] = a_model("bare")
    response = await bench.client.post(CHAT, json=bench.chat(model="bare"))
    assert error_of(response) == (500, "load_failed", None)


async def test_a_body_that_is_too_large_is_a_413(bench: Bench) -> None:
    body = json.dumps(bench.chat(user="x" * (4 * 1024 * 1024))).encode()
    assert error_of(await bench.client.post(CHAT, content=body)) == (413, "payload_too_large", None)


async def test_a_body_that_grows_too_large_on_the_way_is_a_413(bench: Bench) -> None:
    async def parts() -> object:
        for _ in range(5):
            yield b" " * 1024 * 1024

    response = await bench.client.post(CHAT, content=parts())  # type: ignore[arg-type]
    assert error_of(response) == (413, "payload_too_large", None)


async def test_unknown_paths_and_methods_have_the_error_object_too(bench: Bench) -> None:
    assert error_of(await bench.client.get("/nowhere")) == (404, "not_found", None)
    assert error_of(await bench.client.get("/")) == (404, "not_found", None)
    response = await bench.client.get(CHAT)
    assert error_of(response) == (405, "method_not_allowed", None)
    assert response.headers["allow"] == "POST"
    assert error_of(await bench.client.put("/admin/models")) == (405, "method_not_allowed", None)
    assert error_of(await bench.client.get("/v1/models/absent")) == (404, "model_not_found", "model")


async def test_a_deployment_is_accepted_with_its_job(bench: Bench) -> None:
    body = {"model": "org/new", "source": "/models/new", "keep_alive_s": 30}
    response = await bench.client.post("/admin/models", json=body)
    assert (response.status_code, response.json()) == (
        202,
        {"job_id": "job-1", "model": "org/new", "state": "importing"},
    )
    (command,) = bench.scheduler.heard.all(DeployModel)
    assert command == DeployModel(model_id="org/new", source="/models/new", keep_alive_s=30.0)


@pytest.mark.parametrize("model", ["../x", "/etc", "a//b", "..", "a b", ""])
async def test_a_dangerous_model_id_is_refused_at_deploy(bench: Bench, model: str) -> None:
    response = await bench.client.post("/admin/models", json={"model": model, "source": "/models/new"})
    assert error_of(response) == (400, "invalid_request", "model")
    assert bench.scheduler.heard.all(DeployModel) == []


async def test_a_deployment_that_the_scheduler_refuses_has_its_error(bench: Bench) -> None:
    bench.scheduler.errors[DeployModel] = Conflict(reason="it is being deleted")
    response = await bench.client.post("/admin/models", json={"model": "new", "source": "/models/new"})
    assert error_of(response) == (409, "conflict", None)


async def test_a_model_is_deleted_by_its_path(bench: Bench) -> None:
    response = await bench.client.delete("/admin/models/org/old")
    assert (response.status_code, response.json()) == (202, {"model": "org/old", "state": "deleting"})
    assert bench.scheduler.heard.all(DeleteModel) == [DeleteModel(model_id="org/old")]


async def test_jobs_tell_their_progress_and_their_error(bench: Bench) -> None:
    error = error_reply(ImportFailed(model_id="new", stage="verifying", reason="x.safetensors is cut short"))
    bench.scheduler.jobs = {
        "running": JobStatus(job_id="running", model_id="new", stage=JobStage.CONVERTING, done_bytes=5, total_bytes=9),
        "failed": JobStatus(job_id="failed", model_id="new", stage=JobStage.FAILED, error=error),
    }
    assert (await bench.client.get("/admin/jobs/running")).json() == {
        "job_id": "running",
        "model": "new",
        "stage": "converting",
        "done_bytes": 5,
        "total_bytes": 9,
        "error": None,
    }
    failed = (await bench.client.get("/admin/jobs/failed")).json()
    assert failed["error"]["code"] == "import_failed"
    assert "x.safetensors is cut short" in failed["error"]["message"]
    assert error_of(await bench.client.get("/admin/jobs/absent")) == (404, "job_not_found", None)


async def test_a_job_is_cancelled_by_its_path(bench: Bench) -> None:
    status = JobStatus(job_id="running", model_id="new", stage=JobStage.DOWNLOADING, done_bytes=5, total_bytes=9)
    bench.scheduler.jobs = {"running": status}
    response = await bench.client.delete("/admin/jobs/running")
    assert (response.status_code, response.json()["stage"]) == (202, "downloading")
    assert bench.scheduler.heard.all(CancelJob) == [CancelJob(job_id="running")]
    assert error_of(await bench.client.delete("/admin/jobs/absent")) == (404, "job_not_found", None)


async def test_a_source_without_sense_is_refused_and_its_secrets_are_not_told(bench: Bench) -> None:
    body = {"model": "new", "source": "https://alice:s3cret@host/model?token=s3cret"}
    response = await bench.client.post("/admin/models", json=body)
    assert error_of(response) == (400, "invalid_request", "source")
    assert "s3cret" not in response.text


async def test_a_model_can_be_asked_as_soon_as_its_job_says_finished(bench: Bench) -> None:
    bench.scheduler.models["tiny2"] = a_model("tiny2", state=ModelState.IMPORTING)
    assert (await bench.client.post(CHAT, json=bench.chat(model="tiny2"))).status_code == 409
    bench.scheduler.models["tiny2"] = a_model("tiny2")
    bench.scheduler.jobs["job-1"] = JobStatus(job_id="job-1", model_id="tiny2", stage=JobStage.FINISHED)
    assert (await bench.client.get("/admin/jobs/job-1")).json()["stage"] == "finished"
    await bench.scheduler.add_route(a_route("tiny2"))
    assert (await bench.client.post(CHAT, json=bench.chat(model="tiny2"))).status_code == 200


async def test_a_redeployed_model_gets_its_new_tokenizer(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    assert (await bench.post()).status_code == 200
    bench.scheduler.models["tiny"] = a_model("tiny", digest="d2")
    bench.scheduler.jobs["job-1"] = JobStatus(job_id="job-1", model_id="tiny", stage=JobStage.FINISHED)
    await bench.client.get("/admin/jobs/job-1")
    assert (await bench.post()).status_code == 200
    directories = [path.name for path in (bench.service.config.cache_dir / "tiny").iterdir()]
    assert directories == ["d2"]


async def test_deployments_and_the_cluster_are_shown(bench: Bench) -> None:
    bench.scheduler.models["new"] = a_model("new", state=ModelState.IMPORTING)
    models = (await bench.client.get("/admin/models")).json()["models"]
    assert [(model["model"], model["state"]) for model in models] == [("tiny", "ready"), ("new", "importing")]
    one = (await bench.client.get("/admin/models/new")).json()
    assert (one["model"], one["source"], one["residency"]) == ("new", "/somewhere", {"server-0": "ssd"})
    assert (await bench.client.get("/admin/cluster")).json() == {
        "scheduler_epoch": 1,
        "scheduler_id": "",
        "policy": "",
        "servers": [],
        "routers": ["router-0"],
        "waiting_requests": 0,
    }


async def test_the_last_known_models_are_listed_while_the_scheduler_is_away(make_bench: MakeBench) -> None:
    async with make_bench() as bench:
        assert (await bench.client.get("/v1/models")).status_code == 200
        bench.scheduler.is_mute = True
        await bench.scheduler.bus.drain()
        assert [model["id"] for model in (await bench.client.get("/v1/models")).json()["data"]] == ["tiny"]
        response = await bench.client.post("/admin/models", json={"model": "a", "source": "/a"})
        assert error_of(response) == (503, "unavailable", None)
        response = await bench.client.post(CHAT, json=bench.chat(model="absent"))
        assert error_of(response) == (503, "unavailable", None)


async def test_the_openapi_document_is_served(bench: Bench) -> None:
    document = (await bench.client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.")
    for path, operations in document["paths"].items():
        url = path.replace("{model}", "tiny").replace("{job_id}", "x").replace("{server}", "absent")
        for method, operation in operations.items():
            if method == "get":
                asked = {each["name"]: "tiny" for each in operation.get("parameters", []) if each["in"] == "query"}
                response = await bench.client.get(url, params=asked)
                code = None if response.status_code == 200 else response.json()["error"]["code"]
                assert code in (None, "job_not_found", "server_not_found")


async def test_a_stock_openai_client_streams_a_chat(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    async with openai.AsyncOpenAI(base_url=f"{bench.service.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(bench.tokenizer.encode(ANSWER).ids)


async def test_a_stock_openai_client_waits_for_a_cold_model_and_reads_comments(quick_signs: None, bench: Bench) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bench.service.url}/v1", api_key="none", max_retries=0) as client:
        # The headers come while the model is still cold: the first thing in the stream is a comment.
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], stream=True
        )
        await bench.scheduler.add_route(a_route("tiny"))
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == ANSWER


async def test_a_stock_openai_client_completes_lists_and_understands_errors(bench: Bench) -> None:
    await bench.scheduler.add_route(a_route("tiny"))
    async with openai.AsyncOpenAI(base_url=f"{bench.service.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])
        assert answer.choices[0].message.content == ANSWER
        completion = await client.completions.create(model="tiny", prompt="Hello")
        assert completion.choices[0].text == ANSWER
        assert [model.id for model in (await client.models.list()).data] == ["tiny"]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="absent", messages=[{"role": "user", "content": "Hello"}])
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], n=9)
        assert refused.value.param == "n"


async def test_a_port_that_is_taken_is_a_config_error(make_bench: MakeBench, bench: Bench) -> None:
    taken = int(bench.service.url.rsplit(":", 1)[1])
    with pytest.raises(BaseExceptionGroup) as caught:
        async with make_bench(http_port=taken):
            pass
    leaves = caught.value.subgroup(ConfigError)
    assert leaves is not None
