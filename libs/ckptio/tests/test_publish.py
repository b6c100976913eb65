"""Atomic publication: whatever happens, there is a whole checkpoint or none."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptio
from ckptio.publish import publishing

from .stepped import converter, kill_after


def leftovers(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir() if ".ckptio-tmp-" in entry.name]


def test_a_killed_converter_leaves_nothing_that_verifies(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    """F7: kill -9 at random points; then the next conversion succeeds and clears what was left."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    source = write_model(tmp_path / "model", some_tensors(*[(30_000,)] * 8))
    destination = tmp_path / "out"
    killed_midway = 0
    for _ in range(8):
        kill_after(converter(source, destination, chunk_size_bytes=4096), generator.randrange(62))
        killed_midway += len(leftovers(tmp_path))
        if destination.exists():
            ckptio.verify(destination)
            (destination / "manifest.json").unlink()
            for file in destination.iterdir():
                file.unlink()
            destination.rmdir()
        for name in leftovers(tmp_path):
            with pytest.raises(ckptio.UnsupportedFormat):
                ckptio.verify(tmp_path / name)
    assert killed_midway > 0, "no kill hit a running conversion"
    ckptio.convert(source, destination)
    ckptio.verify(destination)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "out"]


def test_a_killed_replacement_leaves_the_old_checkpoint(
    tmp_path: Path, write_model: Callable, some_tensors: Callable, checkpoint_bytes: Callable
) -> None:
    old, new = some_tensors((5000,), seed=1), some_tensors(*[(30_000,)] * 4, seed=2)
    destination = tmp_path / "out"
    ckptio.convert(write_model(tmp_path / "old", old), destination)
    source = write_model(tmp_path / "new", new)
    kill_after(converter(source, destination, chunk_size_bytes=4096, overwrite=True), 1)
    ckptio.verify(destination)
    assert checkpoint_bytes(destination) == old
    ckptio.convert(tmp_path / "new", destination, overwrite=True)
    assert checkpoint_bytes(destination) == new
    assert leftovers(tmp_path) == []


def test_an_existing_checkpoint_is_kept_unless_told_otherwise(
    a_checkpoint: Callable, tmp_path: Path, checkpoint_bytes: Callable
) -> None:
    path = a_checkpoint((100,))
    before = checkpoint_bytes(path)
    with pytest.raises(ckptio.CheckpointExists) as caught:
        ckptio.convert(tmp_path / "source", path)
    assert caught.value.path == path
    assert checkpoint_bytes(path) == before


def test_what_is_no_checkpoint_is_never_replaced(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors((10,)))
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("text")
    for destination in (precious, tmp_path / "file"):
        with pytest.raises(ckptio.CheckpointExists, match="not replaced"):
            ckptio.convert(source, destination, overwrite=True)
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_two_converters_of_one_model_do_not_mix(
    tmp_path: Path, write_model: Callable, some_tensors: Callable, checkpoint_bytes: Callable
) -> None:
    """The second waits, and then finds the work done."""
    tensors = some_tensors(*[(50_000,)] * 4)
    source = write_model(tmp_path / "model", tensors)
    out = tmp_path / "out"
    processes = [converter(source, out, is_stepped=False, chunk_size_bytes=4096) for _ in range(3)]
    endings = [process.communicate(timeout=30)[0].splitlines()[-1:] for process in processes]
    assert endings.count(["published"]) == 1
    assert checkpoint_bytes(out) == tensors
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "out"]


def test_a_waiting_converter_gives_up_in_time_or_when_cancelled(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors((10,)))
    with publishing(tmp_path / "out", marker="manifest.json"):
        with pytest.raises(ckptio.ConversionInProgress) as caught:
            ckptio.convert(source, tmp_path / "out", wait_s=0.05)
        assert caught.value.path == tmp_path / "out"
        with pytest.raises(ckptio.Cancelled):
            ckptio.convert(source, tmp_path / "out", cancelled=lambda: True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "out"]


def test_threads_of_one_process_take_turns(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors((100_000,)))
    outcomes: list[str] = []

    def work() -> None:
        try:
            ckptio.convert(source, tmp_path / "out", chunk_size_bytes=4096)
            outcomes.append("published")
        except ckptio.CheckpointExists:
            outcomes.append("exists")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(outcomes) == ["exists", "exists", "exists", "published"]


def test_a_cancelled_conversion_leaves_nothing(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    source = write_model(tmp_path / "model", some_tensors((100_000,)))
    answers = iter([False, False, True])
    with pytest.raises(ckptio.Cancelled) as caught:
        ckptio.convert(source, tmp_path / "out", chunk_size_bytes=4096, cancelled=lambda: next(answers))
    assert caught.value.done_bytes == 3 * 4096
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]


def test_a_disk_without_room_is_noticed_before_writing(
    tmp_path: Path, write_stock: Callable, some_tensors: Callable
) -> None:
    available_bytes = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    path = write_stock(tmp_path / "huge.safetensors", some_tensors((1,)))
    header = path.read_bytes()
    size_bytes = available_bytes - 8 * 1024 * 1024
    text = header[8:].replace(b'"shape":[1],"data_offsets":[0,1]', b"%s")
    text = text.rstrip(b"\0").split(b"}}")[0] + b"}}"
    text = text.replace(b"%s", b'"shape":[%d],"data_offsets":[0,%d]' % (size_bytes, size_bytes))
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + size_bytes)  # a hole: takes no room itself
    with pytest.raises(ckptio.InsufficientSpace) as caught:
        ckptio.convert(path, tmp_path / "out")
    assert caught.value.required_bytes > caught.value.available_bytes > 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["huge.safetensors"]


def test_a_failing_write_carries_the_path_and_leaves_nothing(
    tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    """ENOSPC and its like come as OSError with the path; here by a limit on the size of files."""
    import resource

    source = write_model(tmp_path / "model", some_tensors((100_000,)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        with pytest.raises(OSError, match="partition_0") as caught:
            ckptio.convert(source, tmp_path / "out", chunk_size_bytes=4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert caught.value.errno == errno.EFBIG
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]
