"""The repository as directory, store and web server: right bytes or a typed error, and publishing that is whole."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ckptio
import obstore
import pytest
from ckptio.manifest import MANIFEST_FILE
from obstore.store import MemoryStore
from whimbrel.chassis.config import ConfigError
from whimbrel.wire.errors import ImportFailed, LoadFailed, Unavailable

from services.storage_agent.checkpoints import checkpoint_digest, file_sizes
from services.storage_agent.core.chunks import CheckpointKey
from services.storage_agent.remote_publishing import RemotePublisher
from services.storage_agent.remote_responses import PIECE_SIZE_BYTES
from services.storage_agent.remote_retries import RemoteOptions, Retries, is_passing
from services.storage_agent.repository import LOCAL_PIECE_BYTES, Repository
from tests.support.checkpoints import make_checkpoint

FAST = RemoteOptions(stall_s=0.5, tries_max=3, pause_s=0.001, pause_s_max=0.005, part_size_bytes=64 * 1024)
# Around every view: what must never be written to.
GUARD = b"guard" * 20


def converted(directory: Path, seed: int = 0, padding_bytes: int = 300_000) -> tuple[Path, CheckpointKey]:
    source = make_checkpoint(directory.with_name(f"{directory.name}-source"), seed, padding_bytes)
    manifest = ckptio.convert(source, directory, chunk_size_bytes=64 * 1024)
    return directory, CheckpointKey(model_id="m", checkpoint_digest=checkpoint_digest(manifest))


# --- how often it is tried again ---


@pytest.mark.parametrize(
    ("tries", "pauses"),
    [
        ("nnnnnn", [0.1, 0.2, 0.4, 0.5, 0.5, None]),
        ("nnpnn", [0.1, 0.2, 0.1, 0.2, 0.4]),
        ("ppppppppp", [0.1] * 9),
    ],
    ids=["nothing comes", "something comes", "always something comes"],
)
def test_pauses_double_and_end_unless_a_try_brought_a_byte(tries: str, pauses: list[float | None]) -> None:
    """L1: a read goes on as long as tries make progress, and ends when they do not."""
    retries = Retries(RemoteOptions(tries_max=6, pause_s=0.1, pause_s_max=0.5))
    assert [retries.pause_after_failure(progressed=each == "p", chance=1.0) for each in tries] == pauses


def test_half_of_a_pause_is_random() -> None:
    options = RemoteOptions(pause_s=0.1)
    shortest = Retries(options).pause_after_failure(progressed=False, chance=0.0)
    assert shortest == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("status", "passing"),
    [(None, True), (500, True), (503, True), (429, True), (408, True), (400, False), (403, False), (416, False)],
)
def test_a_wrong_request_is_not_tried_again(status: int | None, passing: bool) -> None:
    assert is_passing(status) is passing


# --- a directory ---


@pytest.fixture
def local(tmp_path: Path) -> Repository:
    repository = Repository((tmp_path / "a repository").as_uri())
    (tmp_path / "a repository" / "m").mkdir()
    return repository


@pytest.mark.parametrize(("offset_bytes", "size_bytes"), [(0, 10), (7, LOCAL_PIECE_BYTES + 5), (100, 0)])
async def test_a_range_of_a_local_file_lands_in_its_place(
    local: Repository, offset_bytes: int, size_bytes: int
) -> None:
    data = random.Random(offset_bytes).randbytes(LOCAL_PIECE_BYTES + 1000)
    local.location("m", "f").write_bytes(data)
    memory = bytearray(GUARD + bytes(size_bytes) + GUARD)
    counts: list[int] = []
    view = memoryview(memory)[len(GUARD) : len(GUARD) + size_bytes]
    await local.read_into("m", "f", offset_bytes, view, counts.append)
    assert memory == GUARD + data[offset_bytes : offset_bytes + size_bytes] + GUARD
    assert sum(counts) == size_bytes


async def test_a_local_file_that_ends_too_soon_is_truncated_and_named(local: Repository) -> None:
    local.location("m", "f").write_bytes(bytes(100))
    with pytest.raises(ckptio.TruncatedCheckpoint) as caught:
        await local.read_into("m", "f", 50, memoryview(bytearray(60)))
    assert (caught.value.expected_bytes, caught.value.actual_bytes) == (110, 100)
    assert caught.value.path == local.location("m", "f")


async def test_a_local_file_that_is_missing_or_unreadable_is_named(local: Repository) -> None:
    for reading in (local.read("m", "f"), local.size_bytes("m", "f")):
        with pytest.raises(FileNotFoundError, match="a repository/m/f"):
            await reading
    with pytest.raises(FileNotFoundError, match="a repository/m/f"):
        await local.read_into("m", "f", 0, memoryview(bytearray(1)))
    local.location("m", "d").mkdir()
    with pytest.raises(Unavailable, match=r"a repository/m/d \(at offset 3: Is a directory\)"):
        await local.read_into("m", "d", 3, memoryview(bytearray(1)))


async def test_nothing_writes_into_the_view_once_a_local_read_was_cancelled(local: Repository) -> None:
    """L1: memory of a cancelled read can be given to somebody else at once."""
    local.location("m", "f").write_bytes(b"x" * (4 * LOCAL_PIECE_BYTES))
    memory = bytearray(4 * LOCAL_PIECE_BYTES)

    def cancel_twice(count: int) -> None:
        reading.get_loop().call_soon(reading.cancel)
        reading.get_loop().call_soon(reading.cancel)

    reading = asyncio.ensure_future(local.read_into("m", "f", 0, memoryview(memory), cancel_twice))
    await asyncio.wait([reading])
    assert reading.cancelled()
    there_bytes = memory.count(b"x")
    assert there_bytes < len(memory)
    await asyncio.get_running_loop().shutdown_default_executor()
    assert memory.count(b"x") == there_bytes


async def test_small_files_are_read_whole(local: Repository) -> None:
    for data in (b"", b"{}", bytes(1_000_000)):
        local.location("m", "f").write_bytes(data)
        assert await local.read("m", "f") == data
        assert await local.size_bytes("m", "f") == len(data)


async def test_open_refuses_other_content_and_no_content(local: Repository, tmp_path: Path) -> None:
    staged, key = converted(tmp_path / "staged")
    with pytest.raises(LoadFailed, match="is not there; deploy the model again"):
        await local.open(key)
    await local.publish(staged, "m")
    _, manifest, raw_index = await local.open(key)
    assert checkpoint_digest(manifest) == key.checkpoint_digest
    assert len(raw_index) == manifest.index_size_bytes
    with pytest.raises(LoadFailed, match="deploy the model again"):
        await local.open(CheckpointKey(model_id="m", checkpoint_digest="xxh3:0"))


def test_a_url_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="WB_REPOSITORY_URL"):
        Repository("gopher://x")


# --- a web server that lies ---

Answer = Callable[[dict[str, str]], bytes]
DATA = random.Random(1).randbytes(100_000)


def an_answer(status: str, body: bytes = b"", **headers: str) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{lines}\r\n"
    return head.encode() + body


def a_range(request: dict[str, str], *, tag: str = '"1"', shift: int = 0, more: bytes = b"", cut: int = 0) -> bytes:
    """A right answer, unless told otherwise."""
    start, end = (int(part) for part in request["range"].removeprefix("bytes=").split("-"))
    body = DATA[start : end + 1] + more
    whole = an_answer(
        "206 Partial Content", body, ETag=tag,
        Content_Range=f"bytes {start + shift}-{end + shift}/{len(DATA)}",
    )  # fmt: skip
    return whole[: len(whole) - cut]


@asynccontextmanager
async def a_web_server(*answers: Answer) -> AsyncIterator[tuple[Repository, list[dict[str, str]]]]:
    """Gives these answers, the last one again and again, each on a connection of its own."""
    requests: list[dict[str, str]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        request = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        requests.append(request | {"method": head[0].split()[0]})
        writer.write(answers[min(len(requests), len(answers)) - 1](request))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield Repository(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/models", FAST), requests


async def read_guarded(repository: Repository, offset_bytes: int, size_bytes: int) -> bytes:
    """Read into the middle of some memory; what is around must stay as it was, however it ends."""
    memory = bytearray(GUARD + bytes(size_bytes) + GUARD)
    try:
        view = memoryview(memory)[len(GUARD) : len(GUARD) + size_bytes]
        await repository.read_into("m", "partition_0.bin", offset_bytes, view)
    finally:
        assert memory.startswith(GUARD)
        assert memory.endswith(GUARD)
        assert len(memory) == size_bytes + 2 * len(GUARD)
    return bytes(memory[len(GUARD) : -len(GUARD)])


async def test_a_cut_answer_is_gone_on_with_where_it_ended() -> None:
    """L1: what was received is not asked for again, and the rest only of the same object."""
    async with a_web_server(lambda r: a_range(r, cut=10_000), a_range) as (repository, requests):
        assert await read_guarded(repository, 100, 60_000) == DATA[100:60_100]
    first, second = ([int(part) for part in request["range"][6:].split("-")] for request in requests)
    assert (first, second[1]) == ([100, 60_099], 60_099)
    assert 50_100 - PIECE_SIZE_BYTES < second[0] <= 50_100
    assert [request.get("if-match") for request in requests] == [None, '"1"']


async def test_a_weak_tag_promises_nothing_and_is_not_asked_for() -> None:
    async with a_web_server(lambda r: a_range(r, tag='W/"1"', cut=10_000), a_range) as (repository, requests):
        assert await read_guarded(repository, 0, 60_000) == DATA[:60_000]
    assert "if-match" not in requests[1]


async def test_an_object_that_is_replaced_while_it_is_read_is_a_typed_error() -> None:
    """L1: half of one object and half of another are no bytes of either."""
    replaced = an_answer("412 Precondition Failed")
    async with a_web_server(lambda r: a_range(r, cut=10_000), lambda _: replaced) as (repository, requests):
        with pytest.raises(LoadFailed, match="was replaced while it was read"):
            await read_guarded(repository, 0, 60_000)
    assert len(requests) == 2


async def test_an_answer_with_more_bytes_than_asked_for_is_refused() -> None:
    async with a_web_server(lambda r: a_range(r, more=b"more")) as (repository, _):
        with pytest.raises(Unavailable, match="more bytes came than were asked for"):
            await read_guarded(repository, 0, 1_000)


async def test_an_answer_for_another_range_is_refused_and_tried_again() -> None:
    async with a_web_server(lambda r: a_range(r, shift=1), a_range) as (repository, requests):
        assert await read_guarded(repository, 0, 1_000) == DATA[:1_000]
    async with a_web_server(lambda r: a_range(r, shift=1)) as (repository, requests):
        with pytest.raises(Unavailable, match=r"partition_0.bin \(at offset 5: .*3 times in a row"):
            await read_guarded(repository, 5, 1_000)
        assert len(requests) == FAST.tries_max


async def test_a_server_that_ignores_ranges_is_told_from_one_that_is_away() -> None:
    async with a_web_server(lambda _: an_answer("200 OK", DATA)) as (repository, requests):
        with pytest.raises(LoadFailed, match="does not answer ranges"):
            await read_guarded(repository, 5, 1_000)
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("status", "kind", "text", "tries"),
    [
        ("403 Forbidden", LoadFailed, "give the agent credentials", 1),
        ("401 Unauthorized", LoadFailed, "credentials are missing or wrong", 1),
        ("400 Bad Request", Unavailable, "400", 1),
        ("404 Not Found", FileNotFoundError, "m/partition_0.bin", 1),
        ("503 Service Unavailable", Unavailable, "503", FAST.tries_max),
        ("429 Too Many Requests", Unavailable, "429", FAST.tries_max),
    ],
)
async def test_a_refusal_ends_at_once_when_waiting_does_not_heal_it(
    status: str, kind: type[Exception], text: str, tries: int
) -> None:
    async with a_web_server(lambda _: an_answer(status)) as (repository, requests):
        with pytest.raises(kind, match=text):
            await read_guarded(repository, 0, 1_000)
        assert len(requests) == tries
        with pytest.raises(kind, match=text):
            await repository.read("m", "partition_0.bin")
        with pytest.raises(kind, match=text):
            await repository.size_bytes("m", "partition_0.bin")
        assert len(requests) == 3 * tries


async def test_an_object_that_is_shorter_than_it_should_be_is_truncated() -> None:
    def answer(request: dict[str, str]) -> bytes:
        if "range" in request:
            return an_answer("416 Range Not Satisfiable", Content_Range=f"bytes */{len(DATA)}")
        return f"HTTP/1.1 200 OK\r\nContent-Length: {len(DATA)}\r\nConnection: close\r\n\r\n".encode()

    async with a_web_server(answer) as (repository, requests):
        with pytest.raises(ckptio.TruncatedCheckpoint) as caught:
            await read_guarded(repository, len(DATA) + 1, 10)
    assert caught.value.actual_bytes == len(DATA)
    assert [request["method"] for request in requests] == ["GET", "HEAD"]


async def test_a_small_file_is_read_to_its_end_over_a_broken_connection() -> None:
    whole = an_answer("200 OK", DATA, ETag='"1"')
    async with a_web_server(lambda _: whole[:60_000], a_range) as (repository, requests):
        assert await repository.read("m", "config.json") == DATA
    assert requests[1]["if-match"] == '"1"'


# --- publishing ---


async def test_a_directory_is_published_over_an_older_one_and_removed(local: Repository, tmp_path: Path) -> None:
    assert local.directory is not None
    assert local.staging_root() == local.directory
    local.location("m", "x").parent.rmdir()
    for seed in (0, 1):
        staged, key = converted(local.directory / f".staged-{seed}", seed)
        await local.publish(staged, "m")
        await local.open(key)
        ckptio.verify(local.directory / "m")
    await local.remove_published("m")
    await local.remove_published("m")
    assert not (local.directory / "m").exists()
    assert not [path for path in local.directory.iterdir() if path.name.startswith((".removed", ".m."))]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/models", "https://127.0.0.1:9/models"])
async def test_a_web_server_is_not_published_to(url: str, tmp_path: Path) -> None:
    staged, _ = converted(tmp_path / "staged")
    repository = Repository(url)
    assert repository.staging_root() is None
    with pytest.raises(ImportFailed, match="set WB_REPOSITORY_URL to"):
        repository.check_publishable("m")
    with pytest.raises(ImportFailed, match="set WB_REPOSITORY_URL to"):
        await repository.publish(staged, "m")
    await repository.remove_published("m")
    assert (staged / MANIFEST_FILE).exists()


class Store:
    """A publisher into a store in memory, and what is in it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.publisher = RemotePublisher(self.store, self.store, lambda model_id, file: Path(model_id, file), FAST)

    def objects(self) -> dict[str, dict[str, Any]]:
        return {entry["path"]: dict(entry) for entry in obstore.list(self.store).collect()}

    def matches(self, staged: Path) -> bool:
        expected = {f"m/{path.relative_to(staged)}": path.read_bytes() for path in staged.rglob("*") if path.is_file()}
        return {path: bytes(obstore.get(self.store, path).bytes()) for path in self.objects()} == expected


