"""Commands that scale models, take servers out and explain decisions, as a user runs them."""

from __future__ import annotations

import asyncio
import json

import pytest
from rich.console import Console
from whimbrel.cli import show
from whimbrel.cli.explain import explanation
from whimbrel.wire.messages import (
    CandidateSummary,
    CordonServer,
    DecisionSummary,
    DeployModel,
    ExplainModelReply,
    GetCluster,
    JobStage,
    JobStatus,
    MoveSummary,
    ScaleModel,
    Scaling,
    Tier,
    UncordonServer,
)

from tests.unit.cli.conftest import command
from tests.unit.router.conftest import Bench

pytestmark = pytest.mark.asyncio(loop_scope="module")


def an_explanation(*, sentence: str = "Tiny [has] no instance.", is_kept: bool = True) -> ExplainModelReply:
    move = MoveSummary(instance_id="i-2", model_id="b", server_id="server-0", slots=(1,), load_s=0.5, resume_s=0.25)
    chosen = CandidateSummary(
        server_id="server-1", slots=(0,), source_tier=Tier.SSD, size_bytes=2_000_000_000, queue_s=0.5, transfer_s=1.0,
        overhead_s=0.05, is_prior=True, evicted=("i-1",), eviction_s=0.25, moves=(move,), total_s=2.55,
    )  # fmt: skip
    refused = CandidateSummary(server_id="server-0", refusal="busy: 2 running [instances]", source_tier=Tier.DRAM)
    placed = DecisionSummary(
        outcome="placed", policy="migration", age_s=3.0, server_id="server-1", candidates=(chosen, refused)
    )
    earlier = DecisionSummary(outcome="placed", policy="", age_s=240.0, server_id="server-1")
    return ExplainModelReply(
        model_id="tiny", sentence=sentence, waiting_requests=1, instances=(),
        last=placed if is_kept else earlier, now=placed,
    )  # fmt: skip


async def test_a_decision_is_explained_with_the_terms_of_every_server(bench: Bench) -> None:
    bench.scheduler.explanations["tiny"] = an_explanation()
    done = await command(bench, "explain", "tiny", "--json")
    assert (done.returncode, json.loads(done.stdout)["last"]["candidates"][0]["total_s"]) == (0, 2.55)
    answer = json.loads(done.stdout)
    text = printed(answer)
    assert "Tiny [has] no instance." in text
    assert "3.0 s ago: placed on server-1 (policy migration)" in text
    assert (
        "→ server-1: 2.55 s = 0.50 s queue + ~1.00 s for 2.0 GB from ssd + 50 ms overhead + "
        "1.00 s for what goes first: idle i-1, i-2 to server-0; slot 0" in text
    )
    assert "  server-0: busy: 2 running [instances] (a load there: 0 ms" in text
    done = await command(bench, "explain", "tiny")
    assert (done.returncode, "Tiny [has] no instance." in done.stdout) == (0, True)


async def test_what_an_earlier_leader_decided_has_no_reasons(bench: Bench) -> None:
    bench.scheduler.explanations["tiny"] = an_explanation(is_kept=False)
    done = await command(bench, "explain", "tiny")
    assert "4 min ago: placed on server-1" in done.stdout
    assert "reasons are not kept" in done.stdout


async def test_explaining_what_is_not_there_is_exit_code_one(bench: Bench) -> None:
    assert "nothing was decided yet" in (await command(bench, "explain", "tiny")).stdout
    done = await command(bench, "explain", "absent")
    assert done.returncode == 1
    assert "'absent' is not deployed" in done.stderr


async def test_a_server_is_cordoned_and_uncordoned(bench: Bench) -> None:
    bench.scheduler.held["server-0"] = ("i-1",)
    done = await command(bench, "cordon", "server-0")
    assert (done.returncode, done.stdout.strip()) == (0, "server-0 is cordoned; it keeps i-1")
    assert "server-0 is cordoned" in printed_cluster(json.loads((await command(bench, "status", "--json")).stdout))
    done = await command(bench, "uncordon", "server-0", "--json")
    assert json.loads(done.stdout)["is_cordoned"] is False
    assert len(bench.scheduler.heard.all(UncordonServer)) == 1
    done = await command(bench, "cordon", "absent")
    assert done.returncode == 1
    assert "server-0" in done.stderr


