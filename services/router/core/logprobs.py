"""Owns log probabilities on their way to the client: which tokens go with which piece of text, and OpenAI's two shapes.

A token is shown with the first character of its text: with a character that is split over tokens, all of them, and a
token without any text with what follows it. So what a stop string cuts off is cut off here too, and nothing is shown
twice, however the output was cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from whimbrel.wire.logprobs import TokenLogprob

from services.router.core.openai import Json


class ShownToken(NamedTuple):
    """A token of the output that the client gets to see; `offset` counts the characters of the output before it."""

    token: int
    offset: int
    logprobs: TokenLogprob


class Alignment:
    """Fed the tokens of an output with the text that each completes, and the text that is shown."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int]] = deque()
        self._tokens = 0
        self._decoded = 0
        self._shown = 0

    def decoded(self, text: str) -> None:
        """The next token completes so much text."""
        self._waiting.append((self._tokens, self._decoded))
        self._tokens += 1
        self._decoded += len(text)

    def show(self, text: str, *, is_end: bool) -> list[tuple[int, int]]:
        """More text is shown: the numbers and offsets of the tokens that go with it. At the end of an output that was
        not cut off, those are all that are left."""
        self._shown += len(text)
        ready = []
        while self._waiting and (is_end or self._waiting[0][1] < self._shown):
            ready.append(self._waiting.popleft())
        return ready


def logprobs_body(tokens: Sequence[ShownToken], bytes_of: Callable[[int], bytes], *, is_chat: bool) -> Json:
    """A choice's `logprobs`, of a chat or of a completion; `bytes_of` gives those of a token."""
    return _chat_body(tokens, bytes_of) if is_chat else _completion_body(tokens, bytes_of)


def token_text(data: bytes) -> str:
    """A token as text; the bytes of an incomplete character by name, as OpenAI's completions have them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat_body(tokens: Iterable[ShownToken], bytes_of: Callable[[int], bytes]) -> Json:
    def described(token: int, logprob: float) -> Json:
        data = bytes_of(token)
        return {"token": token_text(data), "logprob": logprob, "bytes": list(data)}

    content = [
        {
            **described(shown.token, shown.logprobs.logprob),
            "top_logprobs": [described(token, logprob) for token, logprob in shown.logprobs.top],
        }
        for shown in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_body(tokens: Sequence[ShownToken], bytes_of: Callable[[int], bytes]) -> Json:
    def best(shown: ShownToken) -> dict[str, float]:
        """The alternatives and the token itself; of tokens with the same text, which have one name, the best."""
        named: dict[str, float] = {}
        for token, logprob in (*shown.logprobs.top, (shown.token, shown.logprobs.logprob)):
            named.setdefault(token_text(bytes_of(token)), logprob)
        return named

    return {
        "tokens": [token_text(bytes_of(shown.token)) for shown in tokens],
        "token_logprobs": [shown.logprobs.logprob for shown in tokens],
        "top_logprobs": [best(shown) for shown in tokens],
        "text_offset": [shown.offset for shown in tokens],
    }
