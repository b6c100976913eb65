"""Single tensors of an open checkpoint: right, verified, and no more bytes than needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptio
from ckptio import lazy


def read_bytes_of_this_process() -> int:
    """Bytes asked for in read calls, from the page cache or not."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar"):
            return int(line.split()[1])
    raise AssertionError("no rchar")


def a_state() -> dict[str, torch.Tensor]:
    base = torch.randn(50, 30)
    return {
        "base": base,
        "tied": base,
        "view": base.t()[3:20:2],
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "complex": torch.randn(7, 5, dtype=torch.complex128),
        "big": torch.randn(9000),
    }


def test_every_tensor_is_as_it_was_saved(any_path: Path) -> None:
    """F7: dtypes, strides, ties, tensors over several chunks, with and without verification."""
    state = a_state()
    ckptio.save(state, any_path / "c", chunk_size_bytes=4096)
    for verify in (True, False):
        with lazy.open(any_path / "c", verify=verify) as checkpoint:
            assert set(checkpoint.keys()) == set(checkpoint) == set(state)
            assert len(checkpoint) == len(state)
            assert "view" in checkpoint
            assert "other" not in checkpoint
            assert checkpoint.manifest == ckptio.read_manifest(any_path / "c")
            for name in [*state, *reversed(state)]:
                tensor = checkpoint[name]
                assert tensor.equal(state[name]), name
                assert tensor.stride() == state[name].stride(), name
            with pytest.raises(KeyError, match="other"):
                checkpoint["other"]


def test_stock_tensors_are_read_alone(write_model: Callable, some_tensors: Callable, tmp_path: Path) -> None:
    write_model(tmp_path / "m", some_tensors((5_000_000,), (300,)), shards=2)
    expected = ckptio.load(tmp_path / "m")
    with lazy.open(tmp_path / "m") as checkpoint:
        assert checkpoint.manifest is None
        before = read_bytes_of_this_process()
        small = checkpoint["t.1"]
        assert read_bytes_of_this_process() - before < 2000
        assert small.equal(expected["t.1"])
        assert checkpoint["t.0"].equal(expected["t.0"])


def test_a_chunk_is_digested_once(a_checkpoint: Callable) -> None:
    """L10: what verification costs is said, and is that."""
    path = a_checkpoint((100,), (100,), (50_000,))
    with lazy.open(path) as checkpoint:
        first, second = sorted(checkpoint)[:2]
        before = read_bytes_of_this_process()
        checkpoint[first]
        between = read_bytes_of_this_process()
        checkpoint[second]
        after = read_bytes_of_this_process()
    assert 8192 <= between - before < 8192 + 400
    assert 100 <= after - between < 400


def test_damage_shows_in_the_tensor_it_hits_and_in_no_other(a_checkpoint: Callable) -> None:
    path = a_checkpoint((20_000,), (20_000,))
    raw = bytearray((path / "partition_0.bin").read_bytes())
    raw[5] ^= 1
    (path / "partition_0.bin").write_bytes(raw)
    with lazy.open(path) as checkpoint:
        for _ in range(2):
            with pytest.raises(ckptio.CorruptCheckpoint, match=r"partition_0\.bin.*chunk 0"):
                checkpoint["t.0"]
        assert checkpoint["t.1"].numel() == 20_000
    with lazy.open(path, verify=False) as checkpoint:
        assert checkpoint["t.0"][5] == raw[5]


def test_a_file_that_shrinks_while_open_is_truncated(a_checkpoint: Callable) -> None:
    path = a_checkpoint((20_000,))
    for verify in (True, False):
        with lazy.open(path, verify=verify) as checkpoint:
            whole = (path / "partition_0.bin").read_bytes()
            os.truncate(path / "partition_0.bin", 9000)
            with pytest.raises(ckptio.TruncatedCheckpoint) as caught:
                checkpoint["t.0"]
            assert caught.value.actual_bytes == 9000
            (path / "partition_0.bin").write_bytes(whole)
            assert checkpoint["t.0"].numel() == 20_000


def test_a_closed_checkpoint_says_so(a_checkpoint: Callable) -> None:
    checkpoint = lazy.open(a_checkpoint())
    tensor = checkpoint["t.0"]
    before = tensor.clone()
    checkpoint.close()
    checkpoint.close()
    assert tensor.equal(before)
    with pytest.raises(ValueError, match="closed"):
        checkpoint["t.0"]
    with pytest.raises(ValueError, match="closed"), checkpoint:
        pass


def test_a_leaked_checkpoint_warns_and_closes_its_files(a_checkpoint: Callable) -> None:
    path = a_checkpoint()
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = lazy.open(path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    with pytest.warns(ResourceWarning, match="unclosed ckptio checkpoint"):
        del checkpoint
    assert len(os.listdir("/proc/self/fd")) == before


def test_it_works_without_the_extension(a_checkpoint: Callable, tmp_path: Path) -> None:
    """Opening, and loading what was published (`a_checkpoint` keeps what it converts beside it)."""
    path = a_checkpoint()
    script = f"""
import sys
sys.modules["ckptio._native"] = None
import ckptio
from ckptio import lazy
loaded = ckptio.load({str(tmp_path / "source")!r})
with lazy.open({str(path)!r}) as checkpoint:
    print(all(checkpoint[name].equal(loaded[name]) for name in checkpoint), len(loaded))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("True 3\n", "")
