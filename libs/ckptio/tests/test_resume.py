"""Resuming: an interrupted conversion goes on where it stopped, and ends as if it had never been stopped."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckptio
from ckptio import faults
from ckptio.resume import JOURNAL_FILE

from .stepped import converter, kill_after

CHUNK_BYTES = 8192
SHAPES = [(100_000,), (70_001,), (0, 3), (250_000,), (8192,), (40_000,)] * 4


def hidden(directory: Path) -> list[Path]:
    return sorted(entry for entry in directory.iterdir() if ".ckptio-tmp-" in entry.name)


def content(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def stopping_after(chunks: int) -> Callable[[], bool]:
    """Says "cancelled" at the end of chunk number `chunks`."""
    answers = iter([False] * (chunks - 1))
    return lambda: next(answers, True)


def interrupted(source: Path, destination: Path, chunks: int = 20) -> Path:
    """The hidden directory of a conversion that was cancelled after some chunks."""
    with pytest.raises(ckptio.Cancelled):
        ckptio.convert(
            source,
            destination,
            chunk_size_bytes=CHUNK_BYTES,
            resume=True,
            cancelled=stopping_after(chunks),
        )
    (directory,) = hidden(destination.parent)
    return directory


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all reads of the source from now on."""
    sizes: list[int] = []
    inputs = sys.modules["ckptio.inputs"]
    read = inputs.read_exactly

    def count(descriptor: int, target: memoryview, offset_bytes: int, path: Path) -> None:
        sizes.append(len(target))
        read(descriptor, target, offset_bytes, path)

    monkeypatch.setattr(inputs, "read_exactly", count)
    return sizes


