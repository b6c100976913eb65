"""Owns directories as the source of an import: a model's own, a snapshot of a hub's cache, or what was downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from whimbrel.wire.errors import ImportFailed
from whimbrel.wire.messages import MODEL_CONFIG_BYTES_MAX, JobStage

from services.storage_agent.import_files import CONFIG_FILE, is_weights

# What git leaves in the place of a large file that was not fetched.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
SNAPSHOTS, REFS = "snapshots", "refs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A directory to convert; `name` and `revision` are recorded with the checkpoint."""

    path: Path
    name: str
    revision: str | None = None


def source_directory(model_id: str, location: str) -> Published:
    """The directory that an import reads; raises ImportFailed when it is none of this machine."""
    path = Path(location)
    if not path.exists():
        reason = f"{path} does not exist on this server; give a directory that every agent can read"
    elif not path.is_dir():
        reason = f"{path} is not a directory; give the one that holds {CONFIG_FILE} and the safetensors files"
    elif (path / SNAPSHOTS).is_dir() and not (path / CONFIG_FILE).exists():
        return _snapshot(model_id, path)
    else:
        return Published(path=path, name=location)
    raise _refused(model_id, reason)


def check_directory(model_id: str, directory: Path) -> None:
    """Raises ImportFailed for what would fail later, or never serve, before gigabytes are read."""
    config = directory / CONFIG_FILE
    try:
        size_bytes = config.stat().st_size
    except FileNotFoundError as error:
        raise _refused(model_id, f"{config} is missing; a model's directory has one") from error
    if size_bytes > MODEL_CONFIG_BYTES_MAX:
        raise _refused(model_id, f"{config} has {size_bytes} bytes, at most {MODEL_CONFIG_BYTES_MAX} are allowed")
    for path in sorted(directory.iterdir()):
        if not path.exists():
            reason = f"{path} is a link to {path.readlink()}, which is not there; fetch the model again"
            raise _refused(model_id, reason)
        if is_weights(path.name) and path.is_file():
            with path.open("rb") as content:
                is_pointer = content.read(len(LFS_POINTER)) == LFS_POINTER
            if is_pointer:
                reason = f"{path} is a git-lfs pointer, not the file itself; run: git lfs pull"
                raise _refused(model_id, reason)


def _snapshot(model_id: str, path: Path) -> Published:
    """The snapshot that a model's directory in a hub's cache stands for: that of `main`, or the only one."""
    found = sorted(entry for entry in (path / SNAPSHOTS).iterdir() if entry.is_dir())
    main = path / REFS / "main"
    if main.is_file():
        wanted = path / SNAPSHOTS / main.read_text().strip()
        found = [wanted] if wanted in found else found
    if len(found) != 1:
        names = ", ".join(str(entry) for entry in found[:5]) or "none"
        raise _refused(model_id, f"{path} is a hub's cache with several snapshots, or none; give one of them: {names}")
    name = path.name.removeprefix("models--").replace("--", "/")
    return Published(path=found[0], name=f"hf://{name}", revision=found[0].name)


def _refused(model_id: str, reason: str) -> ImportFailed:
    return ImportFailed(model_id=model_id, stage=JobStage.QUEUED, reason=reason)
