"""Owns how long a repository that fails is tried again: a bound on tries without progress, and the pauses between."""

from __future__ import annotations

from dataclasses import dataclass

# Statuses of 400 to 499 say that the request is wrong, and it stays wrong; these say "not now".
PASSING_STATUSES = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """How a remote repository is talked to.

    `stall_s` without a piece of a response (16 KiB) and the connection is given up. `tries_max` tries in a row that
    bring no new byte end a read. Pauses double from `pause_s` to `pause_s_max`, so six tries take three seconds of
    pauses: a store that restarts is waited for, one that is gone does not hold up the queue of loads.
    """

    stall_s: float = 10.0
    connect_s: float = 5.0
    tries_max: int = 6
    pause_s: float = 0.1
    pause_s_max: float = 3.0
    #: Bytes of one part of an upload. Stores take 10,000 parts; a bigger file gets bigger parts.
    part_size_bytes: int = 16 * 1024 * 1024
    #: One request of an upload, a part at most: 140 kB/s are needed.
    upload_request_s: float = 120.0


class Retries:
    """The tries of one operation. A try that moved a byte makes the next failure the first one again."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._failures = 0

    @property
    def failures(self) -> int:
        """Tries in a row that brought nothing."""
        return self._failures

    def pause_after_failure(self, *, progressed: bool, chance: float) -> float | None:
        """Seconds to wait before the next try, None when there is none; `chance` is a random number from 0 to 1.

        Half of each pause is random, so that agents that a store threw off do not come back all at once.
        """
        self._failures = 1 if progressed else self._failures + 1
        if self._failures >= self._options.tries_max:
            return None
        full_s = min(self._options.pause_s * 2.0 ** (self._failures - 1), self._options.pause_s_max)
        return full_s * (1 + chance) / 2


def is_passing(status: int | None) -> bool:
    """Whether the same request may succeed later; None is a failure below HTTP."""
    return status is None or status >= 500 or status < 400 or status in PASSING_STATUSES
