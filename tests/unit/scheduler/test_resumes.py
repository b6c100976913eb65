"""t_migrate = a (t_in + t_out) + b: how a and b are learned from prefills, and what they say of what runs now."""

from __future__ import annotations

import math
import random

import pytest
from whimbrel.wire.records import ResumeRecord

from services.scheduler.core.resumes import (
    estimate_s,
    joined,
    kind_of,
    observe_migration,
    observe_prefill,
    observe_token_time,
    prior,
    resume_of,
)

A, B = 2e-4, 0.03
LENGTHS = (200, 1000, 4000)
SCATTER = 0.15
SEEDS = range(25)


def unseen(parameter_count: int = 500_000_000, device: str = "cpu") -> ResumeRecord:
    return prior("m", device, parameter_count=parameter_count)


def known(seconds_per_token: float, overhead_s: float, token_s: float) -> ResumeRecord:
    return ResumeRecord(
        model_id="m",
        device="cuda",
        seconds_per_token=seconds_per_token,
        overhead_s=overhead_s,
        covariance=(0.0, 0.0, 0.0, 0.0),
        observations=50,
        token_s=token_s,
        token_observations=50,
    )


def prefill(chance: random.Random, factor: float = 1.0) -> tuple[int, float]:
    """A prompt of any length from 20 to 4000 tokens, and what its prefill takes, as it scatters."""
    tokens = int(math.exp(chance.uniform(math.log(20), math.log(4000))))
    return tokens, (A * tokens + B) * max(0.3, chance.gauss(1.0, SCATTER)) * factor


def learn(record: ResumeRecord, chance: random.Random, count: int, factor: float = 1.0) -> ResumeRecord:
    for _ in range(count):
        tokens, seconds = prefill(chance, factor)
        record = observe_prefill(record, tokens=tokens, seconds=seconds)
    return record


def error(record: ResumeRecord, factor: float = 1.0) -> float:
    """The largest relative error at short, usual and long requests."""
    return max(
        abs(estimate_s(record, prompt_tokens=length, output_tokens=0, requests=1) / (factor * (A * length + B)) - 1.0)
        for length in LENGTHS
    )


# --- priors ---


def test_a_model_that_was_never_seen_has_a_prior_by_its_size_and_device_that_is_marked_as_one() -> None:
    """M1: D4 asks for a prior from the parameter count."""
    small, large = unseen(10**9), unseen(7 * 10**9)
    assert (small.observations, small.token_observations) == (0, 0)
    assert large.seconds_per_token == pytest.approx(7 * small.seconds_per_token)
    assert unseen(10**9, "cuda:1").seconds_per_token < small.seconds_per_token / 100
    assert unseen(10**9, "cuda:1").key() == "m@cuda"
    assert kind_of("cpu") == "cpu"


@pytest.mark.parametrize(("parameter_count", "device"), [(0, "cpu"), (0, "cuda:0"), (10**9, "tpu:3"), (10**9, "")])
def test_what_is_not_known_of_a_model_or_a_device_still_gives_an_estimate(parameter_count: int, device: str) -> None:
    record = unseen(parameter_count, device)
    resume = resume_of(record, requests=2, prompt_tokens=1000, running_s=3.0, now=0.0)
    assert 0.0 < resume.seconds(10.0) < math.inf


# --- learning a and b ---


@pytest.mark.parametrize("parameter_count", [10**6, 10**9, 10**12], ids=str)
def test_fifteen_prefills_replace_a_prior_however_wrong_it_was(parameter_count: int) -> None:
    """M1"""
    for seed in SEEDS:
        record = learn(unseen(parameter_count), random.Random(seed), 15)
        assert error(record) < 0.25, f"seed {seed}"
        assert record.observations == 15


def test_exact_prefills_give_the_very_constants() -> None:
    """M1"""
    record = unseen()
    for tokens in (50, 900, 300, 2000, 120) * 8:
        record = observe_prefill(record, tokens=tokens, seconds=A * tokens + B)
    assert record.seconds_per_token == pytest.approx(A, rel=0.01)
    assert record.overhead_s == pytest.approx(B, rel=0.02)


@pytest.mark.parametrize("factor", [0.1, 5.0, 100.0], ids=str)
def test_one_prefill_in_twenty_that_is_far_off_leaves_the_estimate_where_it_is(factor: float) -> None:
    """M1: a device that had other work says nothing of the model."""
    for seed in SEEDS:
        chance = random.Random(seed)
        record = learn(unseen(), chance, 30)
        for number in range(100):
            tokens, seconds = prefill(chance, factor if number % 20 == 10 else 1.0)
            record = observe_prefill(record, tokens=tokens, seconds=seconds)
            assert error(record) < 0.35, f"seed {seed}, prefill {number}"


@pytest.mark.parametrize("factor", [0.1, 10.0], ids=["faster", "slower"])
def test_a_device_that_changes_tenfold_is_relearned_within_a_dozen_prefills(factor: float) -> None:
    """M1: the constants are updated, not fitted once."""
    for seed in SEEDS:
        chance = random.Random(seed)
        record = learn(learn(unseen(), chance, 100), chance, 12, factor)
        assert error(record, factor) < 0.4, f"seed {seed}"


