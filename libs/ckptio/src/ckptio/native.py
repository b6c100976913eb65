"""Whether the native extension is there, and why not when it is missing."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from ckptio.errors import NativeMissing


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeStatus:
    """`reason` is empty when the extension loaded."""

    is_loaded: bool
    reason: str = ""


_module: ModuleType | None = None
try:
    _module = importlib.import_module("ckptio._native")
except ImportError as error:
    _STATUS = NativeStatus(
        is_loaded=False, reason=f"{error}; install g++, python3-dev and libxxhash-dev, then reinstall ckptio"
    )
else:
    _STATUS = NativeStatus(is_loaded=True)


def native_status() -> NativeStatus:
    """Whether the native part loaded and, if not, why."""
    return _STATUS


def require_native() -> ModuleType:
    """The native module; raises `NativeMissing` with the reason when it did not load."""
    if _module is None:
        raise NativeMissing(_STATUS.reason)
    return _module
