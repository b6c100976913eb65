"""Huge pages for shared memory: asking for them, and seeing whether they came."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptio._native import Mapping

HUGE_PAGE_BYTES = 2 * 1024 * 1024

# The share of a pool that must lie on huge pages for direct reads into it to go undivided.
HUGE_SHARE_MIN = 0.9

_SHMEM_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_SMAPS = Path("/proc/self/smaps")
_HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_HUGE_LINES = ("ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:")

# System calls without a wrapper in older C libraries; the numbers are the same on every architecture.
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC = 1
_SET_STRING, _CREATE = 1, 6


def open_on_huge_tmpfs(name: str) -> int | None:
    """A new file on a tmpfs of huge pages that is mounted nowhere; None where this process may not make one.

    Needs the right to mount (root, or a container with it). The file lives as long as a descriptor or mapping
    of it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    context = libc.syscall(_FSOPEN, b"tmpfs", _CLOEXEC)
    if context < 0:
        return None
    try:
        # "within_size" gives no huge page beyond the end of the file; pools end on whole ones anyway.
        if libc.syscall(_FSCONFIG, context, _SET_STRING, b"huge", b"always", 0) < 0:
            return None
        if libc.syscall(_FSCONFIG, context, _CREATE, None, None, 0) < 0:
            return None
        mount = libc.syscall(_FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)
    if mount < 0:
        return None
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=mount)
    except OSError:
        return None
    finally:
        os.close(mount)


def is_hugetlb(descriptor: int) -> bool:
    """Whether a file lies on hugetlbfs, whose blocks are its pages."""
    return os.fstatvfs(descriptor).f_bsize >= HUGE_PAGE_BYTES


def huge_pages_refusal(mapping: Mapping) -> str:
    """Why a pre-faulted mapping is not on huge pages; empty when it is."""
    huge_bytes = _huge_bytes(mapping.address, mapping.address + mapping.size_bytes)
    if huge_bytes >= HUGE_SHARE_MIN * mapping.size_bytes:
        return ""
    if mapping.size_bytes < HUGE_PAGE_BYTES:
        return "smaller than a huge page"
    try:
        setting = _SHMEM_SETTING.read_text().strip()
    except OSError as error:
        setting = str(error.strerror)
    return (
        f"{huge_bytes} of {mapping.size_bytes} bytes are on huge pages; mount the tmpfs of the pool with "
        f"huge=always, or set {_SHMEM_SETTING} (now {setting}) to advise"
    )


def _huge_bytes(start: int, end: int) -> int:
    """Bytes on huge pages in the mappings of this process between two addresses."""
    total = 0
    is_inside = False
    for line in _SMAPS.read_text().splitlines():
        header = _HEADER.match(line)
        if header is not None:
            is_inside = start <= int(header[1], 16) and int(header[2], 16) <= end
        elif is_inside and line.startswith(_HUGE_LINES):
            total += int(line.split()[1]) * 1024
    return total