async def test_a_store_holds_what_was_staged_and_its_manifest_is_the_newest(tmp_path: Path) -> None:
    """L1: whoever finds the manifest finds everything that it names."""
    staged, _ = converted(tmp_path / "staged")
    store = Store()
    told: list[tuple[int, int]] = []
    await store.publisher.publish(staged, "m", lambda *progress: told.append(progress), None)
    assert store.matches(staged)
    newest = max(store.objects().values(), key=lambda entry: entry["last_modified"])
    assert newest["path"] == f"m/{MANIFEST_FILE}"
    total_bytes = sum(file_sizes(ckptio.read_manifest(staged)).values())
    assert told == sorted(told)
    assert told[-1] == (total_bytes, total_bytes)
    assert len(told) > len(file_sizes(ckptio.read_manifest(staged))), "parts are told of, too"


async def test_the_same_content_is_left_alone_and_damage_is_repaired(tmp_path: Path) -> None:
    staged, _ = converted(tmp_path / "staged")
    store = Store()
    await store.publisher.publish(staged, "m", None, None)
    before = store.objects()
    await store.publisher.publish(staged, "m", None, None)
    assert store.objects() == before
    obstore.put(store.store, "m/partition_0.bin", b"cut off")
    await store.publisher.publish(staged, "m", None, None)
    assert store.matches(staged)
    changed = {path for path, entry in store.objects().items() if entry != before[path]}
    assert changed == {"m/partition_0.bin", f"m/{MANIFEST_FILE}"}, "only what was missing was uploaded"


