"""The choice of the next token: known logits, a plain reference, and dependence on nothing but its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from whimbrel.wire.messages import Sampling

from services.gpu_worker.core.sampling import choose_token, draw_uniform

KNOWN_DRAWS = [0.011547, 0.872073, 0.882467]


def choose(logits: Many[float], *, prompt: Many[int] = (), output: Many[int] = (), **fields: Any) -> int:
    sampling = Sampling(**({"temperature": 0.0} | fields))
    values = np.array(logits, dtype=np.float32)
    return choose_token(values, sampling, prompt=prompt, output=output, position=len(output))


def possible(logits: Many[float], **fields: Any) -> set[int]:
    """Every token that some seed draws."""
    return {choose(logits, seed=seed, **({"temperature": 1.0} | fields)) for seed in range(400)}


def test_temperature_zero_takes_the_best() -> None:
    assert choose([0.1, 3.0, 2.0]) == 1


def test_the_lower_token_wins_a_tie() -> None:
    assert choose([1.0, 3.0, 3.0]) == 1
    assert possible([3.0, 3.0, 3.0], top_k=1) == {0}
    assert possible([3.0, 3.0, 3.0, 3.0], top_k=2) == {0, 1}
    assert possible([3.0, 3.0, 3.0, 3.0], top_p=0.4) == {0, 1}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logit_bias": {0: 5.0}}, 0),
        ({"logit_bias": {1: -100.0}}, 2),
        ({"presence_penalty": 1.5, "output": (1,)}, 2),
        ({"presence_penalty": 1.5, "prompt": (1,)}, 1),
        ({"frequency_penalty": 0.6, "output": (1,)}, 1),
        ({"frequency_penalty": 0.6, "output": (1, 1)}, 2),
        ({"repetition_penalty": 2.0, "prompt": (1,)}, 2),
        ({"repetition_penalty": 2.0, "output": (1, 2)}, 1),
        ({"repetition_penalty": 2.0, "output": (1,), "logit_bias": {1: 1.0}}, 1),
    ],
    ids=str,
)
def test_bias_and_penalties_move_known_logits(fields: dict[str, Any], expected: int) -> None:
    assert choose([-2.0, 3.0, 2.0], **fields) == expected


def test_repetition_lowers_negative_logits_too() -> None:
    assert choose([-1.0, -1.5], repetition_penalty=2.0, prompt=(0,)) == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {1}),
        ({"top_p": 0.8}, {1, 2}),
        ({"min_p": 0.2}, {1, 2}),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.2}, {1, 2}),
        ({"temperature": 0.01}, {1}),
        ({"top_p": 1e-30}, {1}),
    ],
    ids=str,
)
def test_only_the_tokens_that_are_left_are_drawn(fields: dict[str, Any], expected: set[int]) -> None:
    """Probabilities are 0.05, 0.6, 0.3 and 0.05."""
    assert possible([math.log(p) for p in (0.05, 0.6, 0.3, 0.05)], **fields) == expected


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits = [math.log(p) for p in (0.05, 0.6, 0.3, 0.05)]
    drawn = np.bincount([choose(logits, temperature=1.0, seed=seed) for seed in range(4000)]) / 4000
    assert drawn == pytest.approx([0.05, 0.6, 0.3, 0.05], abs=0.03)


def test_chance_is_a_function_of_seed_and_position_alone() -> None:
    """`migration.md` section 3: these numbers may never change, or a moved request changes its answer."""
    assert draw_uniform(0, 0) == draw_uniform(0, 0)
    assert [round(draw_uniform(seed, position), 6) for seed, position in ((0, 0), (7, 0), (7, 1))] == KNOWN_DRAWS
    assert len({draw_uniform(seed, position) for seed in range(50) for position in range(50)}) == 2500
    assert 0.0 <= draw_uniform(2**70, 3) < 1.0


def test_draws_are_spread_evenly_over_positions() -> None:
    draws = [draw_uniform(42, position) for position in range(2000)]
    assert np.histogram(draws, bins=10, range=(0, 1))[0].min() > 150


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_and_not_a_token(bad: float) -> None:
    with pytest.raises(ArithmeticError, match="position 0"):
        choose([0.0, bad], temperature=1.0)


def test_tokens_that_are_impossible_are_never_drawn() -> None:
    assert possible([-math.inf, 0.0, -math.inf, 0.0]) == {1, 3}


def test_the_logits_of_the_engine_are_not_changed() -> None:
    logits = np.array([1.0, 2.0], dtype=np.float32)
    sampling = Sampling(temperature=1.0, presence_penalty=1.0, logit_bias={0: 9.0})
    choose_token(logits, sampling, prompt=(), output=(1,), position=1)
    assert logits.tolist() == [1.0, 2.0]


LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40)


@settings(max_examples=80, deadline=None)
@given(
    logits=LOGITS,
    temperature=st.floats(0.05, 3.0),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**64 - 1),
)
def test_the_draw_agrees_with_a_plain_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    fields = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    probabilities = reference(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token = choose(logits, **fields)
    # Rounding may move the edges of the tokens' shares; what lies next to the edge may win.
    uniform = draw_uniform(seed, 0)
    start = sum(probabilities[:token])
    assert start - 1e-6 <= uniform <= start + probabilities[token] + 1e-6


def reference(logits: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Probabilities after all cuts, the slow and obvious way."""
    values = np.array(logits, dtype=np.float32).astype(np.float64)
    weights = np.exp((values - values.max()) / temperature)
    best = sorted(range(len(values)), key=lambda token: (-values[token], token))
    for token in best[top_k:] if top_k else []:
        weights[token] = 0.0
    kept, mass = [], 0.0
    for token in sorted(range(len(values)), key=lambda token: (-weights[token], token)):
        kept.append(token)
        mass += weights[token]
        if mass >= top_p * weights.sum() and top_p < 1.0:
            break
    kept = [token for token in kept if weights[token] >= min_p * max(weights[t] for t in kept)]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(values))]
