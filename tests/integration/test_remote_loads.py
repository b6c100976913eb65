"""Whole loads from a real S3 server and a real web server, over a network that cuts, stalls, lies and fails.

A load succeeds or ends with a typed error; what came of it is kept and is no model; a repeat goes on from where it was.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import ckptio
import pytest
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import Cancelled, LoadFailed, Unavailable
from whimbrel.wire.messages import LoadEnded, LoadFinished, Tier, TierReport

from services.storage_agent.remote_retries import RemoteOptions
from services.storage_agent.repository import Repository
from tests.support.faulty_proxy import FINE, Fault, FaultyProxy, random_faults
from tests.support.object_store import BUCKET, ObjectStore
from tests.support.web_server import WebServer
from tests.unit.storage_agent.harness import Harness, a_config, an_agent, damage, publish

OPTIONS = RemoteOptions(stall_s=0.6, tries_max=3, pause_s=0.01, pause_s_max=0.05)
PATIENT = RemoteOptions(stall_s=0.6, tries_max=12, pause_s=0.01, pause_s_max=0.05)
CHUNK_BYTES = 256 * 1024
CHUNKS = 24
# Heads of answers, and what a connection that is given up has in its buffers.
SLACK_BYTES = 600_000


@dataclass
class Remote:
    """A published model behind a proxy, and an agent that loads it."""

    agent: Harness
    proxy: FaultyProxy
    digest: str
    size_bytes: int
    published: Path

    async def load(self) -> LoadFinished | LoadEnded:
        return await self.agent.end_of(await self.agent.start_load("m", self.digest))

    async def loaded(self) -> TierReport | None:
        """A load that must succeed; what it fetched."""
        end = await self.load()
        assert isinstance(end, LoadFinished), error_of(end.error)
        await self.agent.peer.unload(end.instance_id)
        await self.agent.stored()
        ckptio.verify(self.agent.on_ssd("m"))
        self.agent.check()
        return next((report for report in end.reports if report.tier is Tier.REMOTE), None)

    async def stored_bytes(self) -> int:
        """What is kept of a load that failed; the model is nowhere whole."""
        beat = await self.agent.heartbeat_with(lambda beat: not beat.tasks)
        assert all(model.tier is Tier.REMOTE for model in beat.resident)
        self.agent.check()
        return sum(model.ssd_bytes for model in beat.resident)


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path("/dev/shm") / f"whimbrel-remote-{uuid.uuid4().hex}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def behind_a_proxy(
    server: ObjectStore | WebServer, home: Path, options: RemoteOptions = OPTIONS
) -> AsyncIterator[Remote]:
    config = a_config(
        home, chunk_size_bytes=CHUNK_BYTES, pool_bytes=(CHUNKS + 8) * CHUNK_BYTES, stall_s_max=30.0, attach_s_max=20.0
    )
    digest = publish(config, "m", size_bytes=CHUNKS * CHUNK_BYTES)
    published = home / "repository" / "m"
    async with FaultyProxy(server.url) as proxy:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if isinstance(server, WebServer):
                place = server.root / home.name
                shutil.copytree(published, place / "m")
                repository = Repository(f"{proxy.url}/{home.name}", options)
            else:
                place = published.parent
                for name, value in server.environ().items():
                    monkeypatch.setenv(name, value)
                staged = shutil.copytree(published, home / "staged")
                await Repository(f"s3://{BUCKET}/{home.name}", options).publish(staged, "m")
                monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
                repository = Repository(f"s3://{BUCKET}/{home.name}", options)
            async with an_agent(config, repository=repository) as agent:
                yield Remote(agent, proxy, digest, ckptio.read_manifest(published).padded_bytes, place / "m")


@pytest.fixture(params=["s3", "web"])
async def remote(
    request: pytest.FixtureRequest, object_store: ObjectStore, web_server: WebServer, home: Path
) -> AsyncIterator[Remote]:
    async with behind_a_proxy(object_store if request.param == "s3" else web_server, home) as remote:
        yield remote


async def test_a_load_over_a_good_network_moves_every_byte_once(remote: Remote) -> None:
    """L1"""
    report = await remote.loaded()
    assert report is not None
    assert report.size_bytes == remote.size_bytes
    assert remote.proxy.answer_bytes < remote.size_bytes + SLACK_BYTES
    assert await remote.loaded() is None, "now DRAM has it"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["s3", "web"])
async def test_a_load_over_a_bad_network_succeeds(
    object_store: ObjectStore, web_server: WebServer, home: Path, kind: str, seed: int
) -> None:
    """L1, L4: cuts, stalls, wrong lengths, 5xx and slow starts, in any order."""
    print(f"seed {seed}")
    async with behind_a_proxy(object_store if kind == "s3" else web_server, home, PATIENT) as remote:
        # Manifest and index come first, and twelve faults would be enough to make anybody give them up.
        quiet = [FINE] * 8
        await remote.proxy.script([*quiet, *random_faults(seed, 12, CHUNK_BYTES)])
        assert await remote.loaded() is not None


@pytest.mark.parametrize(
    "fault",
    [Fault(status=503), Fault(stall_after_bytes=400), Fault(cut_after_bytes=0), Fault(wait_s=60)],
    ids=["5xx", "stalls", "cuts", "never starts"],
)
async def test_a_repository_that_breaks_for_good_is_a_typed_error_and_a_repeat_goes_on(
    remote: Remote, fault: Fault
) -> None:
    """L1: nothing of it looks whole, what is good of it is not fetched again."""
    remote.proxy.bytes_per_s = 4_000_000
    command = await remote.agent.start_load("m", remote.digest)
    await remote.proxy.until(answer_bytes=remote.size_bytes // 2)
    await remote.proxy.script([], always=fault)
    end = await remote.agent.end_of(command)
    assert isinstance(end, LoadEnded)
    error = error_of(end.error)
    assert isinstance(error, Unavailable)
    assert "m/partition_0.bin" in str(error)
    kept_bytes = await remote.stored_bytes()
    assert kept_bytes > 0
    remote.proxy.bytes_per_s = None
    await remote.proxy.script([])
    report = await remote.loaded()
    assert report is not None
    assert report.size_bytes <= remote.size_bytes - kept_bytes
    assert remote.proxy.answer_bytes < remote.size_bytes - kept_bytes + SLACK_BYTES


async def test_a_repository_that_goes_away_and_comes_back_costs_only_what_was_under_way(remote: Remote) -> None:
    """L1: also across a restart of the agent, which finds what it had stored."""
    remote.proxy.bytes_per_s = 4_000_000
    command = await remote.agent.start_load("m", remote.digest)
    await remote.proxy.until(answer_bytes=remote.size_bytes // 2)
    await remote.proxy.go_away()
    end = await remote.agent.end_of(command)
    assert isinstance(end, LoadEnded)
    assert isinstance(error_of(end.error), Unavailable)
    kept_bytes = await remote.stored_bytes()
    await remote.proxy.come()
    remote.proxy.bytes_per_s = None
    await remote.proxy.script([])
    report = await remote.loaded()
    assert report is not None
    assert report.size_bytes <= remote.size_bytes - kept_bytes


async def test_a_cancelled_load_keeps_what_came_and_the_next_one_goes_on(remote: Remote) -> None:
    """E5: cancelled between chunks."""
    remote.proxy.bytes_per_s = 4_000_000
    command = await remote.agent.start_load("m", remote.digest)
    await remote.proxy.until(answer_bytes=remote.size_bytes // 2)
    await remote.agent.cancel(command)
    end = await remote.agent.end_of(command)
    assert isinstance(end, LoadEnded)
    assert isinstance(error_of(end.error), Cancelled)
    kept_bytes = await remote.stored_bytes()
    assert 0 < kept_bytes < remote.size_bytes
    remote.proxy.bytes_per_s = None
    await remote.proxy.script([])
    report = await remote.loaded()
    assert report is not None
    assert report.size_bytes <= remote.size_bytes - kept_bytes


async def test_a_server_that_ignores_ranges_is_refused_before_wrong_bytes_are_kept(remote: Remote) -> None:
    await remote.proxy.script([], always=Fault(hide_range=True))
    async with asyncio.timeout(60):
        end = await remote.load()
    assert isinstance(end, LoadEnded)
    assert isinstance(error_of(end.error), Unavailable | LoadFailed)
    await remote.stored_bytes()
    await remote.proxy.script([])
    await remote.loaded()


async def test_a_chunk_that_is_rotten_in_the_repository_fails_the_load_by_name_until_it_is_mended(
    object_store: ObjectStore, web_server: WebServer, home: Path
) -> None:
    """F7: digests are verified while bytes stream."""
    async with behind_a_proxy(web_server, home) as remote:
        path = remote.published / "partition_0.bin"
        damage(path, 5 * CHUNK_BYTES + 17)
        end = await remote.load()
        assert isinstance(end, LoadEnded)
        error = error_of(end.error)
        assert isinstance(error, LoadFailed)
        assert f"offset {5 * CHUNK_BYTES}" in error.reason
        kept_bytes = await remote.stored_bytes()
        damage(path, 5 * CHUNK_BYTES + 17)
        report = await remote.loaded()
        assert report is not None
        assert report.size_bytes <= remote.size_bytes - kept_bytes
