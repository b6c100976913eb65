"""Owns the choice of the next token: a function of logits, earlier tokens, parameters, seed and position alone.

That is what lets a request move between workers in the middle of a sampled answer: the token at position p is drawn
by a counter-based generator keyed by (seed, p), so no generator state has to travel (`migration.md` section 3).

Order: penalties, bias (so that no penalty scales it), then greedy when the temperature is 0, else temperature, top-k,
top-p, min-p, draw. Ties always go to the lower token id, and the draw goes through the tokens by id, so that logits
that differ by rounding alone, as those of prefill and decode do, hardly ever change it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from whimbrel.wire.messages import Sampling

Floats = NDArray[np.float64]

_SEED_MASK = 2**64 - 1


def choose_token(
    logits: NDArray[np.float32], sampling: Sampling, *, prompt: Sequence[int], output: Sequence[int], position: int
) -> int:
    """The token at `position` of the output, from `logits` of shape (vocabulary size,).

    `prompt` and `output` are the tokens before it. Raises ArithmeticError when the best logit is not a finite number.
    """
    assert logits.ndim == 1
    scores = logits
    if sampling.logit_bias or _has_penalty(sampling):
        scores = _adjust(logits.copy(), sampling, prompt, output)
    best = int(np.argmax(scores))
    if not np.isfinite(scores[best]):
        raise ArithmeticError(f"the logits at position {position} are not finite numbers")
    if sampling.temperature == 0.0:
        return best
    return _draw(_probabilities(scores, sampling), draw_uniform(sampling.seed, position))


def draw_uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position alone: Philox keyed by both."""
    key = np.array([seed & _SEED_MASK, position], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def penalise(
    logits: NDArray[np.float32], sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> NDArray[np.float32]:
    """Lower the logits of tokens that were there before, in place.

    Repetition divides positive logits and multiplies negative ones, once per token of prompt and output. Presence and
    frequency look at the output only: `logit - presence - count * frequency`.
    """
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.array([*prompt, *output], dtype=np.int64))
        values = logits[seen]
        factor = np.float32(sampling.repetition_penalty)
        logits[seen] = np.where(values > 0, values / factor, values * factor)
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        seen, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
        penalty = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits[seen] -= penalty.astype(np.float32)
    return logits


def keep_top_k(scores: NDArray[np.float32], top_k: int) -> NDArray[np.bool_] | None:
    """A mask of exactly the k best tokens; None when all stay (k = 0 means no limit)."""
    if top_k == 0 or top_k >= len(scores):
        return None
    threshold = np.partition(scores, -top_k)[-top_k]
    kept: NDArray[np.bool_] = scores > threshold
    ties = np.flatnonzero(scores == threshold)
    kept[ties[: top_k - int(kept.sum())]] = True
    return kept


def _has_penalty(sampling: Sampling) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def _adjust(
    logits: NDArray[np.float32], sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> NDArray[np.float32]:
    penalise(logits, sampling, prompt, output)
    for token, bias in sampling.logit_bias.items():
        logits[token] += np.float32(bias)
    return logits


def _probabilities(scores: NDArray[np.float32], sampling: Sampling) -> Floats:
    """Shape (vocabulary size,); zero for every token that may not be drawn; not normalised."""
    # Cut by rank before the exponential: a division by the temperature keeps the order.
    kept = keep_top_k(scores, sampling.top_k)
    with np.errstate(over="ignore"):
        scaled = (scores.astype(np.float64) - float(scores.max())) / sampling.temperature
    weights: Floats = np.exp(scaled)
    if kept is not None:
        weights[~kept] = 0.0
    if sampling.top_p < 1.0:
        _cut_top_p(weights, sampling.top_p)
    if sampling.min_p > 0.0:
        weights[weights < sampling.min_p * weights.max()] = 0.0
    return weights


def _cut_top_p(weights: Floats, top_p: float) -> None:
    """Zero all but the fewest best tokens that hold at least `top_p` of the mass, in place; one always stays."""
    total = float(weights.sum())
    # All tokens below this share hold less than 1 - top_p together, so none of them is needed: sort only the others.
    share = min((1.0 - top_p) * total / len(weights), float(weights.max()))
    candidates = np.flatnonzero(weights >= share)
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    mass = np.cumsum(weights[order])
    count = min(int(np.searchsorted(mass, top_p * total)) + 1, len(order))
    dropped = np.ones(len(weights), dtype=np.bool_)
    dropped[order[:count]] = False
    weights[dropped] = 0.0


def _draw(weights: Floats, uniform: float) -> int:
    """The first token at which the cumulated weight exceeds `uniform` of the whole."""
    mass = np.cumsum(weights)
    # Below the whole even after rounding, because `uniform` is below 1: so there always is such a token.
    return int(np.searchsorted(mass, uniform * mass[-1], side="right"))