async def test_other_content_replaces_what_was_there(tmp_path: Path) -> None:
    first, _ = converted(tmp_path / "first", seed=1)
    second, _ = converted(tmp_path / "second", seed=2, padding_bytes=100_000)
    store = Store()
    await store.publisher.publish(first, "m", None, None)
    obstore.put(store.store, "m/partition_7.bin", b"of another one")
    obstore.put(store.store, "mm/partition_7.bin", b"of another model")
    await store.publisher.publish(second, "m", None, None)
    obstore.delete(store.store, "mm/partition_7.bin")  # it must still be there
    assert store.matches(second)


async def test_a_cancelled_publication_leaves_no_manifest_and_a_repeat_goes_on(tmp_path: Path) -> None:
    """L1: cancelled between parts; what was uploaded whole is not uploaded again."""
    first, _ = converted(tmp_path / "first", seed=1)
    second, _ = converted(tmp_path / "second", seed=2)
    store = Store()
    await store.publisher.publish(first, "m", None, None)
    half_bytes = sum(file_sizes(ckptio.read_manifest(second)).values()) / 2
    done = [0]

    def observe(done_bytes: int, total_bytes: int) -> None:
        done.append(done_bytes)

    with pytest.raises(ckptio.Cancelled):
        await store.publisher.publish(second, "m", observe, lambda: done[-1] > half_bytes)
    there = store.objects()
    assert f"m/{MANIFEST_FILE}" not in there, "neither the new one nor the old one"
    await store.publisher.publish(second, "m", None, None)
    assert store.matches(second)
    again = {path for path, entry in store.objects().items() if entry == there.get(path)}
    assert again, "what was there is still the same object"