def test_prompts_of_one_length_only_teach_what_they_can_and_another_length_the_rest() -> None:
    """M1: forgetting blows up nothing."""
    for seed in SEEDS:
        chance = random.Random(seed)
        record = unseen()
        for _ in range(500):
            record = observe_prefill(record, tokens=300, seconds=(A * 300 + B) * chance.gauss(1.0, 0.1))
        at_300_s = estimate_s(record, prompt_tokens=300, output_tokens=0, requests=1)
        assert at_300_s == pytest.approx(A * 300 + B, rel=0.15), f"seed {seed}"
        assert all(math.isfinite(entry) for entry in record.covariance)
        record = learn(record, chance, 10)
        assert error(record) < 0.3, f"seed {seed}"


def test_constants_are_times_whatever_is_observed() -> None:
    """M1: neither is ever negative, and the covariance stays one."""
    for seed in SEEDS:
        chance = random.Random(seed)
        record = unseen(chance.choice([0, 10**6, 10**12]))
        for number in range(300):
            tokens = chance.choice([1, 2, 100, 10**6])
            record = observe_prefill(record, tokens=tokens, seconds=chance.choice([0.0, 1e-6, 0.01, 1.0, 1e4]))
            p_aa, p_ab, p_ba, p_bb = record.covariance
            where = f"seed {seed}, prefill {number}: {record}"
            assert record.seconds_per_token > 0.0, where
            assert record.overhead_s >= 0.0, where
            assert p_ab == p_ba, where
            assert p_aa >= 0.0, where
            assert p_bb >= 0.0, where
            assert p_ab * p_ab <= p_aa * p_bb * (1 + 1e-9), where


def test_ten_migrations_replace_what_any_number_of_prefills_had_told() -> None:
    """A destination that computes while the source does is slower than one that has the machine for itself."""
    for seed in SEEDS:
        chance = random.Random(seed)
        record = learn(unseen(), chance, 100)
        for _ in range(10):
            tokens, seconds = prefill(chance, 2.5)
            record = observe_migration(record, tokens=tokens, seconds=seconds)
        assert record.migrations == 10
        assert error(record, 2.5) < 0.35, f"seed {seed}"


def test_a_migration_that_sent_nothing_says_nothing() -> None:
    record = unseen()
    assert observe_migration(record, tokens=0, seconds=1.0) == record


def test_nothing_is_learned_from_no_tokens() -> None:
    assert observe_prefill(unseen(), tokens=0, seconds=1.0) == unseen()
    assert observe_token_time(unseen(), 0.0) == unseen()


# --- learning t ---


def test_the_mean_time_per_token_is_that_of_the_last_requests() -> None:
    """M3"""
    record = observe_token_time(unseen(), 0.08)
    assert record.token_s == 0.08
    assert record.token_observations == 1
    record = observe_token_time(record, 0.04)
    assert record.token_s == pytest.approx(0.06)
    for _ in range(120):
        record = observe_token_time(record, 0.02)
    assert record.token_s == pytest.approx(0.02, rel=0.05)


def test_one_slow_request_hardly_changes_the_mean_time_per_token() -> None:
    """M3"""
    record = unseen()
    for _ in range(30):
        record = observe_token_time(record, 0.02)
    assert observe_token_time(record, 20.0).token_s == pytest.approx(0.02, rel=0.15)


# --- what is running now ---


def test_a_resume_computes_prompts_and_what_was_decoded_since_again() -> None:
    """M1, M2, M3: t_out = d / t."""
    record = known(seconds_per_token=0.001, overhead_s=0.05, token_s=0.02)
    resume = resume_of(record, requests=2, prompt_tokens=600, running_s=4.0, now=100.0)
    t_out = 4.0 / 0.02
    assert resume.seconds(100.0) == pytest.approx(0.001 * (600 + t_out) + 2 * 0.05)
    assert resume.seconds(100.0) == pytest.approx(
        estimate_s(record, prompt_tokens=600, output_tokens=t_out, requests=2)
    )


def test_a_resume_grows_while_its_requests_go_on_decoding() -> None:
    """M3: nobody asks the GPU server for it."""
    record = known(seconds_per_token=0.001, overhead_s=0.05, token_s=0.02)
    before = resume_of(record, requests=2, prompt_tokens=600, running_s=4.0, now=100.0)
    after = resume_of(record, requests=2, prompt_tokens=600, running_s=4.0 + 2 * 10.0, now=110.0)
    assert before.seconds(110.0) == pytest.approx(after.seconds(110.0))
    assert before.seconds(110.0) - before.seconds(100.0) == pytest.approx(2 * 10.0 / 0.02 * 0.001)


def test_computing_again_never_counts_for_more_than_what_it_took_first() -> None:
    """M3: also not when t is unknown, or a was learned to be larger."""
    for token_s in (0.0, 0.001):
        record = known(seconds_per_token=0.01, overhead_s=0.0, token_s=token_s)
        resume = resume_of(record, requests=3, prompt_tokens=0, running_s=6.0, now=0.0)
        assert resume.seconds(0.0) == pytest.approx(6.0)
        assert resume.growth == pytest.approx(3.0)


def test_requests_of_several_routers_count_together_from_a_common_time() -> None:
    """M2: each router knows only its own."""
    record = known(seconds_per_token=0.001, overhead_s=0.05, token_s=0.02)
    one = resume_of(record, requests=1, prompt_tokens=100, running_s=1.0, now=50.0)
    other = resume_of(record, requests=2, prompt_tokens=300, running_s=3.0, now=52.0)
    both = joined([one, other], now=53.0)
    for now in (53.0, 60.0):
        assert both.seconds(now) == pytest.approx(one.seconds(now) + other.seconds(now))
    assert joined([], now=1.0).seconds(9.0) == 0.0
