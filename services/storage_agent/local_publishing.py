"""Owns publishing in a repository that is a directory of this machine: in one step, by a rename. Blocking."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ckptio.manifest import MANIFEST_FILE
from ckptio.publish import publishing


def publish_directory(staged: Path, destination: Path, cancelled: Callable[[], bool] | None) -> None:
    """Move what `staged` holds into `destination`, over what was there; both are on one file system.

    Raises ckptio's errors: CheckpointExists for a directory that is no checkpoint, Cancelled while waiting for another.
    """
    with publishing(destination, marker=MANIFEST_FILE, overwrite=True, cancelled=cancelled) as directory:
        for entry in sorted(staged.iterdir()):
            os.rename(entry, directory / entry.name)


def remove_directory(path: Path) -> None:
    """Nothing happens when there is none."""
    trash = path.with_name(f".removed-{path.name}-{os.getpid()}")
    try:
        path.rename(trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)
