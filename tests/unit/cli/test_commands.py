"""Commands about imports and servers, as a user runs them, against a real router between scripted peers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_asyncio
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Cancelled, Conflict, ImportFailed
from whimbrel.wire.messages import (
    CancelJob,
    DeployModel,
    EvictModel,
    GetJob,
    GetLoads,
    GetLoadsReply,
    JobStage,
    JobStatus,
    LoadSummary,
    MeasureStorage,
    MeasureStorageReply,
    PinModel,
    PrefetchModel,
    Tier,
    UnpinModel,
    WaitStage,
)

from tests.support.cluster import ROOT, whimbrel
from tests.unit.cli.conftest import command
from tests.unit.router.conftest import Bench
from tests.unit.router.peers import FakeAgent

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_agent(module_bench: Bench) -> FakeAgent:
    agent = FakeAgent(module_bench.hub.bus(name="agent"))
    await agent.start()
    return agent


@pytest_asyncio.fixture(loop_scope="module")
async def agent(module_agent: FakeAgent) -> FakeAgent:
    module_agent.heard.clear()
    module_agent.answers.clear()
    return module_agent


def a_status(stage: JobStage, **more: object) -> JobStatus:
    return JobStatus(job_id="job-1", model_id="new", stage=stage, done_bytes=5, total_bytes=9, **more)  # type: ignore[arg-type]


async def test_deploy_takes_a_hub_s_name_and_prints_the_last_status(bench: Bench) -> None:
    bench.scheduler.jobs["job-1"] = a_status(JobStage.FINISHED)
    done = await command(bench, "deploy", "new", "--source", "hf://org/new@v1", "--json")
    assert (done.returncode, json.loads(done.stdout)["stage"]) == (0, "finished")
    (deployment,) = bench.scheduler.heard.all(DeployModel)
    assert deployment.source == "hf://org/new@v1"


async def test_deploy_makes_a_relative_directory_absolute(bench: Bench) -> None:
    bench.scheduler.jobs["job-1"] = a_status(JobStage.FINISHED)
    done = await command(bench, "deploy", "new", "--source", "models/new")
    assert done.returncode == 0
    assert "new is deployed" in done.stdout
    assert "new: finished" in done.stderr, "the bar"
    assert "5/9 bytes" in done.stderr
    (deployment,) = bench.scheduler.heard.all(DeployModel)
    assert deployment.source == str(Path.cwd() / "models/new")


async def test_a_failed_import_is_exit_code_one_and_its_sentence(bench: Bench) -> None:
    error = ImportFailed(model_id="new", stage="downloading", reason="needs 9 bytes and 5 are free")
    bench.scheduler.jobs["job-1"] = a_status(JobStage.FAILED, error=error_reply(error))
    done = await command(bench, "deploy", "new", "--source", "s3://bucket/new")
    assert done.returncode == 1
    assert "needs 9 bytes and 5 are free" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("source", ["ftp://host/x", "https://host/model.safetensors", "hf://a/b/c"])
async def test_a_source_that_makes_no_sense_is_wrong_usage_and_asks_nobody(bench: Bench, source: str) -> None:
    done = await command(bench, "deploy", "new", "--source", source)
    assert done.returncode == 2
    assert "--source" in done.stderr
    assert bench.scheduler.heard.all(DeployModel) == []


async def test_ctrl_c_leaves_the_import_running_and_says_what_can_be_done(bench: Bench) -> None:
    bench.scheduler.jobs["job-1"] = a_status(JobStage.DOWNLOADING)
    arguments = ["deploy", "new", "--source", "hf://org/new", "--url", bench.service.url]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("WB_", "WHIMBREL_"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "whimbrel.cli.main", *arguments,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, cwd=ROOT,
    )  # fmt: skip
    await bench.scheduler.heard.wait(GetJob, 2)
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(20):
        told = (await process.communicate())[1].decode()
    assert process.returncode == 130
    assert f"whimbrel watch job-1 --url {bench.service.url}" in told
    assert f"whimbrel cancel job-1 --url {bench.service.url}" in told
    assert "Traceback" not in told
    assert bench.scheduler.heard.all(CancelJob) == []


async def test_watch_goes_on_with_a_job(bench: Bench) -> None:
    bench.scheduler.jobs["job-1"] = a_status(JobStage.FINISHED)
    done = await command(bench, "watch", "job-1")
    assert (done.returncode, done.stdout.strip()) == (0, "new is deployed")
    assert (await command(bench, "watch", "absent")).returncode == 1


async def test_cancel_waits_until_the_job_has_ended(bench: Bench) -> None:
    bench.scheduler.jobs["job-1"] = a_status(JobStage.CONVERTING)
    asked = asyncio.create_task(command(bench, "cancel", "job-1", "--json"))
    await bench.scheduler.heard.wait(GetJob, 1)
    assert not asked.done()
    error = error_reply(Cancelled(what="import job-1"))
    bench.scheduler.jobs["job-1"] = a_status(JobStage.FAILED, error=error)
    done = await asked
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (0, "cancelled")


async def test_cancelling_what_is_over_is_exit_code_one(bench: Bench) -> None:
    bench.scheduler.jobs["job-1"] = a_status(JobStage.FINISHED)
    done = await command(bench, "cancel", "job-1")
    assert done.returncode == 1
    assert "whimbrel delete new" in done.stderr
    done = await command(bench, "cancel", "absent")
    assert done.returncode == 1
    assert "no job 'absent'" in done.stderr


async def test_tiers_are_filled_and_emptied(bench: Bench, agent: FakeAgent) -> None:
    """E3"""
    done = await command(bench, "prefetch", "tiny", "--server", "server-0", "--tier", "ssd", "--pin", "--json")
    answer = json.loads(done.stdout)
    (prefetch,) = agent.heard.all(PrefetchModel)
    assert (answer["task_id"], prefetch.tier, prefetch.is_pinned) == (prefetch.task_id, Tier.SSD, True)
    for verb, kind in (("pin", PinModel), ("unpin", UnpinModel), ("evict", EvictModel)):
        done = await command(bench, verb, "tiny")
        assert done.returncode == 0, done.stderr
        assert "dram of server-0" in done.stdout
        assert len(agent.heard.all(kind)) == 1


async def test_a_command_for_a_server_names_the_servers_when_it_must(bench: Bench, agent: FakeAgent) -> None:
    bench.scheduler.servers = ("server-0", "server-1")
    done = await command(bench, "pin", "tiny")
    assert done.returncode == 2
    assert "server-0, server-1" in done.stderr
    done = await command(bench, "pin", "tiny", "--server", "absent")
    assert done.returncode == 1
    assert "server-0, server-1" in done.stderr
    agent.answers[EvictModel] = Conflict(reason="tiny [is] used by instance-1")
    done = await command(bench, "evict", "tiny", "--server", "server-0")
    assert done.returncode == 1
    assert "tiny [is] used by instance-1" in done.stderr


async def test_loads_shows_queues(bench: Bench, agent: FakeAgent) -> None:
    agent.answers[GetLoads] = GetLoadsReply(loads=())
    assert "nothing is loading on server-0" in (await command(bench, "loads")).stdout
    load = LoadSummary(
        task_id="t1", instance_id="", model_id="tiny", stage=WaitStage.FETCHING, source_tier=Tier.REMOTE,
        done_bytes=5, total_bytes=9, running_s=1.5, remaining_s=1.25,
    )  # fmt: skip
    agent.answers[GetLoads] = GetLoadsReply(loads=(load,))
    assert "prefetch" in (await command(bench, "loads")).stdout
    (answer,) = json.loads((await command(bench, "loads", "--json")).stdout)
    assert (answer["server"], answer["loads"][0]["remaining_s"]) == ("server-0", 1.25)


async def test_doctor_measures_every_server_and_names_those_that_do_not_answer(bench: Bench, agent: FakeAgent) -> None:
    agent.answers[MeasureStorage] = MeasureStorageReply(
        server_id="server-0", ssd_directory="/ssd", ssd_direct_bytes_per_s=2.5e9, ssd_buffered_bytes_per_s=1e9,
        is_direct=True, pool_size_bytes=4_000_000_000, has_huge_pages=False, is_locked=True,
        warnings=("huge pages [none] are off",),
    )  # fmt: skip
    done = await command(bench, "doctor")
    assert done.returncode == 0
    assert "2.5 GB/s" in done.stdout
    assert "server-0: huge pages [none] are off" in done.stdout
    bench.scheduler.servers = ("server-0", "server-1")
    done = await command(bench, "doctor", "--json")
    assert (done.returncode, [answer["server"] for answer in json.loads(done.stdout)]) == (1, ["server-0"])
    assert "server-1" in done.stderr


async def test_a_cluster_that_is_not_there_is_exit_code_three() -> None:
    for arguments in (["cancel", "job-1"], ["doctor"], ["evict", "m"], ["watch", "job-1"], ["drain", "s", "--wait"]):
        done = await asyncio.to_thread(whimbrel, *arguments, "--url", "http://127.0.0.1:9", check=False)
        assert done.returncode == 3, done.stderr
        assert "whimbrel up" in done.stderr
