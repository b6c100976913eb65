"""The repository on a real S3 server and a real web server, behind a network that cuts, stalls, lies and is slow.

Every read ends with the right bytes or with a typed error, and goes on from where it was; what is published is whole or
has no manifest.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import ckptio
import httpx
import obstore
import pytest
from ckptio.manifest import MANIFEST_FILE
from obstore.store import from_url
from whimbrel.wire.errors import LoadFailed, Unavailable

from services.router.text_files import TEXT_FILES
from services.router.tokenizers import Tokenizers
from services.storage_agent.checkpoints import checkpoint_digest, file_sizes
from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.remote_responses import PIECE_SIZE_BYTES
from services.storage_agent.remote_retries import RemoteOptions
from services.storage_agent.repository import Repository
from tests.support.checkpoints import make_checkpoint
from tests.support.faulty_proxy import FINE, Fault, FaultyProxy, random_faults
from tests.support.object_store import BUCKET, ObjectStore
from tests.support.web_server import WebServer

# Patient enough for a loaded machine, and quick where something is to be waited out.
OPTIONS = RemoteOptions(stall_s=0.8, tries_max=4, pause_s=0.01, pause_s_max=0.05, part_size_bytes=5 * 1024 * 1024)
DATA = random.Random(7).randbytes(3_000_000)
START, SIZE = 12_345, 2_500_000
# Answers have heads, of a few hundred bytes.
HEAD_BYTES_MAX = 2_000
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parts of an upload, and small files."""
    directory = tmp_path_factory.mktemp("checkpoint")
    source = make_checkpoint(directory / "source", seed=3, padding_bytes=11_000_000)
    ckptio.convert(source, directory / "m", chunk_size_bytes=1024 * 1024)
    return directory / "m"


@dataclass
class Remote:
    """A repository behind a proxy, with DATA as the file `data` of the model `m`."""

    repository: Repository
    proxy: FaultyProxy

    async def read(self, start: int = START, size: int = SIZE) -> bytes:
        view = memoryview(bytearray(size))
        counts: list[int] = []
        async with asyncio.timeout(PATIENCE_S):
            await self.repository.read_into("m", "data", start, view, counts.append)
        assert sum(counts) == size
        return bytes(view)


@asynccontextmanager
async def behind_a_proxy(server: ObjectStore | WebServer) -> AsyncIterator[Remote]:
    async with FaultyProxy(server.url) as proxy, httpx.AsyncClient(timeout=10, trust_env=False) as client:
        if isinstance(server, WebServer):
            (server.root / "a/b/m").mkdir(parents=True)
            (server.root / "a/b/m/data").write_bytes(DATA)
            yield Remote(Repository(f"{proxy.url}/a/b", OPTIONS), proxy)
            shutil.rmtree(server.root / "a")
        else:
            with pytest.MonkeyPatch.context() as monkeypatch:
                for name, value in server.environ(proxy.url).items():
                    monkeypatch.setenv(name, value)
                (await client.put(f"{server.url}/{BUCKET}/a/b/m/data", content=DATA)).raise_for_status()
                remote = Remote(Repository(f"s3://{BUCKET}/a/b", OPTIONS), proxy)
                yield remote
                await proxy.script([])
                await remote.repository.remove_published("m")


@pytest.fixture
async def s3(object_store: ObjectStore) -> AsyncIterator[Remote]:
    async with behind_a_proxy(object_store) as remote:
        yield remote


@pytest.fixture(params=["s3", "web"])
async def remote(
    request: pytest.FixtureRequest, object_store: ObjectStore, web_server: WebServer
) -> AsyncIterator[Remote]:
    async with behind_a_proxy(object_store if request.param == "s3" else web_server) as remote:
        yield remote


# --- reading ---


async def test_what_is_read_is_what_is_there(remote: Remote) -> None:
    """L1: any range, the last byte, several at once over the same connections."""
    ranges = [(0, 1), (START, SIZE), (len(DATA) - 1, 1), (0, len(DATA)), (1_000_000, 70_000)]
    async with asyncio.TaskGroup() as group:
        reads = [group.create_task(remote.read(*each)) for each in ranges]
    assert [read.result() for read in reads] == [DATA[start : start + size] for start, size in ranges]
    assert await remote.repository.size_bytes("m", "data") == len(DATA)
    assert await remote.repository.read("m", "data") == DATA


