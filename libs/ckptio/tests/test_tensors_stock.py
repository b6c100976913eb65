"""Safetensors as they were published, loaded without a conversion."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import ckptio
from ckptio.dtypes import DTYPES
from ckptio.layout import read_layout
from ckptio.stock import encode_header
from ckptio.torch import _read_python
from ckptio.views import contiguous_stride, make_views

STOCK_DTYPES = sorted(name for name, dtype in DTYPES.items() if dtype.stock and hasattr(torch, name))


def unaligned_file(path: Path) -> Path:
    """A valid file of every dtype, where each tensor begins one byte after a multiple of its element."""
    tensors = [("pad", "uint8", (1,))]
    for number, name in enumerate(STOCK_DTYPES):
        tensors += [(name, name, (3, 4)), (f"{name}.none", name, (0, 2)), (f"odd.{number}", "uint8", (16,))]
    header = encode_header(tensors, {"format": "pt", "tied": "float32"})
    size_bytes = sum(DTYPES[dtype].item_size_bytes * shape[0] * (*shape, 1)[1] for _, dtype, shape in tensors)
    path.write_bytes(header + bytes(number * 7 % 256 for number in range(size_bytes)))
    return path


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert got[name].data_ptr() % max(tensor.element_size(), 1) == 0, name
        raw = got[name].reshape(-1).view(torch.uint8)
        assert raw.equal(tensor.reshape(-1).view(torch.uint8)), name


def test_unaligned_tensors_are_copied_never_misread(any_path: Path) -> None:
    """F7: with the native reader and without it, all dtypes; a tied one shares the copy."""
    path = unaligned_file(any_path / "model.safetensors")
    expected = safetensors.torch.load_file(path)
    expected["tied"] = expected["float32"]
    layout = read_layout(any_path)
    assert not layout.is_aligned
    loaded = ckptio.load(any_path)
    assert_equal(loaded, expected)
    assert loaded["tied"].data_ptr() == loaded["float32"].data_ptr()
    assert_equal(make_views(layout.index, [_read_python(layout, 0, False)]), expected)
    pool_bytes = 1 << 20
    with ckptio.ChunkPool.create(None, pool_bytes, 4096) as pool, ckptio.Reader() as reader:
        size_bytes = layout.index.partitions[0].padded_bytes
        chunks = pool.allocate(-(-size_bytes // 4096))
        reader.read(pool, layout.files[0], chunks, size_bytes)
        with ckptio.map_chunks(pool.path, 4096, chunks, size_bytes) as mapping:
            assert_equal(ckptio.tensors(layout.index, [mapping]), expected)


@pytest.mark.parametrize("shards", [1, 3])
def test_a_published_model_loads_as_safetensors_gives_it(
    shards: int, write_model: Callable, some_tensors: Callable, any_path: Path
) -> None:
    """F7: single and sharded, odd sizes around 512 B and 4 KiB, equal tensor by tensor."""
    shapes = [(size + odd,) for size in (512, 4096, 8192) for odd in (-1, 0, 1)]
    write_model(any_path / "m", some_tensors(*shapes, (7, 11), ()), shards=shards)
    expected = {
        name: tensor
        for file in (any_path / "m").glob("*.safetensors")
        for name, tensor in safetensors.torch.load_file(file).items()
    }
    assert_equal(ckptio.load(any_path / "m"), expected)
    for file in (any_path / "m").glob("*.safetensors"):
        assert_equal(ckptio.load(file), safetensors.torch.load_file(file))
    ckptio.convert(any_path / "m", any_path / "c", chunk_size_bytes=8192)
    assert_equal(ckptio.load(any_path / "c"), expected)


def test_each_partition_goes_to_its_own_device(tmp_path: Path) -> None:
    state = {f"layer.{number}": torch.randn(3, 5) for number in range(3)}
    ckptio.save(state, tmp_path / "c", partition_of=lambda name: int(name[-1]))
    loaded = ckptio.load(tmp_path / "c", ["cpu", "meta", torch.device("cpu")])
    assert [loaded[name].device.type for name in sorted(loaded)] == ["cpu", "meta", "cpu"]
    assert loaded["layer.1"].shape == (3, 5)
    assert loaded["layer.2"].equal(state["layer.2"])
    with pytest.raises(ValueError, match="2 devices for 3 partitions"):
        ckptio.load(tmp_path / "c", ["cpu", "cpu"])


def test_verification_can_be_left_out(a_checkpoint: Callable) -> None:
    path = a_checkpoint()
    raw = bytearray((path / "partition_0.bin").read_bytes())
    raw[5] ^= 1
    (path / "partition_0.bin").write_bytes(raw)
    with pytest.raises(ckptio.CorruptCheckpoint, match=r"partition_0\.bin.*chunk 0"):
        ckptio.load(path)
    name = next(iter(ckptio.read_index(path)))
    assert ckptio.load(path, verify=False)[name].reshape(-1)[5] == raw[5]


def test_a_dtype_that_this_torch_lacks_is_named(tmp_path: Path) -> None:
    """An index may be newer than the torch that reads it."""
    lacking = sorted(name for name in DTYPES if not hasattr(torch, name))
    if not lacking:
        pytest.skip("this torch has every dtype of the format")
    path = tmp_path / "model.safetensors"
    stock = [name for name in lacking if DTYPES[name].stock]
    if not stock:
        pytest.skip("this torch has every dtype that safetensors has")
    path.write_bytes(encode_header([("x", stock[0], (2,))], {}) + bytes(2 * DTYPES[stock[0]].item_size_bytes))
    with pytest.raises(ckptio.UnsupportedFormat, match=stock[0]):
        ckptio.load(path)


def test_strides_of_a_contiguous_tensor_are_those_of_torch() -> None:
    for shape in [(), (0,), (3,), (2, 0, 4), (2, 1, 5), (4, 3, 2)]:
        assert contiguous_stride(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(is_enabled: bool, a_checkpoint: Callable) -> None:
    """Also when the read fails."""
    path = a_checkpoint()
    was_enabled = gc.isenabled()
    try:
        gc.enable() if is_enabled else gc.disable()
        ckptio.load(path)
        assert gc.isenabled() == is_enabled
        (path / "manifest.json").write_bytes(b"{")
        with pytest.raises(ckptio.CorruptCheckpoint):
            ckptio.load(path)
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable() if was_enabled else gc.disable()
