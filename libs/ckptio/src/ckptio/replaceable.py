"""Which directories ckptio wrote itself, by their own lists of files: only those are ever replaced."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ckptio.errors import CorruptCheckpoint, PathLike
from ckptio.files import read_bounded
from ckptio.manifest import INDEX_FILE, MANIFEST_BYTES_MAX, MANIFEST_FILE, MANIFEST_FORMAT, partition_file

# Lies in every export and lists its files, so that an export can be told from a model of somebody else.
EXPORT_FILE = ".ckptio-export.json"
EXPORT_FORMAT = "ckptio-export"

_FORMATS = {MANIFEST_FILE: MANIFEST_FORMAT, EXPORT_FILE: EXPORT_FORMAT}


def why_not_replaceable(path: Path, marker: str) -> str:
    """Why the directory `path` must not be replaced; empty when all in it is what its `marker` lists.

    `marker` is `MANIFEST_FILE`, `EXPORT_FILE`, or another name of a file that must be there. An empty
    directory may be replaced. Raises OSError where the directory cannot be read.
    """
    if path.is_symlink():
        return f"is a link to {os.path.realpath(path)}; give that path instead"
    if not path.is_dir():
        return "is not a directory"
    if not any(path.iterdir()):
        return ""
    if marker not in _FORMATS:
        return "" if (path / marker).is_file() else f"has no {marker}: it is something else"
    written = _files_of(path, marker)
    if written is None:
        what = "a checkpoint" if marker == MANIFEST_FILE else "an export"
        return f"is not {what} that ckptio wrote (no {marker} that says so)"
    foreign = _first_foreign(path, written)
    return "" if foreign is None else f"holds {foreign}, which ckptio did not write there"


def is_own_output(path: Path) -> bool:
    """Whether the directory `path` is a checkpoint or an export of ckptio, whatever else it holds."""
    return any(_files_of(path, marker) is not None for marker in _FORMATS)


def export_note(files: list[str]) -> bytes:
    """The content of `EXPORT_FILE` for an export that consists of `files`."""
    return (json.dumps({"format": EXPORT_FORMAT, "files": files}, indent=1) + "\n").encode()


def _files_of(path: Path, marker: str) -> frozenset[str] | None:
    """The files that the marker file lists; None when it is not there or not ours.

    Lenient, because a damaged checkpoint or one of another version may be replaced as well.
    """
    fields = _read_fields(path / marker)
    if fields is None or fields.get("format") != _FORMATS[marker]:
        return None
    listed = fields.get("files")
    names = {marker}
    for item in listed if isinstance(listed, list) else ():
        name = item.get("name") if isinstance(item, dict) else item
        if isinstance(name, str):
            names.add(name)
    if marker == MANIFEST_FILE:
        partitions = fields.get("partitions")
        count = len(partitions) if isinstance(partitions, list) else 0
        names |= {INDEX_FILE, *(partition_file(number) for number in range(count))}
    return frozenset(names)


def _read_fields(path: Path) -> dict[str, object] | None:
    try:
        fields = json.loads(read_bounded(path, MANIFEST_BYTES_MAX))
    except (OSError, ValueError, RecursionError, CorruptCheckpoint):
        return None
    return fields if isinstance(fields, dict) else None


def _first_foreign(path: Path, written: frozenset[str]) -> PathLike | None:
    """The first file, by name, that is not listed; a link to a directory counts as a file."""

    def refuse(error: OSError) -> None:
        raise error

    for directory, subdirectories, names in os.walk(path, onerror=refuse):
        subdirectories.sort()
        links = [name for name in subdirectories if os.path.islink(os.path.join(directory, name))]
        for name in sorted([*names, *links]):
            relative = os.path.relpath(os.path.join(directory, name), path)
            if relative not in written:
                return relative
    return None
