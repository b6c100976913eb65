"""Loading onto GPUs, from the disk and from the pool: the same checks for real ones and for the stand-in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import ckptio
from ckptio import faults

Models = Callable[..., Path]
Pools = Callable[[int], ckptio.ChunkPool]

_OUT_OF_MEMORY = 2

_OTHER_PROCESS = """
import sys, ckptio
path, handle, size_bytes = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
chunk_size_bytes = ckptio.read_index(path).chunk_size_bytes
with (
    ckptio.ChunkPool.create(None, 8 * chunk_size_bytes, chunk_size_bytes) as pool,
    ckptio.Loader(pool) as loader,
    ckptio.DeviceBuffer.open("cuda:0", handle, size_bytes) as buffer,
):
    loader.load_onto(path, [buffer])
"""


def _bytes_of(path: Path, partition: int = 0) -> bytes:
    size_bytes = ckptio.read_manifest(path).partitions[partition].size_bytes
    return (path / f"partition_{partition}.bin").read_bytes()[:size_bytes]


def _buffers(stack: ExitStack, path: Path, gpus: int = 1) -> list[ckptio.DeviceBuffer]:
    partitions = ckptio.read_manifest(path).partitions
    return [
        stack.enter_context(ckptio.DeviceBuffer.allocate(f"cuda:{number % gpus}", part.size_bytes))
        for number, part in enumerate(partitions)
    ]


@pytest.mark.parametrize("pool_chunks", [1, 2, 5, 64])
def test_every_byte_arrives_however_small_the_pool_is(
    a_model: Models, a_pool: Pools, pool_chunks: int
) -> None:
    """L1, L2: a model larger than the pool goes through it as through a ring."""
    path = a_model()
    pool = a_pool(pool_chunks)
    with ckptio.Loader(pool) as loader, ExitStack() as stack:
        buffers = _buffers(stack, path)
        report = loader.load_onto(path, buffers)
        assert bytes(buffers[0].read()) == _bytes_of(path)
        assert [tier.tier for tier in report.tiers] == ["SSD", "GPU"]
        assert report.tiers[1].size_bytes == ckptio.read_manifest(path).total_bytes
        assert loader.leases == 0
    assert pool.free_chunks == pool.chunk_count


def test_what_is_resident_is_not_read_again(a_model: Models, a_pool: Pools) -> None:
    """L2: DRAM to GPU without the disk."""
    path = a_model()
    with ckptio.Loader(a_pool(64)) as loader, ExitStack() as stack:
        buffers = _buffers(stack, path)
        first = loader.load_onto(path, buffers)
        again = _buffers(stack, path)
        # The disk is broken now; nobody may notice.
        with faults.injected(read_error=5, read_error_offset=0):
            second = loader.load_onto(path, again)
        assert (first.resident_bytes, second.resident_bytes) == (0, second.size_bytes)
        assert bytes(again[0].read()) == _bytes_of(path)


def test_partitions_go_to_their_gpus_in_parallel(a_model: Models, a_pool: Pools, gpus: int) -> None:
    """L5: one copier a GPU. With one GPU both partitions go there."""
    path = a_model(partitions=2)
    for factors in (ckptio.Factors(), ckptio.Factors(pipeline=False), ckptio.Factors(threads=False)):
        with ckptio.Loader(a_pool(64), factors=factors) as loader, ExitStack() as stack:
            buffers = _buffers(stack, path, gpus)
            loader.load_onto(path, buffers)
            assert [bytes(buffer.read()) for buffer in buffers] == [_bytes_of(path, 0), _bytes_of(path, 1)]


def test_the_pool_is_page_locked_for_gpus_and_can_do_without(a_model: Models) -> None:
    """L7: pinned memory is a factor that can be switched off."""
    path = a_model()
    chunk_size_bytes = ckptio.read_index(path).chunk_size_bytes
    for is_registered in (None, False):
        with ckptio.ChunkPool.create(
            None, 4 * chunk_size_bytes, chunk_size_bytes, is_registered=is_registered
        ) as pool:
            assert pool.report.is_registered == (is_registered is None)
            factors = ckptio.Factors(pinned=is_registered is None)
            with ckptio.Loader(pool, factors=factors) as loader, ExitStack() as stack:
                buffers = _buffers(stack, path)
                loader.load_onto(path, buffers)
                assert bytes(buffers[0].read()) == _bytes_of(path)


def test_cancelling_at_every_chunk_leaves_pool_and_leases_as_they_were(
    a_model: Models, a_pool: Pools
) -> None:
    path = a_model()
    pool = a_pool(3)
    chunks = pool.chunks_for(ckptio.read_manifest(path).padded_bytes)
    with ckptio.Loader(pool) as loader, ExitStack() as stack:
        buffers = _buffers(stack, path)
        for stop_at in range(chunks):
            token = ckptio.CancelToken()

            def progress(done_bytes: int, at: int = stop_at, token: ckptio.CancelToken = token) -> None:
                if done_bytes >= at * pool.chunk_size_bytes:
                    token.cancel()

            # The last chunks may be on their way already when the cancellation comes.
            with suppress(ckptio.Cancelled):
                loader.load_onto(path, buffers, progress=progress, cancel=token)
            assert (loader.leases, pool.free_chunks) == (0, 3 - loader.resident_chunks)
        loader.load_onto(path, buffers)
        assert bytes(buffers[0].read()) == _bytes_of(path)


def test_a_cancelled_load_says_so_before_anything_is_read(a_model: Models, a_pool: Pools) -> None:
    path = a_model()
    token = ckptio.CancelToken()
    token.cancel()
    with ckptio.Loader(a_pool(3)) as loader, ExitStack() as stack:
        buffers = _buffers(stack, path)
        with pytest.raises(ckptio.Cancelled):
            loader.load_onto(path, buffers, cancel=token)


def test_a_copy_that_fails_is_a_device_error_and_the_next_load_works(a_model: Models, a_pool: Pools) -> None:
    path = a_model()
    pool = a_pool(4)
    with ckptio.Loader(pool) as loader, ExitStack() as stack:
        buffers = _buffers(stack, path)
        for number in range(12):
            with (
                faults.injected(copy_error=_OUT_OF_MEMORY, copy_error_after=number),
                pytest.raises(ckptio.DeviceError, match="cudaMemcpyAsync") as caught,
            ):
                loader.load_onto(path, buffers)
            assert caught.value.code == _OUT_OF_MEMORY
            assert (loader.leases, pool.free_chunks) == (0, 4 - loader.resident_chunks)
        loader.load_onto(path, buffers)
        assert bytes(buffers[0].read()) == _bytes_of(path)


def test_another_process_loads_into_memory_that_this_one_allocated(a_model: Models) -> None:
    """L6: the worker allocates, the storage agent loads, by a handle."""
    path = a_model()
    size_bytes = ckptio.read_manifest(path).total_bytes
    with ckptio.DeviceBuffer.allocate("cuda:0", size_bytes) as buffer:
        handle = buffer.ipc_handle()
        subprocess.run(
            [sys.executable, "-c", _OTHER_PROCESS, str(path), handle.hex(), str(size_bytes)], check=True
        )
        assert bytes(buffer.read()) == _bytes_of(path)
        with pytest.raises(ckptio.DeviceError):
            ckptio.DeviceBuffer.open("cuda:0", handle, size_bytes)  # the runtime refuses its own handle


def test_a_gpu_that_is_not_there_is_named(gpus: int) -> None:
    with pytest.raises(ckptio.DeviceError, match=f"cuda:{gpus}"):
        ckptio.DeviceBuffer.allocate(f"cuda:{gpus}", 4096)


def test_torch_gets_the_same_tensors_on_the_gpu_as_on_the_host(a_model: Models) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    path = a_model()
    on_host = ckptio.load(path)
    on_gpu = ckptio.load(path, device="cuda:0")
    assert on_gpu.keys() == on_host.keys()
    assert all(torch.equal(tensor, on_gpu[name].cpu()) for name, tensor in on_host.items())
