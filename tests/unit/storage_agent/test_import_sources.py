"""Imports from a hub, its caches, web servers and stores: whole, resumed, or a typed error that says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ckptio
import pytest
from huggingface_hub import constants
from whimbrel.wire.codec import error_of
from whimbrel.wire.errors import Cancelled, ImportFailed, WhimbrelError
from whimbrel.wire.messages import ImportEnded, ImportModel, ImportProgressed, JobStage

from services.storage_agent import import_downloads, import_space
from tests.support.checkpoints import make_checkpoint
from tests.support.hub_server import COMMIT, HubServer, running_hub
from tests.unit.storage_agent.held_imports import HeldImports
from tests.unit.storage_agent.import_bench import CHUNK_BYTES, PATIENCE_S, SERVER, ImportBench, import_jobs

MODEL = "org/tiny"
# All that a source has beside its weights: whoever has more has some of them.
SMALL_FILES_BYTES_MAX = 10_000
ROOT = Path(__file__).parents[3]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub that the client uses as HF_ENDPOINT, with an empty cache; both are read when the client is imported."""
    with running_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(import_downloads, "RETRY_S", 0.001)
        yield server


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = make_checkpoint(tmp_path / "source", padding_bytes=10 * CHUNK_BYTES)
    (path / "README.md").write_text("# a model")
    (path / "onnx").mkdir()
    (path / "onnx" / "model.onnx").write_bytes(b"x" * 1000)
    return path


def content_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "manifest.json"}


def reason(error: WhimbrelError) -> str:
    assert isinstance(error, ImportFailed), error
    return error.reason


