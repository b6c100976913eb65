"""The benchmark end to end, on a checkpoint of a few MB: fresh processes, real loaders, one JSON object."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the benchmark makes its checkpoints with torch")
pytest.importorskip("safetensors", reason="the benchmark compares with safetensors")

from ckptio.bench import cli
from ckptio.bench.ablation import ablation_steps, run_step
from ckptio.bench.ceiling import copy_memory, read_raw, touched_buffer
from ckptio.bench.checkpoints import DirectoryInUse, MadeCheckpoint, exclusive, make_checkpoint
from ckptio.bench.loaders import LOADERS
from ckptio.bench.page_cache import set_temperature
from ckptio.bench.processes import MeasurementFailed, measure
from ckptio.bench.runner import Settings, WrongBytes, run_benchmark
from ckptio.bench.schedule import plan_steps
from ckptio.bench.specs import CHECKPOINTS, checkpoint_spec
from ckptio.bench.timing import LoadRequest, time_load, weight_files
from ckptio.bench.usage import Meter
from ckptio.errors import InsufficientSpace
from ckptio.native import native_status

pytestmark = pytest.mark.skipif(not native_status().is_loaded, reason="the native part is not built")

# The loaders that every test environment has.
LOADERS_HERE = [
    "ckptio",
    "ckptio.unverified",
    "ckptio.stock",
    "ckptio.private",
    "safetensors",
    "safetensors.mapped",
    "torch",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeCheckpoint:
    """The tiny checkpoint in all formats that need no other package."""
    directory = tmp_path_factory.mktemp("bench")
    formats = ["safetensors", "ckptio", "torch"]
    return make_checkpoint(checkpoint_spec("tiny"), directory, formats, lambda _: None)


@pytest.fixture(scope="module")
def report(made: MadeCheckpoint) -> dict[str, Any]:
    """What the command printed about the tiny checkpoint."""
    options = ["--checkpoints=tiny", "--loaders=ckptio,safetensors,torch", "--cold", "--rounds=1", "--json"]
    command = [sys.executable, "-m", "ckptio.bench", *options, f"--dir={made.path.parent}", "--keep"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    assert "seed 1" in process.stderr
    lines = process.stdout.splitlines()
    assert len(lines) == 1, "one JSON object and nothing else"
    return json.loads(lines[0])


def test_the_report_has_the_shape_that_all_benchmarks_share(report: dict[str, Any]) -> None:
    assert report["part"] == "ckptio"
    assert report["commit"]
    assert {"cpu", "cores", "memory_bytes", "device", "kernel", "pool_pages"} <= report["machine"].keys()
    assert report["machine"]["memory_bytes"] > 0
    for row in report["results"]:
        assert row.keys() == {"name", "unit", "median", "min", "max", "n", "params"}
        assert row["min"] <= row["median"] <= row["max"]
        assert row["n"] >= 1
    names = [row["name"] for row in report["results"]]
    assert len(set(names)) == len(names)


def test_the_report_names_every_figure_with_a_target(report: dict[str, Any]) -> None:
    names = {row["name"] for row in report["results"]}
    assert {
        "ckptio.cold.share_of_ceiling",
        "ckptio.cold.ratio.safetensors",
        "ckptio.cold.ratio.torch",
        "ckptio.dram.map_s.tiny",
        "ckptio.rss_beyond_pool_bytes",
        "ckptio.cpu_s.cold",
        "ckptio.ceiling.copy_bytes_per_s",
    } <= names


def test_attaching_to_the_pool_of_another_process_copies_nothing(report: dict[str, Any]) -> None:
    row = next(row for row in report["results"] if row["name"] == "ckptio.dram.map_private_bytes.tiny")
    assert row["params"]["size_bytes"] == checkpoint_spec("tiny").size_bytes
    assert row["max"] < row["params"]["size_bytes"] / 4


@pytest.mark.parametrize("temperature", ["cold", "warm"])
@pytest.mark.parametrize("loader", LOADERS_HERE)
def test_every_loader_gives_the_bytes_of_the_checkpoint(
    made: MadeCheckpoint, loader: str, temperature: str
) -> None:
    request = LoadRequest(
        loader=loader,
        temperature=temperature,
        place=str(made.place(LOADERS[loader].format)),
        prime_bytes=1024 * 1024,
        is_checked=True,
    )
    run = time_load(request)
    assert run.digest == made.digest
    assert run.size_bytes == made.spec.size_bytes
    assert run.tensor_count == len(made.spec.tensors)
    assert 0 < run.returned_s <= run.seconds
    assert (run.pool_pages != "") == (LOADERS[loader].prepare.__name__ in ("_ckptio", "_ckptio_unverified"))


def test_wrong_bytes_fail_the_benchmark_while_a_peer_that_fails_is_left_out(
    made: MadeCheckpoint, tmp_path: Path
) -> None:
    """A figure may be bad and a peer may be broken: only wrong tensors are an error."""
    shutil.copytree(made.path, tmp_path / made.path.name)
    (tmp_path / "tiny/torch/pytorch_model.bin").write_bytes(b"not torch")
    marker = tmp_path / "tiny/safetensors.complete.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"digest": "0" * 16}))
    loaders = ("torch", "safetensors")
    seed = next(s for s in range(99) if plan_steps(loaders, ["warm"], rounds=1, seed=s)[0].loader == "torch")
    settings = Settings(
        specs=(made.spec,), loaders=loaders, temperatures=("warm",), rounds=1, seed=seed, directory=tmp_path
    )
    said: list[str] = []
    with pytest.raises(WrongBytes, match="safetensors: the tensors of tiny"):
        run_benchmark(settings, said.append)
    assert any(line.startswith("tiny torch: left out, ") for line in said), said


def test_a_loader_that_is_not_installed_can_be_told() -> None:
    assert LOADERS["torch"].is_installed
    assert not dataclasses.replace(LOADERS["torch"], module="no_such_loader").is_installed


def test_a_process_that_dies_says_why() -> None:
    with pytest.raises(MeasurementFailed, match=r"No such file or directory.*nowhere"):
        measure("read_raw", {"files": ["nowhere"], "threads": 1})


def test_a_checkpoint_is_made_once_and_again_when_it_is_another(tmp_path: Path) -> None:
    spec = checkpoint_spec("tiny")
    said: list[str] = []
    assert make_checkpoint(spec, tmp_path, [], said.append).made == ("safetensors",)
    assert make_checkpoint(spec, tmp_path, [], said.append).made == ()
    other = dataclasses.replace(spec, tensors=spec.tensors[:3])
    assert make_checkpoint(other, tmp_path, [], said.append).made == ("safetensors",)
    assert len(said) == 2


def test_an_interrupted_checkpoint_is_made_anew(tmp_path: Path) -> None:
    spec = checkpoint_spec("tiny")
    first = make_checkpoint(spec, tmp_path, [], lambda _: None)
    (first.path / "safetensors.complete.json").unlink()
    first.stock_file.write_bytes(b"half")
    second = make_checkpoint(spec, tmp_path, [], lambda _: None)
    assert second.made == ("safetensors",)
    assert second.digest == first.digest
    assert second.stock_file.stat().st_size > spec.size_bytes


def test_space_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    spec = checkpoint_spec("tiny")
    huge = dataclasses.replace(spec.tensors[0], shape=(2**48,))
    with pytest.raises(InsufficientSpace):
        make_checkpoint(dataclasses.replace(spec, tensors=(huge,)), tmp_path, [], lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_serves_one_benchmark_at_a_time(tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(DirectoryInUse, match="another benchmark"), exclusive(tmp_path):
        pass
    with exclusive(tmp_path):
        pass


def test_the_page_cache_is_what_was_asked_for(made: MadeCheckpoint) -> None:
    files = weight_files(made.place("ckptio"))
    assert set_temperature(files, "warm") >= made.spec.size_bytes
    assert set_temperature(files, "cold") == 0


@pytest.mark.parametrize("place", ["disk", "tmpfs"])
def test_the_plain_read_reads_whole_files_of_any_size(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    directory = tmp_path if place == "disk" else request.getfixturevalue("tmpfs_path")
    sizes = [0, 1, 4097, 3 * 1024 * 1024 + 5]
    files = [directory / str(size) for size in sizes]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(b"x" * size)
    read = read_raw(files, threads=2)
    assert read.size_bytes == sum(sizes)
    assert read.seconds > 0


def test_the_plain_read_goes_into_private_memory_that_is_backed_already() -> None:
    """Into shared memory, on small pages, it is several times slower: no ceiling."""
    meter = Meter()
    buffer = touched_buffer(32 * 1024 * 1024)
    usage = meter.read()
    assert usage.anonymous_bytes >= len(buffer)
    assert usage.peak_bytes is None or usage.peak_bytes >= len(buffer)


def test_memory_is_copied_by_several_threads() -> None:
    copy = copy_memory(3 * 1024 * 1024, threads=2)
    assert copy.size_bytes == 3 * 1024 * 1024
    assert copy.seconds > 0


@pytest.mark.parametrize("step", ablation_steps(), ids=lambda step: step.name)
def test_every_set_of_factors_loads(made: MadeCheckpoint, step: Any) -> None:
    """L7: each factor can be switched off."""
    assert run_step(made.place("ckptio"), step.factors, "host").size_bytes >= made.spec.size_bytes


def test_the_picture_is_drawn_from_the_report(report: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws it")
    from ckptio.bench.plot import draw_plot

    draw_plot(report, tmp_path / "bench.svg")
    assert "<svg" in (tmp_path / "bench.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--checkpoints", "gpt9"], "there is no 'gpt9'"),
        (["--loaders", "ckptio,pickle"], "there is no 'pickle'"),
        (["--loaders", ","], "name at least one"),
        (["--rounds", "0"], "0 rounds"),
        (["--cold", "--warm"], "not allowed"),
        (["--device", "gpu"], "'gpu' is no device"),
        (["--device", "cuda:x"], "give host or cuda:N"),
    ],
)
def test_wrong_options_are_refused_with_what_is_possible(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["bench", *arguments])
    assert says in capsys.readouterr().err


def test_the_command_adds_itself_to_a_parser() -> None:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    run: Callable[[argparse.Namespace], int] = parser.parse_args(["bench"]).run
    assert run is cli.run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "cuda:9999"], "cuda:9999"),
        (["--plot", "nowhere/bench.svg"], "no directory nowhere"),
        (["--plot", "bench.docx"], "its ending names no kind of picture; there are: .*svg"),
        (["--plot", "bench"], "its ending"),
        (["--plot", "picture.svg"], "is a directory"),
        (["--plot", "file/bench.svg"], "cannot be written to|no directory"),
    ],
)
def test_what_would_fail_at_the_end_fails_before_anything_is_written(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws it")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture.svg").mkdir()
    (tmp_path / "file").touch()
    options = ["--checkpoints=tiny", "--loaders=ckptio", "--rounds=1", "--cold", "--dir", "made"]
    assert cli.main([*options, *arguments]) == 1
    assert re.search(says, capsys.readouterr().err)
    assert not (tmp_path / "made").exists()


def test_the_report_is_printed_before_the_picture_is_drawn(
    made: MadeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What took minutes to measure is not lost with the picture."""
    plot = pytest.importorskip("ckptio.bench.plot")
    pytest.importorskip("matplotlib", reason="matplotlib draws it")
    target = tmp_path / "sub" / "bench.svg"
    target.parent.mkdir()
    check = plot.check_plotting

    def check_and_lose_the_directory(path: Path) -> None:
        check(path)
        target.parent.rmdir()

    monkeypatch.setattr(plot, "check_plotting", check_and_lose_the_directory)
    options = ["--checkpoints=tiny", "--loaders=ckptio", "--rounds=1", "--warm", "--json", "--keep"]
    assert cli.main([*options, f"--dir={made.path.parent}", f"--plot={target}"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["results"]
    assert "bench.svg" in output.err


def test_the_help_and_the_first_line_say_how_much_is_written(tmp_path: Path) -> None:
    for name, size_gb in cli.SIZES_GB.items():
        assert checkpoint_spec(name).size_bytes / 1e9 == pytest.approx(size_gb, rel=0.03)
    assert cli.SIZES_GB.keys() == set(CHECKPOINTS)
    command = [sys.executable, "-m", "ckptio.bench"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "GB of one: qwen1.5b 3.1" in " ".join(done.stdout.split())
    options = ["--checkpoints=tiny", "--loaders=ckptio,torch", "--rounds=1", "--warm", f"--dir={tmp_path}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=True)
    size_bytes = 3 * checkpoint_spec("tiny").size_bytes  # safetensors, ckptio, torch
    assert f"writes up to {size_bytes} bytes" in done.stderr.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("moment", "ending"), [("making tiny as torch", signal.SIGINT), ("round 1/", signal.SIGTERM)]
)
def test_a_benchmark_that_is_told_to_end_leaves_nothing(
    moment: str, ending: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "ckptio.bench", "--checkpoints=tiny", "--loaders=ckptio,torch"]
    process = subprocess.Popen(
        [*command, "--rounds=1000", "--warm", f"--dir={tmp_path}"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if moment in line:
                break
        process.send_signal(ending)
        rest = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
