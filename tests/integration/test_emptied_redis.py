"""Redis loses all it had, and the scheduler dies at the same moment: a whole cluster goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest
import redis
from obstore import put_async

from services.scheduler.core.restore import RESTORED_SOURCE
from services.storage_agent.remote_retries import RemoteOptions
from services.storage_agent.repository import Repository
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster, running_cluster, wait_until, whimbrel
from tests.support.object_store import BUCKET, ObjectStore

MODELS = ("alpha", "beta", "team/gamma")
BACK_S_MAX = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two servers of one slot, three models of different weights; instances stay."""
    directory = tmp_path_factory.mktemp("emptied")
    options = ("--servers", "2", "--slots", "1", "--engine", "echo", "--pool-mib", "256")
    settings = ("--set", "WB_KEEP_ALIVE_S=600", "--set", "WB_ECHO_DECODE_S=0.02")
    with running_cluster(directory / "cluster", *options, *settings) as running:
        for seed, name in enumerate(MODELS):
            source = make_checkpoint(directory / f"source-{seed}", seed, padding_bytes=2_000_000 + seed)
            whimbrel("deploy", name, "--source", str(source), "--url", running.url, "--keep-alive", "600")
        yield running


def complete(cluster: Cluster, model: str, prompt: str) -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 500, "temperature": 0}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)


def assert_echo(response: httpx.Response, prompt: str) -> None:
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == prompt


def instances(cluster: Cluster) -> dict[str, str]:
    """Instance on each slot that has one."""
    return {
        f"{server['server_id']}/{slot['slot']}": slot["instance_id"]
        for server in cluster.get("/admin/cluster")["servers"]
        for slot in server["slots"]
        if slot["instance_id"]
    }


def is_busy(cluster: Cluster) -> bool:
    """Whether anything runs."""
    return any(s["active_requests"] for v in cluster.get("/admin/cluster")["servers"] for s in v["slots"])


def catalogue(cluster: Cluster) -> dict[str, dict[str, object]]:
    """What is deployed; empty while that is not known."""
    answer = httpx.get(f"{cluster.url}/admin/models", timeout=30)
    return {model["model"]: model for model in answer.json()["models"]} if answer.is_success else {}


def restored(cluster: Cluster) -> set[str]:
    """Models that were found in the repository. Until the scheduler has them, routers know those of before."""
    return {name for name, model in catalogue(cluster).items() if model["source"] == RESTORED_SOURCE}


def empty_redis_and_kill(cluster: Cluster) -> None:
    """At once: the scheduler must not write back what it knows."""
    scheduler = cluster.pid("scheduler")
    assert scheduler is not None
    os.kill(scheduler, signal.SIGSTOP)
    with redis.Redis.from_url(cluster.state["redis_url"]) as client:
        client.flushall()
    cluster.kill("scheduler")


def test_models_are_listed_again_and_instances_serve_on(cluster: Cluster) -> None:
    """P2: Redis emptied and kill -9 of the scheduler: a request that runs ends with all its text, no instance is
    unloaded or loaded again, every model can be used and taken away."""
    # Beta comes while alpha is busy: an idle alpha may have to go for it, wherever beta loads faster than elsewhere.
    busy = threading.Thread(target=lambda: complete(cluster, "alpha", "it keeps its slot " * 15))
    busy.start()
    wait_until(lambda: is_busy(cluster), "alpha's request did not start")
    assert_echo(complete(cluster, "beta", "before"), "before")
    busy.join(60)
    wait_until(lambda: len(instances(cluster)) == 2, "the workers' heartbeats do not name both instances")
    before, digests = instances(cluster), {name: m["checkpoint_digest"] for name, m in catalogue(cluster).items()}
    prompt = "it runs all the while " * 15
    answers: list[httpx.Response] = []
    running = threading.Thread(target=lambda: answers.append(complete(cluster, "alpha", prompt)))
    running.start()
    wait_until(lambda: is_busy(cluster), "the request did not start")
    empty_redis_and_kill(cluster)
    wait_until(lambda: restored(cluster) == set(MODELS), "the models were not listed again", BACK_S_MAX)
    assert {name: model["checkpoint_digest"] for name, model in catalogue(cluster).items()} == digests
    running.join(60)
    assert_echo(answers[0], prompt)
    wait_until(lambda: sum(len(m["instances"]) for m in catalogue(cluster).values()) == 2, "not adopted", BACK_S_MAX)
    for name in MODELS[:2]:
        answer = complete(cluster, name, "after")
        assert_echo(answer, "after")
        assert answer.headers["x-whimbrel-tier"] == "gpu"
    assert instances(cluster) == before, "the same instances as before"
    assert_echo(complete(cluster, "team/gamma", "it takes the slot of another"), "it takes the slot of another")


def test_a_request_that_is_made_meanwhile_waits_and_is_answered(cluster: Cluster) -> None:
    """P2: nobody hears that a model is not there because the scheduler does not know it yet."""
    assert_echo(complete(cluster, "alpha", "before"), "before")
    cold = next(name for name in MODELS if name not in cluster.slots().values())
    answers: list[httpx.Response] = []
    empty_redis_and_kill(cluster)
    asking = [
        threading.Thread(target=lambda name=name: answers.append(complete(cluster, name, "meanwhile")))
        for name in ("alpha", cold)
    ]
    for each in asking:
        each.start()
    for each in asking:
        each.join(60)
    assert len(answers) == 2
    for answer in answers:
        assert_echo(answer, "meanwhile")


def test_a_damaged_model_is_left_out_and_the_others_are_there(cluster: Cluster) -> None:
    manifest = cluster.directory / "repository" / "team--gamma" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole.replace(b"parameter_count", b"parameter_ctuno"))
    try:
        empty_redis_and_kill(cluster)
        wait_until(lambda: set(catalogue(cluster)) == {"alpha", "beta"}, "the models were not listed again", BACK_S_MAX)
        assert restored(cluster) == {"alpha", "beta"}
    finally:
        manifest.write_bytes(whole)
    assert_echo(complete(cluster, "alpha", "after"), "after")
    logs = "\n".join(log.read_text() for log in cluster.directory.glob("logs/agent-*.log"))
    assert "repository_model_unreadable" in logs
    assert "team/gamma" in logs


async def test_the_models_of_an_object_store_are_listed(
    object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one answer of the store holds."""
    for name, value in object_store.environ(object_store.url).items():
        monkeypatch.setenv(name, value)
    repository = Repository(f"s3://{BUCKET}/some/where", RemoteOptions())
    names = [f"model-{number:04}" for number in range(1_050)]
    for name in names:
        await put_async(repository._store, f"{name}/manifest.json", b"{}")
    await put_async(repository._store, "team--x/manifest.json", b"{}")
    await put_async(repository._store, "a-file", b"{}")
    assert await repository.model_ids() == (*names, "team/x")
