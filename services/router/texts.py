"""Owns text of one model: prompts to tokens, output tokens to text piece by piece, and the model's own settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import structlog
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from whimbrel.wire.errors import InvalidRequest, LoadFailed

from services.router.core.chat import ChatMessage
from services.router.core.sampling import SamplingDefaults
from services.router.token_bytes import TokenBytes

log = structlog.get_logger()

# For the rare config that names no context length: what the smallest models in use have.
CONTEXT_TOKENS_UNKNOWN = 2048
# Tokens of the prompt that the decoder of a completion sees: enough for the space between words and a split character.
PROMPT_TAIL_TOKENS = 8
# No character is longer than 4 bytes, so no more than 4 tokens; text held back for longer is broken and is let go.
PENDING_TOKENS_MAX = 8

# The library's messages may quote the file that it could not read.
REASON_CHARACTERS_MAX = 500

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
# What a template may raise besides jinja's own errors when messages do not suit it.
_TEMPLATE_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """What config, generation config and tokenizer say about requests."""

    context_tokens: int
    vocabulary_tokens: int
    stop_tokens: tuple[int, ...]
    defaults: SamplingDefaults


class ModelText:
    """The tokenizer and chat template of one model. `encode_*` may be called from any thread."""

    def __init__(self, model_id: str, tokenizer: Any, settings: TextSettings) -> None:
        self.model_id = model_id
        self.settings = settings
        self._tokenizer = tokenizer
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self.token_bytes = TokenBytes(self._backend)
        self._control_tokens = tuple(str(token) for token in tokenizer.added_tokens_encoder)
        self._is_chat = bool(tokenizer.chat_template)

    def for_model(self, model_id: str) -> ModelText:
        """The same text under another model's name; the parsed tokenizer is shared."""
        return ModelText(model_id, self._tokenizer, self.settings)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a completion prompt, with the model's own first token where it has one."""
        return list(self._backend.encode(text).ids)

    def encode_chat(self, messages: tuple[ChatMessage, ...]) -> list[int]:
        """Token ids of a conversation up to the assistant's turn.

        Control tokens that the client wrote into a message are encoded as the characters they are: a message cannot
        end itself and speak as somebody else. Raises InvalidRequest when there is no template or it refuses.
        """
        if not self._is_chat:
            raise InvalidRequest(
                field="messages",
                reason=f"model {self.model_id!r} has no chat template; use /v1/completions",
            )
        conversation = [message.for_template() for message in messages]
        said = [text for fields in conversation for text in fields.values()]
        has_control_tokens = any(token in text for text in said for token in self._control_tokens)
        try:
            if has_control_tokens:
                return list(self._apply(conversation, tokenize=True, sanitize_control_tokens=True, return_dict=False))
            rendered = self._apply(conversation, tokenize=False)
        except _TEMPLATE_ERRORS as cause:
            raise InvalidRequest(
                field="messages", reason=f"the chat template of {self.model_id!r} refuses them: {cause}"
            ) from cause
        return list(self._backend.encode(rendered, add_special_tokens=False).ids)

    def decoder(self, prompt_tail: list[int]) -> TextStream:
        """A decoder for one output that continues `prompt_tail`; empty when the output begins a text of its own."""
        return TextStream(self._backend, prompt_tail[-PROMPT_TAIL_TOKENS:])

    def _apply(self, conversation: list[dict[str, str]], **options: object) -> Any:
        return self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, **options)


