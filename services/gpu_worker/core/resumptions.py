"""Owns the destination's side of migrations: the tokens of requests that run elsewhere, and how many are computed here.

A resumption follows one request. Its tokens come in rounds, by position, so that what comes twice changes nothing; its
KV cache is filled with all of them but the last, which is computed by the step that gives the next one, as everywhere.
It ends with the start of the request here, with the migration, or by itself when nothing is heard of it (X3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msgspec.structs import replace
from whimbrel.wire.codec import error_reply, pack_tokens, unpack_tokens
from whimbrel.wire.errors import (
    Cancelled,
    ContextLengthExceeded,
    InferenceLost,
    InvalidRequest,
    QueueFull,
    WhimbrelError,
)
from whimbrel.wire.messages import InferenceResumed, ResumeInference, StartInference

# An instance computes one request at a time, and so each migration to it brings one; the rest is room for migrations
# that died on the way. Each holds a KV cache.
RESUMPTIONS_MAX = 8
# Rounds take seconds, a new scheduler leads within some, and a router starts a request here within milliseconds.
RESUMPTION_KEEP_S = 30.0
# Migrations that are over, so that a late message does not have their tokens computed again.
OVER_MAX = 64


class Resumption:
    """A request that runs elsewhere: to an engine it is a sequence that never decodes."""

    #: Nobody knows yet how it is sampled (see `Sequence.may_share`).
    may_share = False

    def __init__(self, message: ResumeInference, now: float) -> None:
        self.request_id = message.request_id
        self.migration_id = message.migration_id
        self.instance_id = message.instance_id
        self.source = message.source_server_id, message.source_slot
        self.tokens: list[int] = []
        self.computed = 0
        self.heard_at = now
        self.is_answered = True
        self.prefill_s = 0.0

    @property
    def is_due(self) -> bool:
        return self.computed < len(self.tokens) - 1

    def piece_end(self, tokens_max: int) -> int:
        """Where the next piece of its prefill ends."""
        assert self.is_due
        return min(self.computed + tokens_max, len(self.tokens) - 1)

    def answer(self) -> InferenceResumed:
        self.is_answered = True
        prefill_s, self.prefill_s = self.prefill_s, 0.0
        return InferenceResumed(
            migration_id=self.migration_id,
            request_id=self.request_id,
            tokens=len(self.tokens),
            prefill_s=prefill_s,
        )


class Resumptions:
    """`now` is in monotonic seconds. `dropped` are the requests whose KV caches nobody will go on from; the shell has
    the engine forget them before it computes anything else."""

    def __init__(self) -> None:
        self._by_request: dict[str, Resumption] = {}
        self._over: deque[str] = deque(maxlen=OVER_MAX)
        self.dropped: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._by_request)

    def hear(self, message: ResumeInference, now: float) -> InferenceResumed | None:
        """Take a round's tokens; None while there is something to compute of them, else the answer.

        Raises Cancelled when the migration is over, QueueFull, ProtocolError.
        """
        if message.migration_id in self._over:
            raise Cancelled(what=f"migration {message.migration_id}")
        tokens = unpack_tokens(message.tokens)
        resumption = self._by_request.get(message.request_id)
        if resumption is not None and not _goes_on(resumption, message, tokens):
            self._drop(resumption)
            resumption = None
        if resumption is None:
            if message.position > 0:
                return _nothing(message)
            if len(self._by_request) >= RESUMPTIONS_MAX:
                raise QueueFull(queue="requests of other workers: this one", limit=RESUMPTIONS_MAX)
            resumption = self._by_request[message.request_id] = Resumption(message, now)
        resumption.heard_at = now
        if message.position <= len(resumption.tokens):
            resumption.tokens.extend(tokens[len(resumption.tokens) - message.position :])
            resumption.is_answered = False
            return None if resumption.is_due else resumption.answer()
        return resumption.answer()

    def next(self) -> Resumption | None:
        """The one to compute a piece of."""
        return next((resumption for resumption in self._by_request.values() if resumption.is_due), None)

    def holds(self, resumption: Resumption) -> bool:
        """Whether it is still wanted; while a piece is computed it may be started here, or abandoned."""
        return self._by_request.get(resumption.request_id) is resumption

    def advance(self, resumption: Resumption, end: int, prefill_s: float, now: float) -> InferenceResumed | None:
        """A piece up to `end` is computed; the answer when that was the last one."""
        if not self.holds(resumption):
            return None
        resumption.computed = end
        resumption.prefill_s += prefill_s
        resumption.heard_at = now
        return None if resumption.is_due or resumption.is_answered else resumption.answer()

    def fail(self, resumption: Resumption, error: WhimbrelError) -> InferenceResumed | None:
        """A piece could not be computed."""
        if not self.holds(resumption):
            return None
        self._drop(resumption)
        return refusal(resumption.migration_id, resumption.request_id, error)

    def complete(self, request: StartInference) -> StartInference:
        """The request with all of its tokens. Raises InferenceLost when it builds on some that are not here."""
        if request.base_tokens == 0:
            return request
        resumption = self._by_request.get(request.request_id)
        if (
            resumption is None
            or resumption.instance_id != request.instance_id
            or len(resumption.tokens) < request.base_tokens
        ):
            reason = f"its first {request.base_tokens} tokens are not here"
            output_tokens = max(0, request.base_tokens + len(request.tokens) // 4 - request.prompt_tokens)
            raise InferenceLost(reason=reason, output_tokens=output_tokens)
        base = pack_tokens(resumption.tokens[: request.base_tokens])
        return replace(request, tokens=base + request.tokens, base_tokens=0)

    def take(self, request: StartInference, tokens: list[int]) -> int:
        """The request, of which these are all tokens, starts here; the answer is how many of them are computed.

        Whoever was told to start it here without a base, because its source was lost, goes on from what there is, too.
        """
        resumption = self._by_request.get(request.request_id)
        if resumption is None:
            return 0
        if resumption.migration_id not in self._over:
            # Its source has stopped: what still comes of it comes late.
            self._over.append(resumption.migration_id)
        if resumption.tokens != tokens[: len(resumption.tokens)]:
            self._drop(resumption)
            return 0
        del self._by_request[request.request_id]
        return resumption.computed

    def abandon(self, migration_id: str) -> None:
        if migration_id not in self._over:
            self._over.append(migration_id)
        self._drop_all(lambda resumption: resumption.migration_id == migration_id)

    def clear(self) -> None:
        """The instance goes."""
        self._drop_all(lambda _: True)

    def expire(self, now: float) -> None:
        """Drop what nobody has spoken of for long."""
        self._drop_all(lambda resumption: now - resumption.heard_at >= RESUMPTION_KEEP_S)

    def _drop_all(self, is_dropped: Callable[[Resumption], bool]) -> None:
        for resumption in [each for each in self._by_request.values() if is_dropped(each)]:
            self._drop(resumption)

    def _drop(self, resumption: Resumption) -> None:
        del self._by_request[resumption.request_id]
        self.dropped.append(resumption.request_id)


def refusal(migration_id: str, request_id: str, error: WhimbrelError) -> InferenceResumed:
    return InferenceResumed(migration_id=migration_id, request_id=request_id, tokens=0, error=error_reply(error))


def check_resume(message: ResumeInference, *, context_tokens: int, vocabulary_size: int) -> None:
    """Raise InvalidRequest or ContextLengthExceeded for what the model cannot compute."""
    tokens = unpack_tokens(message.tokens)
    if tokens and max(tokens) >= vocabulary_size:
        reason = f"token {max(tokens)} is not in the model's vocabulary of {vocabulary_size}"
        raise InvalidRequest(field="tokens", reason=reason)
    if message.position + len(tokens) > context_tokens:
        raise ContextLengthExceeded(
            context_tokens=context_tokens, prompt_tokens=message.position + len(tokens), output_tokens=0
        )


def _goes_on(resumption: Resumption, message: ResumeInference, tokens: list[int]) -> bool:
    """Whether this is about the same tokens as before; another migration begins anew."""
    if (resumption.migration_id, resumption.instance_id) != (message.migration_id, message.instance_id):
        return False
    known = resumption.tokens[message.position : message.position + len(tokens)]
    return known == tokens[: len(known)]


def _nothing(message: ResumeInference) -> InferenceResumed:
    return InferenceResumed(migration_id=message.migration_id, request_id=message.request_id, tokens=0)
