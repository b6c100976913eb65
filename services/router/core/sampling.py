"""Owns what a request may say about sampling, and how that and the model's defaults become a `Sampling`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from whimbrel.wire.messages import Sampling

from services.router.core.fields import read_number, read_object, read_optional, read_whole, refuse

T = TypeVar("T")

# OpenAI's bounds, and wide ones where OpenAI has no such parameter.
TEMPERATURE_MAX = 2.0
TOP_P_MIN = 1e-6
TOP_K_MAX = 2**24
PENALTY_MAX = 2.0
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.01, 10.0
LOGIT_BIAS_MAX = 100.0
# A bias for every token of a big vocabulary would make the request larger than its prompt; nobody needs that many.
LOGIT_BIAS_TOKENS_MAX = 1024
SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What holds when the request says nothing: OpenAI's defaults, then the model's generation config."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChoices:
    """What the request says about sampling; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


def read_choices(given: dict[str, object]) -> SamplingChoices:
    """The sampling parameters among those given; raises InvalidRequest that names the one out of range."""

    def number(name: str, minimum: float, maximum: float) -> float | None:
        return read_optional(given, name, lambda value, field: read_number(value, field, minimum, maximum))

    def whole(name: str, minimum: int, maximum: int) -> int | None:
        return read_optional(given, name, lambda value, field: read_whole(value, field, minimum, maximum))

    top_k = whole("top_k", -1, TOP_K_MAX)
    seed = whole("seed", -SEED_MAX - 1, SEED_MAX)
    return SamplingChoices(
        temperature=number("temperature", 0.0, TEMPERATURE_MAX),
        top_p=number("top_p", TOP_P_MIN, 1.0),
        top_k=None if top_k is None else max(top_k, 0),
        min_p=number("min_p", 0.0, 1.0),
        seed=None if seed is None else seed & SEED_MAX,
        presence_penalty=number("presence_penalty", -PENALTY_MAX, PENALTY_MAX),
        frequency_penalty=number("frequency_penalty", -PENALTY_MAX, PENALTY_MAX),
        repetition_penalty=number("repetition_penalty", REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX),
        logit_bias=_read_logit_bias(given.get("logit_bias", {})),
    )


def resolve_sampling(choices: SamplingChoices, defaults: SamplingDefaults, random_seed: int) -> Sampling:
    """Everything that decides the next token; `random_seed` serves requests that give none."""

    def chosen(given: T | None, default: T) -> T:
        return default if given is None else given

    return Sampling(
        temperature=chosen(choices.temperature, defaults.temperature),
        top_p=chosen(choices.top_p, defaults.top_p),
        top_k=chosen(choices.top_k, defaults.top_k),
        min_p=chosen(choices.min_p, defaults.min_p),
        seed=chosen(choices.seed, random_seed),
        presence_penalty=chosen(choices.presence_penalty, 0.0),
        frequency_penalty=chosen(choices.frequency_penalty, 0.0),
        repetition_penalty=chosen(choices.repetition_penalty, defaults.repetition_penalty),
        logit_bias=dict(choices.logit_bias),
    )


def _read_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    biases = read_object(value, "logit_bias")
    if len(biases) > LOGIT_BIAS_TOKENS_MAX:
        refuse("logit_bias", f"names {len(biases)} tokens; at most {LOGIT_BIAS_TOKENS_MAX} are allowed")
    return tuple(_read_bias(token, bias) for token, bias in biases.items())


def _read_bias(token: str, bias: object) -> tuple[int, float]:
    if not (token.isascii() and token.isdigit() and len(token) <= 10):
        refuse("logit_bias", f"{token[:32]!r} is no token id")
    return int(token), read_number(bias, f"logit_bias.{token}", -LOGIT_BIAS_MAX, LOGIT_BIAS_MAX)
