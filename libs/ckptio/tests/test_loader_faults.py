"""What went wrong once with leases, locks, forks and signals, each as its whole kind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch

import ckptio
from ckptio import _native, faults

CHUNK_BYTES = 8192
Checkpoints = Callable[..., Path]


@pytest.fixture
def models(tmp_path: Path) -> Callable[..., Path]:
    """Builder of checkpoints of one tensor, all of whose bytes are `value`."""

    def build(value: int, chunks: int = 6) -> Path:
        path = tmp_path / f"model-{value}-{chunks}"
        if path.exists():
            return path
        tensor = torch.full((chunks * CHUNK_BYTES,), value, dtype=torch.uint8)
        ckptio.save({"t": tensor}, path, chunk_size_bytes=CHUNK_BYTES)
        return path

    return build


def flip_a_byte(path: Path, offset_bytes: int) -> None:
    with open(path / "partition_0.bin", "r+b") as file:
        file.seek(offset_bytes)
        byte = file.read(1)[0]
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 1]))


def test_what_was_read_unverified_never_passes_for_verified(loader: ckptio.Loader, models: Callable) -> None:
    path = models(1, chunks=4)
    flip_a_byte(path, 2 * CHUNK_BYTES)
    with loader.load(path, verify=False) as loaded:
        assert int(loaded.tensors["t"][2 * CHUNK_BYTES]) == 0
    with pytest.raises(ckptio.CorruptCheckpoint):
        loader.load(path)


def test_a_refused_close_keeps_the_lease_whatever_is_asked_afterwards(
    loader: ckptio.Loader, models: Callable
) -> None:
    loaded = loader.load(models(1))
    tensor = loaded.tensors["t"]
    for _ in range(3):
        with pytest.raises(BufferError, match="delete or clone"):
            loaded.close()
        assert int(loaded.tensors["t"][0]) == 1
        assert loader.leases == 6
    with pytest.raises(ckptio.PoolExhausted):
        loader.load(models(2))
    del tensor
    loaded.close()
    loader.load(models(2)).close()


def test_an_error_inside_a_load_is_not_hidden_by_its_tensors(loader: ckptio.Loader, models: Callable) -> None:
    kept: list[ckptio.Loaded] = []
    tensors = []

    def work() -> None:
        with loader.load(models(1)) as loaded:
            kept.append(loaded)
            tensors.append(loaded.tensors["t"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    with pytest.raises(BufferError):
        kept[0].close()
    tensors.clear()
    kept[0].close()


def test_tensors_of_many_threads_share_one_lease(loader: ckptio.Loader, models: Callable) -> None:
    for _ in range(20):
        loaded = loader.load(models(1))
        barrier = threading.Barrier(4)

        def look(loaded: ckptio.Loaded = loaded, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            assert loaded.tensors["t"][0] == 1

        def close(loaded: ckptio.Loaded = loaded, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            loaded.close()

        for work in (look, close):
            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert loader.leases == 0


def test_a_load_that_outlives_its_pool_never_maps_another_file(models: Callable, tmp_path: Path) -> None:
    pool = ckptio.ChunkPool.create(None, 10 * CHUNK_BYTES, CHUNK_BYTES)
    loader = ckptio.Loader(pool)
    loaded = loader.load(models(1))
    loader.close()
    pool.close()
    # They get the descriptors that the pool had.
    with ExitStack() as stack:
        for number in range(5):
            file = stack.enter_context(open(tmp_path / str(number), "wb+"))
            file.truncate(10 * CHUNK_BYTES)
        with pytest.raises(ValueError, match="closed"):
            _ = loaded.tensors
    loaded.close()


@pytest.mark.parametrize("is_private", [True, False])
def test_a_stock_file_that_changes_between_header_and_bytes_is_an_error(
    loader: ckptio.Loader, write_stock: Callable, tmp_path: Path, is_private: bool
) -> None:
    from ckptio.torch import load_layout

    path = tmp_path / "model.safetensors"
    write_stock(path, {"a": ("uint8", (4,), b"aaaa"), "b": ("uint8", (4,), b"bbbb")})
    layout = ckptio.read_layout(path)
    write_stock(tmp_path / "other", {"b": ("uint8", (4,), b"bbbb"), "a": ("uint8", (4,), b"aaaa")})
    os.replace(tmp_path / "other", path)
    with ckptio.DeviceBuffer.allocate("host", 1000) as buffer:
        use = load_layout if is_private else partial(loader.load_layout_onto, buffers=[buffer])
        with pytest.raises(ckptio.CorruptCheckpoint, match="changed"):
            use(layout)
    assert bytes(ckptio.load(path)["a"].numpy()) == b"aaaa"


def test_a_forked_child_ends_though_it_has_the_parents_threads(
    pool: ckptio.ChunkPool, models: Callable
) -> None:
    loader = ckptio.Loader(pool)
    loader.load(models(1)).close()
    for is_closed in (False, True):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            if is_closed:
                loader.close()
            del loader
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loader.load(models(2)).close()
    loader.close()


def test_a_warm_load_can_be_cancelled_and_counts_what_has_arrived(
    loader: ckptio.Loader, pool: ckptio.ChunkPool, models: Callable
) -> None:
    """Resident chunks go on without a read to be cancelled."""
    path = models(1)
    loader.load(path).close()
    token = ckptio.CancelToken()
    seen: list[int] = []

    def progress(done_bytes: int) -> None:
        seen.append(done_bytes)

    with ckptio.DeviceBuffer.allocate("host", 6 * CHUNK_BYTES) as buffer:
        loader.load_onto(path, [buffer], progress=progress)
        assert seen == sorted(set(seen))
        assert seen[-1] == 6 * CHUNK_BYTES
        token.cancel()
        with pytest.raises(ckptio.Cancelled):
            loader.load_onto(path, [buffer], cancel=token)
    assert loader.leases == 0


def test_a_load_in_the_queue_hears_of_its_cancellation(loader: ckptio.Loader, models: Callable) -> None:
    started, token = threading.Event(), ckptio.CancelToken()
    token.cancel()
    release = threading.Event()

    def progress(done_bytes: int) -> None:
        started.set()
        release.wait(30)

    first = threading.Thread(target=lambda: loader.load(models(1), progress=progress).close())
    first.start()
    assert started.wait(30)
    with pytest.raises(ckptio.Cancelled):
        loader.load(models(2), cancel=token)
    assert first.is_alive()
    release.set()
    first.join()


def test_closing_a_loader_during_a_load_loses_no_chunk(pool: ckptio.ChunkPool, models: Callable) -> None:
    loader = ckptio.Loader(pool, threads=1)
    loader.load(models(1, chunks=3)).close()
    started = threading.Event()
    caught: list[BaseException] = []

    def load() -> None:
        try:
            loader.load(models(2, chunks=5), progress=lambda _: started.set()).close()
        except (ckptio.Cancelled, ValueError) as error:
            caught.append(error)

    with faults.injected(read_delay_us=20_000):
        thread = threading.Thread(target=load)
        thread.start()
        assert started.wait(30)
        loader.close()
        thread.join()
    assert pool.free_chunks == 10


def test_a_pool_that_somebody_else_uses_up_costs_no_lease(
    loader: ckptio.Loader, pool: ckptio.ChunkPool, models: Callable
) -> None:
    loader.load(models(1, chunks=3)).close()
    others = pool.allocate(pool.free_chunks)
    with pytest.raises(ckptio.PoolExhausted):
        loader.load(models(2))
    assert (loader.leases, loader.resident_chunks) == (0, 3)
    pool.free(others)
    loader.load(models(2)).close()


def test_a_forgotten_load_gives_its_chunks_back(loader: ckptio.Loader, models: Callable) -> None:
    loaded = [loader.load(models(1))]
    with pytest.warns(ResourceWarning, match="unclosed load"):
        loaded.clear()
    assert loader.leases == 0


def test_a_load_larger_than_the_pool_leaves_others_their_chunks(
    models: Callable,
) -> None:
    with ckptio.ChunkPool.create(None, 30 * CHUNK_BYTES, CHUNK_BYTES) as pool, ckptio.Loader(pool) as loader:
        loader.load(models(1, chunks=20)).close()
        with ckptio.DeviceBuffer.allocate("host", 60 * CHUNK_BYTES) as buffer:
            loader.load_onto(models(2, chunks=60), [buffer])
            assert bytes(buffer.read()) == bytes([2]) * 60 * CHUNK_BYTES
        assert loader.resident_chunks == 20


def test_a_load_that_was_cancelled_before_it_began_evicts_nothing(
    loader: ckptio.Loader, models: Callable
) -> None:
    loader.load(models(1)).close()
    token = ckptio.CancelToken()
    token.cancel()
    with pytest.raises(ckptio.Cancelled):
        loader.load(models(2), cancel=token)
    assert loader.resident_chunks == 6


def test_what_progress_raises_is_the_callers_own_error(loader: ckptio.Loader, models: Callable) -> None:
    class Late(TimeoutError):
        """Is an OSError, and none of the disk."""

    def progress(done_bytes: int) -> None:
        raise Late("deadline passed")

    with pytest.raises(Late, match=r"^deadline passed$"):
        loader.load(models(1), progress=progress)
    with ckptio.DeviceBuffer.allocate("host", 6 * CHUNK_BYTES) as buffer, pytest.raises(Late):
        loader.load_onto(models(1), [buffer], progress=progress)
    assert loader.leases == 0


def test_a_file_that_exists_is_never_taken_for_a_pool(tmpfs_path: Path) -> None:
    (tmpfs_path / "precious").write_bytes(b"weights")
    with pytest.raises(FileExistsError, match="not a pool of ckptio"):
        ckptio.ChunkPool.create(tmpfs_path / "precious", 10 * CHUNK_BYTES, CHUNK_BYTES)
    assert (tmpfs_path / "precious").read_bytes() == b"weights"
    # Nor where a pool was before.
    with ckptio.ChunkPool.create(tmpfs_path / "pool", 10 * CHUNK_BYTES, CHUNK_BYTES):
        (tmpfs_path / "pool").unlink()
        (tmpfs_path / "pool").write_bytes(b"something else")
    assert (tmpfs_path / "pool").read_bytes() == b"something else"


def test_a_pool_on_a_disk_is_refused(tmp_path: Path) -> None:
    from ckptio.pool_file import _file_system_of

    if _file_system_of(tmp_path) in ("tmpfs", "ramfs", ""):
        pytest.skip("temporary files are in memory here")
    with pytest.raises(ValueError, match="a pool is memory"):
        ckptio.ChunkPool.create(tmp_path / "pool", 10 * CHUNK_BYTES, CHUNK_BYTES)


def test_of_many_processes_that_want_one_pool_one_gets_it(tmpfs_path: Path) -> None:
    code = (
        "import sys, ckptio\n"
        "try:\n"
        f"    pool = ckptio.ChunkPool.create({str(tmpfs_path / 'pool')!r}, 81920, 8192)\n"
        "except FileExistsError:\n"
        "    print('other'); sys.exit()\n"
        "print('owner', flush=True); sys.stdin.read(); pool.close()\n"
    )
    for _ in range(3):
        processes = [
            subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) for _ in range(4)
        ]
        said = [process.stdout.readline().strip() for process in processes if process.stdout]
        assert sorted(said) == ["other", "other", "other", "owner"]
        for process in processes:
            process.communicate("")
        assert list(tmpfs_path.iterdir()) == []


def test_the_pool_of_a_killed_process_is_replaced(tmpfs_path: Path) -> None:
    make = f"pool = ckptio.ChunkPool.create({str(tmpfs_path / 'pool')!r}, 81920, 8192)"
    code = f"import os, ckptio; {make}; os._exit(9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    assert (tmpfs_path / "pool").exists()
    with ckptio.ChunkPool.create(tmpfs_path / "pool", 10 * CHUNK_BYTES, CHUNK_BYTES) as pool:
        assert pool.free_chunks == 10
    assert list(tmpfs_path.iterdir()) == []


def test_private_memory_of_any_size_is_given_back_whole() -> None:
    def mapped_kb() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmSize:"))

    _native.Mapping.anonymous(12293).close()
    before = mapped_kb()
    for _ in range(100):
        _native.Mapping.anonymous(12293).close()
    assert mapped_kb() - before < 100 * 1024


def test_a_pipeline_is_made_for_the_chunks_that_are_read(pool: ckptio.ChunkPool) -> None:
    memory = _native.DeviceMemory.allocate(-1, CHUNK_BYTES)
    sink = _native.CopyPipeline([memory], [(0, 0, CHUNK_BYTES)], pool.mapping, [], CHUNK_BYTES, True)
    threads = _native.ReaderThreads(1)
    with pytest.raises(ValueError, match="another number of chunks"):
        threads.read(pool.mapping, [], [], False, False, None, sink, None)
    with pytest.raises(BufferError, match="use the memory"):
        memory.close()
    assert sink.finish(True, None, None)[:3] == (0, "", 0)
    with pytest.raises(ValueError, match="finished"):
        sink.finish(True, None, None)
    threads.close()
    memory.close()


def test_a_pipeline_that_the_collector_finds_lets_go_of_everything(pool: ckptio.ChunkPool) -> None:
    memory = _native.DeviceMemory.allocate(-1, CHUNK_BYTES)

    class Holder:
        """Part of a cycle, so that only the collector frees what it has."""

    holder = Holder()
    holder.itself = holder  # type: ignore[attr-defined]
    holder.sink = _native.CopyPipeline([memory], [], pool.mapping, [], CHUNK_BYTES, True)  # type: ignore[attr-defined]
    del holder
    gc.collect()
    assert pool.mapping.views == 0
    memory.close()


def test_threads_that_cannot_be_had_are_an_os_error() -> None:
    code = (
        "import resource, ckptio\n"
        "ckptio.Reader(1).close()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20),) * 2)  # stacks of a few threads\n"
        "try:\n"
        "    ckptio.Reader(200)\n"
        "except OSError as error:\n"
        "    print(error.errno)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == str(errno.EAGAIN), result.stderr


def test_room_is_what_a_container_has_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ckptio import memory

    group = tmp_path / "groups" / "service"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/service\n")
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("900000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    (tmp_path / "groups" / "memory.max").write_text("max\n")
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    assert memory.available_bytes() == 150000
