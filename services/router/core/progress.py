"""Owns the output tokens of one request: which frames are accepted, and what they say about time (R2, M3).

Position n is accepted exactly once and in order. An entry that begins lower repeats tokens already here: only what is
new of it counts. One that begins higher leaves a gap, so none of it counts until the worker has said the missing tokens
again. A request may be started several times, each time under a higher epoch: its tokens stay, and an entry of another
epoch speaks of an earlier start and counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, auto

from whimbrel.wire.codec import unpack_tokens
from whimbrel.wire.errors import ProtocolError
from whimbrel.wire.logprobs import record_bytes
from whimbrel.wire.messages import FinishReason, TokenEntry


class Verdict(StrEnum):
    """What became of an entry."""

    ACCEPTED = auto()
    DUPLICATE = auto()
    GAP = auto()
    BUSY = auto()  # no token, no end: only that the worker is at work
    OLD_EPOCH = auto()


@dataclass(slots=True, kw_only=True)
class Start:
    """One start of the request on one instance: what the scheduler learns of that instance (M3).

    `prefill_tokens` had to be computed for its first token; the rest is about its own tokens.
    """

    epoch: int
    prefill_tokens: int
    started_at: float
    heard_at: float
    first_token_at: float | None = None
    last_token_at: float = 0.0
    output_tokens: int = 0
    prefill_s: float | None = None

    @property
    def duration_s(self) -> float:
        """R2, R6: from the start on the instance to the last thing heard of it."""
        return self.heard_at - self.started_at

    @property
    def token_s(self) -> float:
        """M3: t on this instance, the mean time per token after its first; 0 while there is none."""
        if self.first_token_at is None or self.output_tokens < 2:
            return 0.0
        return (self.last_token_at - self.first_token_at) / (self.output_tokens - 1)


class Progress:
    """Tokens accepted so far; `finish` is the entry that ended them. All times are the router's monotonic seconds.

    `queue_s` and `prefill_s` are the worker's, of the start that gave the first token. `pause_s` is the last pause:
    from the last token of one start to the first of the next, less the usual time of a token. With `top_logprobs`,
    `logprobs` has a packed record for each token.
    """

    def __init__(self, *, epoch: int, now: float, top_logprobs: int | None = None) -> None:
        self.start = Start(epoch=epoch, prefill_tokens=0, started_at=now, heard_at=now)
        self.first_token_at: float | None = None
        self.last_token_at = now
        self.tokens: list[int] = []
        self.logprobs: list[bytes] = []
        self.finish: TokenEntry | None = None
        self.queue_s = 0.0
        self.prefill_s = 0.0
        self.pause_s = 0.0
        self._pauses_s = 0.0
        self._record_bytes = 0 if top_logprobs is None else record_bytes(top_logprobs)

    def restart(self, epoch: int, prefill_tokens: int, now: float) -> None:
        """The request is started (again), with the tokens that it has; from now on only that start counts."""
        assert epoch > self.epoch, "a start has an epoch of its own"
        self.start = Start(epoch=epoch, prefill_tokens=prefill_tokens, started_at=now, heard_at=now)
        self.finish = None

    @property
    def epoch(self) -> int:
        return self.start.epoch

    @property
    def position(self) -> int:
        """The position that comes next."""
        return len(self.tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.finish is None else self.finish.finish_reason

    def accept(self, entry: TokenEntry, now: float) -> Verdict:
        """Take what is new in `entry`; raises ProtocolError when it is not packed as agreed."""
        if entry.epoch != self.epoch:
            return Verdict.OLD_EPOCH
        if entry.position > self.position:
            return Verdict.GAP
        if self.finish is not None:
            return Verdict.DUPLICATE
        tokens = unpack_tokens(entry.tokens)
        if len(entry.logprobs) != len(tokens) * self._record_bytes:
            reason = f"{len(entry.logprobs)} bytes of log probabilities for {len(tokens)} tokens"
            raise ProtocolError(size_bytes=len(entry.logprobs), reason=reason)
        known = self.position - entry.position
        fresh = tokens[known:]
        is_last = entry.finish_reason is not None and entry.position + len(tokens) >= self.position
        if not fresh and not is_last:
            return Verdict.DUPLICATE if tokens or entry.finish_reason is not None else Verdict.BUSY
        self._note_times(entry, now)
        if fresh:
            self._take(fresh, now)
            self.logprobs += self._records(entry.logprobs)[known:]
        if is_last:
            self.finish = entry
        return Verdict.ACCEPTED

    def _records(self, packed: bytes) -> list[bytes]:
        size = self._record_bytes
        return [packed[begin : begin + size] for begin in range(0, len(packed), size)] if size else []

    def _note_times(self, entry: TokenEntry, now: float) -> None:
        self.start.heard_at = now
        if entry.prefill_s is not None:
            self.start.prefill_s = entry.prefill_s
        if self.first_token_at is None:
            self.queue_s = self.queue_s if entry.queue_s is None else entry.queue_s
            self.prefill_s = self.prefill_s if entry.prefill_s is None else entry.prefill_s

    def _take(self, fresh: list[int], now: float) -> None:
        start = self.start
        if self.first_token_at is None:
            self.first_token_at = now
        elif start.first_token_at is None:
            self.pause_s = max(0.0, now - self.last_token_at - self.token_s)
            self._pauses_s += self.pause_s
        if start.first_token_at is None:
            start.first_token_at = now
        start.output_tokens += len(fresh)
        start.last_token_at = self.last_token_at = now
        self.tokens.extend(fresh)

    @property
    def token_s(self) -> float:
        """M3: t, the mean time per output token after the first, pauses left out; 0 while there is none."""
        return self.decode_s / (self.position - 1) if self.position > 1 else 0.0

    @property
    def decode_s(self) -> float:
        """M3: d of `t_out = d / t + 1`, the time since the first token, pauses left out."""
        if self.first_token_at is None:
            return 0.0
        return self.last_token_at - self.first_token_at - self._pauses_s

    def decoding_s(self, now: float) -> float:
        """M3: d as it is at `now`, while tokens still come; it stands still in a pause."""
        if self.first_token_at is None or self.start.first_token_at is None:
            return self.decode_s
        return max(0.0, now - self.first_token_at - self._pauses_s)