class TextStream:
    """Output tokens to text: a character that is split over tokens comes out whole, with its last token."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail: list[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt_tail)
        self._base = self._decode(prompt_tail)
        self._stream = DecodeStream(ids=list(prompt_tail), skip_special_tokens=True)
        self._pending: list[int] = []
        # So many of the first pending tokens have no text of their own, as special ones.
        self._silent = 0
        self._texts: list[str] = []

    def step(self, token: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        self._tokens.append(token)
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # the library has no class for it: bytes that turned out to be no UTF-8 after all
            return self._give_up()
        if text is not None:
            return self._say(text)
        said = self._decode(self._pending)
        if not said:
            self._silent = len(self._pending)
        elif len(self._pending) - self._silent >= PENDING_TOKENS_MAX and said.endswith(_REPLACEMENT):
            return self._give_up()
        return ""

    def flush(self) -> str:
        """What the end of the output leaves incomplete, as replacement characters."""
        if not self._pending:
            return ""
        whole, said = self._decode(self._tokens), self._base + "".join(self._texts)
        return self._say(whole[len(said) :] if whole.startswith(said) else self._decode(self._pending))

    def _give_up(self) -> str:
        text = self._decode(self._pending)
        self._stream = DecodeStream(skip_special_tokens=True)
        return self._say(text)

    def _say(self, text: str) -> str:
        self._pending.clear()
        self._silent = 0
        self._texts.append(text)
        return text

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def load_text(model_id: str, directory: Path) -> ModelText:
    """Read the tokenizer files of a model (blocking, up to a second); raises LoadFailed naming what is wrong."""
    config = _read_json(model_id, directory / "config.json")
    generation = _read_json(model_id, directory / "generation_config.json")
    try:
        tokenizer = _load_tokenizer(directory)
    except Exception as cause:  # the library raises whatever its parsers raise; the file is at fault, not we
        reason = f"its tokenizer files cannot be read: {type(cause).__name__}: {cause}"
        raise LoadFailed(model_id=model_id, reason=reason[:REASON_CHARACTERS_MAX]) from cause
    text = ModelText(model_id, tokenizer, _settings(config, generation, tokenizer))
    if tokenizer.chat_template:
        _compile_template(text)
    return text


def warm_up() -> None:
    """Import what loading needs (blocking, one to three seconds the first time)."""
    from transformers import PreTrainedTokenizerFast

    assert PreTrainedTokenizerFast is not None


def _load_tokenizer(directory: Path) -> Any:
    # Imported here and not above: it takes more than a second, and the rest of the router need not wait for it.
    if (directory / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def _compile_template(text: ModelText) -> None:
    """The first use of a template compiles it; no client should wait for that. What it says does not matter here."""
    try:
        text.encode_chat((ChatMessage(role="user", content="."),))
    except InvalidRequest as error:
        log.warning("chat_template_refuses", model_id=text.model_id, reason=error.reason)


def _settings(config: dict[str, Any], generation: dict[str, Any], tokenizer: Any) -> TextSettings:
    config = {**config, **(config.get("text_config") or {})}
    stops: set[int] = set()
    for given in (generation.get("eos_token_id"), config.get("eos_token_id"), tokenizer.eos_token_id):
        stops.update(given if isinstance(given, list) else [] if given is None else [given])
    return TextSettings(
        context_tokens=_context_tokens(config, tokenizer),
        vocabulary_tokens=config.get("vocab_size") or len(tokenizer),
        stop_tokens=tuple(sorted(stops)),
        defaults=_defaults(generation),
    )


def _context_tokens(config: dict[str, Any], tokenizer: Any) -> int:
    for key in _CONTEXT_KEYS:
        if isinstance(config.get(key), int) and config[key] > 0:
            return int(config[key])
    # transformers says "unknown" as a number beyond every context.
    return int(tokenizer.model_max_length) if tokenizer.model_max_length < 2**31 else CONTEXT_TOKENS_UNKNOWN


def _defaults(generation: dict[str, Any]) -> SamplingDefaults:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    return SamplingDefaults(**given)


def _read_json(model_id: str, path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except ValueError as cause:
        raise LoadFailed(model_id=model_id, reason=f"{path.name} is no JSON: {cause}") from cause
    if not isinstance(values, dict):
        raise LoadFailed(model_id=model_id, reason=f"{path.name} is no JSON object")
    return values
