"""Owns /v1/chat/completions and /v1/completions: from body to choices, and from choices to answer."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import aclosing

import msgspec
import structlog
from starlette.types import Receive, Scope, Send
from whimbrel.wire.errors import ContextLengthExceeded, InternalError, InvalidRequest, WhimbrelError
from whimbrel.wire.ids import new_id

from services.router.catalogue import Catalogue
from services.router.choices import Choices
from services.router.core.logprobs import ShownToken, logprobs_body
from services.router.core.openai import Answer, Choice, Json
from services.router.core.params import InferenceParams, read_chat, read_completion
from services.router.core.requests import Limits
from services.router.core.sampling import SEED_MAX, resolve_sampling
from services.router.dispatch import Dispatch
from services.router.outputs import Begun, Text, Waiting
from services.router.replies import ClientLeft, Reply, read_body, unless_disconnected
from services.router.specification import Specification
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
        answer = Answer(
            answer_id=reply.request_id.replace("req", self._prefix, 1),
            created_s=int(time.time()),
            model_id=params.model_id,
            is_chat=params.is_chat,
            is_usage_included=params.is_usage_included,
        )
        # One is counted already.
        with self._dispatch.admitted(params.choice_count - 1):
            choices = Choices(specification, params.choice_count, self._dispatch, self._limits)
            sending = _Sending(choices, specification, answer, reply)
            if params.is_stream:
                await sending.send_stream()
            else:
                await sending.send_whole()

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
            top_logprobs=params.top_logprobs,
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


class _Sending:
    """From what the choices have to show to what the client gets."""

    def __init__(self, choices: Choices, specification: Specification, answer: Answer, reply: Reply) -> None:
        self._choices = choices
        self._specification = specification
        self._answer = answer
        self._reply = reply

    async def send_whole(self) -> None:
        texts: defaultdict[int, list[Text]] = defaultdict(list)
        async with aclosing(self._choices.items()) as items:
            async for index, item in items:
                if isinstance(item, Begun):
                    self._tell_begun()
                elif isinstance(item, Text):
                    texts[index].append(item)
        whole = [self._whole(texts[index]) for index in sorted(texts)]
        await self._reply.send_json(200, self._answer.whole(whole, self._choices.usage))

    async def send_stream(self) -> None:
        async with aclosing(self._choices.items()) as items:
            async for index, item in items:
                match item:
                    case Waiting(stage=stage, remaining_s=remaining_s):
                        await self._reply.send_events(_comment(_waiting_sentence(stage, remaining_s)))
                    case Begun():
                        self._tell_begun()
                        first = self._answer.first_chunk(index)
                        if first is not None:
                            await self._reply.send_events(_event(first))
                    case Text():
                        is_last = self._choices.is_over
                        data = self._piece(index, item) + (self._ending() if is_last else b"")
                        await self._reply.send_events(data, is_last=is_last)

    def _tell_begun(self) -> None:
        assert self._choices.begun is not None
        self._reply.tell(self._choices.begun)

    def _whole(self, texts: list[Text]) -> Choice:
        finish_reason = texts[-1].finish_reason
        assert finish_reason is not None
        logprobs = None
        if self._specification.top_logprobs is not None:
            logprobs = self._logprobs([token for text in texts for token in text.tokens])
        return Choice(text="".join(text.text for text in texts), finish_reason=finish_reason, logprobs=logprobs)

    def _piece(self, index: int, text: Text) -> bytes:
        """More of a choice, and why it ended when it did."""
        parts = []
        if text.text or text.tokens:
            logprobs = self._logprobs(text.tokens) if text.tokens else None
            parts.append(_event(self._answer.text_chunk(index, text.text, logprobs)))
        if text.finish_reason is not None:
            parts.append(_event(self._answer.last_chunk(index, text.finish_reason)))
        return b"".join(parts)

    def _ending(self) -> bytes:
        """Usage when asked for, the stage times, and the end."""
        parts = []
        if self._answer.is_usage_included:
            parts.append(_event(self._answer.usage_chunk(self._choices.usage)))
        assert self._choices.begun is not None
        parts.append(_comment(f"server-timing {self._choices.begun.times.header()}"))
        return b"".join([*parts, b"data: [DONE]\n\n"])

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Json:
        bytes_of = self._specification.text.token_bytes.of
        return logprobs_body(tokens, bytes_of, is_chat=self._answer.is_chat)


def _event(body: Json) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _comment(text: str) -> bytes:
    return f": {text}\n\n".encode()


def _waiting_sentence(stage: str, remaining_s: float | None) -> str:
    about = "" if remaining_s is None else f", about {remaining_s:.1f} s left"
    return f"waiting ({stage}{about})"
