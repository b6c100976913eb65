"""Requests that survive their instance, on a real cluster: moved by hand, drained away, killed under, told to stop.

The echo engine answers with the prompt, so that every missing, doubled or reordered token shows in the text."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from whimbrel.client.admin import MIGRATION_ENDS

from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import Cluster, running_cluster, wait_until, whimbrel

MODEL = "alpha"
PROMPT = "a whimbrel flies from one continent to the other and arrives 🐦 " * 3


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two servers of one slot; an answer takes some seconds."""
    directory = tmp_path_factory.mktemp("moves")
    options = ("--servers", "2", "--slots", "1", "--engine", "echo", "--pool-mib", "256")
    settings = ("--set", "WB_KEEP_ALIVE_S=600", "--set", "WB_ECHO_DECODE_S=0.04")
    with running_cluster(directory / "cluster", *options, *settings) as running:
        source = make_checkpoint(directory / "source", 1, padding_bytes=2_000_000)
        whimbrel("deploy", MODEL, "--source", str(source), "--url", running.url, "--keep-alive", "600")
        yield running


@dataclass
class Client:
    """A stock client that streams the prompt back, in a thread of its own."""

    cluster: Cluster
    is_streaming: bool = True
    text: str = ""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: object = None

    def start(self) -> Client:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        wait_until(lambda: self.cluster_has_a_request() or not self.thread.is_alive(), "the request did not start")
        if self.is_streaming:
            wait_until(lambda: len(self.text) > 20 or not self.thread.is_alive(), "no text came")
        assert self.thread.is_alive(), self.error or "it has ended already"
        return self

    def cluster_has_a_request(self) -> bool:
        return bool(where(self.cluster))

    def end(self) -> Client:
        self.thread.join(60)
        assert not self.thread.is_alive(), "the stream does not end"
        assert self.error is None, self.error
        assert self.text == PROMPT, "every token once and in order"
        assert self.finish_reason == "stop"
        return self

    def _run(self) -> None:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 500, "temperature": 0, "stream": self.is_streaming}
        url = f"{self.cluster.url}/v1/completions"
        if not self.is_streaming:
            answer = httpx.post(url, json=body, timeout=60).json()
            self.error = answer.get("error")
            if self.error is None:
                self.text, self.finish_reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
                self.usage = answer["usage"]
            return
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            if response.is_error:
                self.error = response.read().decode()
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.error = event["error"]
                    return
                for choice in event["choices"]:
                    self.text += choice["text"]
                    self.finish_reason = choice["finish_reason"] or self.finish_reason


def where(cluster: Cluster) -> str:
    """The server whose slot runs a request; empty when none does."""
    for server in cluster.get("/admin/cluster")["servers"]:
        if any(slot["active_requests"] for slot in server["slots"]):
            return str(server["server_id"])
    return ""


def at_rest(cluster: Cluster) -> None:
    """Nothing is on the move, every worker is there, and one instance at most is left."""
    wait_until(lambda: len(cluster.slots()) == 2, "a worker is missing")
    wait_until(
        lambda: all(one["state"] in MIGRATION_ENDS for one in cluster.get("/admin/migrations")["migrations"]),
        "a migration goes on for ever",
    )
    wait_until(lambda: not where(cluster), "a request is left")


def other(server_id: str) -> str:
    return "s1" if server_id == "s0" else "s0"


@pytest.mark.parametrize("is_streaming", [True, False], ids=["streaming", "whole"])
def test_an_operator_moves_a_running_instance_and_its_client_gets_the_whole_text(
    cluster: Cluster, is_streaming: bool
) -> None:
    """G3-G11"""
    client = Client(cluster, is_streaming).start()
    source = where(cluster)
    done = whimbrel("migrate", MODEL, "--to", f"{other(source)}/0", "--url", cluster.url, "--json")
    status = json.loads(done.stdout)
    assert (status["state"], status["source_server_id"]) == ("finished", source)
    assert where(cluster) == other(source), "it goes on there"
    client.end()
    if not is_streaming:
        assert client.usage["completion_tokens"] == client.usage["prompt_tokens"]
    listed = whimbrel("migrations", "--url", cluster.url).stdout
    assert "finished" in listed
    at_rest(cluster)


def test_a_server_is_drained_while_it_streams(cluster: Cluster) -> None:
    client = Client(cluster).start()
    source = where(cluster)
    whimbrel("drain", source, "--wait", "--url", cluster.url)
    assert client.thread.is_alive(), "nobody waited for its end"
    client.end()
    whimbrel("uncordon", source, "--url", cluster.url)
    at_rest(cluster)


def kill(cluster: Cluster, server_id: str) -> None:
    cluster.signal(f"worker-{server_id}-0", signal.SIGKILL)


def stop(cluster: Cluster, server_id: str) -> None:
    cluster.signal(f"worker-{server_id}-0", signal.SIGTERM)


def stop_server(cluster: Cluster, server_id: str) -> None:
    for service in (f"agent-{server_id}", f"worker-{server_id}-0"):
        cluster.signal(service, signal.SIGTERM)


@pytest.mark.parametrize(
    "harm", [kill, stop, stop_server], ids=["killed", "told to stop", "its whole server told to stop"]
)
@pytest.mark.parametrize("is_streaming", [True, False], ids=["streaming", "whole"])
def test_a_client_does_not_notice_that_its_worker_is_gone(
    cluster: Cluster, is_streaming: bool, harm: Callable[[Cluster, str], None]
) -> None:
    """Failover is on by default; a worker that is told to stop hands over."""
    client = Client(cluster, is_streaming).start()
    harm(cluster, where(cluster))
    client.end()
    at_rest(cluster)


def test_an_agent_that_is_told_to_stop_waits_until_its_server_s_requests_run_elsewhere(cluster: Cluster) -> None:
    client = Client(cluster).start()
    source = where(cluster)
    pid = cluster.signal(f"agent-{source}", signal.SIGTERM)
    wait_until(lambda: where(cluster) == other(source), "it was not moved")
    client.end()
    wait_until(lambda: cluster.pid(f"agent-{source}") not in (None, pid), "the agent did not end")
    at_rest(cluster)


def test_events_tell_every_state_of_a_migration_and_what_its_client_saw(cluster: Cluster) -> None:
    client = Client(cluster).start()
    whimbrel("migrate", MODEL, "--to", other(where(cluster)), "--url", cluster.url)
    client.end()
    lines = whimbrel("events", "--dir", str(cluster.directory), "--since", "1h", "--type", "*", "--json").stdout
    kinds = [json.loads(line)["type"] for line in lines.splitlines()]
    for kind in ("migration.started", "migration.resuming", "migration.handed_over", "migration.finished"):
        assert kind in kinds
    assert "request.switched" in kinds
    at_rest(cluster)
