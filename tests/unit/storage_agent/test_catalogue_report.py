"""What an agent says of the repository to a scheduler that has lost its records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import obstore
import pytest
from ckptio.manifest import MANIFEST_FILE
from whimbrel.chassis.testing import InMemoryHub
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.messages import Ack, ImportFinished, ReportRepository, RepositoryModelFound, RepositoryReported

from services.storage_agent.import_files import CONFIG_FILE
from services.storage_agent.remote_retries import RemoteOptions
from services.storage_agent.repository import SMALL_FILE_BYTES_MAX, Repository
from tests.support.checkpoints import make_checkpoint
from tests.unit.storage_agent.harness import SERVER, Harness, a_config, an_agent, damage, publish
from tests.unit.storage_agent.operators import ask, refusal

FAST = RemoteOptions(stall_s=0.5, tries_max=2, pause_s=0.001, pause_s_max=0.002)


class FlakyRepository(Repository):
    """Reads of a model's files fail as often as it says, for a reason that may pass; `is_away`: so does the list, once
    a read has failed."""

    def __init__(self, url: str) -> None:
        super().__init__(url, FAST)
        self.failures: dict[str, int] = {}
        self.is_away = False
        self.lists = 0

    async def model_ids(self) -> tuple[str, ...]:
        self.lists += 1
        if self.is_away and self.lists > 1:
            raise Unavailable(what="the list of repository")
        return await super().model_ids()

    async def read(self, model_id: str, file: str, size_bytes_max: int = SMALL_FILE_BYTES_MAX) -> bytes:
        if self.failures.get(model_id, 0) > 0:
            self.failures[model_id] -= 1
            raise Unavailable(what=f"repository file {self.location(model_id, file)}")
        return await super().read(model_id, file, size_bytes_max)


async def report(agent: Harness, epoch: int = 1) -> RepositoryReported:
    await agent.send(ReportRepository(scheduler_epoch=epoch))
    return await agent.until(RepositoryReported, lambda message: message.scheduler_epoch == epoch)


async def until_given_up(agent: Harness) -> None:
    """A report is asked for, and ends without an end."""
    await ask(agent, ReportRepository(scheduler_epoch=1), Ack)
    work = agent.service._parts.commands._report._work
    assert work is not None
    await work


def found(agent: Harness) -> dict[str, RepositoryModelFound]:
    return {message.model_id: message for message in agent.heard if isinstance(message, RepositoryModelFound)}


async def test_a_report_names_each_model_as_its_import_did(home: Path) -> None:
    """F4, F7: the scheduler makes the same record of it."""
    async with an_agent(a_config(home)) as agent:
        for seed, model_id in enumerate(("a", "team/b")):
            await agent.import_model(model_id, make_checkpoint(home / f"source-{seed}", seed=seed))
        end = await report(agent)
        assert (end.server_id, end.models, end.unreadable) == (SERVER, 2, {})
        assert set(found(agent)) == {"a", "team/b"}
        for imported in [message for message in agent.heard if isinstance(message, ImportFinished)]:
            message = found(agent)[imported.model_id]
            for name in set(RepositoryModelFound.__struct_fields__):
                assert getattr(message, name) == getattr(imported, name), name


async def test_a_repository_without_models_is_reported_as_that(home: Path) -> None:
    async with an_agent(a_config(home)) as agent:
        assert (await report(agent)).models == 0


async def test_what_cannot_be_read_is_named_and_costs_nobody_else(home: Path) -> None:
    """L1: a damaged manifest is not believed."""
    config = a_config(home)
    for number, model_id in enumerate(("damaged", "fine", "no-config", "huge-config", "team/text")):
        publish(config, model_id, seed=number)
    async with an_agent(config) as agent:
        damage(agent.published("damaged") / MANIFEST_FILE, 100)
        (agent.published("no-config") / CONFIG_FILE).unlink()
        (agent.published("huge-config") / CONFIG_FILE).write_bytes(bytes(300_000))
        (agent.published("team/text") / MANIFEST_FILE).write_text("hello")
        end = await report(agent)
        assert end.models == 1
        assert set(found(agent)) == {"fine"}
        assert set(end.unreadable) == {"damaged", "huge-config", "no-config", "team/text"}
        assert "300000 bytes" in end.unreadable["huge-config"]
        assert CONFIG_FILE in end.unreadable["no-config"]


async def test_what_is_no_published_model_is_left_out(home: Path) -> None:
    config = a_config(home)
    publish(config, "a")
    async with an_agent(config) as agent:
        for name in (".import-server-0@b", ".removed-a-1", "half-removed", "no model id"):
            shutil.copytree(agent.published("a"), agent.repository / name)
        (agent.repository / "half-removed" / MANIFEST_FILE).unlink()
        (agent.repository / "a file").write_text("x")
        end = await report(agent)
        assert (end.models, end.unreadable) == (1, {})
        assert set(found(agent)) == {"a"}


async def test_asked_again_it_says_all_of_it_again_but_not_twice_at_once(home: Path) -> None:
    config = a_config(home)
    publish(config, "a")
    async with an_agent(config) as agent:
        for _ in range(5):
            await agent.send(ReportRepository(scheduler_epoch=1))
        await agent.until(RepositoryReported)
        assert len([m for m in agent.heard if isinstance(m, RepositoryModelFound)]) == 1
        agent.heard.clear()
        await report(agent)
        assert set(found(agent)) == {"a"}


async def test_a_newer_scheduler_has_a_report_of_its_own_and_an_older_one_none(home: Path) -> None:
    """P2"""
    config = a_config(home)
    publish(config, "a")
    async with an_agent(config) as agent:
        await agent.send(ReportRepository(scheduler_epoch=1))
        assert (await report(agent, epoch=2)).models == 1
        assert (await refusal(agent, ReportRepository(scheduler_epoch=1))).code == "stale_epoch"


async def test_an_agent_that_shuts_down_leaves_the_report_to_another(home: Path) -> None:
    config = a_config(home)
    publish(config, "a")
    async with an_agent(config) as agent:
        await agent.service.drain()
        commands = agent.service._parts.commands
        await commands.answer(ReportRepository(scheduler_epoch=1))
        assert commands._report._work is None


async def test_a_model_whose_message_is_too_large_is_named(home: Path) -> None:
    """No message is over the limit of the bus; every other model is there."""
    config = a_config(home)
    publish(config, "a")
    async with an_agent(config) as agent:
        raw_config = json.dumps({"x": "y" * 200_000})
        publish(config, "large")
        (agent.published("large") / CONFIG_FILE).write_text(raw_config)
        agent.hub.max_payload_bytes = 100_000
        end = await report(agent)
        assert end.models == 1
        assert set(found(agent)) == {"a"}
        assert "max_payload" in end.unreadable["large"]


async def test_more_unreadable_models_than_a_message_holds_are_named_in_part(home: Path) -> None:
    config = a_config(home)
    hub = InMemoryHub(max_payload_bytes=8_000)
    async with an_agent(config, hub) as agent:
        for number in range(200):
            agent.published(f"m{number:03}").mkdir(parents=True)
            (agent.published(f"m{number:03}") / MANIFEST_FILE).write_text("nothing")
        end = await report(agent)
        assert end.models == 0
        assert 10 < len(end.unreadable) < 200


@pytest.mark.parametrize("failures", [1, 100])
async def test_a_model_that_cannot_be_reached_has_a_second_chance(home: Path, failures: int) -> None:
    config = a_config(home)
    repository = FlakyRepository(config.repository_url)
    for model_id in ("a", "b"):
        publish(config, model_id)
    repository.failures["a"] = failures
    async with an_agent(config, repository=repository) as agent:
        end = await report(agent)
        is_there = failures == 1
        assert (end.models, set(end.unreadable)) == ((2, set()) if is_there else (1, {"a"}))
        assert set(found(agent)) == ({"a", "b"} if is_there else {"b"})


async def test_a_repository_that_goes_away_is_not_reported_on_until_it_is_back(home: Path) -> None:
    """Half of it must never be taken for all of it."""
    config = a_config(home)
    repository = FlakyRepository(config.repository_url)
    for model_id in ("a", "b"):
        publish(config, model_id)
    repository.failures["b"], repository.is_away = 1, True
    async with an_agent(config, repository=repository) as agent:
        await until_given_up(agent)
        assert not [message for message in agent.heard if isinstance(message, RepositoryReported)]
        repository.is_away = False
        assert (await report(agent)).models == 2


async def test_a_directory_that_is_gone_is_not_an_empty_repository(home: Path) -> None:
    config = a_config(home)
    async with an_agent(config) as agent:
        shutil.rmtree(agent.repository)
        await until_given_up(agent)
        assert not [message for message in agent.heard if isinstance(message, RepositoryReported)]
        agent.repository.mkdir()
        assert (await report(agent)).models == 0


async def test_the_models_of_a_store_are_its_directories() -> None:
    repository = Repository("memory:///", FAST)
    for key in ("a/manifest.json", "team--b/x", ".hidden/x", "no id/x", "file"):
        await obstore.put_async(repository._store, key, b"x")
    assert await repository.model_ids() == ("a", "team/b")


async def test_a_store_that_does_not_answer_has_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENDPOINT_URL", "http://127.0.0.1:9"), ("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s")):
        monkeypatch.setenv(f"AWS_{name}", value)
    with pytest.raises(Unavailable, match="the list of repository"):
        await Repository("s3://bucket/a", FAST).model_ids()


async def test_a_web_server_has_no_list() -> None:
    assert await Repository("http://127.0.0.1:9", FAST).model_ids() == ()
