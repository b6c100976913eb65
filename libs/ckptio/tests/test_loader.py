"""The loader, with host memory in the place of a GPU: residency, leases, rings, faults."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import ckptio
from ckptio import faults

CHUNK_BYTES = 8192
Checkpoints = Callable[..., Path]


def size_of(path: Path) -> int:
    return ckptio.read_manifest(path).total_bytes


def bytes_of(path: Path) -> bytes:
    return (path / "partition_0.bin").read_bytes()[: size_of(path)]


def six_chunks(a_checkpoint: Checkpoints, directory: Path, name: str = "one") -> Path:
    (directory / name).mkdir()
    return a_checkpoint((5 * CHUNK_BYTES + 100,), directory=directory / name)


def test_a_loaded_checkpoint_has_its_tensors_without_a_copy(
    loader: ckptio.Loader, a_checkpoint: Checkpoints
) -> None:
    """F3, L2: the tensors are views of the pool's chunks."""
    path = a_checkpoint()
    expected = ckptio.load(path)
    with loader.load(path) as loaded:
        assert loaded.tensors.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.tensors.items())
        assert [len(chunks) for chunks in loaded.chunks] == [loader.leases]
        assert loaded.report.tiers[0].size_bytes == loaded.report.size_bytes > 0


def test_stock_safetensors_load_through_the_same_machinery(
    loader: ckptio.Loader, a_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """U1: on what is already on disk, without conversion."""
    path = a_checkpoint()
    expected = ckptio.load(path)
    with loader.load(tmp_path / "source") as loaded:
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.tensors.items())
        assert not loaded.layout.is_verified


