"""Loads that meet damage: in the repository, on the SSD, in the pool."""

from __future__ import annotations

from pathlib import Path

import ckptio
import pytest
from whimbrel.wire.errors import (
    LoadFailed,
)
from whimbrel.wire.messages import (
    Tier,
)

from tests.unit.storage_agent.harness import (
    CHUNK_BYTES,
    a_config,
    an_agent,
    damage,
    publish,
    truncate,
)
from tests.unit.storage_agent.load_stories import commands, tiers_of


async def test_a_corrupt_ssd_copy_is_fetched_again_and_the_load_succeeds(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    digest = publish(config, "m", size_bytes=6 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        await agent.load("m", digest)
    damage(config.ssd_dir / "m" / "partition_0.bin", 2 * CHUNK_BYTES + 5)
    async with an_agent(config) as agent:
        end = await agent.load("m", digest)
        assert tiers_of(end) == [Tier.REMOTE, Tier.SSD]
        assert commands(agent) == ["AttachInstance", "ActivateInstance"], "the worker noticed nothing"
        await agent.stored()
        ckptio.verify(agent.on_ssd("m"))


@pytest.mark.parametrize("file", ["index.msgpack", "manifest.json"])
async def test_an_ssd_copy_with_a_damaged_small_file_is_fetched_again(home: Path, file: str) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        await agent.load("m", digest)
    damage(config.ssd_dir / "m" / file, 40)
    async with an_agent(config) as agent:
        assert (await agent.load("m", digest)).source_tier is Tier.REMOTE
        await agent.stored()
        ckptio.verify(agent.on_ssd("m"))


async def test_an_ssd_copy_that_somebody_deleted_is_fetched_again(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        end = await agent.load("m", digest)
        await agent.peer.unload(end.instance_id)
        await agent.heartbeat_with(lambda beat: beat.attached == ())
        (agent.on_ssd("m") / "manifest.json").unlink()
        assert (await agent.load("m", digest)).source_tier is Tier.REMOTE


async def test_a_corrupt_repository_is_refused_with_file_and_offset_and_the_next_load_works(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m", size_bytes=6 * CHUNK_BYTES)
    good = publish(config, "good")
    async with an_agent(config) as agent:
        path = agent.published("m") / "partition_0.bin"
        damage(path, 2 * CHUNK_BYTES + 5)
        error = await agent.failed_load("m", digest)
        assert isinstance(error, LoadFailed)
        assert str(path) in error.reason
        assert f"offset {2 * CHUNK_BYTES}" in error.reason
        assert "ActivateInstance" not in commands(agent), "it was never given to a worker"
        beat = await agent.heartbeat_with(lambda beat: not beat.tasks)
        assert [model.tier for model in beat.resident] == [Tier.REMOTE], "what was good of it is kept, and is no model"
        await agent.load("good", good)


@pytest.mark.parametrize(
    ("harm", "names"),
    [
        (lambda path: truncate(path / "partition_0.bin", 8192), "partition_0.bin: truncated at offset 8192"),
        (lambda path: (path / "partition_0.bin").unlink(), "partition_0.bin: missing"),
        (lambda path: damage(path / "index.msgpack", 100), "index.msgpack: the file does not match"),
        (lambda path: damage(path / "config.json", 3), "config.json: the file does not match"),
        (lambda path: damage(path / "manifest.json", 60), "manifest.json: "),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is not there; deploy the model again"),
    ],
    ids=["truncated", "missing", "index", "small file", "manifest", "no manifest"],
)
async def test_every_kind_of_damage_in_the_repository_names_its_file(home: Path, harm: object, names: str) -> None:
    config = a_config(home)
    digest = publish(config, "m")
    async with an_agent(config) as agent:
        harm(agent.published("m"))  # type: ignore[operator]
        error = await agent.failed_load("m", digest)
        assert isinstance(error, LoadFailed)
        assert names in error.reason


async def test_a_corrupt_ssd_copy_over_a_corrupt_repository_is_never_activated(home: Path) -> None:
    config = a_config(home)
    digest = publish(config, "m", size_bytes=6 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        await agent.load("m", digest)
    for directory in (config.ssd_dir, home / "repository"):
        damage(directory / "m" / "partition_0.bin", 3 * CHUNK_BYTES)
    async with an_agent(config) as agent:
        error = await agent.failed_load("m", digest)
        assert isinstance(error, LoadFailed)
        assert f"offset {3 * CHUNK_BYTES}" in error.reason
        assert commands(agent) == ["AttachInstance", "DetachInstance"]
        beat = await agent.heartbeat_with(lambda beat: beat.attached == ())
        assert [model.tier for model in beat.resident] == [Tier.REMOTE], (
            "all but one chunk is good, and that is no model"
        )
        assert beat.resident[0].dram_bytes == beat.resident[0].size_bytes - CHUNK_BYTES


async def test_other_content_on_the_ssd_is_replaced_by_what_was_asked_for(home: Path) -> None:
    config = a_config(home)
    old = publish(config, "m", seed=1)
    async with an_agent(config) as agent:
        end = await agent.load("m", old)
        new = publish(config, "m", seed=2)
        assert new != old
        assert (await agent.load("m", new)).source_tier is Tier.REMOTE
        await agent.peer.unload(end.instance_id)
        beat = await agent.heartbeat_with(lambda beat: end.instance_id not in beat.attached)
        assert [model.checkpoint_digest for model in beat.resident] == [new], "the old one left with its instance"
        error = await agent.failed_load("m", old)
        assert isinstance(error, LoadFailed)
        assert "deploy the model again" in error.reason


async def test_chunks_of_another_size_are_refused_and_not_misread(home: Path) -> None:
    config = a_config(home)
    digest = publish(a_config(home, chunk_size_bytes=2 * CHUNK_BYTES), "m")
    async with an_agent(config) as agent:
        error = await agent.failed_load("m", digest)
        assert isinstance(error, LoadFailed)
        assert "deploy it again" in error.reason
