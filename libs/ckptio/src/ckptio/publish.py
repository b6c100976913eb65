"""Atomic publication of a directory: written beside its destination, synced, renamed.

One writer per destination, by a file lock that the kernel drops when its holder dies. Whoever holds it owns
every temporary directory of that destination, so it may remove what killed writers left behind, or go on with
it when its journal says that it is of the same content.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptio.errors import (
    BadDestination,
    Cancelled,
    CheckpointExists,
    CkptioError,
    ConversionInProgress,
    InsufficientSpace,
)
from ckptio.files import sync_directory
from ckptio.replaceable import why_not_replaceable
from ckptio.resume import is_resumable

# How often a waiting writer looks again; a conversion takes seconds to minutes.
LOCK_POLL_S = 0.05

# How long a second writer of one destination waits for the first before it fails.
LOCK_WAIT_S = 600.0

# Room for directories, index and manifest beside the partitions.
SPACE_MARGIN_BYTES = 16 * 1024 * 1024

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def publishing(
    destination: Path,
    *,
    marker: str,
    overwrite: bool = False,
    cancelled: Callable[[], bool] | None = None,
    wait_s: float = LOCK_WAIT_S,
    fingerprint: str | None = None,
) -> Iterator[Path]:
    """Gives an empty directory to fill; at the end it becomes `destination`, on an error it is removed.

    With a `fingerprint` the directory stays, hidden, after a cancellation or a failing device, if it has a
    journal of that content; the next call with that fingerprint gives it again. Only an empty directory is
    ever replaced, or one whose file `marker` shows that ckptio wrote all that is in it (`replaceable`). The
    caller syncs each file that it writes. Raises `CheckpointExists`, `ConversionInProgress` after `wait_s`,
    and `Cancelled` when `cancelled()` says so while waiting.
    """
    destination = Path(os.path.abspath(destination))
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _locked(destination, cancelled, wait_s):
        _check_free(destination, marker, overwrite)
        temporary = destination.parent / f"{_prefix(destination)}{os.getpid()}"
        _clear_leftovers(destination, temporary, fingerprint)
        temporary.mkdir(exist_ok=fingerprint is not None)
        try:
            yield temporary
            for directory, _, _ in os.walk(temporary):
                sync_directory(directory)
            _check_free(destination, marker, overwrite)
            _rename_over(temporary, destination)
            sync_directory(destination.parent)
        except BaseException as error:
            if fingerprint is None or not _can_go_on(error) or not is_resumable(temporary, fingerprint):
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        shutil.rmtree(temporary, ignore_errors=True)


def check_space(directory: Path, required_bytes: int) -> None:
    """Raises `InsufficientSpace` when the file system of `directory` cannot take `required_bytes` more."""
    status = os.statvfs(directory)
    available_bytes = status.f_bavail * status.f_frsize
    if available_bytes < required_bytes + SPACE_MARGIN_BYTES:
        raise InsufficientSpace(
            directory, required_bytes=required_bytes + SPACE_MARGIN_BYTES, available_bytes=available_bytes
        )


def check_outside(destination: Path, source: Path) -> None:
    """Raises `BadDestination` when `destination` is inside the directory `source`."""
    inner, outer = (Path(os.path.realpath(path)) for path in (destination, source))
    if not outer.is_dir():
        return
    if inner != outer and inner.is_relative_to(outer):
        raise BadDestination(
            destination, f"is inside {source}, which would become part of the model; choose a place outside"
        )


@contextmanager
def _locked(destination: Path, cancelled: Callable[[], bool] | None, wait_s: float) -> Iterator[None]:
    path = destination.parent / f".{destination.name}.ckptio-lock"
    deadline = time.monotonic() + wait_s
    descriptor = _try_lock(path)
    while descriptor is None:
        if cancelled is not None and cancelled():
            raise Cancelled(destination)
        if time.monotonic() >= deadline:
            raise ConversionInProgress(destination, wait_s=wait_s)
        time.sleep(LOCK_POLL_S)
        descriptor = _try_lock(path)
    try:
        yield
    finally:
        # Removed while still locked: whoever opened this file meanwhile sees that it is gone and starts
        # again.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        # Nobody asked for the lock file: what cannot be written to is the directory.
        raise OSError(error.errno, error.strerror, os.fspath(path.parent)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _check_free(destination: Path, marker: str, overwrite: bool) -> None:
    if not os.path.lexists(destination):
        return
    reason = why_not_replaceable(destination, marker)
    if reason:
        raise CheckpointExists(
            destination, f"{reason}: it is not replaced; choose another destination, or remove it yourself"
        )
    if not overwrite:
        raise CheckpointExists(
            destination, "exists; pass overwrite=True (--overwrite in the command) to replace it"
        )


def _clear_leftovers(destination: Path, temporary: Path, fingerprint: str | None) -> None:
    """Removes what killed writers left, except one directory to go on with, which becomes `temporary`."""
    prefix = _prefix(destination)
    kept = None
    for entry in list(os.scandir(destination.parent)):
        if not entry.name.startswith(prefix) or not entry.name[len(prefix) :].isdecimal():
            continue
        path = Path(entry.path)
        is_wanted = fingerprint is not None and kept is None and entry.is_dir(follow_symlinks=False)
        if is_wanted and is_resumable(path, fingerprint or ""):
            kept = path
        else:
            shutil.rmtree(path, ignore_errors=True)
    if kept is not None:
        os.rename(kept, temporary)


def _can_go_on(error: BaseException) -> bool:
    """Whether the same conversion may succeed later: it was stopped, or a device failed."""
    return not isinstance(error, CkptioError) or isinstance(error, Cancelled | InsufficientSpace)


def _rename_over(temporary: Path, destination: Path) -> None:
    """Puts `temporary` in the place of `destination`; an old checkpoint there ends up as `temporary`."""
    try:
        os.rename(temporary, destination)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(temporary, destination)


def _exchange(first: Path, second: Path) -> None:
    """Swaps two directories in one step, so that at no moment there is none at `second`."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.renameat2(
        _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)
    )
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(second))


def _prefix(destination: Path) -> str:
    return f".{destination.name}.ckptio-tmp-"
