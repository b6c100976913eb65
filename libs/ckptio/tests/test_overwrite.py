"""What is replaced: only what ckptio wrote. What is read or exported: only what was written."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import ckptio
from ckptio.manifest import MANIFEST_FILE
from ckptio.publish import publishing
from ckptio.replaceable import EXPORT_FILE, export_note


def tree(path: Path) -> Mapping[str, bytes | str]:
    """Every file and link below a directory, with its content."""
    found: dict[str, bytes | str] = {}
    for directory, subdirectories, names in os.walk(path):
        for name in [*names, *subdirectories]:
            entry = Path(directory) / name
            if entry.is_symlink():
                found[str(entry.relative_to(path))] = os.readlink(entry)
            elif entry.is_file():
                found[str(entry.relative_to(path))] = entry.read_bytes()
    return found


def write_tree(path: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


FOREIGN = {
    "a web application": {"manifest.json": '{"name": "App", "icons": []}', "index.html": "<html>"},
    "a manifest that is no JSON": {"manifest.json": "not JSON", "notes": "x"},
    "a manifest that is a list": {"manifest.json": '["ckptio"]'},
    "a downloaded model": {
        "model.safetensors": "weights",
        "config.json": "{}",
        "NOTES.md": "x",
        ".git/HEAD": "ref",
    },
    "a model with nothing else": {"model.safetensors": "weights"},
    "a home directory": {"thesis.txt": "years of work"},
    "an export with a file more": {
        EXPORT_FILE: export_note(["model.safetensors"]).decode(),
        "model.safetensors": "weights",
        "deep/below/NOTES.md": "x",
    },
    "a note of another kind": {EXPORT_FILE: '{"format": "other"}', "model.safetensors": "weights"},
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN.keys())
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_directory_of_somebody_else_is_never_replaced(
    files: Mapping[str, str], overwrite: bool, a_checkpoint: Callable, tmp_path: Path
) -> None:
    """F7: by no command, whatever names its files have."""
    checkpoint = a_checkpoint()
    precious = write_tree(tmp_path / "precious", files)
    before = tree(precious)
    for replace in (
        lambda: ckptio.convert(tmp_path / "source", precious, overwrite=overwrite),
        lambda: ckptio.export(checkpoint, precious, overwrite=overwrite),
    ):
        with pytest.raises(ckptio.CheckpointExists, match="not replaced") as caught:
            replace()
        assert "--overwrite" not in str(caught.value), "never advised, then refused"
        assert tree(precious) == before


@pytest.mark.parametrize("kind", ["file", "file below", "link", "link to a directory"])
def test_what_somebody_put_into_a_checkpoint_or_an_export_is_kept_and_named(
    kind: str, a_checkpoint: Callable, tmp_path: Path
) -> None:
    checkpoint = a_checkpoint()
    ckptio.export(checkpoint, tmp_path / "stock")
    again: dict[str, Callable[[], object]] = {
        "checkpoint": lambda: ckptio.convert(tmp_path / "source", checkpoint, overwrite=True),
        "stock": lambda: ckptio.export(checkpoint, tmp_path / "stock", overwrite=True),
    }
    for name, replace in again.items():
        replace()
        extra = tmp_path / name / ("sub/mine" if kind == "file below" else "mine")
        extra.parent.mkdir(exist_ok=True)
        if kind.startswith("file"):
            extra.write_text("mine")
        else:
            extra.symlink_to(tmp_path / "source" if kind == "link to a directory" else "nowhere")
        before = tree(tmp_path / name)
        with pytest.raises(ckptio.CheckpointExists, match=r"holds (sub/)?mine, which ckptio did not write"):
            replace()
        assert tree(tmp_path / name) == before
        extra.unlink()
        replace()


def test_a_checkpoint_is_no_export_and_an_export_no_checkpoint(
    a_checkpoint: Callable, tmp_path: Path
) -> None:
    checkpoint = a_checkpoint()
    ckptio.export(checkpoint, tmp_path / "stock")
    with pytest.raises(ckptio.CheckpointExists):
        ckptio.convert(tmp_path / "source", tmp_path / "stock", overwrite=True)
    other = a_checkpoint((5,), directory=tmp_path / "other")
    with pytest.raises(ckptio.CheckpointExists):
        ckptio.export(other, checkpoint, overwrite=True)
    ckptio.verify(checkpoint)


def test_a_damaged_checkpoint_and_one_of_another_version_are_replaced(
    a_checkpoint: Callable, tmp_path: Path
) -> None:
    checkpoint = a_checkpoint()
    manifest = json.loads((checkpoint / MANIFEST_FILE).read_text())
    manifest["format_version"] = 99
    (checkpoint / MANIFEST_FILE).write_text(json.dumps(manifest))
    (checkpoint / "partition_0.bin").unlink()
    ckptio.convert(tmp_path / "source", checkpoint, overwrite=True)
    ckptio.verify(checkpoint)


def test_another_marker_still_has_to_be_there(tmp_path: Path) -> None:
    write_tree(tmp_path / "own", {"done": "", "data": "old"})
    with publishing(tmp_path / "own", marker="done", overwrite=True) as directory:
        write_tree(directory, {"done": "", "data": "new"})
    assert (tmp_path / "own" / "data").read_text() == "new"
    with pytest.raises(ckptio.CheckpointExists), publishing(tmp_path / "own", marker="other", overwrite=True):
        pass


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("target", ["checkpoint", "empty", "nowhere"])
def test_a_link_is_refused_before_any_work(
    target: str, overwrite: bool, a_checkpoint: Callable, tmp_path: Path
) -> None:
    checkpoint = a_checkpoint()
    (tmp_path / "empty").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    before = tree(tmp_path)
    seen: list[ckptio.Progress] = []
    with pytest.raises(ckptio.CheckpointExists, match=f"link to .*{target}; give that path instead"):
        ckptio.convert(tmp_path / "source", link, overwrite=overwrite, progress=seen.append)
    with pytest.raises(ckptio.CheckpointExists, match="is a link"):
        ckptio.export(checkpoint, link, overwrite=overwrite, progress=seen.append)
    assert seen == []
    assert tree(tmp_path) == before


@pytest.mark.parametrize("place", ["c", "sub/c", "../source/c", "link/c"])
def test_a_destination_inside_the_source_is_refused(
    place: str, a_checkpoint: Callable, tmp_path: Path
) -> None:
    checkpoint = a_checkpoint()
    source = tmp_path / "source"
    (tmp_path / "link").symlink_to(source)
    destination = tmp_path / place if place.startswith("link") else source / place
    before = tree(tmp_path)
    for attempt in (ckptio.convert, ckptio.plan_conversion):
        with pytest.raises(ckptio.CkptioError, match=r"is inside .*choose a place outside"):
            attempt(source, destination)
    if not place.startswith("link"):
        with pytest.raises(ckptio.CkptioError, match="is inside"):
            ckptio.export(checkpoint, checkpoint / place.replace("../source", "../checkpoint"))
    assert tree(tmp_path) == before
    ckptio.convert(source, tmp_path / "source-2")  # a name that only begins alike


def test_checkpoints_and_exports_inside_a_source_are_no_part_of_it(
    a_checkpoint: Callable, tmp_path: Path
) -> None:
    """As earlier versions made them there: a model stays what it is."""
    first = ckptio.read_manifest(a_checkpoint())
    source = tmp_path / "source"
    ckptio.export(tmp_path / "checkpoint", tmp_path / "stock")
    os.rename(tmp_path / "checkpoint", source / "made")
    (source / "sub").mkdir()
    os.rename(tmp_path / "stock", source / "sub" / "stock")
    write_tree(source / "app", {"manifest.json": "{}"})
    manifest = ckptio.convert(source, tmp_path / "again")
    assert {file.name for file in manifest.files} == {
        *(file.name for file in first.files),
        "app/manifest.json",
    }
    assert {"made", "sub/stock"} <= {
        warning.split(":")[0] for warning in ckptio.plan_conversion(source).warnings
    }


@pytest.mark.parametrize("gpus", [None, 2])
def test_an_export_of_damaged_bytes_is_refused_unless_asked_for(
    gpus: int | None, tmp_path: Path, write_model: Callable, some_tensors: Callable
) -> None:
    """F7: lossless, so what was damaged is not handed on; a flipped bit in any tensor is found."""
    tensors = some_tensors((3000,), (20_000,), (7, 11))
    source = write_model(tmp_path / "source", tensors)
    checkpoint = tmp_path / "c"
    ckptio.convert(source, checkpoint, chunk_size_bytes=8192, partitioning=gpus)
    index = ckptio.read_index(checkpoint)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for entry in index.values():
        file = checkpoint / f"partition_{entry.partition}.bin"
        raw = file.read_bytes()
        place = entry.offset_bytes + random.Random(seed).randrange(entry.size_bytes)
        file.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        with pytest.raises(ckptio.CorruptCheckpoint) as caught:
            ckptio.export(checkpoint, tmp_path / "stock")
        assert caught.value.path == file
        assert caught.value.offset_bytes == place // 8192 * 8192
        assert not (tmp_path / "stock").exists()
        ckptio.export(checkpoint, tmp_path / "stock", overwrite=True, verify=False)
        file.write_bytes(raw)
        ckptio.export(checkpoint, tmp_path / "stock", overwrite=True)
        for child in (tmp_path / "stock").iterdir():
            child.unlink()
        (tmp_path / "stock").rmdir()


def test_an_export_checks_a_tensor_split_over_gpus_and_a_view(tmp_path: Path) -> None:
    """F7: joined and strided reads as well."""
    torch = pytest.importorskip("torch", reason="views are torch's")
    base = torch.arange(9000, dtype=torch.float32).reshape(90, 100)
    torch.save({"w.weight": base}, tmp_path / "split.pt")
    plan = ckptio.by_tensor_parallel({"w": "rowwise"}, 2)
    ckptio.convert(tmp_path / "split.pt", tmp_path / "split", partitioning=plan, chunk_size_bytes=4096)
    ckptio.save({"view": base.T}, tmp_path / "view", chunk_size_bytes=4096)
    for name in ("split", "view"):
        file = tmp_path / name / "partition_0.bin"
        with open(file, "r+b") as stream:
            stream.seek(4096 * 2 + 5)
            stream.write(b"\xff")
        with pytest.raises(ckptio.CorruptCheckpoint) as caught:
            ckptio.export(tmp_path / name, tmp_path / f"{name}-stock")
        assert (caught.value.path, caught.value.chunk_index) == (file, 2)


def test_an_export_checks_the_files_beside_the_weights(a_checkpoint: Callable, tmp_path: Path) -> None:
    checkpoint = a_checkpoint()
    (checkpoint / "tokenizer.json").write_text('{"version": "6.6"}')
    with pytest.raises(ckptio.CorruptCheckpoint, match=r"tokenizer\.json.*digest"):
        ckptio.export(checkpoint, tmp_path / "stock")
    assert not (tmp_path / "stock").exists()
    ckptio.export(checkpoint, tmp_path / "stock", verify=False)
    assert (tmp_path / "stock" / "tokenizer.json").read_text() == '{"version": "6.6"}'