@pytest.mark.parametrize(
    "place", [0, 10, 1_000, 500_000, SIZE - 1], ids=["at once", "in the head", "early", "later", "late"]
)
@pytest.mark.parametrize("how", ["cut", "stall"])
async def test_a_broken_connection_is_gone_on_with_from_where_it_broke(remote: Remote, place: int, how: str) -> None:
    """L1, L4: the bytes that crossed before are not sent again, but for what was buffered."""
    fault = Fault(cut_after_bytes=place) if how == "cut" else Fault(stall_after_bytes=place)
    await remote.proxy.script([fault])
    assert await remote.read() == DATA[START : START + SIZE]
    assert remote.proxy.connections == 2
    assert remote.proxy.answer_bytes <= SIZE + PIECE_SIZE_BYTES + 2 * HEAD_BYTES_MAX


async def test_thirty_cuts_are_survived_as_each_try_brings_bytes(remote: Remote) -> None:
    """L1: the bound is on tries without a new byte, not on tries."""
    await remote.proxy.script([Fault(cut_after_bytes=80_000)] * 30)
    assert await remote.read() == DATA[START : START + SIZE]
    assert remote.proxy.faults_left == 0
    assert remote.proxy.answer_bytes <= SIZE + 31 * (PIECE_SIZE_BYTES + HEAD_BYTES_MAX)


@pytest.mark.parametrize("error_bytes", [-1_000, -SIZE + 5, 1, 1_000])
async def test_a_wrong_content_length_ends_in_the_right_bytes(remote: Remote, error_bytes: int) -> None:
    """L1: an answer that ends early is gone on with, one that never ends is not waited for."""
    await remote.proxy.script([Fault(length_error_bytes=error_bytes)])
    assert await remote.read() == DATA[START : START + SIZE]
    assert await remote.read(0, 100) == DATA[:100], "the connection that is out of step is not used again"


@pytest.mark.parametrize("status", [500, 502, 503, 429])
async def test_an_overloaded_server_is_tried_again(remote: Remote, status: int) -> None:
    await remote.proxy.script([Fault(status=status)] * (OPTIONS.tries_max - 1))
    assert await remote.read() == DATA[START : START + SIZE]
    assert remote.proxy.connections == OPTIONS.tries_max


async def test_a_server_that_stays_broken_is_a_typed_error_and_a_repeat_succeeds(remote: Remote) -> None:
    """L1: the error names the file, the offset and the cause; nothing of it stays behind."""
    await remote.proxy.script([], always=Fault(status=503))
    with pytest.raises(Unavailable, match=rf"m/data \(at offset {START}: .*503.*{OPTIONS.tries_max} times in a row"):
        await remote.read()
    assert remote.proxy.connections == OPTIONS.tries_max
    for reading in (remote.repository.read("m", "data"), remote.repository.size_bytes("m", "data")):
        with pytest.raises(Unavailable, match="503"):
            await reading
    await remote.proxy.script([])
    assert await remote.read() == DATA[START : START + SIZE]


async def test_a_connection_that_always_stalls_is_a_typed_error_in_time(remote: Remote) -> None:
    started_s = time.monotonic()
    await remote.proxy.script([], always=Fault(stall_after_bytes=50))
    with pytest.raises(Unavailable, match=r"m/data .*nothing came for 0\.8 s, 4 times in a row"):
        await remote.read()
    assert time.monotonic() - started_s < 2 * OPTIONS.tries_max * (OPTIONS.stall_s + OPTIONS.pause_s_max)


async def test_a_slow_start_is_waited_for_and_a_too_slow_one_tried_again(remote: Remote) -> None:
    await remote.proxy.script([Fault(wait_s=0.1)])
    assert await remote.read() == DATA[START : START + SIZE]
    assert remote.proxy.connections == 1
    await remote.proxy.script([Fault(wait_s=60)])
    assert await remote.read() == DATA[START : START + SIZE]
    assert remote.proxy.connections == 2


async def test_a_slow_network_is_no_stall(remote: Remote) -> None:
    """L1: only bytes count: a range may take several times as long as nothing may come."""
    remote.proxy.bytes_per_s = 500_000
    started_s = time.monotonic()
    await remote.proxy.script([])
    assert await remote.read(0, 1_000_000) == DATA[:1_000_000]
    assert time.monotonic() - started_s > 2 * OPTIONS.stall_s
    assert remote.proxy.connections == 1


async def test_a_server_that_answers_with_the_whole_file_writes_nothing_wrong(remote: Remote) -> None:
    await remote.proxy.script([], always=Fault(hide_range=True))
    with pytest.raises((LoadFailed, Unavailable), match="m/data"):
        await remote.read()
    await remote.proxy.script([])
    assert await remote.read() == DATA[START : START + SIZE]


async def test_a_server_that_is_away_is_a_typed_error_until_it_is_back(remote: Remote) -> None:
    await remote.proxy.go_away()
    with pytest.raises(Unavailable, match="m/data"):
        await remote.read()
    await remote.proxy.come()
    assert await remote.read() == DATA[START : START + SIZE]


