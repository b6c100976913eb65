"""Reading checkpoints of the repository: nothing that is not verified gets through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import ckptio
import pytest

from services.storage_agent.checkpoints import layout_of
from services.storage_agent.core.chunks import CheckpointKey, ChunkId
from services.storage_agent.fetch import Source
from services.storage_agent.remote_reads import OnBytes
from services.storage_agent.repository import Repository
from services.storage_agent.threads import Threads
from tests.unit.storage_agent.harness import CHUNK_BYTES, a_config, damage, publish


class Unreliable(Repository):
    """A repository whose first answer for every range, and for every small file, has one byte wrong."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.answered: list[object] = []

    async def read(self, model_id: str, file: str) -> bytes:
        data = await super().read(model_id, file)
        self.answered.append(file)
        is_manifest_or_index = file.startswith(("manifest", "index"))
        return data if is_manifest_or_index or self.answered.count(file) > 1 else data[:-1] + b"?"

    async def read_into(
        self, model_id: str, file: str, offset_bytes: int, view: memoryview, on_bytes: OnBytes | None = None
    ) -> None:
        await super().read_into(model_id, file, offset_bytes, view, on_bytes)
        self.answered.append(offset_bytes)
        if self.answered.count(offset_bytes) == 1:
            view[7] ^= 0xFF


@asynccontextmanager
async def a_source(repository: Repository) -> AsyncIterator[Source]:
    threads = Threads(2, "test")
    try:
        yield Source(repository, threads)
    finally:
        threads.close()


def a_model(home: Path) -> tuple[str, CheckpointKey]:
    config = a_config(home)
    key = CheckpointKey(model_id="m", checkpoint_digest=publish(config, "m", size_bytes=3 * CHUNK_BYTES))
    return config.repository_url, key


async def test_a_checkpoint_is_its_small_files_and_then_chunks_in_any_order(home: Path) -> None:
    url, key = a_model(home)
    async with a_source(Repository(url)) as source:
        published = await source.open(key)
        files = await source.small_files(published)
        assert {name: (home / "repository" / "m" / name).read_bytes() for name in files} == files
        layout = layout_of(published.index)
        expected = (home / "repository" / "m" / "partition_0.bin").read_bytes()
        for chunk in reversed(list(layout.chunks())):
            heard: list[int] = []
            view = memoryview(bytearray(layout.bytes_of(chunk)))
            await source.read_chunk(published.index, "m", chunk, view, heard.append)
            offset_bytes = layout.offset_bytes(chunk)
            assert view == expected[offset_bytes : offset_bytes + len(view)]
            assert sum(heard) == len(view)


async def test_what_arrives_damaged_is_read_once_more(home: Path) -> None:
    url, key = a_model(home)
    repository = Unreliable(url)
    async with a_source(repository) as source:
        published = await source.open(key)
        files = await source.small_files(published)
        assert files["config.json"] == (home / "repository" / "m" / "config.json").read_bytes()
        view = memoryview(bytearray(CHUNK_BYTES))
        await source.read_chunk(published.index, "m", ChunkId(0, 1), view, lambda _: None)
        assert repository.answered.count("config.json") == repository.answered.count(CHUNK_BYTES) == 2


async def test_what_stays_damaged_ends_with_its_file_and_offset(home: Path) -> None:
    url, key = a_model(home)
    path = home / "repository" / "m" / "partition_0.bin"
    damage(path, CHUNK_BYTES)
    async with a_source(Repository(url)) as source:
        published = await source.open(key)
        view = memoryview(bytearray(CHUNK_BYTES))
        with pytest.raises(ckptio.CorruptCheckpoint) as caught:
            await source.read_chunk(published.index, "m", ChunkId(0, 1), view, lambda _: None)
        assert (caught.value.path, caught.value.offset_bytes) == (path, CHUNK_BYTES)


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda path: path.unlink(), ckptio.MissingFile),
        (lambda path: path.write_bytes(path.read_bytes()[:-4096]), ckptio.TruncatedCheckpoint),
        (lambda path: path.write_bytes(path.read_bytes() + b"more"), ckptio.CorruptCheckpoint),
    ],
    ids=["missing", "short", "long"],
)
async def test_a_checkpoint_that_is_not_whole_is_refused_before_its_weights_move(
    home: Path, harm: Callable[[Path], None], error: type[ckptio.CkptioError]
) -> None:
    """L1: the sizes of all files are compared first."""
    url, key = a_model(home)
    harm(home / "repository" / "m" / "partition_0.bin")
    async with a_source(Repository(url)) as source:
        with pytest.raises(error, match=r"partition_0\.bin"):
            await source.open(key)