async def test_a_task_that_is_cancelled_stops_its_publication(tmp_path: Path) -> None:
    staged, _ = converted(tmp_path / "staged")
    store = Store()

    def stop(done_bytes: int, total_bytes: int) -> None:
        publishing.cancel()

    publishing = asyncio.ensure_future(store.publisher.publish(staged, "m", stop, None))
    await asyncio.wait([publishing])
    assert publishing.cancelled()
    assert f"m/{MANIFEST_FILE}" not in store.objects()


async def test_a_staged_file_that_is_too_short_is_named_and_not_published(tmp_path: Path) -> None:
    staged, _ = converted(tmp_path / "staged")
    os.truncate(staged / "partition_0.bin", 1000)
    store = Store()
    with pytest.raises(ckptio.TruncatedCheckpoint, match=r"partition_0\.bin"):
        await store.publisher.publish(staged, "m", None, None)
    assert not {"m/partition_0.bin", f"m/{MANIFEST_FILE}"} & store.objects().keys()


async def test_a_removed_model_is_gone_and_others_stay(tmp_path: Path) -> None:
    staged, _ = converted(tmp_path / "staged")
    store = Store()
    for model_id in ("m", "m2"):
        await store.publisher.publish(staged, model_id, None, None)
    await store.publisher.remove("m")
    await store.publisher.remove("m")
    assert {path.split("/")[0] for path in store.objects()} == {"m2"}