def test_a_conversion_killed_at_random_points_ends_with_the_same_bytes(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    """F7: kill -9 a dozen times; nothing half verifies, and the end is as without."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    source = write_model(tmp_path / "model", some_tensors(*SHAPES), shards=3)
    ckptio.convert(source, tmp_path / "whole", chunk_size_bytes=CHUNK_BYTES, partitioning=2)
    destination = tmp_path / "out"
    kept_most = 0
    for _ in range(12):
        options = {"chunk_size_bytes": CHUNK_BYTES, "resume": True, "partitioning": 2}
        kill_after(converter(source, destination, **options), generator.randrange(180))
        if destination.exists():
            assert content(destination) == content(tmp_path / "whole")
            shutil.rmtree(destination)
        for directory in hidden(tmp_path):
            journal = directory / JOURNAL_FILE
            kept_most = max(kept_most, journal.stat().st_size if journal.exists() else 0)
            if not (directory / "manifest.json").exists():
                with pytest.raises(ckptio.UnsupportedFormat):
                    ckptio.verify(directory)
    assert kept_most > 100, "no kill hit a running conversion"
    ckptio.convert(source, destination, chunk_size_bytes=CHUNK_BYTES, resume=True, partitioning=2)
    assert content(destination) == content(tmp_path / "whole")
    ckptio.verify(destination)
    assert hidden(tmp_path) == []


def test_what_was_written_is_not_read_from_the_source_again(
    tmp_path: Path, write_model: Callable, some_tensors: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "model", some_tensors((800_000,)))
    directory = interrupted(source, tmp_path / "out", chunks=60)
    assert (directory / "partition_0.bin").stat().st_size == 60 * CHUNK_BYTES
    sizes = counted_reads(monkeypatch)
    seen: list[ckptio.Progress] = []
    ckptio.convert(source, tmp_path / "out", chunk_size_bytes=CHUNK_BYTES, resume=True, progress=seen.append)
    assert sum(sizes) == 800_000 - 60 * CHUNK_BYTES
    assert len(seen) == 98
    assert seen[-1].done_bytes == seen[-1].total_bytes
    ckptio.verify(tmp_path / "out")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda d: flip(d / "partition_0.bin", 10 * CHUNK_BYTES + 5),
        lambda d: os.truncate(d / "partition_0.bin", 10 * CHUNK_BYTES + 100),
        lambda d: zero_tail(d / "partition_0.bin", 10 * CHUNK_BYTES),
        lambda d: flip(d / JOURNAL_FILE, 33 + 8 * 10),
        lambda d: os.truncate(d / JOURNAL_FILE, 33 + 8 * 10 + 3),
    ],
    ids=["flipped-bit", "cut", "zero-tail", "journal-flipped", "journal-torn"],
)
def test_only_the_prefix_that_is_still_right_is_kept(
    harm: Callable[[Path], None],
    tmp_path: Path,
    write_model: Callable,
    some_tensors: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F7: what a crash or a bad disk did to the part that was there is written again."""
    source = write_model(tmp_path / "model", some_tensors((300_000,)))
    ckptio.convert(source, tmp_path / "whole", chunk_size_bytes=CHUNK_BYTES)
    harm(interrupted(source, tmp_path / "out", chunks=20))
    sizes = counted_reads(monkeypatch)
    ckptio.convert(source, tmp_path / "out", chunk_size_bytes=CHUNK_BYTES, resume=True)
    assert sum(sizes) == 300_000 - 10 * CHUNK_BYTES
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def flip(path: Path, offset_bytes: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset_bytes] ^= 4
    path.write_bytes(raw)


def zero_tail(path: Path, offset_bytes: int) -> None:
    size_bytes = path.stat().st_size
    os.truncate(path, offset_bytes)
    os.truncate(path, size_bytes)


def test_a_conversion_interrupted_again_and_again_arrives(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors((200_000,), (100_000,)))
    for chunks in (5, 12, 13, 30):
        directory = interrupted(source, tmp_path / "out", chunks)
        assert (directory / JOURNAL_FILE).stat().st_size == 33 + 8 * chunks
    ckptio.convert(source, tmp_path / "out", chunk_size_bytes=CHUNK_BYTES, resume=True)
    ckptio.convert(source, tmp_path / "whole", chunk_size_bytes=CHUNK_BYTES)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("change", ["weights", "time", "config", "chunks", "plan"])
def test_another_source_or_plan_starts_anew(
    change: str,
    tmp_path: Path,
    write_model: Callable,
    some_tensors: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = some_tensors((200_000,), (100_000,))
    source = write_model(tmp_path / "model", tensors)
    interrupted(source, tmp_path / "out", chunks=20)
    if change == "weights":
        write_model(tmp_path / "model", some_tensors((200_001,), (100_000,)))
    if change == "time":
        os.utime(source / "model.safetensors", ns=(1, 1))
    if change == "config":
        (source / "config.json").write_text('{"architectures": ["Another"]}')
    sizes = counted_reads(monkeypatch)
    ckptio.convert(
        source,
        tmp_path / "out",
        chunk_size_bytes=4096 if change == "chunks" else CHUNK_BYTES,
        partition_of=(lambda name: 0 if name == "t.1" else 1) if change == "plan" else None,
        resume=True,
    )
    assert sum(sizes) == (300_001 if change == "weights" else 300_000)
    ckptio.verify(tmp_path / "out")
    assert hidden(tmp_path) == []


def test_without_resume_nothing_is_kept_and_nothing_is_used(
    tmp_path: Path, write_model: Callable, some_tensors: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "model", some_tensors((200_000,)))
    interrupted(source, tmp_path / "out")
    sizes = counted_reads(monkeypatch)
    with pytest.raises(ckptio.Cancelled):
        ckptio.convert(source, tmp_path / "out", chunk_size_bytes=CHUNK_BYTES, cancelled=stopping_after(3))
    assert sum(sizes) == 3 * CHUNK_BYTES
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]


def test_a_bad_source_leaves_nothing_even_with_resume(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors((200_000,)))

    def cut(progress: ckptio.Progress) -> None:
        os.truncate(source / "model.safetensors", 100_000)

    with pytest.raises(ckptio.TruncatedCheckpoint):
        ckptio.convert(source, tmp_path / "out", chunk_size_bytes=CHUNK_BYTES, resume=True, progress=cut)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]


@contextmanager
def files_limited_to(size_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)