def test_a_second_load_reads_nothing_and_a_partly_evicted_one_only_what_is_missing(
    loader: ckptio.Loader, a_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """L2: residency and eviction are per chunk."""
    one, two = six_chunks(a_checkpoint, tmp_path), six_chunks(a_checkpoint, tmp_path, "two")
    # The same bytes would be the same chunks: the second checkpoint is another one.
    two = ckptio_with_other_bytes(two)
    loader.load(one).close()
    with loader.load(one) as again:
        assert again.report.resident_bytes == again.report.size_bytes
        assert again.report.tiers[0].size_bytes == 0
    loader.load(two).close()  # needs six of ten: two of the first go
    with loader.load(one) as partly:
        assert 0 < partly.report.resident_bytes < partly.report.size_bytes
        assert bytes(torch.cat([t.view(-1) for t in partly.tensors.values()]).numpy()) == bytes_of(one)


def ckptio_with_other_bytes(path: Path) -> Path:
    tensors = {name: tensor + 1 for name, tensor in ckptio.load(path).items()}
    ckptio.save(tensors, path, chunk_size_bytes=CHUNK_BYTES, overwrite=True)
    return path


def test_two_copies_of_one_checkpoint_share_their_chunks(
    loader: ckptio.Loader, a_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    one, same = six_chunks(a_checkpoint, tmp_path), six_chunks(a_checkpoint, tmp_path, "same")
    with loader.load(one) as first, loader.load(same) as second:
        assert first.chunks == second.chunks
        assert loader.resident_chunks == 6
        assert loader.leases == 12


def test_a_leased_checkpoint_is_not_evicted_for_another(
    loader: ckptio.Loader, pool: ckptio.ChunkPool, a_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    one = six_chunks(a_checkpoint, tmp_path)
    two = ckptio_with_other_bytes(six_chunks(a_checkpoint, tmp_path, "two"))
    with loader.load(one) as loaded:
        with pytest.raises(ckptio.PoolExhausted) as caught:
            loader.load(two)
        assert (caught.value.requested_chunks, caught.value.free_chunks) == (6, 4)
        assert (loader.leases, pool.free_chunks) == (6, 4)
        assert bytes(loaded.tensors["t.0"].numpy()) == bytes_of(one)
    loader.load(two).close()


def test_closing_a_load_whose_tensors_are_in_use_is_refused(
    loader: ckptio.Loader, a_checkpoint: Checkpoints
) -> None:
    """Their chunks would hold something else after the next load."""
    loaded = loader.load(a_checkpoint())
    tensor = loaded.tensors["t.0"]
    with pytest.raises(BufferError):
        loaded.close()
    assert loader.leases > 0
    del tensor
    loaded.close()
    loaded.close()
    assert loader.leases == 0
    with pytest.raises(ValueError, match="closed"):
        _ = loaded.tensors


@pytest.mark.parametrize("pool_chunks", [1, 2, 7, 100])
def test_a_checkpoint_of_any_size_goes_through_a_pool_of_any_size(
    a_checkpoint: Checkpoints, pool_chunks: int
) -> None:
    """L1, L2: as through a ring when it is larger."""
    path = a_checkpoint((150_000,), (3,), (60_000,))
    with (
        ckptio.ChunkPool.create(None, pool_chunks * CHUNK_BYTES, chunk_size_bytes=CHUNK_BYTES) as pool,
        ckptio.Loader(pool) as loader,
        ckptio.DeviceBuffer.allocate("host", size_of(path)) as buffer,
    ):
        report = loader.load_onto(path, [buffer])
        assert bytes(buffer.read()) == bytes_of(path)
        assert loader.leases == 0
        assert loader.resident_chunks == (
            len(ckptio.read_index(path).partitions[0].digests) if pool_chunks > 90 else 0
        )
        assert {tier.tier for tier in report.tiers} == {"SSD", "GPU"}


@pytest.mark.parametrize("off", ["bulk", "direct", "threads", "pinned", "pipeline"])
def test_each_factor_can_be_switched_off(a_checkpoint: Checkpoints, off: str) -> None:
    """L7: and the bytes are the same."""
    path = a_checkpoint((70_000,), (123,), (9000,))
    with (
        ckptio.ChunkPool.create(None, 100 * CHUNK_BYTES, chunk_size_bytes=CHUNK_BYTES) as pool,
        ckptio.Loader(pool, factors=ckptio.Factors(**{off: False})) as loader,
        ckptio.DeviceBuffer.allocate("host", size_of(path)) as buffer,
    ):
        report = loader.load_onto(path, [buffer], verify=off != "bulk")
        assert bytes(buffer.read()) == bytes_of(path)
        assert report.size_bytes > 0
        if off == "direct":
            assert report.direct_bytes == 0
        if off == "bulk":
            with pytest.raises(ValueError, match="verify=False"):
                loader.load_onto(path, [buffer])


def test_cancelling_at_every_chunk_leaves_pool_and_leases_as_they_were(
    loader: ckptio.Loader, pool: ckptio.ChunkPool, a_checkpoint: Checkpoints
) -> None:
    path = a_checkpoint((6 * CHUNK_BYTES,))
    for stop_at in range(7):
        token = ckptio.CancelToken()

        def progress(done_bytes: int, at: int = stop_at, token: ckptio.CancelToken = token) -> None:
            if done_bytes >= at * CHUNK_BYTES:
                token.cancel()

        if stop_at == 0:
            token.cancel()
        # The last chunks may be done already when the cancellation comes.
        with faults.injected(read_delay_us=300), suppress(ckptio.Cancelled):
            loader.load(path, progress=progress, cancel=token).close()
        loader.drop()
        assert (loader.leases, loader.resident_chunks, pool.free_chunks) == (0, 0, 10)
    loader.load(path).close()


@pytest.mark.parametrize("is_onto", [False, True])
def test_an_input_output_error_at_every_chunk_names_it_and_leaves_nothing(
    loader: ckptio.Loader, pool: ckptio.ChunkPool, a_checkpoint: Checkpoints, is_onto: bool
) -> None:
    path = a_checkpoint((6 * CHUNK_BYTES - 50,))
    with ckptio.DeviceBuffer.allocate("host", size_of(path)) as buffer:
        for chunk_index in range(6):
            offset_bytes = chunk_index * CHUNK_BYTES
            with (
                faults.injected(read_error=errno.EIO, read_error_offset=offset_bytes),
                pytest.raises(OSError, match=f"offset {offset_bytes}") as caught,
            ):
                loader.load_onto(path, [buffer]) if is_onto else loader.load(path)
            assert caught.value.errno == errno.EIO
            assert caught.value.filename == str(path / "partition_0.bin")
            assert (loader.leases, loader.resident_chunks, pool.free_chunks) == (0, 0, 10)
        loader.load_onto(path, [buffer])
        assert bytes(buffer.read()) == bytes_of(path)


def test_a_flipped_bit_is_read_again_and_if_it_stays_its_chunk_is_named(
    loader: ckptio.Loader, pool: ckptio.ChunkPool, a_checkpoint: Checkpoints
) -> None:
    path = a_checkpoint((6 * CHUNK_BYTES,))
    with faults.injected(corrupt_offset=2 * CHUNK_BYTES + 5, times=1), loader.load(path) as loaded:
        assert loaded.report.reread_chunks == 1
    loader.drop()
    with (
        faults.injected(corrupt_offset=2 * CHUNK_BYTES + 5),
        pytest.raises(ckptio.CorruptCheckpoint) as caught,
    ):
        loader.load(path)
    assert (caught.value.chunk_index, caught.value.offset_bytes) == (2, 2 * CHUNK_BYTES)
    assert (loader.leases, pool.free_chunks) == (0, 10)


def test_a_corrupt_chunk_is_named_by_its_number_also_when_others_are_resident(
    loader: ckptio.Loader, a_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    one = six_chunks(a_checkpoint, tmp_path)
    loader.load(one).close()
    loader.load(ckptio_with_other_bytes(six_chunks(a_checkpoint, tmp_path, "two"))).close()
    with (
        faults.injected(corrupt_offset=5 * CHUNK_BYTES + 1),
        pytest.raises(ckptio.CorruptCheckpoint) as caught,
    ):
        loader.load(one)
    assert caught.value.chunk_index == 5


def test_a_copy_that_fails_is_a_device_error_and_the_next_load_works(
    loader: ckptio.Loader, pool: ckptio.ChunkPool, a_checkpoint: Checkpoints
) -> None:
    path = a_checkpoint((12 * CHUNK_BYTES,))
    with ckptio.DeviceBuffer.allocate("host", size_of(path)) as buffer:
        for number in range(12):
            with faults.injected(copy_error=2, copy_error_after=number), pytest.raises(ckptio.DeviceError):
                loader.load_onto(path, [buffer])
            assert (loader.leases, loader.resident_chunks, pool.free_chunks) == (0, 0, 10)
        loader.load_onto(path, [buffer])
        assert bytes(buffer.read()) == bytes_of(path)


def test_what_progress_raises_ends_the_load_and_leaves_nothing(
    loader: ckptio.Loader, pool: ckptio.ChunkPool, a_checkpoint: Checkpoints
) -> None:
    def stop(done_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loader.load(a_checkpoint((6 * CHUNK_BYTES,)), progress=stop)
    assert (loader.leases, pool.free_chunks) == (0, 10)


def test_buffers_that_do_not_fit_are_refused_before_anything_moves(
    loader: ckptio.Loader, a_checkpoint: Checkpoints
) -> None:
    path = a_checkpoint()
    with ckptio.DeviceBuffer.allocate("host", size_of(path) - 1) as small:
        with pytest.raises(ValueError, match="buffer 0 has"):
            loader.load_onto(path, [small])
        with pytest.raises(ValueError, match="2 buffers for 1 partitions"):
            loader.load_onto(path, [small, small])


def test_another_chunk_size_than_the_pool_has_is_refused(
    a_checkpoint: Checkpoints,
) -> None:
    path = a_checkpoint()
    with (
        ckptio.ChunkPool.create(None, 65536, chunk_size_bytes=4096) as pool,
        ckptio.Loader(pool) as loader,
        pytest.raises(ValueError, match="make a pool with the same"),
    ):
        loader.load(path)


def test_loads_of_many_threads_take_turns_and_all_are_right(
    loader: ckptio.Loader, a_checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """E4: one load at a time; leases add up to nothing at the end."""
    paths = [six_chunks(a_checkpoint, tmp_path)]
    paths.append(ckptio_with_other_bytes(six_chunks(a_checkpoint, tmp_path, "two")))
    expected = [ckptio.load(path)["t.0"] for path in paths]
    wrong: list[object] = []

    def work(number: int) -> None:
        for turn in range(5):
            which = (number + turn) % 2
            try:
                with loader.load(paths[which]) as loaded:
                    if not torch.equal(loaded.tensors["t.0"], expected[which]):
                        wrong.append(which)
            except ckptio.PoolExhausted:
                continue  # the other one is leased just now

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, loader.leases) == ([], 0)


def test_a_closed_loader_says_so_and_open_loads_may_outlive_it(
    pool: ckptio.ChunkPool, a_checkpoint: Checkpoints
) -> None:
    path = a_checkpoint()
    loader = ckptio.Loader(pool)
    loaded = loader.load(path)
    loader.close()
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        loader.load(path)
    assert loaded.tensors
    loaded.close()
    assert pool.free_chunks == 10


def test_what_is_forgotten_is_warned_about(pool: ckptio.ChunkPool, a_checkpoint: Checkpoints) -> None:
    loader = ckptio.Loader(pool)
    loaded = loader.load(a_checkpoint())
    with pytest.warns(ResourceWarning, match="unclosed load"):
        loaded.__del__()
    with pytest.warns(ResourceWarning, match="unclosed ckptio loader"):
        loader.__del__()
    with (
        ckptio.DeviceBuffer.allocate("host", 10) as buffer,
        pytest.warns(ResourceWarning, match="buffer on host"),
    ):
        buffer.__del__()
    loaded.close()
    loader.close()


def test_reports_tell_the_share_of_a_ceiling_that_was_measured(
    pool: ckptio.ChunkPool, a_checkpoint: Checkpoints
) -> None:
    """L10."""
    with (
        ckptio.Loader(pool, ceilings_bytes_per_s={"SSD": 1e9}) as loader,
        loader.load(a_checkpoint()) as loaded,
    ):
        ssd = loaded.report.tiers[0]
        assert ssd.share_of_ceiling == pytest.approx(ssd.bandwidth_bytes_per_s / 1e9)


def test_memory_of_a_buffer_is_read_in_ranges_that_exist() -> None:
    with ckptio.DeviceBuffer.allocate("host", 100) as buffer:
        with pytest.raises(ValueError, match="ends after"):
            buffer.read(50, 51)
        with pytest.raises(ValueError, match="a GPU is named"):
            buffer.ipc_handle()
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.size_bytes
    with pytest.raises(ValueError, match="device 'tpu'"):
        ckptio.DeviceBuffer.allocate("tpu", 5)
