"""Nothing lost on any way through the format: save, verify, load, open, export, convert, and stock again."""

from __future__ import annotations

import ctypes
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import ckptio
from ckptio import lazy
from ckptio.dtypes import DTYPES
from ckptio.safetensors_face import load_file, save_file

STOCK_DTYPES = sorted(name for name, dtype in DTYPES.items() if dtype.stock and hasattr(torch, name))
CHUNK_BYTES = (4096, 8192)
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

# One byte less, exact, and one more, around blocks of devices, pages, chunks, two chunks; and small odd ones.
SIZES_BYTES = sorted(
    {0, 1, 3, 17} | {edge + odd for edge in (256, 512, 4096, 8192, 16384) for odd in (-1, 0, 1)}
)


def elements(tensor: torch.Tensor) -> bytes:
    """Bytes of all elements in row-major order."""
    dense = tensor.view(CARRIERS[tensor.element_size()]).contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())


def assert_equal(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], way: str) -> None:
    assert set(got) == set(expected), way
    for name in expected:
        assert got[name].dtype == expected[name].dtype, (way, name)
        assert got[name].shape == expected[name].shape, (way, name)
        assert elements(got[name]) == elements(expected[name]), (way, name)


def random_bytes(draw: st.DrawFn, size_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


@st.composite
def edge_tensors(draw: st.DrawFn, dtypes: list[str]) -> torch.Tensor:
    """A contiguous tensor whose bytes end at or beside an edge, of one to three dimensions, or a scalar."""
    dtype = draw(st.sampled_from(dtypes))
    item_size_bytes = DTYPES[dtype].item_size_bytes
    if DTYPES[dtype].stock_packing == 1 and draw(st.integers(0, 7)) == 0:
        return random_bytes(draw, item_size_bytes).view(getattr(torch, dtype)).reshape(())
    count = draw(st.sampled_from(SIZES_BYTES)) // item_size_bytes
    flat = random_bytes(draw, count * item_size_bytes).view(getattr(torch, dtype))
    divisor = draw(st.sampled_from([d for d in (1, 2, 3, 5, 7) if count % d == 0]))
    return flat.reshape(
        draw(st.sampled_from([(count,), (divisor, count // divisor), (count // divisor, 1, divisor)]))
    )


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the storage of `base`: tied, offset, transposed, stepped or expanded."""
    flat = base.reshape(-1)
    kind = draw(st.sampled_from(["tied", "offset", "transposed", "stepped", "expanded"]))
    event(kind)
    if kind == "tied" or len(flat) < 6:
        return base
    start = draw(st.integers(0, len(flat) // 2))
    match kind:
        case "offset":
            return flat[start:]
        case "transposed":
            rows = (len(flat) - start) // 3
            return flat[start : start + 3 * rows].reshape(rows, 3).t()
        case "stepped":
            return flat[start :: draw(st.integers(2, 4))]
        case _:
            return flat[start : start + 3].expand(draw(st.integers(1, 4)), 3)


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for _ in range(draw(st.integers(1, 4))):
        base = draw(edge_tensors(STOCK_DTYPES))
        state[f"t.{len(state)}"] = base
        for _ in range(draw(st.integers(0, 2))):
            state[f"t.{len(state)}"] = draw(views(base))
    return state


@settings(max_examples=50)
@given(
    state=state_dicts(),
    chunk_size_bytes=st.sampled_from(CHUNK_BYTES),
    partitions=st.integers(1, 3),
    is_on_tmpfs=st.booleans(),
)
def test_every_way_back_gives_the_same_elements(
    tmp_path: Path,
    tmpfs_path: Path,
    state: dict[str, torch.Tensor],
    chunk_size_bytes: int,
    partitions: int,
    is_on_tmpfs: bool,
) -> None:
    """F2, F3, F7: dtypes, shapes, strides, offsets, ties; odd sizes around pages, chunks, partitions."""
    root = Path(tempfile.mkdtemp(dir=tmpfs_path if is_on_tmpfs else tmp_path))
    ckptio.save(
        state,
        root / "saved",
        chunk_size_bytes=chunk_size_bytes,
        partition_of=lambda name: int(name.rpartition(".")[2]) % partitions,
    )
    ckptio.verify(root / "saved")
    loaded = ckptio.load(root / "saved")
    assert_equal(loaded, state, "load")
    for name, tensor in state.items():
        assert tensor.is_contiguous() or loaded[name].stride() == tensor.stride()
    with lazy.open(root / "saved") as checkpoint:
        assert_equal({name: checkpoint[name] for name in checkpoint}, state, "open")
    file = ckptio.export(root / "saved", root / "stock")
    assert_equal(safetensors.torch.load_file(file), state, "export, by safetensors")
    assert_equal(load_file(file), state, "export, by load_file")
    assert_equal(ckptio.load(root / "stock"), state, "export, as a stock directory")
    ckptio.convert(root / "stock", root / "again", chunk_size_bytes=chunk_size_bytes)
    ckptio.verify(root / "again")
    assert_equal(ckptio.load(root / "again"), state, "converted again")
    dense = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in plain(state).items()
    }
    save_file(dense, root / "dense.safetensors")
    assert_equal(safetensors.torch.load_file(root / "dense.safetensors"), dense, "save_file")
    shutil.rmtree(root)


def plain(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The bytes of tensors as integers: torch does not copy strided tensors of every dtype."""
    return {name: tensor.view(CARRIERS[tensor.element_size()]) for name, tensor in state.items()}


@settings(max_examples=40)
@given(
    sizes=st.lists(st.sampled_from(SIZES_BYTES), min_size=1, max_size=6),
    chunk_size_bytes=st.sampled_from(CHUNK_BYTES),
    partitions=st.integers(1, 3),
    is_on_tmpfs=st.booleans(),
)
def test_partitions_are_sequential_aligned_and_whole(
    tmp_path: Path,
    tmpfs_path: Path,
    sizes: list[int],
    chunk_size_bytes: int,
    partitions: int,
    is_on_tmpfs: bool,
) -> None:
    """F2: tensors lie one after the other, aligned, in whole pages; F3: each at its offset."""
    path = (tmpfs_path if is_on_tmpfs else tmp_path) / "c"
    state = {f"t.{n}": torch.full((size,), n + 1, dtype=torch.uint8) for n, size in enumerate(sizes)}
    ckptio.save(
        state,
        path,
        chunk_size_bytes=chunk_size_bytes,
        overwrite=True,
        partition_of=lambda name: int(name[2:]) % partitions,
    )
    index = ckptio.read_index(path)
    end = [0] * len(index.partitions)
    files = [(path / f"partition_{number}.bin").read_bytes() for number in range(len(index.partitions))]
    for entry in index.values():
        assert entry.partition == int(entry.name[2:]) % partitions
        assert entry.offset_bytes == math.ceil(end[entry.partition] / 256) * 256
        end[entry.partition] = entry.offset_bytes + entry.size_bytes
        raw = files[entry.partition][entry.offset_bytes : end[entry.partition]]
        assert raw == bytes([int(entry.name[2:]) + 1]) * entry.size_bytes
    for part, raw, size_bytes in zip(index.partitions, files, end, strict=True):
        assert part.size_bytes == size_bytes
        assert part.padded_bytes == len(raw) == math.ceil(size_bytes / 4096) * 4096
        assert not any(raw[size_bytes:])
        assert len(part.digests) == math.ceil(len(raw) / chunk_size_bytes)
