"""Owns the parameters of an inference: which are honoured, harmless or unsupported, and their typed values.

Nothing is ignored in silence: a parameter is honoured, or has no effect here whatever its value (HARMLESS), or holds
the value that means "not used" (NEUTRAL), or is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.wire.errors import UnsupportedParameter
from whimbrel.wire.ids import check_model_id
from whimbrel.wire.messages import TOP_LOGPROBS_MAX

from services.router.core.chat import ChatMessage, read_messages
from services.router.core.fields import (
    describe,
    read_flag,
    read_list,
    read_object,
    read_optional,
    read_text,
    read_whole,
    refuse,
)
from services.router.core.sampling import SamplingChoices, read_choices

# OpenAI's own bounds.
STOPS_MAX = 4
STOP_CHARACTERS_MAX = 512
COMPLETION_LOGPROBS_MAX = 5
# Each choice is an inference of its own, and all must fit in the queues at once. OpenAI allows 128; few ask for more
# than this.
CHOICES_MAX = 8
# Above every context there is; a prompt of ids is bounded by the size of the body as well.
TOKENS_MAX = 2**24
TOKEN_ID_MAX = 2**32 - 1
# OpenAI's default for /v1/completions; /v1/chat/completions has none: there the rest of the context is used.
COMPLETION_TOKENS_DEFAULT = 16

# Parameters that can have no effect on the answer here, whatever they say: labels for the caller's own bookkeeping,
# storage and billing choices of a hosted service, and hints to caches that do not exist here.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)

# Parameters that are known and not supported, with the values that mean the same as leaving them out.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "keep_alive": (),
}

CHAT_ONLY = ("messages", "max_completion_tokens", "top_logprobs")
COMPLETION_ONLY = ("prompt",)
HONOURED = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "n",
        "logprobs",
        "top_logprobs",
        # Ours: whether the request may go on elsewhere when its instance is lost.
        "failover",
    }
)


Prompt = tuple[ChatMessage, ...] | str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceParams:
    """A request body that was understood. The prompt is messages, text or token ids. `top_logprobs` is how many
    alternatives come with each token's log probability; None when that is not wanted."""

    model_id: str
    is_chat: bool
    prompt: Prompt
    is_stream: bool
    is_usage_included: bool
    output_tokens_max: int | None
    choices: SamplingChoices
    stops: tuple[str, ...]
    may_fail_over: bool = True
    choice_count: int = 1
    top_logprobs: int | None = None


def read_chat(body: object) -> InferenceParams:
    """The parameters of POST /v1/chat/completions; raises InvalidRequest or UnsupportedParameter."""
    given = _known(body, COMPLETION_ONLY)
    prompt = read_messages(_required(given, "messages"))
    return _read(
        given,
        prompt,
        is_chat=True,
        output_tokens_max=_output_tokens_max(given),
        top_logprobs=_read_chat_logprobs(given),
    )


def read_completion(body: object) -> InferenceParams:
    """The parameters of POST /v1/completions; raises InvalidRequest or UnsupportedParameter."""
    given = _known(body, CHAT_ONLY)
    prompt = _read_prompt(_required(given, "prompt"))
    output_tokens_max = _output_tokens_max(given) or COMPLETION_TOKENS_DEFAULT
    top_logprobs = None
    # Also what a chat client says when it wants none.
    if given.get("logprobs", False) is not False:
        top_logprobs = read_whole(given["logprobs"], "logprobs", 0, COMPLETION_LOGPROBS_MAX)
    return _read(given, prompt, is_chat=False, output_tokens_max=output_tokens_max, top_logprobs=top_logprobs)


def _known(body: object, foreign: tuple[str, ...]) -> dict[str, object]:
    """The honoured parameters that hold a value; raises for those that are not honoured and would matter."""
    given: dict[str, object] = {}
    for name, value in read_object(body, "body").items():
        if name in HARMLESS:
            continue
        if name in foreign or (name not in HONOURED and name not in NEUTRAL):
            raise UnsupportedParameter(field=name[:64], reason=" (it is unknown here)")
        if value is None:
            continue
        if name in HONOURED:
            given[name] = value
        elif not any(value == neutral and type(value) is type(neutral) for neutral in NEUTRAL[name]):
            raise UnsupportedParameter(field=name, reason=_only(NEUTRAL[name]))
    return given


def _required(given: dict[str, object], name: str) -> object:
    if name not in given:
        refuse(name, "is missing")
    return given[name]


def _only(neutral: tuple[object, ...]) -> str:
    return f" with this value (only {neutral[0]!r} is)" if neutral else ""


def _read(
    given: dict[str, object],
    prompt: Prompt,
    *,
    is_chat: bool,
    output_tokens_max: int | None,
    top_logprobs: int | None,
) -> InferenceParams:
    is_stream = read_optional(given, "stream", read_flag) or False
    return InferenceParams(
        model_id=check_model_id(read_text(_required(given, "model"), "model")),
        is_chat=is_chat,
        prompt=prompt,
        is_stream=is_stream,
        is_usage_included=_read_stream_options(given.get("stream_options"), is_stream),
        output_tokens_max=output_tokens_max,
        choices=read_choices(given),
        stops=_read_stops(given.get("stop")),
        may_fail_over=read_optional(given, "failover", read_flag) is not False,
        choice_count=read_whole(given.get("n", 1), "n", 1, CHOICES_MAX),
        top_logprobs=top_logprobs,
    )


def _output_tokens_max(given: dict[str, object]) -> int | None:
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    values = {read_whole(given[name], name, 1, TOKENS_MAX) for name in names}
    if len(values) > 1:
        refuse("max_tokens", "differs from max_completion_tokens; give one of them")
    return values.pop() if values else None


def _read_stream_options(value: object, is_stream: bool) -> bool:
    """Whether a usage chunk is asked for."""
    if value is None:
        return False
    if not is_stream:
        refuse("stream_options", 'goes with "stream": true only')
    options = read_object(value, "stream_options")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise UnsupportedParameter(field=f"stream_options.{name[:64]}", reason=" (it is unknown here)")
    if options.get("include_obfuscation") not in (None, False):
        raise UnsupportedParameter(field="stream_options.include_obfuscation")
    given = options.get("include_usage")
    return given is not None and read_flag(given, "stream_options.include_usage")


def _read_chat_logprobs(given: dict[str, object]) -> int | None:
    top = read_whole(given.get("top_logprobs", 0), "top_logprobs", 0, TOP_LOGPROBS_MAX)
    if read_optional(given, "logprobs", read_flag):
        return top
    if top:
        refuse("top_logprobs", 'goes with "logprobs": true only')
    return None


def _read_prompt(value: object) -> str | tuple[int, ...]:
    """Text, a list of one text, token ids, or a list of one list of token ids."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse("prompt", f"must be a string or an array of token ids, not {describe(value)}")
    if not value:
        refuse("prompt", "must not be empty")
    if isinstance(value[0], str | list):
        if len(value) > 1:
            refuse("prompt", f"holds {len(value)} prompts; send one request for each")
        return _read_prompt(value[0])
    return tuple(read_whole(token, f"prompt[{index}]", 0, TOKEN_ID_MAX) for index, token in enumerate(value))


def _read_stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else read_list(value, "stop")
    if len(stops) > STOPS_MAX:
        refuse("stop", f"holds {len(stops)} strings; at most {STOPS_MAX} are allowed")
    texts = tuple(read_text(stop, "stop") for stop in stops)
    if any(not 0 < len(text) <= STOP_CHARACTERS_MAX for text in texts):
        refuse("stop", f"each string must have between 1 and {STOP_CHARACTERS_MAX} characters")
    return texts
