"""Owns the question whether there is room for what an import will write, and the error that says how much is not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from whimbrel.wire.errors import ImportFailed
from whimbrel.wire.messages import JobStage

# Small files, directories and what others write meanwhile.
MARGIN_BYTES = 16 * 1024 * 1024


def check_free(model_id: str, stage: JobStage, needs: Sequence[tuple[Path, int]]) -> None:
    """Raises ImportFailed when a file system has less room than all that is needed on it, in directories that exist."""
    need_bytes: dict[int, int] = {}
    place: dict[int, Path] = {}
    for directory, size_bytes in needs:
        device = os.stat(directory).st_dev
        need_bytes[device] = need_bytes.get(device, MARGIN_BYTES) + size_bytes
        place.setdefault(device, directory)
    for device, directory in place.items():
        if free_bytes(directory) < need_bytes[device]:
            raise no_space(model_id, stage, directory, need_bytes[device])


def free_bytes(directory: Path) -> int:
    """What an agent may still write there."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def no_space(model_id: str, stage: JobStage, directory: Path, need_bytes: int) -> ImportFailed:
    """The error of a file system that is full, or would be."""
    reason = (
        f"{directory} needs {need_bytes} bytes and {free_bytes(directory)} are free; free some space, or set "
        "WB_STAGING_DIR to a larger disk, then deploy again: what was downloaded is used again"
    )
    return ImportFailed(model_id=model_id, stage=stage, reason=reason)
