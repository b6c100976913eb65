"""What part 3 of the seeds says of the two estimators (D3, D4), sentence by sentence, with the router's own core where
a sentence is about what routers know. `test_scheduling.py` has what the scheduler does with the estimates."""

from __future__ import annotations

import random

import pytest
from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.messages import InstanceActivity, Route, RouteState, Tier, TokenEntry

from services.router.core.progress import Progress
from services.router.core.routes import RouteTable
from services.scheduler.core import accuracy, bandwidth, resumes
from services.scheduler.core.estimates import PathSpeed, estimate_load, path_speeds

GB = 10**9


# --- estimating a load (part3:25-27) ---


def learned_speed(tier: Tier, *, bytes_per_s: float, scatter: float, chance: random.Random) -> PathSpeed:
    """What is known of a path after ten loads of models of many sizes."""
    record = bandwidth.prior("s0", tier)
    for _ in range(10):
        size_bytes = chance.randint(GB, 60 * GB)
        seconds = size_bytes / bytes_per_s * chance.uniform(1 - scatter, 1 + scatter)
        record = bandwidth.observe_transfer(record, size_bytes=size_bytes, seconds=seconds)
    return path_speeds("s0", {tier: record}, 0.0)[tier]


@pytest.mark.parametrize("real_bytes_per_s", [2e8, 5e9, 6e10], ids=["disk", "drive", "raid"])
def test_reported_latencies_correct_the_bandwidth_whatever_was_assumed(real_bytes_per_s: float) -> None:
    """E6: "does not rely on fixed bandwidth constants"."""
    speed = learned_speed(Tier.SSD, bytes_per_s=real_bytes_per_s, scatter=0.0, chance=random.Random(1))
    slowest = max(1 / real_bytes_per_s, 1 / bandwidth.PRIOR_BANDWIDTH_BYTES_PER_S[Tier.DRAM])
    assert speed.seconds_per_byte == pytest.approx(slowest)


@pytest.mark.parametrize(("tier", "bytes_per_s", "within_s"), [(Tier.SSD, 5e9, 0.04), (Tier.DRAM, 2.5e10, 0.005)])
def test_on_steady_hardware_the_estimates_are_within_40_ms_from_the_ssd_and_5_ms_to_the_gpu(
    tier: Tier, bytes_per_s: float, within_s: float
) -> None:
    """E7: a drive and a link that scatter by one per cent, and a model of 13 GB."""
    for seed in range(20):
        chance = random.Random(seed)
        speed = learned_speed(tier, bytes_per_s=bytes_per_s, scatter=0.01, chance=chance)
        estimate = estimate_load(queue_s=0.0, size_bytes=13 * GB, speed=speed)
        assert estimate.transfer_s == pytest.approx(13 * GB / bytes_per_s, abs=within_s), f"seed {seed}"


def test_the_error_is_known_and_an_outlier_in_119_loads_survives() -> None:
    """E7: one load took 623 ms longer; neither the estimate nor what is said of its quality follows it."""
    record = bandwidth.prior("s0", Tier.SSD)
    quality = accuracy.unknown("s0", Tier.SSD)
    for number in range(119):
        estimate_s = GB * record.seconds_per_byte
        actual_s = GB / 5e9 + (0.623 if number == 110 else 0.0)
        quality = accuracy.observe(quality, estimate_s=estimate_s, actual_s=actual_s)
        record = bandwidth.observe_transfer(record, size_bytes=GB, seconds=actual_s)
    assert GB * record.seconds_per_byte == pytest.approx(0.2)
    assert accuracy.quality(quality).error_s_p90 < 0.04
    assert max(abs(estimate_s - actual_s) for estimate_s, actual_s in quality.recent) == pytest.approx(0.623)


# --- estimating a migration (part3:29-35) ---


def test_the_cost_of_a_migration_is_a_times_the_tokens_plus_b() -> None:
    """M1: t_migrate = a (t_in + t_out) + b; the transfer of the tokens is ignored (M4)."""
    a, b = 0.0005, 0.2
    record = resumes.prior("opt", "cuda:0", parameter_count=7 * GB)
    for tokens in (100, 2000, 400, 1200) * 5:
        record = resumes.observe_prefill(record, tokens=tokens, seconds=a * tokens + b)
    told_s = resumes.estimate_s(record, prompt_tokens=512, output_tokens=256, requests=1)
    assert told_s == pytest.approx(a * (512 + 256) + b, rel=0.01)


def test_the_constants_are_per_model_and_hardware() -> None:
    """M1"""
    keys = {
        resumes.prior(model_id, device, parameter_count=7 * GB).key()
        for model_id in ("opt", "llama")
        for device in ("cpu", "cuda:0", "cuda:1")
    }
    assert keys == {"opt@cpu", "opt@cuda", "llama@cpu", "llama@cuda"}


def test_the_output_so_far_is_what_the_router_knows_of_duration_and_time_per_token() -> None:
    """M2, M3: t_out = d / t. An inference decodes at 20 ms a token; the GPU server is asked nothing, and the estimate
    is that of the tokens that there really are, at the heartbeat and later."""
    token_s, prompt_tokens = 0.02, 300
    ended = Progress(epoch=1, now=0.0)
    decode(ended, tokens=100, first_at=1.0, token_s=token_s)
    record = resumes.prior("opt", "cuda:0", parameter_count=7 * GB)
    record = resumes.observe_token_time(record, ended.token_s)

    running = Progress(epoch=1, now=50.0)
    decode(running, tokens=151, first_at=50.0, token_s=token_s)
    table = RouteTable()
    table.add(Route(instance_id="i", model_id="opt", server_id="s0", slot=0, state=RouteState.READY))
    table.acquire("i")
    said = InstanceActivity(
        instance_id="i", requests=1, prompt_tokens=prompt_tokens, running_s=running.decoding_s(53.0)
    )
    (activity,) = table.activity([said])
    resume = resumes.resume_of(
        record,
        requests=activity.requests,
        prompt_tokens=activity.prompt_tokens,
        running_s=activity.running_s,
        now=53.0,
    )
    for now, t_out in ((53.0, 150), (58.0, 400)):
        expected_s = resumes.estimate_s(record, prompt_tokens=prompt_tokens, output_tokens=t_out, requests=1)
        assert resume.seconds(now) == pytest.approx(expected_s, rel=0.01)


def decode(progress: Progress, *, tokens: int, first_at: float, token_s: float) -> None:
    """The tokens arrive one by one."""
    for position in range(tokens):
        entry = TokenEntry(request_id="r", epoch=1, position=position, tokens=pack_tokens([7]))
        progress.accept(entry, first_at + position * token_s)
