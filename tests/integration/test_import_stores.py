"""Imports from a real S3 server and into one: resumed after cuts, cancelled between parts, nothing half published."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ckptio
import httpx
import obstore
import pytest
from obstore.store import from_url
from whimbrel.wire.errors import Cancelled, ImportFailed
from whimbrel.wire.messages import ImportEnded, ImportFinished, JobStage

from services.storage_agent import import_downloads
from services.storage_agent.checkpoints import checkpoint_digest
from services.storage_agent.remote_retries import RemoteOptions
from services.storage_agent.repository import Repository
from tests.support.checkpoints import make_checkpoint
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.object_store import BUCKET, ObjectStore
from tests.unit.storage_agent.import_bench import ImportBench, import_jobs

OPTIONS = RemoteOptions(stall_s=2.0, tries_max=4, pause_s=0.01, pause_s_max=0.05, part_size_bytes=5 * 1024 * 1024)
PADDING_BYTES = 12_000_000


@dataclass
class Store:
    """An S3 server behind a proxy; `put` publishes a directory as it is."""

    server: ObjectStore
    proxy: FaultyProxy

    async def put(self, directory: Path, prefix: str) -> None:
        async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
            for path in directory.iterdir():
                url = f"{self.server.url}/{BUCKET}/{prefix}/{path.name}"
                (await client.put(url, content=path.read_bytes())).raise_for_status()

    async def names(self, prefix: str) -> list[str]:
        store = from_url(f"s3://{BUCKET}", client_options={"allow_http": True})
        found = await obstore.list(store, prefix).collect_async()
        return sorted(meta["path"].removeprefix(f"{prefix}/") for meta in found)


@pytest.fixture
async def store(object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    monkeypatch.setattr(import_downloads, "RETRY_S", 0.001)
    async with FaultyProxy(object_store.url) as proxy:
        for name, value in object_store.environ(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield Store(object_store, proxy)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "source", padding_bytes=PADDING_BYTES)


@asynccontextmanager
async def jobs_for(home: Path, url: str, tries_max: int = 4) -> AsyncIterator[ImportBench]:
    async with import_jobs(home, Repository(url, replace(OPTIONS, tries_max=tries_max))) as bench:
        yield bench


async def test_a_prefix_of_a_store_is_a_source_and_is_resumed_after_a_cut(
    store: Store, source: Path, tmp_path: Path
) -> None:
    await store.put(source, "from/cut")
    async with import_jobs(tmp_path) as bench:
        # The listing, then one connection per file: the weights are the last of them.
        await store.proxy.script([Fault()] + [Fault(cut_after_bytes=400_000)] * 8)
        await bench.finish("m", f"s3://{BUCKET}/from/cut")
        ckptio.verify(bench.published("m"))
        assert store.proxy.answer_bytes < 2 * PADDING_BYTES, "what was there was not asked for again"
        assert ckptio.read_manifest(bench.published("m")).source.name == f"s3://{BUCKET}/from/cut"
        assert bench.left() == []


async def test_an_empty_prefix_is_named(store: Store, tmp_path: Path) -> None:
    async with import_jobs(tmp_path) as bench:
        error = await bench.fail("m", f"s3://{BUCKET}/from/nowhere")
        assert isinstance(error, ImportFailed)
        assert "there is nothing under this prefix" in error.reason


async def test_an_import_into_a_store_is_whole_and_told_by_its_bytes(
    store: Store, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.storage_agent.progress.PROGRESS_S", 0.001)
    async with jobs_for(tmp_path, f"s3://{BUCKET}/repo-1") as bench:
        command = bench.start("org/m", source)
        end = await bench.end_of(command)
        assert isinstance(end, ImportFinished), end
        said = await bench.at_stage(command, JobStage.PUBLISHING)
        assert said.done_bytes <= said.total_bytes
        assert "manifest.json" in await store.names("repo-1/org--m")
        assert bench.left() == []
        again = await bench.finish("org/m", source)
        assert again.checkpoint_digest == end.checkpoint_digest, "twice is once"


async def test_an_import_that_is_cancelled_while_it_publishes_leaves_no_manifest(
    store: Store, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.storage_agent.progress.PROGRESS_S", 0.001)
    async with jobs_for(tmp_path, f"s3://{BUCKET}/repo-2", tries_max=1000) as bench:
        await store.proxy.script([], always=Fault(cut_upload_after_bytes=1_000_000))
        command = bench.start("m", source)
        await bench.at_stage(command, JobStage.PUBLISHING)
        bench.jobs.cancel(command.job_id)
        end = await bench.end_of(command)
        assert isinstance(end, ImportEnded)
        assert end.error.code == Cancelled.code
        await store.proxy.script([])
        assert "manifest.json" not in await store.names("repo-2/m")
        assert await store.server.unfinished_uploads() == []
        assert bench.left() == []
        assert await bench.finish("m", source)


async def test_a_publication_that_fails_is_tried_again_by_the_next_job(
    store: Store, source: Path, tmp_path: Path
) -> None:
    async with jobs_for(tmp_path, f"s3://{BUCKET}/repo-3") as bench:
        await store.proxy.script([], always=Fault(status=503))
        error = await bench.fail("m", source)
        assert "secret" not in str(error)
        assert bench.left() == []
        await store.proxy.script([])
        end = await bench.finish("m", source)
        manifest = await Repository(f"s3://{BUCKET}/repo-3", OPTIONS).read("m", "manifest.json")
        assert checkpoint_digest(ckptio.Manifest.from_json(manifest)) == end.checkpoint_digest
