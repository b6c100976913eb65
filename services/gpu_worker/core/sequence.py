"""Owns a request's tokens on this worker: prompt, output, position, and when the output ends."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from whimbrel.wire.codec import pack_tokens, unpack_tokens
from whimbrel.wire.errors import ContextLengthExceeded, InvalidRequest
from whimbrel.wire.logprobs import record_bytes
from whimbrel.wire.messages import ErrorReply, FinishReason, Moved, StartInference, TokenEntry

# Log probabilities of one entry: a quarter of what NATS takes by default. What is longer is said in several entries.
ENTRY_LOGPROBS_BYTES_MAX = 256 * 1024


class Sequence:
    """A running, waiting or finished request. Positions count output tokens from 0; `now` is in monotonic seconds.

    A stop token ends the output and is no part of it. Nothing changes once there is a finish reason. Log probabilities
    are kept of the tokens that were decoded here, and travel with them; the router has those of the others.
    """

    def __init__(self, request: StartInference, now: float) -> None:
        tokens = unpack_tokens(request.tokens)
        self.request = request
        self.request_id = request.request_id
        self.epoch = request.epoch
        self.tokens = tokens
        self.prompt_tokens = request.prompt_tokens
        self.finish_reason: FinishReason | None = None
        self.error: ErrorReply | None = None
        self.moved: Moved | None = None
        # So many of its first tokens were computed here before it started, while it ran elsewhere.
        self.computed = 0
        self.finished_at: float | None = None
        # How many steps the engine had made when it started here, or when its router asked for news last.
        self.steps_told = 0
        self._stop_tokens = frozenset(request.stop_tokens)
        self._first_position = len(tokens) - request.prompt_tokens
        self._logprobs = bytearray()
        self._arrived_at = now
        self._started_at: float | None = None
        self._first_token_at: float | None = None
        if self.position >= request.output_tokens_max:
            self.finish(FinishReason.LENGTH, now)

    @property
    def position(self) -> int:
        """Of the next output token, which is the number of output tokens so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def output(self) -> Tokens[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def may_share(self) -> bool:
        """Whether it may go on from what was computed for another request that begins with the same tokens.

        How a prompt is cut into passes shows in the last bits, and decoding in 16 bits makes much of them. A greedy
        answer hardly cares; a seeded sample has to be the same whatever was asked before.
        """
        return self.request.sampling.temperature == 0

    def is_stop(self, token: int) -> bool:
        return token in self._stop_tokens

    def start(self, now: float) -> None:
        """Its turn has come."""
        self._started_at = now

    def advance(self, token: int | None, now: float, logprobs: bytes = b"") -> TokenEntry | None:
        """Take the next token with its log probabilities, or None when the model has ended the output; the answer is
        what is new.

        None when the sequence was finished meanwhile: an abort and a decode step overlap.
        """
        if self.is_finished:
            return None
        position = self.position
        if self._first_token_at is None:
            self._first_token_at = now
        if token is None:
            self.finish(FinishReason.STOP, now)
        else:
            self.tokens.append(token)
            self._logprobs += logprobs
            if self.position >= self.request.output_tokens_max:
                self.finish(FinishReason.LENGTH, now)
        return self.entry(position)

    def finish(
        self, reason: FinishReason, now: float, *, error: ErrorReply | None = None, moved: Moved | None = None
    ) -> None:
        """The end. Finishing twice keeps the first reason."""
        assert (reason is FinishReason.MOVED) == (moved is not None)
        if self.is_finished:
            return
        self.finish_reason = reason
        self.error = error
        self.moved = moved
        self.finished_at = now

    def entry(self, position: int) -> TokenEntry:
        """Everything from `position` on; times come with the first token of this start of the request.

        With log probabilities it is no more than fits in an entry, and only of the tokens of this start. Raises
        InvalidRequest for a position that is still ahead.
        """
        if position > self.position:
            raise InvalidRequest(field="position", reason=f"{position} is ahead of {self.position}, the next one here")
        end, logprobs = self.position, b""
        if self.request.top_logprobs is not None:
            size = record_bytes(self.request.top_logprobs)
            position = max(position, self._first_position)
            end = min(end, position + ENTRY_LOGPROBS_BYTES_MAX // size)
            begin = position - self._first_position
            logprobs = bytes(self._logprobs[begin * size : (begin + end - position) * size])
        is_first = position <= self._first_position and self._first_token_at is not None
        is_last = end == self.position
        return TokenEntry(
            request_id=self.request_id,
            epoch=self.epoch,
            position=position,
            tokens=pack_tokens(self.tokens[self.prompt_tokens + position : self.prompt_tokens + end]),
            finish_reason=self.finish_reason if is_last else None,
            queue_s=self.queue_s if is_first else None,
            prefill_s=self.prefill_s if is_first else None,
            error=self.error if is_last else None,
            moved=self.moved if is_last else None,
            logprobs=logprobs,
        )

    def entries(self, position: int) -> list[TokenEntry]:
        """Everything from `position` on, in as many entries as it takes: one at least."""
        entries = [self.entry(position)]
        while (after := entries[-1].position + len(unpack_tokens(entries[-1].tokens))) < self.position:
            entries.append(self.entry(after))
        return entries

    @property
    def queue_s(self) -> float:
        """From arrival at this worker to its turn."""
        return 0.0 if self._started_at is None else max(0.0, self._started_at - self._arrived_at)

    @property
    def prefill_s(self) -> float:
        """From its turn to the first token."""
        if self._started_at is None or self._first_token_at is None:
            return 0.0
        return max(0.0, self._first_token_at - self._started_at)


def check_request(request: StartInference, *, context_tokens: int, vocabulary_size: int) -> None:
    """Raise InvalidRequest or ContextLengthExceeded for what the model cannot compute."""
    tokens = unpack_tokens(request.tokens)
    if not 0 < request.prompt_tokens <= len(tokens):
        reason = f"{request.prompt_tokens} of {len(tokens)} tokens; a prompt needs at least one, and all of its own"
        raise InvalidRequest(field="prompt_tokens", reason=reason)
    if max(tokens) >= vocabulary_size:
        reason = f"token {max(tokens)} is not in the model's vocabulary of {vocabulary_size}"
        raise InvalidRequest(field="tokens", reason=reason)
    biased = [token for token in request.sampling.logit_bias if not 0 <= token < vocabulary_size]
    if biased:
        reason = f"token {biased[0]} is not in the model's vocabulary of {vocabulary_size}"
        raise InvalidRequest(field="logit_bias", reason=reason)
    if (request.top_logprobs or 0) > vocabulary_size:
        reason = f"{request.top_logprobs} alternatives are more than the model's vocabulary of {vocabulary_size}"
        raise InvalidRequest(field="top_logprobs", reason=reason)
    if request.prompt_tokens + request.output_tokens_max > context_tokens:
        raise ContextLengthExceeded(
            context_tokens=context_tokens,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens_max,
        )


def prefill_ends(sequence: Sequence, piece_tokens_max: int) -> range:
    """Where each piece of the prefill but the last ends. The last one, which gives the first token, is at least one
    token long and at most `piece_tokens_max`."""
    return range(sequence.computed + piece_tokens_max, len(sequence.tokens), piece_tokens_max)