async def test_a_missing_object_and_a_short_one_are_told_apart(remote: Remote) -> None:
    with pytest.raises(FileNotFoundError, match="m/other"):
        await remote.repository.read_into("m", "other", 0, memoryview(bytearray(10)))
    for start in (len(DATA) - 5, len(DATA), len(DATA) + 1_000):
        with pytest.raises(ckptio.TruncatedCheckpoint) as caught:
            await remote.read(start, 10)
        assert (caught.value.expected_bytes, caught.value.actual_bytes) == (start + 10, len(DATA))


async def test_a_cancelled_read_writes_nothing_more_and_drops_its_connection(remote: Remote) -> None:
    """L1: cancelled at any point; the memory is somebody else's from then on."""
    remote.proxy.bytes_per_s = 2_000_000
    await remote.proxy.script([])
    memory = bytearray(SIZE)
    reading = asyncio.create_task(remote.repository.read_into("m", "data", 0, memoryview(memory)))
    await remote.proxy.until(answer_bytes=300_000)
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    there = bytes(memory)
    async with asyncio.timeout(PATIENCE_S):
        await remote.proxy.until(open_connections=0)
    assert bytes(memory) == there
    assert there.rstrip(b"\0") == DATA[: len(there.rstrip(b"\0"))]


@pytest.mark.parametrize("seed", range(5))
async def test_random_faults_never_bring_wrong_bytes(remote: Remote, seed: int) -> None:
    """L1, L4: four ranges at once; each is right, or a typed error that a repeat heals."""
    print(f"seed {seed}")
    await remote.proxy.script(random_faults(seed, 25, 400_000))
    ranges = [(start, 700_000) for start in range(0, 2_800_000, 700_000)]
    results = await asyncio.gather(*(remote.read(*each) for each in ranges), return_exceptions=True)
    for (start, size), result in zip(ranges, results, strict=True):
        if isinstance(result, BaseException):
            assert isinstance(result, Unavailable), f"seed {seed}: {result!r}"
        else:
            assert result == DATA[start : start + size], f"seed {seed}"
    await remote.proxy.script([])
    assert await remote.read() == DATA[START : START + SIZE]


