"""The `ckptio` command."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptio import faults
from ckptio.cli import main


def test_a_model_goes_through_every_command(
    tmp_path: Path, write_model: Callable, some_tensors: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_model(tmp_path / "model", some_tensors((100, 3), (7,)))
    path = str(tmp_path / "c")
    assert main(["convert", str(source), path, "--name", "acme/model", "--revision", "v1"]) == 0
    assert main(["verify", path]) == 0
    assert main(["export", path, str(tmp_path / "stock")]) == 0
    assert (tmp_path / "stock" / "model.safetensors").exists()
    capsys.readouterr()

    assert main(["inspect", path, "--tensors"]) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM" in text
    assert "acme/model@v1" in text
    assert "t.0  uint8 [100, 3]" in text
    assert main(["inspect", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensor_count"] == 2


def test_a_dry_run_says_what_would_be_and_writes_nothing(
    tmp_path: Path, write_model: Callable, some_tensors: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_model(tmp_path / "model", some_tensors((100, 3), (7,)))
    (source / "model.gguf").write_text("other")
    command = ["convert", str(source), str(tmp_path / "c"), "--dry-run", "--gpus", "2"]
    assert main(command) == 0
    text = capsys.readouterr().out
    for line in ("2 tensors, 307 bytes", "GPU 0         1 tensors, 300", "GPU 1         1 tensors, 7 bytes"):
        assert line in text
    for line in (
        "copied        tokenizer.json",
        "warning       model.gguf: other weights",
        " bytes needed, ",
    ):
        assert line in text
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_an_interrupted_convert_command_is_resumed_unless_told_otherwise(
    tmp_path: Path,
    write_model: Callable,
    some_tensors: Callable,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """F7: on by default in the command."""
    source = write_model(tmp_path / "model", some_tensors(*[(9 << 20,)] * 4))
    for options, leftovers in (([], 1), (["--no-resume"], 0)):
        with faults.injected(write_error=errno.EIO, write_after_bytes=33 << 20):
            assert main(["convert", str(source), str(tmp_path / "c"), *options]) == 1
        assert "partition_0.bin" in capsys.readouterr().err
        assert len(list(tmp_path.glob(".c.ckptio-tmp-*"))) == leftovers
    assert main(["convert", str(source), str(tmp_path / "c")]) == 0
    assert main(["verify", str(tmp_path / "c")]) == 0


def test_errors_are_one_line_and_status_1(
    tmp_path: Path, a_checkpoint: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_checkpoint()
    raw = bytearray((path / "partition_0.bin").read_bytes())
    raw[5000] ^= 1
    (path / "partition_0.bin").write_bytes(raw)
    assert main(["verify", str(path)]) == 1
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert main(["convert", str(tmp_path / "source"), str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "partition_0.bin" in lines[0]
    assert "offset 0" in lines[0]
    assert "nowhere" in lines[1]
    assert "overwrite" in lines[2]


def test_the_doctor_knows_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "native part   loaded" in capsys.readouterr().out


def test_an_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["frobnicate"])
    assert caught.value.code == 2
