"""What a piece of work cost this process: processor time, private memory, page faults, peak memory."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFERENCES = Path("/proc/self/clear_refs")

# Writing this to the file above sets the peak back to the present size.
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Growth between two moments; `peak_bytes` is None where the kernel cannot reset the peak."""

    cpu_s: float
    anonymous_bytes: int
    minor_faults: int
    peak_bytes: int | None


class Meter:
    """Starts when made; `read` gives the growth since then."""

    def __init__(self) -> None:
        self._has_peak = _reset_peak()
        status = _memory_bytes()
        self._anonymous_bytes = status["RssAnon"]
        self._resident_bytes = status["VmRSS"]
        self._minor_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._cpu_s = time.process_time()

    def read(self) -> Usage:
        """The growth until now, of all threads."""
        cpu_s = time.process_time() - self._cpu_s
        status = _memory_bytes()
        return Usage(
            cpu_s=cpu_s,
            anonymous_bytes=status["RssAnon"] - self._anonymous_bytes,
            minor_faults=resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._minor_faults,
            peak_bytes=max(0, status["VmHWM"] - self._resident_bytes) if self._has_peak else None,
        )


def _reset_peak() -> bool:
    try:
        _CLEAR_REFERENCES.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _memory_bytes() -> dict[str, int]:
    sizes = {}
    for line in _STATUS.read_text().splitlines():
        key, _, value = line.partition(":")
        if value.endswith(" kB"):
            sizes[key] = int(value.split()[0]) * 1024
    return sizes
