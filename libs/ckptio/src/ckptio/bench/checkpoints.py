"""The benchmark's checkpoints on disk: made once, in the formats that are needed, reused while complete."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptio.bench.digest import stock_digest
from ckptio.bench.specs import CheckpointSpec
from ckptio.bench.writing import CKPTIO_DIRECTORY, TENSORIZER_FILE, TORCH_FILE, write_format
from ckptio.errors import CkptioError, InsufficientSpace
from ckptio.files import sync_directory, write_durably

# Beyond the bytes of the tensors: headers, padding, the small files, and what the file system needs.
_SPACE_SLACK_BYTES = 64 * 1024 * 1024


class DirectoryInUse(CkptioError):
    """Another benchmark works in the same directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path}: another benchmark uses this directory; wait for it, or pass another --dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeCheckpoint:
    """A checkpoint on disk. `digest` is over all its tensors; `refused` says why a format is missing."""

    spec: CheckpointSpec
    path: Path
    digest: str
    made: tuple[str, ...]
    refused: dict[str, str]

    def place(self, kind: str) -> Path:
        """What a loader of this format is given: a directory, or for torch and tensorizer a file."""
        directory = self.path / kind
        places = {
            "ckptio": directory / CKPTIO_DIRECTORY,
            "torch": directory / TORCH_FILE,
            "tensorizer": directory / TENSORIZER_FILE,
        }
        return places.get(kind, directory)

    @property
    def stock_file(self) -> Path:
        """The one safetensors file."""
        return self.path / "safetensors" / self.spec.weights_file


def make_checkpoint(
    spec: CheckpointSpec, directory: Path, formats: Sequence[str], say: Callable[[str], None]
) -> MadeCheckpoint:
    """Makes what is missing of `spec` below `directory`; safetensors always, as the source of the others.

    Raises `InsufficientSpace` before anything is written, and OSError.
    """
    path = directory / spec.directory_name
    wanted = [kind for kind in dict.fromkeys(("safetensors", *formats)) if _is_possible(kind)]
    missing = [kind for kind in wanted if not _is_complete(path, kind, spec)]
    _check_space(directory, spec, len(missing))
    made, refused = [], {}
    for kind in missing:
        say(f"making {spec.name} as {kind}, {spec.size_bytes / 1e9:.2f} GB")
        try:
            _make(path, kind, spec)
        except RuntimeError as error:
            if kind == "safetensors":
                raise
            refused[kind] = f"cannot be written: {error}"
            continue
        made.append(kind)
    digest = json.loads(_marker(path, "safetensors").read_text())["digest"]
    return MadeCheckpoint(spec=spec, path=path, digest=digest, made=tuple(made), refused=refused)


def remove_formats(path: Path, kinds: Sequence[str]) -> None:
    """Removes formats of the checkpoint at `path`, whole or partial, and `path` when it is empty then."""
    for kind in kinds:
        _marker(path, kind).unlink(missing_ok=True)
        for directory in (path / kind, path / f"{kind}.partial"):
            shutil.rmtree(directory, ignore_errors=True)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Holds `directory`, made when missing, for one benchmark; raises `DirectoryInUse`."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUse(directory) from None
        yield
    finally:
        os.close(descriptor)


def _is_possible(kind: str) -> bool:
    return kind != "tensorizer" or importlib.util.find_spec("tensorizer") is not None


def _marker(path: Path, kind: str) -> Path:
    """Written last, outside the format's directory: what is copied from there must not see it."""
    return path / f"{kind}.complete.json"


def _is_complete(path: Path, kind: str, spec: CheckpointSpec) -> bool:
    try:
        marker = json.loads(_marker(path, kind).read_text())
    except (OSError, ValueError):
        return False
    return (path / kind).is_dir() and marker.get("fingerprint") == spec.fingerprint


def _check_space(directory: Path, spec: CheckpointSpec, count: int) -> None:
    required_bytes = count * (spec.size_bytes + _SPACE_SLACK_BYTES)
    available_bytes = shutil.disk_usage(directory).free
    if count and available_bytes < required_bytes:
        raise InsufficientSpace(directory, required_bytes=required_bytes, available_bytes=available_bytes)


def _make(path: Path, kind: str, spec: CheckpointSpec) -> None:
    final, partial = path / kind, path / f"{kind}.partial"
    _marker(path, kind).unlink(missing_ok=True)
    for old in (final, partial):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write_format(kind, spec, path / "safetensors", partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(final)
    content = {"fingerprint": spec.fingerprint}
    if kind == "safetensors":
        content["digest"] = stock_digest(final / spec.weights_file)
    write_durably(_marker(path, kind), json.dumps(content).encode())
    sync_directory(path)
