"""Owns one answer of a remote store: its pieces, the memory that they go into, and what obstore says when it breaks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Self

# What is buffered below us before we see it, and so what a cut connection loses at most. On a fast network pieces come
# out many times as big, because more has arrived; copying one takes less than 0.1 ms.
PIECE_SIZE_BYTES = 16 * 1024

OnBytes = Callable[[int], None]


class Response:
    """The pieces of one answer. Leaving it drops the connection, unless its end was seen.

    obstore has no call to close a stream: it closes with the last reference, and tracebacks keep references for long.
    """

    def __init__(self, result: Any) -> None:
        self._stream = result.stream(min_chunk_size=PIECE_SIZE_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream = None

    async def next(self, wait_s: float) -> bytes:
        """The next piece, empty at the end; raises TimeoutError and obstore's errors."""
        async with asyncio.timeout(wait_s):
            return await anext(self._stream, b"")


class Place:
    """Memory that is filled from its start on."""

    def __init__(self, view: memoryview, on_bytes: OnBytes | None) -> None:
        self._view = view
        self._on_bytes = on_bytes
        self.size_bytes = len(view)
        self.done_bytes = 0

    @property
    def is_full(self) -> bool:
        return self.done_bytes == self.size_bytes

    def take(self, piece: bytes) -> bool:
        """Put a piece behind those before; False, and nothing is written, when it does not fit."""
        end_bytes = self.done_bytes + len(piece)
        if end_bytes > self.size_bytes:
            return False
        self._view[self.done_bytes : end_bytes] = piece
        self.done_bytes = end_bytes
        if self._on_bytes is not None:
            self._on_bytes(len(piece))
        return True


def status_of(error: Exception) -> int | None:
    """The HTTP status that an error of obstore is about; it has no field for it, only a sentence."""
    found = re.search(r"status code: (\d{3})\b", first_line(error))
    return None if found is None else int(found.group(1))


def first_line(error: Exception) -> str:
    """obstore adds pages of debug output to its messages."""
    return str(error).split("\n", 1)[0].rstrip(": ") or type(error).__name__