async def test_the_loop_goes_on_while_a_big_range_arrives(remote: Remote) -> None:
    """L4: other work of the agent is not held up by copying."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    counts: list[int] = []
    view = memoryview(bytearray(len(DATA)))
    await remote.repository.read_into("m", "data", 0, view, counts.append)
    counting.cancel()
    assert max(counts) <= 2 * 1024 * 1024, "a copy of this takes less than a millisecond"
    assert turns >= len(counts)


# --- publishing ---


def key_of(directory: Path) -> CheckpointKey:
    return CheckpointKey(model_id="m", checkpoint_digest=checkpoint_digest(ckptio.read_manifest(directory)))


def total_bytes(directory: Path) -> int:
    return sum(file_sizes(ckptio.read_manifest(directory)).values())


async def objects(object_store: ObjectStore) -> dict[str, bytes]:
    """What the store really holds of the model, read around the proxy."""
    store = from_url(f"s3://{BUCKET}/a/b", endpoint=object_store.url, client_options={"allow_http": True})
    found = await obstore.list(store, prefix="m").collect_async()
    return {
        entry["path"].removeprefix("m/"): bytes(await (await obstore.get_async(store, entry["path"])).bytes_async())
        for entry in found
    }


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


async def test_a_published_checkpoint_is_whole_and_strays_are_gone(
    s3: Remote, object_store: ObjectStore, checkpoint: Path
) -> None:
    """L1: in parts, over cut connections, with the manifest last."""
    told: list[tuple[int, int]] = []
    await s3.proxy.script([FINE, Fault(cut_upload_after_bytes=3_000_000), Fault(status=503)])
    assert s3.repository.staging_root() is None
    await s3.repository.publish(checkpoint, "m", lambda *progress: told.append(progress))
    assert await objects(object_store) == files(checkpoint), "and what was there before, is not"
    assert await object_store.unfinished_uploads() == []
    assert told == sorted(told)
    assert told[-1] == (total_bytes(checkpoint), total_bytes(checkpoint))
    await s3.repository.open(key_of(checkpoint))


async def test_the_same_checkpoint_is_not_uploaded_twice(s3: Remote, checkpoint: Path) -> None:
    await s3.repository.publish(checkpoint, "m")
    await s3.proxy.script([])
    await s3.repository.publish(checkpoint, "m")
    assert s3.proxy.upload_bytes < 100_000


async def test_a_publication_that_fails_leaves_no_manifest_and_a_repeat_goes_on(
    s3: Remote, object_store: ObjectStore, checkpoint: Path
) -> None:
    """L1: also where an older checkpoint was published; files that were uploaded whole are not sent again."""
    await s3.repository.publish(checkpoint, "m")
    store = from_url(f"s3://{BUCKET}/a/b", endpoint=object_store.url, client_options={"allow_http": True})
    await obstore.put_async(store, "m/partition_0.bin", b"damaged")
    await s3.proxy.script([], always=Fault(cut_upload_after_bytes=2_000_000))
    with pytest.raises(Unavailable, match=r"m/partition_0\.bin"):
        await s3.repository.publish(checkpoint, "m")
    assert MANIFEST_FILE not in await objects(object_store)
    assert await object_store.unfinished_uploads() == []
    with pytest.raises(LoadFailed, match="deploy the model again"):
        await s3.repository.open(key_of(checkpoint))
    await s3.proxy.script([])
    await s3.repository.publish(checkpoint, "m")
    partition_bytes = (checkpoint / "partition_0.bin").stat().st_size
    assert s3.proxy.upload_bytes < partition_bytes + 100_000, "only what was missing"
    assert await objects(object_store) == files(checkpoint)


@pytest.mark.parametrize("how", ["asked", "task"])
async def test_a_cancelled_publication_leaves_no_manifest_and_no_parts(
    s3: Remote, object_store: ObjectStore, checkpoint: Path, how: str
) -> None:
    """L1: cancelled between two parts of an upload."""
    asked = asyncio.Event()
    publishing = asyncio.create_task(s3.repository.publish(checkpoint, "m", None, asked.is_set))
    async with asyncio.timeout(PATIENCE_S):
        await s3.proxy.until(upload_bytes=6_000_000)
    if how == "asked":
        asked.set()
    else:
        publishing.cancel()
    await asyncio.wait([publishing])
    assert publishing.cancelled() if how == "task" else isinstance(publishing.exception(), ckptio.Cancelled)
    assert MANIFEST_FILE not in await objects(object_store)
    assert await object_store.unfinished_uploads() == []


async def test_a_removal_that_is_cut_off_takes_the_manifest_first_and_a_repeat_the_rest(
    s3: Remote, object_store: ObjectStore, tmp_path: Path
) -> None:
    """L1: wherever the connection breaks, a manifest that is left names what is there."""
    source = make_checkpoint(tmp_path / "source")
    ckptio.convert(source, tmp_path / "small", chunk_size_bytes=1024 * 1024)
    impatient = Repository(s3.repository.url, replace(OPTIONS, tries_max=2))
    half_done = 0
    for number in range(1, 6):  # one connection for the listing, one for each of more deletes than this
        await s3.repository.publish(tmp_path / "small", "m")
        await s3.proxy.script([FINE] * number, always=Fault(cut_after_bytes=100))
        with suppress(Unavailable):
            await impatient.remove_published("m")
        left = await objects(object_store)
        assert MANIFEST_FILE not in left or left == files(tmp_path / "small"), f"cut after {number} requests"
        half_done += bool(left) and MANIFEST_FILE not in left
        await s3.proxy.script([])
        await s3.repository.remove_published("m")
        assert await objects(object_store) == {}
    assert half_done, "no cut came between the manifest and the rest: the test would prove nothing"


async def test_a_store_that_is_away_is_a_typed_error_for_those_who_publish(s3: Remote, checkpoint: Path) -> None:
    impatient = Repository(s3.repository.url, replace(OPTIONS, tries_max=2, upload_request_s=0.3))
    await s3.proxy.script([], always=Fault(wait_s=60))
    with pytest.raises(Unavailable, match=r"a/b/m"):
        await impatient.publish(checkpoint, "m")
    with pytest.raises(Unavailable, match=r"a/b/m"):
        await impatient.remove_published("m")


# --- the router reads its few files from the same places ---


async def test_a_router_finds_its_text_files_in_every_kind_of_repository(
    remote: Remote, checkpoint: Path, web_server: WebServer, tmp_path: Path
) -> None:
    """L1: a web server can't list; servers that are overloaded and connections that break are tried again."""
    if remote.repository.url.startswith("s3:"):
        await remote.repository.publish(checkpoint, "m")
    else:
        shutil.copytree(checkpoint, web_server.root / "a/b/m", dirs_exist_ok=True)
    await remote.proxy.script([Fault(status=503), Fault(cut_after_bytes=700)])
    async with asyncio.TaskGroup() as group:
        tokenizers = Tokenizers(remote.repository.url, tmp_path / "cache", group.create_task)
        text = await tokenizers.get("m", "xxh3:abc")
        with pytest.raises(LoadFailed, match="no tokenizer files"):
            await tokenizers.get("absent", "xxh3:abc")
    tokenizers.close()
    assert text.encode_text("Paris")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "cache/m/xxh3-abc").iterdir()}
    assert kept == {name: data for name, data in files(checkpoint).items() if name in TEXT_FILES}