def test_a_failing_write_can_be_resumed(
    tmp_path: Path, write_model: Callable, some_tensors: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "model", some_tensors((200_000,)))
    with files_limited_to(50_000), pytest.raises(OSError, match="partition_0") as caught:
        ckptio.convert(source, tmp_path / "out", chunk_size_bytes=CHUNK_BYTES, resume=True)
    assert caught.value.errno == errno.EFBIG
    assert len(hidden(tmp_path)) == 1
    sizes = counted_reads(monkeypatch)
    ckptio.convert(source, tmp_path / "out", chunk_size_bytes=CHUNK_BYTES, resume=True)
    assert sum(sizes) == 200_000 - 6 * CHUNK_BYTES
    ckptio.verify(tmp_path / "out")


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.33, 0.5, 0.99])
def test_a_device_that_fails_at_any_share_is_a_typed_error_and_the_next_conversion_works(
    share: float, code: int, is_resumed: bool, tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    """F7: ENOSPC at n %, EIO at a chunk: the file is named, nothing half is visible, and it can go on."""
    source = write_model(tmp_path / "model", some_tensors((200_000,), (100_000,)))
    ckptio.convert(source, tmp_path / "whole", chunk_size_bytes=CHUNK_BYTES, partitioning=2)
    after_bytes = int(share * 300_000)
    with (
        faults.injected(write_error=code, write_after_bytes=after_bytes),
        pytest.raises(OSError if code == errno.EIO else ckptio.InsufficientSpace) as caught,
    ):
        ckptio.convert(
            source, tmp_path / "out", chunk_size_bytes=CHUNK_BYTES, partitioning=2, resume=is_resumed
        )
    error = caught.value
    name = os.fspath(error.filename if isinstance(error, OSError) else error.path)
    assert f"{tmp_path}{os.sep}.out.ckptio-tmp-" in name
    if isinstance(error, ckptio.InsufficientSpace):
        missing_bytes = error.required_bytes - error.available_bytes
        assert 300_000 - after_bytes <= missing_bytes < 320_000 + CHUNK_BYTES - after_bytes
        assert str(missing_bytes) in str(error)
    else:
        assert error.errno == errno.EIO
    assert len(hidden(tmp_path)) == int(is_resumed and after_bytes > 2 * CHUNK_BYTES)
    assert not (tmp_path / "out").exists()
    ckptio.convert(source, tmp_path / "out", chunk_size_bytes=CHUNK_BYTES, partitioning=2, resume=is_resumed)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert hidden(tmp_path) == []


def test_an_export_onto_a_full_device_says_what_is_missing(a_checkpoint: Callable, tmp_path: Path) -> None:
    path = a_checkpoint((100_000,))
    with (
        faults.injected(write_error=errno.ENOSPC, write_after_bytes=30_000),
        pytest.raises(ckptio.InsufficientSpace, match=r"model\.safetensors"),
    ):
        ckptio.export(path, tmp_path / "stock")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint", "source"]


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 24 MiB, where we may mount one."""
    path = tmp_path / "small"
    path.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    command = [mount, "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_file_system_that_fills_up_is_named_with_what_is_missing(
    is_resumed: bool, small_file_system: Path, tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    """F7: ENOSPC underway, because somebody else writes there too; after there is room it goes on."""
    size_bytes = 5 << 20
    source = write_model(tmp_path / "model", some_tensors((size_bytes,)))
    ballast = small_file_system / "ballast"

    def fill(progress: ckptio.Progress) -> None:
        if progress.done_bytes == 10 * CHUNK_BYTES:
            status = os.statvfs(small_file_system)
            with open(ballast, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - 20 * CHUNK_BYTES)

    with pytest.raises(ckptio.InsufficientSpace) as caught:
        ckptio.convert(
            source,
            small_file_system / "out",
            chunk_size_bytes=CHUNK_BYTES,
            resume=is_resumed,
            progress=fill,
        )
    assert caught.value.path.name == "partition_0.bin"
    missing_bytes = caught.value.required_bytes - caught.value.available_bytes
    assert size_bytes - 35 * CHUNK_BYTES < missing_bytes <= size_bytes
    assert len(hidden(small_file_system)) == int(is_resumed)
    assert not (small_file_system / "out").exists()
    ballast.unlink()
    ckptio.convert(source, small_file_system / "out", chunk_size_bytes=CHUNK_BYTES, resume=is_resumed)
    ckptio.verify(small_file_system / "out")
    assert hidden(small_file_system) == []
