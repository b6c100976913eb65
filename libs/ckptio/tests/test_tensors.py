"""Torch tensors through the format: every dtype, shape, stride, offset and alias, bit for bit."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckptio
from ckptio.dtypes import DTYPES
from ckptio.index import TensorEntry
from ckptio.layout import read_layout
from ckptio.torch import _read_python
from ckptio.views import contiguous_bytes, make_views, make_wholes

TORCH_DTYPES = sorted(name for name in DTYPES if hasattr(torch, name))


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte address, the last one excluded."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def elements(tensor: torch.Tensor) -> bytes:
    """Bytes of all elements in row-major order."""
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    dense = tensor.view(carriers[tensor.element_size()]).contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert elements(got[name]) == elements(tensor), name
        if not tensor.is_contiguous():
            assert got[name].stride() == tensor.stride(), name
    spans = {name: (span_of(expected[name]), span_of(got[name])) for name in expected}
    for a, (a_before, a_after) in spans.items():
        for b, (b_before, b_after) in spans.items():
            overlaps = max(a_before[0], b_before[0]) < min(a_before[1], b_before[1])
            assert overlaps == (max(a_after[0], b_after[0]) < min(a_after[1], b_after[1])), (a, b)
            if overlaps:
                assert a_before[0] - b_before[0] == a_after[0] - b_after[0], (a, b)


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """A few storages of random bytes, and on each a few tensors of any dtype, shape, stride and offset."""
    state_dict: dict[str, torch.Tensor] = {}
    for _ in range(draw(st.integers(1, 3))):
        size_bytes = draw(st.sampled_from([16, 512, 4096, 8192])) + 16 * draw(st.integers(-1, 1))
        size_bytes = max(size_bytes, 16)
        seed = draw(st.integers(0, 2**31))
        generator = torch.Generator().manual_seed(seed)
        storage = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)
        for _ in range(draw(st.integers(1, 4))):
            state_dict[f"t.{len(state_dict)}"] = draw(tensors_on(storage))
    return state_dict


@st.composite
def tensors_on(draw: st.DrawFn, storage: torch.Tensor) -> torch.Tensor:
    typed = storage.view(getattr(torch, draw(st.sampled_from(TORCH_DTYPES))))
    if draw(st.integers(0, 3)) == 0:
        return typed
    offset = draw(st.integers(0, len(typed) - 1))
    shape: list[int] = []
    stride: list[int] = []
    room = len(typed) - offset - 1
    for _ in range(draw(st.integers(0, 4))):
        step = draw(st.integers(0, min(room, 40)))
        most = room // step if step else 3
        size = draw(st.integers(0, min(most, 5) + 1))
        shape.append(size)
        stride.append(step)
        room -= max(size - 1, 0) * step
    return typed.as_strided(shape, stride, offset)


@settings(max_examples=80)
@given(state_dicts(), st.sampled_from([4096, 8192, 65536]), st.sampled_from([True, True, True, False]))
def test_any_state_dict_survives(
    tmp_path: Path,
    tmpfs_path: Path,
    state_dict: dict[str, torch.Tensor],
    chunk_size_bytes: int,
    is_on_tmpfs: bool,
) -> None:
    """F7: every dtype, shape, stride, offset and aliasing; odd sizes around 512 B, 4 KiB and chunks."""
    path = (tmpfs_path if is_on_tmpfs else tmp_path) / "c"
    ckptio.save(state_dict, path, chunk_size_bytes=chunk_size_bytes, overwrite=True)
    ckptio.verify(path)
    assert_same(ckptio.load(path), state_dict)
    layout = read_layout(path)
    bases = [_read_python(layout, number, True) for number in range(len(layout.files))]
    assert_same(make_views(layout.index, bases), state_dict)
    assert_same(make_wholes(layout.index, bases, torch.device("cpu")), state_dict)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_dtype_is_kept_bit_for_bit(dtype: str, any_path: Path) -> None:
    """F7: bool, integers, floats, complex, fp8, packed fp4, bits; with 0 dimensions and with 0 elements."""
    raw = torch.arange(16 * 40, dtype=torch.int64).to(torch.uint8)
    tensor = raw.view(getattr(torch, dtype))
    expected = {
        "flat": tensor[:17],
        "scalar": tensor.as_strided((), (), 30),
        "empty": tensor.as_strided((0, 3), (3, 1), 0),
        "transposed": tensor.as_strided((2, 3), (1, 2), 5),
    }
    ckptio.save(expected, any_path / "c")
    assert_same(ckptio.load(any_path / "c"), expected)


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    """F7: a write through one name shows through the other."""
    embed = torch.randn(64, 32)
    ckptio.save({"embed": embed, "head": embed, "half": embed[:32], "other": torch.randn(3)}, tmp_path / "c")
    manifest = ckptio.read_manifest(tmp_path / "c")
    assert manifest.total_bytes == 64 * 32 * 4 + 12
    assert manifest.parameter_count == 64 * 32 + 3
    loaded = ckptio.load(tmp_path / "c")
    loaded["head"][1, 1] = 42
    assert loaded["embed"][1, 1] == 42
    assert loaded["half"][1, 1] == 42


def test_parameters_keep_the_order_of_the_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4, bias=False))
    ckptio.save(model.state_dict(), tmp_path / "c", source_name="unit", architecture="Sequential")
    assert list(ckptio.read_index(tmp_path / "c")) == list(model.state_dict())
    again = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4, bias=False))
    again.load_state_dict(ckptio.load(tmp_path / "c"), assign=True)
    x = torch.randn(2, 4)
    assert torch.equal(model(x), again(x))
    assert ckptio.read_manifest(tmp_path / "c").source.kind == "state_dict"


def test_conjugated_and_negated_views_are_saved_as_what_they_mean(tmp_path: Path) -> None:
    z = torch.randn(5, dtype=torch.complex64)
    ckptio.save({"conj": z.conj(), "imag": z.conj().imag}, tmp_path / "c")
    loaded = ckptio.load(tmp_path / "c")
    assert torch.equal(loaded["conj"], z.conj())
    assert torch.equal(loaded["imag"], -z.imag)


def test_partitions_load_together(tmp_path: Path) -> None:
    expected = {f"layer.{number}": torch.randn(50, 7) for number in range(6)}
    ckptio.save(expected, tmp_path / "c", partition_of=lambda name: int(name[-1]) // 2)
    assert len(ckptio.read_manifest(tmp_path / "c").partitions) == 3
    assert_same(ckptio.load(tmp_path / "c"), expected)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.empty(3, device="meta"), "meta"),
        ([1, 2], "list is not a tensor"),
    ],
    ids=["sparse", "meta", "list"],
)
def test_what_has_no_plain_bytes_is_refused_by_name(value: object, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ckptio.UnsupportedFormat, match=f"bad.*{reason}"):
        ckptio.save({"good": torch.ones(1), "bad": value}, tmp_path / "c")  # type: ignore[dict-item]
    assert list(tmp_path.iterdir()) == []


def test_an_empty_state_dict_is_a_checkpoint_too(tmp_path: Path) -> None:
    ckptio.save({}, tmp_path / "c")
    ckptio.verify(tmp_path / "c")
    assert ckptio.load(tmp_path / "c") == {}


def test_export_writes_ties_out_and_makes_views_contiguous(tmp_path: Path) -> None:
    """F7: equal tensor by tensor, read by the safetensors package."""
    base = torch.randn(40, 30)
    expected = {"base": base, "tied": base, "view": base.t()[3:20:2], "fp8": base.to(torch.float8_e4m3fn)}
    ckptio.save(expected, tmp_path / "c")
    exported = load_file(ckptio.export(tmp_path / "c", tmp_path / "stock"))
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert exported[name].dtype == tensor.dtype
        assert elements(exported[name]) == elements(tensor)


def test_export_refuses_what_safetensors_does_not_have(tmp_path: Path) -> None:
    ckptio.save({"z": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "c")
    with pytest.raises(ckptio.UnsupportedFormat, match="z: safetensors has no complex128"):
        ckptio.export(tmp_path / "c", tmp_path / "stock")
    assert not (tmp_path / "stock").exists()


def test_a_damaged_checkpoint_does_not_load(a_checkpoint: Callable) -> None:
    path = a_checkpoint()
    raw = bytearray((path / "partition_0.bin").read_bytes())
    raw[9000] ^= 1
    (path / "partition_0.bin").write_bytes(raw)
    with pytest.raises(ckptio.CorruptCheckpoint) as caught:
        ckptio.load(path)
    assert (caught.value.offset_bytes, caught.value.chunk_index) == (8192, 1)
    (path / "partition_0.bin").write_bytes(raw[:-1])
    with pytest.raises(ckptio.TruncatedCheckpoint):
        ckptio.load(path)


def test_contiguous_bytes_of_an_expanded_tensor_repeat_its_elements() -> None:
    entry = TensorEntry(
        name="x", partition=0, offset_bytes=0, size_bytes=3, dtype="uint8", shape=(2, 3), stride=(0, 1)
    )
    assert contiguous_bytes(bytearray(b"abc"), entry) == b"abcabc"


def test_everything_but_tensors_works_without_torch(a_checkpoint: Callable, tmp_path: Path) -> None:
    a_checkpoint()
    script = f"""
import sys
sys.modules["torch"] = None  # any import of it fails
import ckptio
from pathlib import Path
root = Path({str(tmp_path)!r})
ckptio.convert(root / "source", root / "again", chunk_size_bytes=8192)
ckptio.verify(root / "again")
index = ckptio.read_index(root / "again")
ckptio.export(root / "again", root / "stock")
part = index.partitions[0]
with ckptio.ChunkPool.create(None, 1 << 20, 8192) as pool, ckptio.Reader() as reader:
    chunks = pool.allocate(len(part.digests))
    reader.read(pool, root / "again" / "partition_0.bin", chunks, part.padded_bytes, digests=part.digests)
    with ckptio.map_chunks(pool.path, 8192, chunks, part.padded_bytes) as mapping:
        assert bytes(mapping) == (root / "again" / "partition_0.bin").read_bytes()
try:
    ckptio.load(root / "again")
except ImportError:
    print("as expected")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("as expected\n", "")
