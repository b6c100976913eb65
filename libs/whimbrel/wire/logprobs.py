"""Owns the packed form of log probabilities: for each token a record of its own and its best alternatives."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

# JSON has no infinity; what a model rules out is as good as never drawn at this (vLLM's number).
LOGPROB_MIN = -9999.0


class TokenLogprob(NamedTuple):
    """The natural logarithm of a token's probability, and the best tokens at its position, the best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def record_bytes(top: int) -> int:
    """The size of one token's record with so many alternatives."""
    return _record(top).size


def pack_logprob(logprob: float, top: Iterable[tuple[int, float]]) -> bytes:
    """The token's own as float32, then each alternative as uint32 and float32; all little-endian."""
    fields = [field for pair in top for field in pair]
    return _record(len(fields) // 2).pack(logprob, *fields)


def unpack_logprob(record: bytes) -> TokenLogprob:
    """The inverse of `pack_logprob`; the number of alternatives shows in the length."""
    logprob, *fields = _record((len(record) - 4) // 8).unpack(record)
    return TokenLogprob(logprob, tuple(zip(fields[::2], fields[1::2], strict=True)))


@cache
def _record(top: int) -> struct.Struct:
    return struct.Struct("<f" + "If" * top)
