"""Owns the answers to requests on the modelled bus, and the names of those who speak on it."""

from __future__ import annotations

from whimbrel.wire.messages import ErrorReply, GetRoutesReply, Message, PlaceModelReply, Value

SCHEDULER, ROUTER, OPERATOR = "s", "r", "operator"
#: The worker, and the agent, of each server; a server has one slot.
SERVERS = ("a", "b")
MODEL_ID = "m"
PROMPT = (7, 8, 9)
VOCABULARY = 50_000
#: What a request call may take, seconds: a start or a place, and a resend.
CALL_S_MAX, RESEND_S_MAX = 2.0, 1.0


class StartAnswered(Message, frozen=True, kw_only=True):
    """Of StartInference. None: it runs."""

    request_id: str
    epoch: int
    base_tokens: int
    error: ErrorReply | None = None


class ResendAnswered(Message, frozen=True, kw_only=True):
    request_id: str
    epoch: int
    error: ErrorReply | None = None


class PlaceAnswered(Message, frozen=True, kw_only=True):
    request_id: str
    epoch: int
    reply: PlaceModelReply | None = None
    error: ErrorReply | None = None


class RoutesAnswered(Message, frozen=True, kw_only=True):
    reply: GetRoutesReply


class Call(Value, frozen=True, kw_only=True):
    """A message whose sender waits for an answer; `reply_to` says which of its calls it is."""

    message: Message
    reply_to: str


Sent = tuple[str, Message | Call]


def next_token(request_id: str, tokens: list[int]) -> int:
    """The engine: a function of the request and of all tokens before, so that a wrong one shows in all that follow."""
    value = sum((k + 1) * ord(letter) for k, letter in enumerate(request_id))
    for token in tokens:
        value = (value * 31 + token + 1) % 2147483647
    return value % VOCABULARY


def undisturbed(request_id: str, output_tokens: int) -> list[int]:
    """What the client is to get."""
    tokens = list(PROMPT)
    for _ in range(output_tokens):
        tokens.append(next_token(request_id, tokens))
    return tokens[len(PROMPT) :]
