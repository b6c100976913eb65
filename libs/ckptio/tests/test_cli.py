"""The `ckptio` command."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckptio
from ckptio import faults
from ckptio.cli import main

NOBODY = 65534


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
    text = capsys.readouterr().out
    assert "native part   loaded" in text
    status = ckptio.cuda_status()
    lines = [line for line in text.splitlines() if line.startswith("GPUs ")]
    assert len(lines) == 1
    assert (status.reason or str(status.device_count)) in lines[0]


def test_an_unknown_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["frobnicate"])
    assert caught.value.code == 2


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"ckptio {ckptio.__version__}\n"


@pytest.mark.parametrize("file", ["manifest.json", "partition_0.bin", "config.json"])
@pytest.mark.parametrize("command", ["inspect", "verify", "export"])
def test_a_file_in_the_place_of_a_checkpoint_is_answered_with_what_to_give(
    command: str, file: str, a_checkpoint: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_checkpoint()
    arguments = [command, str(path / file), *([str(tmp_path / "e")] if command == "export" else [])]
    assert main(arguments) == 1
    assert capsys.readouterr().err == (
        f"ckptio: {path / file}: is a file; give the checkpoint directory, such as {path}\n"
    )


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_of_shards_is_answered_with_its_directory(
    name: str,
    tmp_path: Path,
    write_model: Callable,
    some_tensors: Callable,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_model(tmp_path / "model", some_tensors((100, 3), (7,)), shards=2)
    (source / "pytorch_model.bin.index.json").write_text("{}")
    assert main(["convert", str(source / name), str(tmp_path / "c")]) == 1
    assert f"give its directory, {source}" in capsys.readouterr().err


def test_one_shard_of_several_converts_with_a_warning(
    tmp_path: Path, write_model: Callable, some_tensors: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the plan, and when it is done; not for the whole directory, nor for a set of one."""
    source = write_model(tmp_path / "model", some_tensors((100, 3), (7,), (8,)), shards=3)
    shard = source / "model-00001-of-00003.safetensors"
    assert main(["convert", str(shard), str(tmp_path / "c"), "--dry-run"]) == 0
    assert "only one of 3 shards" in capsys.readouterr().out
    assert main(["convert", str(shard), str(tmp_path / "c")]) == 0
    assert "only one of 3 shards" in capsys.readouterr().err
    for number, whole in enumerate((source, tmp_path / "m-00001-of-00001.safetensors")):
        if not whole.exists():
            shutil.copy(shard, whole)
        assert main(["convert", str(whole), str(tmp_path / str(number)), "--dry-run"]) == 0
        assert main(["convert", str(whole), str(tmp_path / str(number))]) == 0
        output = capsys.readouterr()
        assert "shards" not in output.out + output.err


def test_overwriting_is_advised_only_where_it_would_work(
    a_checkpoint: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_checkpoint()
    assert main(["convert", str(tmp_path / "source"), str(path)]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "source"), str(path), "--overwrite"]) == 0
    (path / "mine").write_text("mine")
    capsys.readouterr()
    for options in ([], ["--overwrite"]):
        assert main(["convert", str(tmp_path / "source"), str(path), *options]) == 1
        text = capsys.readouterr().err
        assert "--overwrite" not in text
        assert "holds mine" in text
    assert main(["convert", str(tmp_path / "source"), str(path), "--dry-run"]) == 0
    assert "never replaced" in capsys.readouterr().out


def test_an_export_of_a_damaged_checkpoint_fails_unless_told_otherwise(
    a_checkpoint: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_checkpoint()
    with open(path / "partition_0.bin", "r+b") as stream:
        stream.write(b"\xff\xff")
    assert main(["export", str(path), str(tmp_path / "stock")]) == 1
    assert "partition_0.bin" in capsys.readouterr().err
    assert not (tmp_path / "stock").exists()
    assert main(["export", str(path), str(tmp_path / "stock"), "--no-verify"]) == 0


def test_a_reader_that_leaves_early_is_no_error(a_checkpoint: Callable, tmp_path: Path) -> None:
    path = a_checkpoint(*[(1,)] * 5000)
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptio.cli", "inspect", str(path), "--tensors"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert "tensors" in process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert errors == ""


INTERRUPTED = """
import sys
from ckptio.cli import main

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "ckptio.bench.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
sys.exit(main(["bench"]))
"""


def test_an_interruption_before_the_command_began_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stderr.splitlines() == ["ckptio: interrupted; run the same command again to finish"]


def test_only_the_benchmark_imports_the_benchmark(a_checkpoint: Callable) -> None:
    script = (
        "import sys; from ckptio.cli import main; main(sys.argv[1:]); "
        "print([name for name in sys.modules if name.startswith('ckptio.bench') or name == 'torch'])"
    )
    command = [sys.executable, "-c", script, "inspect", str(a_checkpoint())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Without the rights of root, if the tests have them."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_place_that_cannot_be_written_to_is_named_itself(
    write_model: Callable, some_tensors: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not some lock file that nobody asked for; and a dry run warns."""
    root = Path(tempfile.mkdtemp(prefix="ckptio-test-"))
    try:
        source = write_model(root / "model", some_tensors((10,)))
        place = root / "locked"
        place.mkdir()
        for directory, mode in ((root, 0o755), (source, 0o755), (place, 0o555)):
            directory.chmod(mode)
        with ordinary_user():
            assert main(["convert", str(source), str(place / "c")]) == 1
            assert main(["convert", str(source), str(place / "c"), "--dry-run"]) == 0
        output = capsys.readouterr()
        assert output.err.splitlines()[0] == f"ckptio: [Errno 13] Permission denied: '{place}'"
        assert f"cannot be made, because {place} cannot be written to" in output.out
        assert main(["convert", str(source), str(root / "c"), "--dry-run"]) == 0
        assert "cannot be made" not in capsys.readouterr().out
    finally:
        shutil.rmtree(root)
