"""Owns the output tokens of one request: which frames are accepted, and what they say about time (R2, M3).

Position n is accepted exactly once and in order. An entry that begins lower repeats tokens already here: only what is
new of it counts. One that begins higher leaves a gap, so none of it counts until the worker has said the missing tokens
again. An entry of another epoch speaks of an earlier start of the request and counts for nothing.
"""

from __future__ import annotations

from enum import StrEnum, auto

from whimbrel.wire.codec import unpack_tokens
from whimbrel.wire.messages import FinishReason, TokenEntry


class Verdict(StrEnum):
    """What became of an entry."""

    ACCEPTED = auto()
    DUPLICATE = auto()
    GAP = auto()
    OLD_EPOCH = auto()


class Progress:
    """Tokens accepted so far; `finish` is the entry that ended them. All times are the router's monotonic seconds."""

    def __init__(self, *, epoch: int, now: float) -> None:
        self.epoch = epoch
        self.started_at = now
        self.first_token_at: float | None = None
        self.last_token_at = now
        self.tokens: list[int] = []
        self.finish: TokenEntry | None = None
        self.queue_s = 0.0
        self.prefill_s = 0.0

    @property
    def position(self) -> int:
        """The position that comes next."""
        return len(self.tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.finish is None else self.finish.finish_reason

    def accept(self, entry: TokenEntry, now: float) -> Verdict:
        """Take what is new in `entry`; raises ProtocolError when its tokens are not packed as agreed."""
        if entry.epoch != self.epoch:
            return Verdict.OLD_EPOCH
        if entry.position > self.position:
            return Verdict.GAP
        if self.finish is not None:
            return Verdict.DUPLICATE
        tokens = unpack_tokens(entry.tokens)
        fresh = tokens[self.position - entry.position :]
        is_last = entry.finish_reason is not None and entry.position + len(tokens) >= self.position
        if not fresh and not is_last:
            return Verdict.DUPLICATE
        self._take(entry, fresh, now)
        if is_last:
            self.finish = entry
        return Verdict.ACCEPTED

    def _take(self, entry: TokenEntry, fresh: list[int], now: float) -> None:
        if fresh and self.first_token_at is None:
            self.first_token_at = now
        if entry.position == 0:
            self.queue_s = self.queue_s if entry.queue_s is None else entry.queue_s
            self.prefill_s = self.prefill_s if entry.prefill_s is None else entry.prefill_s
        self.tokens.extend(fresh)
        self.last_token_at = now

    @property
    def duration_s(self) -> float:
        """R2, R6: from the start on the instance to the last thing heard of it."""
        return self.last_token_at - self.started_at

    @property
    def token_s(self) -> float:
        """M3: t, the mean time per output token after the first; 0 while there is none."""
        if self.first_token_at is None or self.position < 2:
            return 0.0
        return (self.last_token_at - self.first_token_at) / (self.position - 1)

    @property
    def decode_s(self) -> float:
        """M3: d of `t_out = d / t + 1`, the time since the first token."""
        return self.decoding_s(self.last_token_at)

    def decoding_s(self, now: float) -> float:
        """M3: d as it is at `now`, while tokens still come."""
        return 0.0 if self.first_token_at is None else max(0.0, now - self.first_token_at)
