"""Fault injection, for tests: devices that fail, are slow, full, or give wrong bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptio.native import native_status, require_native


@dataclass(slots=True, kw_only=True)
class _WriteFault:
    """The device fails with `error` once `left_bytes` more were written."""

    error: int
    left_bytes: int


_write_fault: _WriteFault | None = None


@contextmanager
def injected(
    *,
    read_bytes_max: int = 0,
    read_error: int = 0,
    read_error_offset: int = -1,
    corrupt_offset: int = -1,
    times: int = 1_000_000,
    read_delay_us: int = 0,
    copy_error: int = 0,
    copy_error_after: int = 0,
    write_error: int = 0,
    write_after_bytes: int = 0,
) -> Iterator[None]:
    """Makes devices fail inside the `with`, for the whole process.

    Native reads give at most `read_bytes_max` bytes; fail with errno `read_error` where they touch
    `read_error_offset` of a file; flip a bit at `corrupt_offset`; both `times` times; and take
    `read_delay_us` longer. Copy number `copy_error_after` to a device, and each after it, fails with code
    `copy_error`. Writes of a conversion fail with errno `write_error` after `write_after_bytes`.
    """
    global _write_fault
    _write_fault = _WriteFault(error=write_error, left_bytes=write_after_bytes) if write_error else None
    has_native = native_status().is_loaded
    if has_native:
        require_native().set_faults(
            read_bytes_max=read_bytes_max,
            read_error=read_error,
            read_error_offset=read_error_offset,
            corrupt_offset=corrupt_offset,
            times=times,
            read_delay_us=read_delay_us,
            copy_error=copy_error,
            copy_error_after=copy_error_after,
        )
    try:
        yield
    finally:
        _write_fault = None
        if has_native:
            require_native().clear_faults()


def writable_bytes(size_bytes: int) -> int:
    """How many of `size_bytes` the next write may take; raises the injected OSError when there is no room."""
    if _write_fault is None:
        return size_bytes
    if _write_fault.left_bytes <= 0 < size_bytes:
        raise OSError(_write_fault.error, os.strerror(_write_fault.error))
    allowed = min(size_bytes, _write_fault.left_bytes)
    _write_fault.left_bytes -= allowed
    return allowed
