"""The SSD directory: a copy looks whole only when it is, and one that was cut off goes on where it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import ckptio
import pytest
from ckptio.manifest import partition_file

from services.storage_agent.checkpoints import Checkpoint, footprint_bytes, layout_of, open_checkpoint
from services.storage_agent.core.chunks import ChunkId
from services.storage_agent.ssd import JOURNAL_FILE, FoundCheckpoint, SsdDirectory, SsdWriter
from tests.support.checkpoints import make_checkpoint
from tests.unit.storage_agent.harness import CHUNK_BYTES, damage, truncate

MODEL = "org/m"


@pytest.fixture
def published(home: Path) -> Checkpoint:
    """A checkpoint of two partitions, as the repository has it."""
    source = make_checkpoint(home / "source", padding_bytes=3 * CHUNK_BYTES)
    ckptio.convert(source, home / "published", chunk_size_bytes=CHUNK_BYTES, partitioning=2)
    return open_checkpoint(home / "published", MODEL)


@pytest.fixture
def directory(home: Path) -> Iterator[SsdDirectory]:
    directory = SsdDirectory(home / "ssd")
    directory.lock()
    yield directory
    directory.unlock()


def small_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    paths = (path for path in sorted(checkpoint.path.rglob("*")) if path.is_file() and path.suffix != ".bin")
    return {str(path.relative_to(checkpoint.path)): path.read_bytes() for path in paths}


def begin(directory: SsdDirectory, checkpoint: Checkpoint) -> None:
    directory.begin(checkpoint.key, checkpoint.manifest, small_files(checkpoint))


def store(directory: SsdDirectory, checkpoint: Checkpoint, *chunks: ChunkId) -> None:
    layout = layout_of(checkpoint.index)
    writer = SsdWriter(directory.path_of(MODEL), layout)
    try:
        for chunk in chunks:
            with (checkpoint.path / partition_file(chunk.partition)).open("rb") as file:
                file.seek(layout.offset_bytes(chunk))
                writer.store(chunk, memoryview(file.read(layout.bytes_of(chunk))))
    finally:
        writer.close()


def all_chunks(checkpoint: Checkpoint) -> list[ChunkId]:
    return list(layout_of(checkpoint.index).chunks())


def a_whole_copy(directory: SsdDirectory, checkpoint: Checkpoint) -> None:
    begin(directory, checkpoint)
    store(directory, checkpoint, *all_chunks(checkpoint))
    directory.publish(MODEL)


def found_in(directory: SsdDirectory) -> FoundCheckpoint:
    (found,) = directory.scan()
    return found


# --- a copy on its way ---


def test_a_copy_takes_all_its_space_when_it_begins_and_is_whole_when_it_is_published(
    directory: SsdDirectory, published: Checkpoint
) -> None:
    begin(directory, published)
    chunks = all_chunks(published)
    found = found_in(directory)
    assert found.key == published.key
    assert found.size_bytes == footprint_bytes(published.manifest)
    assert found.missing == frozenset(chunks)
    for number, part in enumerate(published.index.partitions):
        status = (directory.path_of(MODEL) / partition_file(number)).stat()
        assert status.st_size == part.padded_bytes <= status.st_blocks * 512
    store(directory, published, *chunks)
    assert found_in(directory).missing == frozenset()
    directory.publish(MODEL)
    directory.publish(MODEL)
    assert found_in(directory).missing == frozenset()
    assert sorted(path.name for path in directory.path_of(MODEL).iterdir()) == sorted(
        path.name for path in published.path.iterdir()
    )
    ckptio.verify(directory.path_of(MODEL))


class Killed(BaseException):
    """The process is gone at this system call."""


def kill_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """The `call`-th change of the file system from now on, counted from 0, does not happen any more."""
    left = [call]

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*arguments, **named)

        return run

    for name in ("pwrite", "write", "posix_fallocate"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    for name in ("mkdir", "touch", "write_bytes", "rename", "replace", "unlink"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree))


def is_good(directory: SsdDirectory, checkpoint: Checkpoint, chunk: ChunkId) -> bool:
    layout, name = layout_of(checkpoint.index), partition_file(chunk.partition)
    offset_bytes, size_bytes = layout.offset_bytes(chunk), layout.bytes_of(chunk)
    ours = (directory.path_of(MODEL) / name).read_bytes()[offset_bytes : offset_bytes + size_bytes]
    return ours == (checkpoint.path / name).read_bytes()[offset_bytes : offset_bytes + size_bytes]


def replace(directory: SsdDirectory, checkpoint: Checkpoint) -> None:
    a_whole_copy(directory, checkpoint)


def demote_and_repair(directory: SsdDirectory, checkpoint: Checkpoint) -> None:
    first, *others = all_chunks(checkpoint)
    directory.demote(MODEL, others)
    store(directory, checkpoint, first)
    directory.publish(MODEL)


def remove(directory: SsdDirectory, checkpoint: Checkpoint) -> None:
    directory.remove(MODEL)


@pytest.mark.parametrize(
    ("work", "has_copy"),
    [(replace, False), (replace, True), (demote_and_repair, True), (remove, True), (remove, False)],
    ids=["a first copy", "over a whole copy", "a repair", "a removal", "a removal of nothing"],
)
def test_an_agent_that_is_killed_at_any_moment_leaves_what_is_true(
    directory: SsdDirectory,
    published: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[SsdDirectory, Checkpoint], None],
    has_copy: bool,
) -> None:
    """It never looks whole, or holds a chunk, that it has not got; and the next agent goes on where this one was."""
    partial, is_over = set(), False
    for call in range(200):
        with monkeypatch.context() as patch:
            shutil.rmtree(directory.path_of(MODEL), ignore_errors=True)
            if has_copy:
                a_whole_copy(directory, published)
            kill_at(patch, call)
            try:
                work(directory, published)
                is_over = True
            except Killed:
                pass
        found = directory.scan()
        for checkpoint in found:
            stored = [chunk for chunk in all_chunks(published) if chunk not in checkpoint.missing]
            assert all(is_good(directory, published, chunk) for chunk in stored), f"killed at call {call}"
            partial.add(len(stored))
            store(directory, published, *checkpoint.missing)
            directory.publish(MODEL)
            ckptio.verify(directory.path_of(MODEL))
        assert sorted(path.name for path in directory.path.iterdir()) in ([".agent.lock"], [".agent.lock", "org--m"])
        if is_over:
            break
    assert is_over, "200 calls were not enough"
    if work is replace:
        assert partial == set(range(len(all_chunks(published)) + 1)), "every kind of half copy was seen"


def test_a_journal_that_was_cut_off_in_an_entry_lacks_that_chunk(
    directory: SsdDirectory, published: Checkpoint
) -> None:
    begin(directory, published)
    first, second, *_ = all_chunks(published)
    store(directory, published, first, second)
    journal = directory.path_of(MODEL) / JOURNAL_FILE
    for cut in range(1, 8):
        truncate(journal, 16 - cut)
        assert frozenset(all_chunks(published)) - found_in(directory).missing == {first}


def test_a_journal_that_was_cut_off_in_an_entry_can_be_gone_on_with(
    directory: SsdDirectory, published: Checkpoint
) -> None:
    begin(directory, published)
    first, second, *others = all_chunks(published)
    store(directory, published, first, second)
    truncate(directory.path_of(MODEL) / JOURNAL_FILE, 11)
    assert second in found_in(directory).missing
    store(directory, published, second, *others[:-1])
    assert found_in(directory).missing == {others[-1]}, "entries that came after the cut count"


def test_a_journal_with_entries_that_mean_nothing_is_not_believed_further(
    directory: SsdDirectory, published: Checkpoint
) -> None:
    begin(directory, published)
    (directory.path_of(MODEL) / JOURNAL_FILE).write_bytes(b"\xff" * 24)
    assert found_in(directory).missing == frozenset(all_chunks(published))


# --- what is not what it says ---


@pytest.mark.parametrize("file", ["config.json", "index.msgpack", "manifest.json", "tokenizer.json"])
@pytest.mark.parametrize("harm", [lambda path: damage(path, 30), lambda path: path.unlink()], ids=["bad", "missing"])
def test_a_copy_with_an_unsound_small_file_is_removed(
    directory: SsdDirectory, published: Checkpoint, file: str, harm: Callable[[Path], None]
) -> None:
    a_whole_copy(directory, published)
    harm(directory.path_of(MODEL) / file)
    if file == "manifest.json" and not (directory.path_of(MODEL) / file).exists():
        assert directory.scan() == [], "without manifest and journal it is nothing of ours"
        assert directory.path_of(MODEL).exists()
        return
    assert directory.scan() == []
    assert not directory.path_of(MODEL).exists()


@pytest.mark.parametrize("size_bytes", [0, 4096, CHUNK_BYTES * 100])
def test_a_copy_whose_partition_has_another_size_is_removed(
    directory: SsdDirectory, published: Checkpoint, size_bytes: int
) -> None:
    a_whole_copy(directory, published)
    truncate(directory.path_of(MODEL) / "partition_1.bin", size_bytes)
    assert directory.scan() == []
    assert not directory.path_of(MODEL).exists()


def test_leftovers_are_removed_and_strangers_stay(directory: SsdDirectory, published: Checkpoint) -> None:
    a_whole_copy(directory, published)
    for name in (".partial-probe", ".trash-org--m"):
        (directory.path / name).mkdir()
        (directory.path / name / "file").touch()
    (directory.path / "lost+found").mkdir()
    (directory.path / "somebody's notes").write_text("keep")
    (directory.path / ".staging").mkdir()
    assert [found.key for found in directory.scan()] == [published.key]
    left = sorted(path.name for path in directory.path.iterdir())
    assert left == [".agent.lock", ".staging", "lost+found", "org--m", "somebody's notes"]


# --- marks ---


def test_the_time_of_the_last_use_is_kept_on_the_disk(directory: SsdDirectory, published: Checkpoint) -> None:
    a_whole_copy(directory, published)
    os.utime(directory.path_of(MODEL), (0, 0))
    assert found_in(directory).idle_s > 1e9
    directory.touch(MODEL)
    assert found_in(directory).idle_s < 60
    directory.touch("not/there")


def test_pins_are_a_list_that_outlives_copies_and_is_never_half(tmp_path: Path) -> None:
    directory = SsdDirectory(tmp_path)
    assert directory.read_pins() == []
    directory.write_pins({"org/b", "a"})
    assert directory.read_pins() == ["a", "org/b"]
    directory.write_pins(())
    assert directory.read_pins() == []
    for nonsense in (b"../x\n", b"\xff\xfe"):
        (tmp_path / ".pinned").write_bytes(nonsense)
        assert directory.read_pins() == []


def test_one_agent_at_a_time_has_a_directory(directory: SsdDirectory) -> None:
    other = SsdDirectory(directory.path)
    with pytest.raises(FileExistsError, match="give each agent its own WB_SSD_DIR"):
        other.lock()
    other.unlock()
    directory.unlock()
    other.lock()
    other.unlock()
