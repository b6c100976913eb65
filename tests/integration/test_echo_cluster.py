"""A whole cluster with the echo engine: real processes, real NATS and Redis, and checkpoints that are really loaded."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster, running_cluster, wait_until, whimbrel

# Well below what silence takes: three heartbeats less the part of a second since the last one.
NOTICED_S_MAX = 1.5
SERVICES = ("router", "scheduler", "agent-s0", "worker-s0-0")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two servers of one slot, three deployed models of different weights."""
    directory = tmp_path_factory.mktemp("echo")
    options = ("--servers", "2", "--slots", "1", "--engine", "echo", "--pool-mib", "256")
    settings = ("--set", "WB_KEEP_ALIVE_S=2", "--set", "WB_ECHO_DECODE_S=0.001")
    with running_cluster(directory / "cluster", *options, *settings) as running:
        for seed, name in enumerate(("alpha", "beta", "team/gamma")):
            source = make_checkpoint(directory / f"source-{seed}", seed, padding_bytes=20_000_000 + seed)
            whimbrel("deploy", name, "--source", str(source), "--url", running.url)
        yield running


def complete(cluster: Cluster, model: str, prompt: str, **options: Any) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 500, "temperature": 0, **options}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)


def assert_echo(response: httpx.Response, prompt: str) -> None:
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == prompt
    assert response.json()["choices"][0]["finish_reason"] == "stop"


def events(cluster: Cluster, types: str) -> list[dict[str, Any]]:
    lines = whimbrel("events", "--dir", str(cluster.directory), "--since", "1h", "--type", types, "--json").stdout
    return [json.loads(line) for line in lines.splitlines()]


def test_fifty_concurrent_requests_end_with_their_exact_text_and_each_model_is_loaded_once(cluster: Cluster) -> None:
    """R1, F1: single flight: however many requests wait for a cold model, it is loaded once."""
    wait_until(lambda: not any(cluster.slots().values()), "the slots were not free at the start")
    loads_before = Counter(event["data"]["model_id"] for event in events(cluster, "load.started"))
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    prompts = [
        f"request {n}: " + "".join(chance.choices("abc déf 漢字 🙂 ", k=chance.randint(1, 60))) for n in range(50)
    ]

    async def one(client: httpx.AsyncClient, number: int) -> None:
        model = ("alpha", "beta")[number % 2]
        body = {"model": model, "prompt": prompts[number], "max_tokens": 500, "temperature": 0}
        assert_echo(await client.post(f"{cluster.url}/v1/completions", json=body), prompts[number])

    async def all_at_once() -> None:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(timeout=60, limits=limits) as client, asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(one(client, number))

    asyncio.run(all_at_once())
    loads = Counter(event["data"]["model_id"] for event in events(cluster, "load.started"))
    assert loads - loads_before == Counter({"alpha": 1, "beta": 1})
    wait_until(lambda: not any(cluster.slots().values()), "slots did not return to zero after the keep-alive")
    wait_until(lambda: not cluster.leases(), f"leases did not return to zero: {cluster.leases()}")


def test_three_models_share_two_slots_and_nobody_starves(cluster: Cluster) -> None:
    models = ("alpha", "beta", "team/gamma")

    async def one(client: httpx.AsyncClient, number: int) -> None:
        prompt = f"request {number} of many"
        body = {"model": models[number % 3], "prompt": prompt, "max_tokens": 500, "temperature": 0}
        assert_echo(await client.post(f"{cluster.url}/v1/completions", json=body), prompt)

    async def all_at_once() -> None:
        async with httpx.AsyncClient(timeout=90) as client, asyncio.TaskGroup() as group:
            for number in range(30):
                group.create_task(one(client, number))

    asyncio.run(all_at_once())