async def test_drain_returns_at_once_and_with_wait_when_the_server_is_empty(bench: Bench) -> None:
    bench.scheduler.held["server-0"] = ("i-1", "i-2")
    done = await command(bench, "drain", "server-0")
    assert (done.returncode, done.stdout.strip()) == (0, "server-0 is drained of i-1, i-2")
    waiting = asyncio.create_task(command(bench, "drain", "server-0", "--wait"))
    await bench.scheduler.heard.wait(GetCluster, 2)
    assert not waiting.done()
    bench.scheduler.held.clear()
    done = await waiting
    assert (done.returncode, done.stdout.strip()) == (0, "server-0 is empty")
    assert "still has i-1, i-2" in done.stderr
    assert all(order.drain for order in bench.scheduler.heard.all(CordonServer))


async def test_waiting_for_a_drain_ends_when_somebody_takes_the_server_back(bench: Bench) -> None:
    bench.scheduler.held["server-0"] = ("i-1",)
    # The scheduler forgets the drain as soon as it was asked for: the next look finds no cordon.
    waiting = asyncio.create_task(command(bench, "drain", "server-0", "--wait"))
    await bench.scheduler.heard.wait(CordonServer)
    bench.scheduler.taken_out.clear()
    done = await waiting
    assert done.returncode == 1
    assert "was uncordoned before it was empty" in done.stderr


async def test_a_model_is_scaled(bench: Bench) -> None:
    """R6"""
    done = await command(bench, "scale", "tiny", "--min", "1", "--max", "3", "--target", "4", "--keep-alive", "30")
    assert bench.scheduler.heard.all(ScaleModel) == [
        ScaleModel(model_id="tiny", min_instances=1, max_instances=3, target_concurrency=4, keep_alive_s=30.0)
    ]
    assert done.returncode == 0
    assert "tiny has 1 to 3 instances" in done.stdout
    done = await command(bench, "scale", "tiny", "--max", "2", "--json")
    assert json.loads(done.stdout)["scaling"]["max_instances"] == 2
    assert bench.scheduler.heard.all(ScaleModel)[1] == ScaleModel(model_id="tiny", max_instances=2)


@pytest.mark.parametrize("arguments", [[], ["--min", "-1"], ["--max", "0"], ["--target", "many"]])
async def test_a_change_of_scaling_without_sense_is_wrong_usage_and_asks_nobody(
    bench: Bench, arguments: list[str]
) -> None:
    done = await command(bench, "scale", "tiny", *arguments)
    assert done.returncode == 2
    assert bench.scheduler.heard.all(ScaleModel) == []


async def test_a_model_is_deployed_with_its_scaling(bench: Bench) -> None:
    bench.scheduler.jobs["job-1"] = JobStatus(job_id="job-1", model_id="new", stage=JobStage.FINISHED)
    done = await command(bench, "deploy", "new", "--source", "hf://org/new", "--min-instances", "2", "--json")
    assert done.returncode == 0, done.stderr
    (deployment,) = bench.scheduler.heard.all(DeployModel)
    assert deployment.scaling == Scaling(min_instances=2, max_instances=2)


async def test_models_are_listed_with_the_instances_they_have_and_want(bench: Bench) -> None:
    (model,) = json.loads((await command(bench, "models", "--json")).stdout)
    assert show.instances_of({**model, "instances": ["i-1"], "desired_instances": 2}) == "1 of 2 (0–1)"


async def test_the_status_shows_how_good_estimates_are_and_who_leads(bench: Bench) -> None:
    found = json.loads((await command(bench, "status", "--json")).stdout)
    assert "error p90" not in printed_cluster(found), "nothing was loaded yet"
    found["servers"][0] |= {
        "estimates": {"ssd": {"observations": 7, "error_s_p90": 0.125, "error_share_p90": 0.25}},
        "bandwidth_bytes_per_s": {"ssd": 2.5e9},
    }
    found |= {"policy": "locality", "scheduler_id": "scheduler-1", "scheduler_epoch": 4}
    text = printed_cluster(found)
    assert "2.5 GB/s" in text
    assert "25%" in text
    assert "policy locality; scheduler-1 leads, epoch 4" in text


def printed(answer: dict[str, object]) -> str:
    console = Console(width=240)
    with console.capture() as capture:
        console.print(explanation(answer))
    return capture.get()


def printed_cluster(cluster: dict[str, object]) -> str:
    console = Console(width=240)
    with console.capture() as capture:
        console.print(show.cluster_table(cluster))
    return capture.get()
