"""Owns /v1/chat/completions and /v1/completions: from body to stream, and from stream to answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator

import msgspec
import structlog
from starlette.types import Receive, Scope, Send
from whimbrel.wire.errors import ContextLengthExceeded, InternalError, InvalidRequest, WhimbrelError
from whimbrel.wire.ids import new_id

from services.router.catalogue import Catalogue
from services.router.core.openai import Answer, Usage
from services.router.core.params import InferenceParams, read_chat, read_completion
from services.router.core.requests import Limits
from services.router.core.sampling import SEED_MAX, resolve_sampling
from services.router.dispatch import Dispatch
from services.router.outputs import Begun, Item, Text, Waiting
from services.router.replies import ClientLeft, Reply, read_body, unless_disconnected
from services.router.specification import Specification
from services.router.streams import Stream
from services.router.texts import ModelText

log = structlog.get_logger()

# Shorter prompts take less time to tokenise than the way to a thread and back, and far less than a decode step.
INLINE_CHARACTERS_MAX = 16 * 1024


class Inference:
    """An ASGI endpoint; `is_chat` tells which of the two."""

    def __init__(self, dispatch: Dispatch, catalogue: Catalogue, limits: Limits, *, is_chat: bool) -> None:
        self._dispatch = dispatch
        self._catalogue = catalogue
        self._limits = limits
        self._read = read_chat if is_chat else read_completion
        self._prefix = "chatcmpl" if is_chat else "cmpl"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_at = time.monotonic()
        reply = Reply(send, new_id("req"))
        try:
            with self._dispatch.admitted():
                body = await read_body(scope, receive)
                await unless_disconnected(receive, self._dispatch.spawn, self._answer(body, reply, arrived_at))
        except ClientLeft:
            return
        except WhimbrelError as error:
            await reply.fail(error)
        except Exception:  # the top of the request
            log.exception("request_broken", request_id=reply.request_id)
            await reply.fail(InternalError(service="router"))

    async def _answer(self, body: object, reply: Reply, arrived_at: float) -> None:
        params = self._read(body)
        text = await self._catalogue.text(params.model_id)
        specification = await self._specify(params, text, reply.request_id, arrived_at)
        stream = Stream(specification, self._dispatch, self._limits)
        answer = Answer(
            answer_id=reply.request_id.replace("req", self._prefix, 1),
            created_s=int(time.time()),
            model_id=params.model_id,
            is_chat=params.is_chat,
            is_usage_included=params.is_usage_included,
        )
        items = stream.items()
        try:
            if params.is_stream:
                await _send_stream(items, stream, answer, reply)
            else:
                await _send_whole(items, stream, answer, reply)
        finally:
            await items.aclose()

    async def _specify(
        self, params: InferenceParams, text: ModelText, request_id: str, arrived_at: float
    ) -> Specification:
        tokens = await _tokenise(params, text)
        _check_tokens(params, tokens, text)
        return Specification(
            request_id=request_id,
            model_id=params.model_id,
            text=text,
            is_chat=params.is_chat,
            tokens=tokens,
            output_tokens_max=_output_tokens_max(len(tokens), params.output_tokens_max, text.settings.context_tokens),
            sampling=resolve_sampling(params.choices, text.settings.defaults, secrets.randbelow(SEED_MAX)),
            stops=params.stops,
            arrived_at=arrived_at,
            may_fail_over=params.may_fail_over,
        )


async def _tokenise(params: InferenceParams, text: ModelText) -> list[int]:
    prompt = params.prompt
    if isinstance(prompt, str):
        if len(prompt) <= INLINE_CHARACTERS_MAX:
            return text.encode_text(prompt)
        return await asyncio.to_thread(text.encode_text, prompt)
    messages = tuple(message for message in prompt if not isinstance(message, int))
    if not messages:
        return [token for token in prompt if isinstance(token, int)]
    if sum(len(message.content) for message in messages) <= INLINE_CHARACTERS_MAX:
        return text.encode_chat(messages)
    return await asyncio.to_thread(text.encode_chat, messages)


def _check_tokens(params: InferenceParams, tokens: list[int], text: ModelText) -> None:
    """Raises InvalidRequest for a prompt without tokens and for ids that the model does not have."""
    vocabulary_tokens = text.settings.vocabulary_tokens
    if not tokens:
        raise InvalidRequest(field="prompt", reason="has no tokens")
    if max(tokens) >= vocabulary_tokens:
        raise InvalidRequest(
            field="prompt", reason=f"token {max(tokens)} is beyond the {vocabulary_tokens} of the model"
        )
    for token, _ in params.choices.logit_bias:
        if token >= vocabulary_tokens:
            raise InvalidRequest(
                field="logit_bias", reason=f"token {token} is beyond the {vocabulary_tokens} of the model"
            )


def _output_tokens_max(prompt_tokens: int, asked: int | None, context_tokens: int) -> int:
    """What was asked for, or the rest of the context; raises ContextLengthExceeded when there is less than that."""
    rest = context_tokens - prompt_tokens
    wanted = max(rest, 1) if asked is None else asked
    if wanted > rest:
        raise ContextLengthExceeded(context_tokens=context_tokens, prompt_tokens=prompt_tokens, output_tokens=wanted)
    return wanted


async def _send_whole(items: AsyncGenerator[Item, None], stream: Stream, answer: Answer, reply: Reply) -> None:
    texts: list[str] = []
    async for item in items:
        if isinstance(item, Begun):
            reply.tell(item)
        elif isinstance(item, Text):
            texts.append(item.text)
    assert stream.output.finish_reason is not None
    await reply.send_json(200, answer.whole("".join(texts), stream.output.finish_reason, _usage(stream)))


async def _send_stream(items: AsyncGenerator[Item, None], stream: Stream, answer: Answer, reply: Reply) -> None:
    async for item in items:
        match item:
            case Waiting(stage=stage, remaining_s=remaining_s):
                await reply.send_events(_comment(_waiting_sentence(stage, remaining_s)))
            case Begun():
                reply.tell(item)
                first = answer.first_chunk()
                if first is not None:
                    await reply.send_events(_event(first))
            case Text(text=text, finish_reason=None):
                await reply.send_events(_event(answer.text_chunk(text)))
            case Text(text=text, finish_reason=finish_reason):
                await reply.send_events(_ending(stream, answer, text, str(finish_reason)), is_last=True)


def _ending(stream: Stream, answer: Answer, text: str, finish_reason: str) -> bytes:
    """The last text, why it ended, usage when asked for, the stage times, and the end."""
    parts = [_event(answer.text_chunk(text))] if text else []
    parts.append(_event(answer.last_chunk(finish_reason)))
    if answer.is_usage_included:
        parts.append(_event(answer.usage_chunk(_usage(stream))))
    if stream.output.begun is not None:
        parts.append(_comment(f"server-timing {stream.output.begun.times.header()}"))
    return b"".join([*parts, b"data: [DONE]\n\n"])


def _usage(stream: Stream) -> Usage:
    return Usage(prompt_tokens=len(stream.specification.tokens), output_tokens=stream.output.output_tokens)


def _event(body: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _comment(text: str) -> bytes:
    return f": {text}\n\n".encode()


def _waiting_sentence(stage: str, remaining_s: float | None) -> str:
    about = "" if remaining_s is None else f", about {remaining_s:.1f} s left"
    return f"waiting ({stage}{about})"