def test_the_stock_openai_client_streams_a_chat(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    chunks = list(
        client.chat.completions.create(
            model="alpha",
            messages=[{"role": "user", "content": "Grüße, whimbrel 🐦"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Grüße, whimbrel 🐦" in text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_a_client_that_does_not_stream_gets_the_same_text(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "the same"}]
    whole = client.chat.completions.create(model="alpha", messages=messages)
    parts = client.chat.completions.create(model="alpha", messages=messages, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content


def test_the_stock_openai_client_gets_choices_with_log_probabilities(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "alpha", "messages": [{"role": "user", "content": "漢字 🐦"}], "n": 2}
    asked |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1]
    for choice in whole.choices:
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 2 * len(content)
        assert "漢字 🐦".encode() in b"".join(bytes(token.bytes or []) for token in content)
        assert all(token.logprob == token.top_logprobs[0].logprob for token in content), "the echo is the most probable"
    parts = list(client.chat.completions.create(**asked, stream=True))
    for choice in whole.choices:
        said = [part.choices[0] for part in parts if part.choices[0].index == choice.index]
        assert "".join(part.delta.content or "" for part in said) == choice.message.content
        streamed = [token for part in said if part.logprobs for token in part.logprobs.content or []]
        assert streamed == choice.logprobs.content  # type: ignore[union-attr]
    completion = client.completions.create(model="alpha", prompt="ab", logprobs=1, max_tokens=4)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []) == completion.choices[0].text
    assert (logprobs.text_offset or [None])[0] == 0


def test_the_response_says_where_the_time_went(cluster: Cluster) -> None:
    wait_until(lambda: "beta" not in cluster.slots().values(), "beta did not scale to zero")
    cold = complete(cluster, "beta", "hello")
    warm = complete(cluster, "beta", "hello")
    assert cold.headers["x-whimbrel-tier"] in ("remote", "ssd", "dram")
    assert warm.headers["x-whimbrel-tier"] == "gpu"
    for stage in ("queue", "fetch", "load", "bind", "prefill", "first_token"):
        assert f"{stage};dur=" in cold.headers["server-timing"]
    finished = [e["data"] for e in events(cluster, "request.finished")]
    assert any(e["request_id"] == cold.headers["x-request-id"] and e["tier"] != "gpu" for e in finished)


@pytest.mark.parametrize("service", SERVICES)
def test_killing_any_one_service_costs_at_most_the_requests_it_ran(cluster: Cluster, service: str) -> None:
    """P2: after kill -9 and a restart of one service the next request succeeds, and nothing else is restarted."""
    assert_echo(complete(cluster, "alpha", "before"), "before")
    others = {name: pid for name, pid in cluster.state["services"].items() if name != service}
    cluster.kill(service)
    if service == "router":
        wait_until(lambda: is_up(cluster), "the router did not come back")
    assert_echo(complete(cluster, "alpha", "after, warm or not"), "after, warm or not")
    assert_echo(complete(cluster, "beta", "and another model"), "and another model")
    assert {name: cluster.pid(name) for name in others} == others


def test_a_killed_worker_is_noticed_by_its_exit_and_not_by_its_silence(cluster: Cluster) -> None:
    """The kernel tells its agent; three missed heartbeats would take three seconds."""
    noticed_s: list[float] = []
    while not noticed_s or (noticed_s[-1] >= NOTICED_S_MAX and len(noticed_s) < 3):  # once is enough
        wait_until(lambda: len(cluster.slots()) == 2, "the slots were not there at the start")
        pid = cluster.pid("worker-s1-0")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        wait_until(lambda: "s1/0" not in cluster.slots(), "the slot still counted as alive")
        noticed_s.append(time.monotonic() - killed_s)
        wait_until(lambda: "s1/0" in cluster.slots(), "the worker was not started again")
    assert min(noticed_s) < NOTICED_S_MAX, noticed_s
    assert cluster.state["restarts"]["worker-s1-0"] >= 1


@pytest.mark.parametrize("server", ["nats-server", "redis-server"])
def test_killing_the_bus_or_the_store_is_survived_too(cluster: Cluster, server: str) -> None:
    assert_echo(complete(cluster, "alpha", "before"), "before")
    services = cluster.state["services"]
    cluster.kill(server)
    assert_echo(complete(cluster, "beta", "after"), "after")
    assert {name: pid for name, pid in cluster.state["services"].items() if name != server} == {
        name: pid for name, pid in services.items() if name != server
    }


def test_a_request_that_runs_while_its_worker_is_killed_ends_with_a_typed_error_or_all_its_text(
    cluster: Cluster,
) -> None:
    prompt = "a long text " * 80
    body = {"model": "alpha", "prompt": prompt, "max_tokens": 1000, "temperature": 0, "stream": True}
    assert_echo(complete(cluster, "alpha", "warm up"), "warm up")
    holder = next(slot for slot, model in cluster.slots().items() if model == "alpha")
    lines: list[str] = []
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            lines.append(line)
            if len(lines) == 20:
                cluster.kill("worker-" + holder.replace("/", "-"))
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    errors = [event["error"]["code"] for event in data if "error" in event]
    text = "".join(event["choices"][0]["text"] for event in data if event.get("choices"))
    assert errors == ["inference_lost"] or text == prompt
    assert prompt.startswith(text)
    assert_echo(complete(cluster, "alpha", "next"), "next")


def is_up(cluster: Cluster) -> bool:
    try:
        return httpx.get(f"{cluster.url}/healthz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


BAD_REQUESTS = {
    "unknown model": ({"model": "nobody", "prompt": "x"}, 404, "model_not_found"),
    "a path for a model": ({"model": "../x", "prompt": "x"}, 400, "invalid_request"),
    "no model": ({"prompt": "x"}, 400, "invalid_request"),
    "no prompt": ({"model": "alpha"}, 400, "invalid_request"),
    "unknown parameter": ({"model": "alpha", "prompt": "x", "colour": "red"}, 400, "unsupported_parameter"),
    "unsupported parameter": ({"model": "alpha", "prompt": "x", "best_of": 3}, 400, "unsupported_parameter"),
    "wrong type": ({"model": "alpha", "prompt": "x", "max_tokens": "many"}, 400, "invalid_request"),
    "out of range": ({"model": "alpha", "prompt": "x", "temperature": -1}, 400, "invalid_request"),
    "too long a prompt": ({"model": "alpha", "prompt": "x" * 5000}, 400, "context_length_exceeded"),
}


@pytest.mark.parametrize(("body", "status", "code"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_gets_openais_error_object_and_harms_nobody(
    cluster: Cluster, body: dict[str, Any], status: int, code: str
) -> None:
    response = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert error.keys() >= {"message", "type", "param", "code"}
    assert "Traceback" not in error["message"]
    assert_echo(complete(cluster, "alpha", "still fine"), "still fine")


def test_malformed_json_is_a_400(cluster: Cluster) -> None:
    response = httpx.post(f"{cluster.url}/v1/chat/completions", content=b'{"model": ', timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"
    assert_echo(complete(cluster, "alpha", "still fine"), "still fine")


def deploy_refused(cluster: Cluster, name: str, source: Path | str) -> str:
    done = whimbrel("deploy", name, "--source", str(source), "--url", cluster.url, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_a_truncated_checkpoint_is_refused_at_deploy_naming_file_and_offset(cluster: Cluster, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", seed=9)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    message = deploy_refused(cluster, "truncated", source)
    assert "model.safetensors" in message
    assert str(weights.stat().st_size) in message
    refused = complete(cluster, "truncated", "x")
    assert refused.status_code == 409
    assert "deploy it again" in refused.json()["error"]["message"]
    assert "truncated" not in {entry["id"] for entry in cluster.get("/v1/models")["data"]}
    assert_echo(complete(cluster, "alpha", "still fine"), "still fine")


@pytest.mark.parametrize("name", ["../x", "a/b/c", ".hidden", "a--b"])
def test_a_model_id_that_is_no_name_is_refused(cluster: Cluster, name: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    assert "model" in deploy_refused(cluster, name, source)


def test_a_source_that_is_not_there_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in deploy_refused(cluster, "nothing", tmp_path / "nothing").replace(" ", "")


def test_a_checkpoint_that_rots_in_the_repository_is_refused_at_load_naming_file_and_offset(
    cluster: Cluster, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", seed=11, padding_bytes=40_000_000)
    whimbrel("deploy", "rotten", "--source", str(source), "--url", cluster.url)
    partition = cluster.directory / "repository" / "rotten" / "partition_0.bin"
    with partition.open("r+b") as file:
        file.seek(20_000_000)
        file.write(b"rot")
    response = complete(cluster, "rotten", "x")
    assert response.status_code >= 500, response.text
    assert response.json()["error"]["code"] == "load_failed"
    assert "partition_0.bin" in response.json()["error"]["message"]
    assert "16777216" in response.json()["error"]["message"]
    assert_echo(complete(cluster, "alpha", "still fine"), "still fine")
    whimbrel("delete", "rotten", "--url", cluster.url)


def test_deploying_again_is_idempotent_and_new_weights_replace_old_ones(cluster: Cluster, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", seed=20)
    whimbrel("deploy", "again", "--source", str(source), "--url", cluster.url)
    first = model(cluster, "again")["checkpoint_digest"]
    whimbrel("deploy", "again", "--source", str(source), "--url", cluster.url)
    assert model(cluster, "again")["checkpoint_digest"] == first
    assert_echo(complete(cluster, "again", "old weights"), "old weights")
    make_checkpoint(source, seed=21)
    whimbrel("deploy", "again", "--source", str(source), "--url", cluster.url)
    assert model(cluster, "again")["checkpoint_digest"] != first
    assert_echo(complete(cluster, "again", "new weights"), "new weights")


def test_a_deleted_model_is_gone_from_the_catalogue_and_the_disks(cluster: Cluster, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", seed=30)
    whimbrel("deploy", "short-lived", "--source", str(source), "--url", cluster.url)
    assert_echo(complete(cluster, "short-lived", "hello"), "hello")
    whimbrel("delete", "short-lived", "--url", cluster.url)
    assert complete(cluster, "short-lived", "hello").status_code == 404
    wait_until(
        lambda: not list(cluster.directory.glob("**/short-lived/partition_0.bin")), "copies of the weights were left"
    )


def model(cluster: Cluster, name: str) -> dict[str, Any]:
    models = cluster.get("/admin/models")["models"]
    return next(entry for entry in models if entry["model"] == name)


def test_the_command_line_shows_models_and_slots(cluster: Cluster) -> None:
    assert_echo(complete(cluster, "alpha", "hello"), "hello")
    assert "alpha" in whimbrel("models", "--url", cluster.url).stdout
    assert "team/gamma" in whimbrel("models", "--url", cluster.url).stdout
    listed = {entry["id"] for entry in cluster.get("/v1/models")["data"]}
    assert {"alpha", "beta", "team/gamma"} <= listed
    servers = json.loads(whimbrel("status", "--url", cluster.url, "--json").stdout)["servers"]
    assert [server["server_id"] for server in servers] == ["s0", "s1"]
    assert whimbrel("chat", "alpha", "hello", "--url", cluster.url).stdout.strip()


def test_commands_against_no_cluster_say_so_in_one_sentence(tmp_path: Path) -> None:
    done = whimbrel("models", "--url", "http://127.0.0.1:9", check=False)
    assert done.returncode == 3
    assert "whimbrel up" in done.stderr
    assert "Traceback" not in done.stderr
    assert "no cluster" in whimbrel("down", "--dir", str(tmp_path)).stdout


def test_public_events_are_cloud_events_on_jetstream(cluster: Cluster) -> None:
    deployed = events(cluster, "model.deployed")
    assert {event["data"]["model_id"] for event in deployed} >= {"alpha", "beta", "team/gamma"}
    assert all(event["specversion"] == "1.0" and event["source"].startswith("/whimbrel/") for event in deployed)
    sequences = [event["sequence"] for event in events(cluster, "*")]
    assert sequences == sorted(set(sequences))
