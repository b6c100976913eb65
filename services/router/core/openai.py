"""Owns the bodies of OpenAI's API as plain data: whole answers, chunks of a stream, models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    output_tokens: int

    def body(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the answers to a request, whole."""

    text: str
    finish_reason: str
    logprobs: Json | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What all bodies of one answer share. `created_s` is Unix time in seconds; `index` is that of a choice."""

    answer_id: str
    created_s: int
    model_id: str
    is_chat: bool
    is_usage_included: bool = False

    def whole(self, choices: Iterable[Choice], usage: Usage) -> Json:
        """The answer in one piece."""
        bodies = [
            _choice(index, self._message(choice.text), choice.logprobs, choice.finish_reason)
            for index, choice in enumerate(choices)
        ]
        return self._body("chat.completion" if self.is_chat else "text_completion", bodies, usage=usage.body())

    def first_chunk(self, index: int) -> Json | None:
        """The chunk that names the role, before any text; completions have none."""
        if not self.is_chat:
            return None
        return self._chunk(_choice(index, {"delta": {"role": "assistant", "content": ""}}))

    def text_chunk(self, index: int, text: str, logprobs: Json | None = None) -> Json:
        content: Json = {"delta": {"content": text}} if self.is_chat else {"text": text}
        return self._chunk(_choice(index, content, logprobs))

    def last_chunk(self, index: int, finish_reason: str) -> Json:
        """The chunk that says why the text of a choice ended."""
        return self._chunk(_choice(index, {"delta": {}} if self.is_chat else {"text": ""}, None, finish_reason))

    def usage_chunk(self, usage: Usage) -> Json:
        """The chunk without choices that ends a stream whose usage was asked for."""
        return self._body(self._chunk_kind, [], usage=usage.body())

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _message(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}

    def _chunk(self, choice: Json) -> Json:
        # With usage asked for, every other chunk says null, as OpenAI's do.
        return self._body(self._chunk_kind, [choice], **({"usage": None} if self.is_usage_included else {}))

    def _body(self, kind: str, choices: list[Json], **more: object) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model_id,
            "choices": choices,
            **more,
        }


def _choice(index: int, content: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def model_list(models: list[Json]) -> Json:
    return {"object": "list", "data": models}


def model_body(model_id: str, created_s: int, more: Json) -> Json:
    """A model; `more` is what only Whimbrel says of it."""
    return {"id": model_id, "object": "model", "created": created_s, "owned_by": "whimbrel", "whimbrel": more}