async def test_a_hub_s_model_becomes_the_same_checkpoint_as_its_directory(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    """F1: what is not needed is not fetched, and the commit is recorded."""
    hub.models[MODEL] = source
    async with import_jobs(tmp_path) as bench:
        end = await bench.finish("m", f"hf://{MODEL}")
        (source / "README.md").unlink()
        shutil.rmtree(source / "onnx")
        assert (await bench.finish("other", source)).checkpoint_digest == end.checkpoint_digest
        assert content_of(bench.published("m")) == content_of(bench.published("other"))
        manifest = ckptio.read_manifest(bench.published("m"))
        assert (manifest.source.name, manifest.source.revision) == (f"hf://{MODEL}", COMMIT)
        assert hub.asked("README.md") == hub.asked("model.onnx") == []
        assert bench.left() == []


async def test_the_hub_is_the_one_that_the_agent_s_environment_names(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    """In a process of its own: the client reads HF_ENDPOINT when it is imported."""
    hub.models[MODEL] = source
    script = (
        "import asyncio\n"
        "from services.storage_agent.import_hub import HubOrigin\n"
        "from services.storage_agent.threads import Threads\n"
        f"files = asyncio.run(HubOrigin({MODEL!r}, None, Threads(1, 'hub')).files())\n"
        "print(*(file.name for file in files))"
    )
    environ = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT / 'libs'}"}
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


@pytest.mark.parametrize("ignores_ranges", [False, True], ids=["ranges", "no ranges"])
async def test_a_download_that_is_cut_goes_on_from_the_byte_it_reached(
    hub: HubServer, source: Path, tmp_path: Path, ignores_ranges: bool
) -> None:
    hub.models[MODEL] = source
    hub.cuts, hub.cut_after_bytes, hub.ignores_ranges = 2, 200_000, ignores_ranges
    async with import_jobs(tmp_path) as bench:
        await bench.finish("m", f"hf://{MODEL}@main")
        ckptio.verify(bench.published("m"))
        ranges = hub.asked("model.safetensors")
        assert ranges[0] is None
        assert len(ranges) == 3
        assert all(span is not None for span in ranges[1:])


async def test_a_failed_download_is_resumed_by_the_next_job(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.models[MODEL] = source
    hub.cuts, hub.cut_after_bytes = 1, 300_000
    async with import_jobs(tmp_path) as bench:
        import_downloads.TRIES_MAX, tries = 1, import_downloads.TRIES_MAX
        try:
            error = await bench.fail("m", f"hf://{MODEL}")
        finally:
            import_downloads.TRIES_MAX = tries
        assert "model.safetensors at byte" in reason(error)
        assert list(bench.repository.iterdir()) == []
        before = hub.sent_bytes
        await bench.finish("m", f"hf://{MODEL}")
        size_bytes = (source / "model.safetensors").stat().st_size
        assert hub.sent_bytes - before < size_bytes - 200_000, "what was there was not sent again"
        assert bench.left() == []


async def test_a_killed_agent_s_download_is_resumed_in_its_next_life(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    hub.models[MODEL] = source
    hub.may_go_on.clear()
    async with import_jobs(tmp_path) as bench:
        command = bench.start("m", f"hf://{MODEL}")
        await bench.until(ImportProgressed, lambda said: said.done_bytes > SMALL_FILES_BYTES_MAX)
    assert not any(isinstance(said, ImportEnded) for said in bench.heard)
    hub.may_go_on.set()
    async with import_jobs(tmp_path) as bench:
        end = await bench.end_of(bench.start("m", command.source, job_id=command.job_id))
        assert not isinstance(end, ImportEnded), end
        assert hub.asked("config.json") == [None], "fetched once"
        assert hub.asked("model.safetensors")[-1] is not None


async def test_servers_in_trouble_are_asked_again(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.models[MODEL] = source
    hub.refusals = 3
    async with import_jobs(tmp_path) as bench:
        await bench.finish("m", f"hf://{MODEL}")
        assert hub.refusals == 0, "it met all of them"
        ckptio.verify(bench.published("m"))


async def test_an_origin_that_stays_silent_is_left(
    hub: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_downloads, "STALL_S_MAX", 0.1)
    monkeypatch.setattr(import_downloads, "TRIES_MAX", 2)
    hub.models[MODEL] = source
    hub.held_after_bytes = 0
    hub.may_go_on.clear()
    async with import_jobs(tmp_path) as bench:
        assert "it sent nothing for 0.1 s" in reason(await bench.fail("m", f"hf://{MODEL}"))


async def test_bytes_with_another_digest_are_not_used(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.models[MODEL] = source
    hub.flipped.add("model.safetensors")
    async with import_jobs(tmp_path) as bench:
        assert "another digest" in reason(await bench.fail("m", f"hf://{MODEL}"))
        hub.flipped.clear()
        await bench.finish("m", f"hf://{MODEL}")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (f"{MODEL}@v9", "no revision 'v9'"),
        ("org/absent", "no such model, or it is private"),
        ("org/gated", "set HF_TOKEN for the storage agents"),
        ("org/bare", "no config.json"),
        ("org/empty", "no weights"),
    ],
)
async def test_what_a_hub_can_t_give_is_named_with_what_to_do(
    hub: HubServer, source: Path, tmp_path: Path, name: str, says: str
) -> None:
    hub.models = {MODEL: source, "org/gated": source, "org/bare": tmp_path / "bare", "org/empty": tmp_path / "empty"}
    hub.gated = {"org/gated"}
    for path in ("bare", "empty"):
        (tmp_path / path).mkdir()
    (tmp_path / "bare" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "empty" / "config.json").write_text("{}")
    async with import_jobs(tmp_path) as bench:
        assert says in reason(await bench.fail("m", f"hf://{name}"))
        assert list(bench.repository.iterdir()) == []


async def test_a_hub_that_is_away_is_a_typed_error(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    async with import_jobs(tmp_path) as bench:
        assert "the connection to http://127.0.0.1:9 failed" in reason(await bench.fail("m", f"hf://{MODEL}"))


def a_hub_cache(root: Path, source: Path) -> Path:
    """As the hub's client lays it out: blobs, and snapshots of links to them."""
    home = root / "models--org--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir()
    for number, file in enumerate(path for path in sorted(source.iterdir()) if path.is_file()):
        shutil.copy(file, home / "blobs" / f"blob{number}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob{number}")
    return home


async def test_an_offline_agent_uses_its_hub_cache_or_says_what_is_missing(
    hub: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert constants.is_offline_mode()
    async with import_jobs(tmp_path) as bench:
        assert "HF_HUB_OFFLINE is set" in reason(await bench.fail("m", f"hf://{MODEL}"))
        a_hub_cache(tmp_path / "hub-cache", source)
        await bench.finish("m", f"hf://{MODEL}")
        assert ckptio.read_manifest(bench.published("m")).source.revision == COMMIT
        assert "at v2" in reason(await bench.fail("m", f"hf://{MODEL}@v2"))
    assert hub.requests == []


async def test_what_the_hub_s_cache_has_of_the_commit_is_not_fetched_again(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    hub.models[MODEL] = source
    home = a_hub_cache(tmp_path / "hub-cache", source)
    async with import_jobs(tmp_path) as bench:
        await bench.finish("m", f"hf://{MODEL}")
        assert hub.asked("model.safetensors") == []
        assert ckptio.read_manifest(bench.published("m")).source.revision == COMMIT
        (home / "snapshots" / COMMIT).rename(home / "snapshots" / ("0" * 40))
        (home / "refs" / "main").write_text("0" * 40)
        await bench.finish("n", f"hf://{MODEL}")
        assert hub.asked("model.safetensors") == [None], "the cache is of another commit than main is now"


async def test_a_hub_cache_and_its_snapshot_are_directories_to_import(source: Path, tmp_path: Path) -> None:
    home = a_hub_cache(tmp_path / "cache", source)
    async with import_jobs(tmp_path) as bench:
        first = await bench.finish("m", home)
        assert (await bench.finish("n", home / "snapshots" / COMMIT)).checkpoint_digest == first.checkpoint_digest
        (home / "refs" / "main").unlink()
        (home / "snapshots" / ("f" * 40)).mkdir()
        assert "several snapshots" in reason(await bench.fail("o", home))
        (home / "blobs" / "blob0").unlink()
        assert "which is not there" in reason(await bench.fail("o", home / "snapshots" / COMMIT))


async def test_a_git_lfs_pointer_is_named_with_the_command_that_mends_it(source: Path, tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (source / "model.safetensors").write_bytes(pointer)
    async with import_jobs(tmp_path) as bench:
        said = reason(await bench.fail("m", source))
        assert "model.safetensors is a git-lfs pointer" in said
        assert "git lfs pull" in said


# --- web servers ---


async def test_a_web_directory_is_a_source_and_is_resumed(hub: HubServer, source: Path, tmp_path: Path) -> None:
    hub.root = source.parent
    hub.cuts, hub.cut_after_bytes = 1, 200_000
    async with import_jobs(tmp_path) as bench:
        await bench.finish("m", f"{hub.url}/source/")
        ckptio.verify(bench.published("m"))
        assert ckptio.read_manifest(bench.published("m")).source.name == f"{hub.url}/source"
        assert bench.left() == []


@pytest.mark.parametrize("ignores_ranges", [False, True])
async def test_a_web_download_is_resumed_by_the_next_job(
    hub: HubServer, source: Path, tmp_path: Path, ignores_ranges: bool
) -> None:
    hub.root, hub.ignores_ranges = source.parent, ignores_ranges
    async with import_jobs(tmp_path) as bench:
        hub.may_go_on.clear()
        bench.start("m", f"{hub.url}/source")
        await bench.until(ImportProgressed, lambda said: said.done_bytes > SMALL_FILES_BYTES_MAX)
    hub.may_go_on.set()
    async with import_jobs(tmp_path) as bench:
        await bench.finish("m", f"{hub.url}/source")
        ckptio.verify(bench.published("m"))
        spans = hub.asked("model.safetensors")
        assert any(span is not None for span in spans), "from the byte that the first job reached"
        assert (spans[-1] is None) == ignores_ranges, "and whole from a server that cannot"


async def test_shards_of_a_web_directory_are_found_by_their_index(hub: HubServer, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "sharded")
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    names = [tensor.name for tensor in ckptio.plan_conversion(path).tensors]
    weight_map = ", ".join(f'"{name}": "model-00001-of-00001.safetensors"' for name in names)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {' + weight_map + "}}")
    hub.root = tmp_path
    async with import_jobs(tmp_path) as bench:
        await bench.finish("m", f"{hub.url}/sharded")
        (path / "model-00001-of-00001.safetensors").unlink()
        assert "is named by model.safetensors.index.json and is not there" in reason(
            await bench.fail("n", f"{hub.url}/sharded")
        )


async def test_credentials_in_a_url_are_used_and_never_told(
    hub: HubServer, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.root = source.parent
    hub.user_password = "Basic YWxpY2U6czNjcmV0"
    place = hub.url.removeprefix("http://")
    async with import_jobs(tmp_path) as bench:
        await bench.finish("m", f"http://alice:s3cret@{place}/source")
        said = [await bench.fail("n", f"http://alice:wrong-s3cret@{place}/source")]
        assert "access is refused" in reason(said[0])
        said.append(await bench.fail("n", f"http://bob:s3cret@{place}:x/source"))
        said.append(await bench.fail("n", "http://bob:s3cret@127.0.0.1:9/source"))
        assert "s3cret" not in "".join(map(str, said))
        assert b"s3cret" not in (bench.published("m") / "manifest.json").read_bytes()
    told = capsys.readouterr()
    assert "import_started" in told.out + told.err, "the log was captured"
    assert "s3cret" not in told.out + told.err


@pytest.mark.parametrize(
    "source",
    ["http://127.0.0.1:9/m/model.safetensors", "relative/path", "ftp://host/x", "s3://key:secret@bucket/x", ""],
)
async def test_a_source_that_makes_no_sense_is_refused(source: str, tmp_path: Path) -> None:
    async with import_jobs(tmp_path) as bench:
        error = await bench.fail("m", source)
        assert error.code == "invalid_request"
        assert "secret" not in str(error)


# --- space ---


async def test_too_little_space_is_said_before_anything_is_fetched(
    hub: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2: need and free bytes are named. The disk says how much is free; nothing else is pretended."""
    hub.models[MODEL] = source
    monkeypatch.setattr(import_space, "free_bytes", lambda _: 1_000_000)
    async with import_jobs(tmp_path) as bench:
        said = reason(await bench.fail("m", f"hf://{MODEL}"))
        size_bytes = (source / "model.safetensors").stat().st_size
        need_bytes = int(said.split(" needs ")[1].split()[0])
        assert need_bytes > 2 * size_bytes, "downloads and the checkpoint are on one disk"
        assert "1000000 are free" in said
        assert hub.asked("model.safetensors") == []


@contextmanager
def a_small_disk(path: Path, size_bytes: int) -> Iterator[Path]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a small disk to fill")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


async def test_a_disk_that_fills_up_meanwhile_is_named_and_the_next_try_goes_on(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    """E2: somebody else takes the space that was free when the download began."""
    hub.models[MODEL] = source
    size_bytes = (source / "model.safetensors").stat().st_size
    with a_small_disk(tmp_path / "staging", 2 * size_bytes + 20 * 1024 * 1024) as disk:
        async with import_jobs(tmp_path) as bench:
            hub.may_go_on.clear()
            command = bench.start("m", f"hf://{MODEL}")
            await bench.until(ImportProgressed, lambda said: said.done_bytes > 200_000)
            other = disk / "other"
            with contextlib.suppress(OSError), other.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            hub.may_go_on.set()
            end = await bench.end_of(command)
            assert isinstance(end, ImportEnded)
            said = reason(error_of(end.error))
            assert f"{disk}" in said
            assert " 0 are free" in said
            other.unlink()
            await bench.finish("m", f"hf://{MODEL}")
            assert hub.asked("model.safetensors")[-1] is not None, "it went on"


async def test_a_disk_without_room_for_the_checkpoint_is_named(source: Path, tmp_path: Path) -> None:
    with a_small_disk(tmp_path / "repository", 512 * 1024):
        async with import_jobs(tmp_path) as bench:
            said = reason(await bench.fail("m", source))
            assert f"{bench.repository} needs " in said
            assert bench.left() == []


async def test_a_killed_agent_s_conversion_is_resumed_in_its_next_life(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "big", padding_bytes=200 * CHUNK_BYTES)
    async with import_jobs(tmp_path) as bench:
        staged = bench.repository / f".import-{SERVER}@m"
    done: list[int] = []
    with pytest.raises(ckptio.Cancelled):
        ckptio.convert(
            source, staged, source_name=str(source), chunk_size_bytes=CHUNK_BYTES, resume=True,
            progress=lambda latest: done.append(latest.done_bytes), cancelled=lambda: len(done) > 100,
        )  # fmt: skip
    (half,) = bench.left()
    assert half.startswith(f"..import-{SERVER}@m.ckptio-tmp-"), "as a killed conversion leaves it"
    inode = (bench.repository / half / "partition_0.bin").stat().st_ino
    async with import_jobs(tmp_path) as bench:
        await bench.finish("m", source)
        assert (bench.published("m") / "partition_0.bin").stat().st_ino == inode, "the same file, gone on with"
        ckptio.verify(bench.published("m"))
        assert bench.left() == []


# --- cancelling ---


async def cancelled_at(bench: ImportBench, source: Path | str, stage: JobStage) -> None:
    command = bench.start("m", source)
    await bench.at_stage(command, stage)
    await cancelled(bench, command)


async def cancelled(bench: ImportBench, command: ImportModel) -> None:
    bench.jobs.cancel(command.job_id)
    end = await bench.end_of(command)
    assert isinstance(end, ImportEnded), "it was cancelled"
    assert end.error.code == Cancelled.code
    assert bench.left() == []
    assert not bench.published("m").exists()


async def test_a_download_is_cancelled_at_once_though_its_origin_is_silent(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    hub.models[MODEL] = source
    hub.root = source.parent
    hub.may_go_on.clear()
    async with import_jobs(tmp_path) as bench:
        for place in (f"hf://{MODEL}", f"{hub.url}/source"):
            hub.stands_still.clear()
            bench.heard.clear()
            command = bench.start("m", place)
            assert await asyncio.to_thread(hub.stands_still.wait, PATIENCE_S), "its origin is silent"
            async with asyncio.timeout(import_downloads.STALL_S_MAX / 2):
                await cancelled(bench, command)


@pytest.mark.parametrize("stage", [JobStage.CONVERTING, JobStage.VERIFYING])
async def test_a_conversion_is_cancelled_at_its_next_chunk(
    tmp_path: Path, stage: JobStage, held_imports: HeldImports
) -> None:
    source = make_checkpoint(tmp_path / "big", padding_bytes=20 * CHUNK_BYTES)
    if stage is JobStage.VERIFYING:
        held_imports.may_go_on.set()
    async with import_jobs(tmp_path) as bench:
        await cancelled_at(bench, source, stage)


async def test_a_job_that_waits_is_cancelled_before_it_runs_and_one_unknown_when_it_comes(
    hub: HubServer, source: Path, tmp_path: Path
) -> None:
    hub.models[MODEL] = source
    hub.may_go_on.clear()
    async with import_jobs(tmp_path) as bench:
        running = bench.start("m", f"hf://{MODEL}")
        assert await asyncio.to_thread(hub.stands_still.wait, PATIENCE_S)
        waiting = bench.start("n", source)
        bench.jobs.cancel(waiting.job_id)
        bench.jobs.cancel("late")
        late = bench.start("o", source, job_id="late")
        for command in (waiting, late):
            end = await bench.end_of(command)
            assert isinstance(end, ImportEnded)
            assert end.error.code == Cancelled.code
        hub.may_go_on.set()
        assert not isinstance(await bench.end_of(running), ImportEnded)
        async with asyncio.timeout(PATIENCE_S):
            await bench.nothing_left.wait()
        bench.heard.clear()
        bench.jobs.cancel(running.job_id)
        assert not isinstance(await bench.end_of(running), ImportEnded), "what is over stays as it is"
        assert sorted(path.name for path in bench.repository.iterdir()) == ["m"]


async def test_a_removed_model_s_import_ends_and_its_downloads_go(
    hub: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_downloads, "TRIES_MAX", 1)
    hub.models[MODEL] = source
    hub.cuts, hub.cut_after_bytes = 1, 300_000
    async with import_jobs(tmp_path) as bench:
        await bench.fail("m", f"hf://{MODEL}")
        assert len(bench.left()) == 1
        bench.jobs.stop("m")
        await bench.jobs.stopped("m")
        assert bench.left() == []
