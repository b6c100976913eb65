"""Owns Unix sockets by path: listening where nobody else does, connecting, and paths that are too long for either."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

# The kernel's limit for the address of a Unix socket, without the zero byte at its end.
ADDRESS_BYTES_MAX = 107
BACKLOG = 128


def listen_unix(path: Path) -> socket.socket:
    """A listening, non-blocking socket at `path`. The file of a process that was killed is replaced.

    Raises FileExistsError when somebody listens there, or when it is no socket; OSError with the path otherwise.
    """
    with _directory_of(path) as directory, _named(path):
        # One process at a time: a socket that is bound and does not listen yet looks like a dead one.
        fcntl.flock(directory, fcntl.LOCK_EX)
        _remove_dead(path, directory)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(_address(path, directory))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    return listener


def connect_unix(path: Path) -> socket.socket:
    """A connected, non-blocking socket; connecting to a Unix socket needs no waiting. Raises OSError with the path."""
    with _directory_of(path) as directory, _named(path):
        return _connect(path, directory)


def _connect(path: Path, directory: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(_address(path, directory))
    except BaseException:
        connection.close()
        raise
    return connection


def _remove_dead(path: Path, directory: int) -> None:
    """Remove the file of a socket to which nobody listens."""
    try:
        mode = os.stat(path.name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is no socket; name another place")
    try:
        _connect(path, directory).close()
    except ConnectionRefusedError:
        os.unlink(path.name, dir_fd=directory)
        return
    except BlockingIOError:  # its queue of connections is full, so there is somebody
        pass
    raise FileExistsError(errno.EEXIST, "another process listens here; stop it, or name another place")


def _address(path: Path, directory: int) -> str:
    """`path` itself, or a shorter name of the same file as long as `directory` is open. Raises OSError."""
    address = os.fspath(path)
    if len(os.fsencode(address)) > ADDRESS_BYTES_MAX:
        address = f"/proc/self/fd/{directory}/{path.name}"
    if len(os.fsencode(address)) > ADDRESS_BYTES_MAX:
        raise OSError(errno.ENAMETOOLONG, "the name of this socket is too long; choose a shorter one")
    return address


@contextlib.contextmanager
def _directory_of(path: Path) -> Iterator[int]:
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of sockets do not say which; these do."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise
