"""Imports: from a published checkpoint to the repository, or to an error that says what is wrong with it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import ckptio
import pytest
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import Cancelled, ImportFailed
from whimbrel.wire.messages import (
    AgentHeartbeat,
    CancelImport,
    ImportEnded,
    ImportFinished,
    ImportProgressed,
    JobStage,
    LoadFinished,
    Tier,
)

from services.storage_agent.checkpoints import checkpoint_digest
from tests.support.checkpoints import make_checkpoint
from tests.unit.storage_agent.harness import CHUNK_BYTES, Harness, a_config, an_agent, damage, truncate
from tests.unit.storage_agent.held_imports import HeldImports


def leftovers(agent: Harness) -> list[str]:
    return [path.name for path in agent.repository.iterdir() if path.name.startswith(".")]


async def test_an_import_publishes_a_whole_checkpoint_and_says_what_the_scheduler_needs(home: Path) -> None:
    """F1, F4: converted once, at registration; size and plan are known without touching the weights."""
    source = make_checkpoint(home / "source", padding_bytes=5 * CHUNK_BYTES)
    async with an_agent(a_config(home)) as agent:
        command = await agent.start_import("org/model", source)
        end = await agent.end_of_import(command)
        assert isinstance(end, ImportFinished)
        manifest = ckptio.read_manifest(agent.published("org/model"))
        ckptio.verify(agent.published("org/model"))
        assert end.checkpoint_digest == checkpoint_digest(manifest)
        assert end.size_bytes == manifest.total_bytes
        assert ckptio.Manifest.from_json(end.manifest) == manifest
        assert json.loads(end.model_config)["model_type"] == "llama"
        assert leftovers(agent) == []
        assert (await agent.load("org/model", end.checkpoint_digest)).source_tier is Tier.REMOTE


async def test_importing_the_same_source_again_gives_the_same_digest_and_repairs_what_is_published(home: Path) -> None:
    source = make_checkpoint(home / "source")
    async with an_agent(a_config(home)) as agent:
        first = await agent.import_model("m", source)
        damage(agent.published("m") / "partition_0.bin", 10)
        assert await agent.import_model("m", source) == first
        ckptio.verify(agent.published("m"))


@pytest.mark.parametrize("change", ["weights", "tokenizer"])
async def test_other_content_gives_another_digest_and_takes_the_place(home: Path, change: str) -> None:
    source = make_checkpoint(home / "source")
    async with an_agent(a_config(home)) as agent:
        first = await agent.import_model("m", source)
        if change == "weights":
            make_checkpoint(home / "source", seed=1)
        else:
            (source / "tokenizer_config.json").write_text("{}")
        second = await agent.import_model("m", source)
        assert second != first
        assert checkpoint_digest(ckptio.read_manifest(agent.published("m"))) == second


async def test_the_end_of_a_job_is_said_until_it_is_acknowledged(home: Path) -> None:
    source = make_checkpoint(home / "source")
    async with an_agent(a_config(home)) as agent:
        agent.may_answer = False
        command = await agent.start_import("m", source)
        end = await agent.end_of_import(command)
        assert (await agent.heartbeat_with(lambda _: True)).jobs == (command.job_id,)
        agent.may_answer = True
        agent.heard.clear()
        assert await agent.end_of_import(command) == end
        await agent.heartbeat_with(lambda beat: beat.jobs == ())


async def test_a_repeated_command_is_one_job_and_is_answered_with_its_end(home: Path) -> None:
    source = make_checkpoint(home / "source", padding_bytes=20 * CHUNK_BYTES)
    async with an_agent(a_config(home)) as agent:
        command = await agent.start_import("m", source)
        await agent.send(command)
        end = await agent.end_of_import(command)
        await agent.heartbeat_with(lambda beat: beat.jobs == ())
        written = (agent.published("m") / "manifest.json").stat().st_mtime_ns
        agent.heard.clear()
        await agent.send(command)
        assert await agent.end_of_import(command) == end
        assert (agent.published("m") / "manifest.json").stat().st_mtime_ns == written


async def test_jobs_run_one_after_another_and_are_listed_while_they_do(home: Path, held_imports: HeldImports) -> None:
    sources = [make_checkpoint(home / f"source-{n}", seed=n) for n in range(2)]
    async with an_agent(a_config(home)) as agent:
        commands = [await agent.start_import(f"m{n}", source) for n, source in enumerate(sources)]
        job_ids = tuple(command.job_id for command in commands)
        assert (await agent.until(AgentHeartbeat, lambda beat: len(beat.jobs) == 2)).jobs == job_ids
        held_imports.go_on()
        ends = [await agent.end_of_import(command) for command in commands]
        assert all(isinstance(end, ImportFinished) for end in ends)


async def test_a_long_import_says_how_far_it_is(home: Path, held_imports: HeldImports) -> None:
    source = make_checkpoint(home / "source", padding_bytes=20 * CHUNK_BYTES)
    async with an_agent(a_config(home)) as agent:
        command = await agent.start_import("m", source)
        progress = await agent.until(ImportProgressed, lambda said: said.done_bytes > 0)
        assert progress.job_id == command.job_id
        assert progress.stage in (JobStage.CONVERTING, JobStage.VERIFYING)
        assert progress.done_bytes <= progress.total_bytes
        assert progress.total_bytes > 20 * CHUNK_BYTES
        await agent.remove("m", everywhere=True)
        end = await agent.end_of_import(command)
        assert isinstance(end, ImportEnded), "removing the model cancels its import"
        assert isinstance(error_of(end.error), Cancelled)
        await agent.removed("m")
        assert list(agent.repository.iterdir()) == [], "nothing half is left"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda path: path.rename(path.with_name("elsewhere")), "does not exist on this server"),
        (lambda path: truncate(path / "model.safetensors", 50_000), "model.safetensors: truncated at offset 50000"),
        (lambda path: damage(path / "model.safetensors", 9), "model.safetensors: "),
        (lambda path: (path / "config.json").unlink(), "config.json is missing"),
        (lambda path: (path / "config.json").write_bytes(b" " * 300_000), "config.json has 300000 bytes"),
        (lambda path: (path / "model.safetensors").unlink(), "source"),
    ],
    ids=["missing", "truncated", "corrupt", "no config", "no config but a novel", "no weights"],
)
async def test_a_bad_source_is_refused_with_a_message_that_names_it(home: Path, harm: object, says: str) -> None:
    source = make_checkpoint(home / "source")
    harm(source)  # type: ignore[operator]
    async with an_agent(a_config(home)) as agent:
        error = await agent.failed_import("m", source)
        assert isinstance(error, ImportFailed)
        assert says in error.reason
        assert str(source) in error.reason
        assert list(agent.repository.iterdir()) == [], "nothing was published, nothing half is left"
        await agent.import_model("m", make_checkpoint(home / "good"))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("relative/path", "is not understood"),
        ("ftp://host/model", "is not understood"),
        ("/dev/null", "not a directory"),
    ],
)
async def test_a_source_that_is_none_is_refused(home: Path, source: str, says: str) -> None:
    async with an_agent(a_config(home)) as agent:
        assert says in str(await agent.failed_import("m", source))


async def test_a_file_url_is_a_source_too(home: Path) -> None:
    source = make_checkpoint(home / "with space")
    async with an_agent(a_config(home)) as agent:
        end = await agent.end_of_import(await agent.start_import("m", f"file://{home}/with%20space"))
        assert isinstance(end, ImportFinished)
        assert end.checkpoint_digest == await agent.import_model("n", source)


async def test_a_repository_that_cannot_be_published_to_is_refused_and_named(home: Path) -> None:
    source = make_checkpoint(home / "source")
    async with an_agent(a_config(home, repository_url="http://127.0.0.1:9/models")) as agent:
        error = await agent.failed_import("m", source)
        assert isinstance(error, ImportFailed)
        assert "http://127.0.0.1:9/models can't be published to" in error.reason
        assert "WB_REPOSITORY_URL" in error.reason


async def test_an_id_that_is_no_model_id_is_never_a_path(home: Path) -> None:
    source = make_checkpoint(home / "source")
    async with an_agent(a_config(home)) as agent:
        await agent.start_import("../escaped", source)
        await agent.import_model("m", source)
        assert not (home / "escaped").exists()
        assert [path.name for path in agent.repository.iterdir()] == ["m"]


# --- removal ---


async def test_a_removed_model_leaves_every_tier_and_the_repository_when_asked(home: Path) -> None:
    source = make_checkpoint(home / "source")
    async with an_agent(a_config(home)) as agent:
        digest = await agent.import_model("m", source)
        end = await agent.load("m", digest)
        await agent.peer.unload(end.instance_id)
        await agent.remove("m")
        await agent.removed("m")
        beat = await agent.heartbeat_with(lambda beat: beat.resident == ())
        assert beat.ssd_used_bytes == 0
        assert beat.pool_free_bytes == beat.pool_size_bytes
        assert agent.published("m").exists()
        agent.heard.clear()
        await agent.remove("m", everywhere=True)
        await agent.removed("m")
        assert not agent.published("m").exists()
        assert leftovers(agent) == []
        agent.heard.clear()
        await agent.remove("m", everywhere=True)
        await agent.removed("m")


async def test_a_model_that_is_in_use_is_removed_when_its_instance_lets_go(home: Path) -> None:
    source = make_checkpoint(home / "source")
    async with an_agent(a_config(home)) as agent:
        digest = await agent.import_model("m", source)
        end = await agent.load("m", digest)
        await agent.remove("m")
        beat = await agent.heartbeat_with(lambda beat: beat.resident == ())
        assert beat.attached == (end.instance_id,)
        assert beat.pool_free_bytes < beat.pool_size_bytes
        await agent.peer.unload(end.instance_id)
        await agent.removed("m")
        assert not agent.on_ssd("m").exists()
        await agent.heartbeat_with(lambda beat: beat.pool_free_bytes == beat.pool_size_bytes)


async def test_removing_a_model_cancels_its_loads(home: Path) -> None:
    source = make_checkpoint(home / "source")
    async with an_agent(a_config(home)) as agent:
        digest = await agent.import_model("m", source)
        agent.peer.hold_attaches()
        running = await agent.start_load("m", digest)
        waiting = await agent.start_load("m", digest)
        await agent.heartbeat_with(lambda beat: len(beat.tasks) == 2)
        await agent.remove("m")
        await agent.removed("m")
        for command in (running, waiting):
            end = await agent.end_of(command)
            assert not isinstance(end, LoadFinished)
            assert isinstance(error_of(end.error), Cancelled)
        assert not agent.on_ssd("m").exists()


async def test_a_killed_agents_half_import_is_removed_at_the_next_start(home: Path) -> None:
    config = a_config(home)
    half = home / "repository" / f".import-{config.server_id}@m"
    others = home / "repository" / ".import-server-9@m"
    old = home / "repository" / f"..import-{config.server_id}@m.ckptio-tmp-7"
    young = home / "repository" / f"..import-{config.server_id}@n.ckptio-tmp-7"
    for path in (half, others, old, young):
        path.mkdir(parents=True)
    os.utime(old, (0, 0))
    lock = home / "repository" / f"..import-{config.server_id}@m.ckptio-lock"
    lock.touch()
    async with an_agent(config) as agent:
        assert not any(path.exists() for path in (half, old, lock))
        assert others.exists(), "that is another agent's, and it may be alive"
        assert young.exists(), "an import of the same source goes on with it"
        assert await agent.import_model("m", make_checkpoint(home / "source"))


async def test_a_cancel_command_ends_an_import(home: Path, held_imports: HeldImports) -> None:
    source = make_checkpoint(home / "source", padding_bytes=20 * CHUNK_BYTES)
    async with an_agent(a_config(home)) as agent:
        command = await agent.start_import("m", source)
        await agent.until(ImportProgressed, lambda said: said.done_bytes > 0)
        await agent.send(CancelImport(job_id=command.job_id, scheduler_epoch=1))
        end = await agent.end_of_import(command)
        assert isinstance(end, ImportEnded)
        assert isinstance(error_of(end.error), Cancelled)
        assert list(agent.repository.iterdir()) == [], "nothing half is left"


async def test_an_agent_that_stops_leaves_its_import_to_another_one(home: Path, held_imports: HeldImports) -> None:
    source = make_checkpoint(home / "source", padding_bytes=20 * CHUNK_BYTES)
    async with an_agent(a_config(home)) as agent:
        command = await agent.start_import("m", source)
        await agent.until(AgentHeartbeat, lambda beat: beat.jobs == (command.job_id,))
    assert not any(isinstance(message, ImportFinished | ImportEnded) for message in agent.heard)
    assert list(agent.repository.iterdir()) == [], "nothing was published, nothing half is left"


async def test_an_import_does_not_hold_up_loads(home: Path, held_imports: HeldImports) -> None:
    source = make_checkpoint(home / "source")
    big = make_checkpoint(home / "big", padding_bytes=20 * CHUNK_BYTES)
    async with an_agent(a_config(home)) as agent:
        held_imports.go_on()
        digest = await agent.import_model("m", source)
        held_imports.may_go_on.clear()
        command = await agent.start_import("big", big)
        await agent.until(AgentHeartbeat, lambda beat: beat.jobs == (command.job_id,))
        await agent.load("m", digest)
        assert not any(isinstance(said, ImportFinished) and said.model_id == "big" for said in agent.heard)
        held_imports.go_on()
        async with asyncio.timeout(10):
            assert isinstance(await agent.end_of_import(command), ImportFinished)
