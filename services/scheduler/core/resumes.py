"""Owns what is learned of computing a request again elsewhere: t_migrate = a (t_in + t_out) + b, with t_out = d / t.

Theory of operation. Every migration is one observation of a and b: the tokens that were sent, and the time from the
first of them to the stop of the source. Until there was one, prefills of ordinary requests stand in for them. They know
nothing of a destination that computes while the source does, nor of the step that the source ends first, so they are
not mixed.

a and b are fitted by recursive least squares that forgets, each observation weighed by how much those of that length
scatter, which is by a share of their time. One far off (its device had other work) moves the fit by a bounded step, and
makes the fit less sure of itself: the next ordinary one pulls it back at once, while several in a row are soon
believed, so hardware that changed is relearned. Forgetting never makes anything less certain than a prior is, so
observations that are all of one length do not blow up what they can't tell.

Computing a token again is never slower than computing it was, so a running request costs at most its own age (d)
besides its prompt, whatever was learned.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import copysign, sqrt

import msgspec
from whimbrel.wire.records import ResumeRecord

from services.scheduler.core.views import Resume

# Priors, used until the first prefill is observed and marked as such. A token costs two operations per parameter to
# prefill, and reads every parameter once (two bytes each) to decode. What the two kinds of devices do of both per
# second, in practice, not by their data sheets.
PRIOR_OPERATIONS_PER_S = {"cpu": 1e11, "cuda": 1e14}
PRIOR_BYTES_PER_S = {"cpu": 1e10, "cuda": 1e12}
PRIOR_OVERHEAD_S = 0.02
# A device that is neither is taken for the slower one. A model that does not say its size is taken for a small one.
PRIOR_KIND = "cpu"
PRIOR_PARAMETERS = 10**9
# How far off a prior may well be, as a multiple of itself, and what an overhead may well be when nothing is known.
PRIOR_ERROR = 3.0
PRIOR_OVERHEAD_ERROR_S = 0.5

# What one prefill counts for after another one: about the last thirty are remembered.
FORGETTING = 0.97
# Prefills of one length scatter by this share, and by this time at least, standard deviations.
SCATTER_SHARE = 0.15
SCATTER_S = 0.001
# What is further off than so many standard deviations is not taken at its word, and adds this much to the doubt.
OUTLIER_DEVIATIONS = 3.0
OUTLIER_DOUBT = 4.0
SECONDS_PER_TOKEN_MIN = 1e-9

# The mean time per output token follows the last twenty requests, and none of them by more than this factor.
TOKEN_WEIGHT_MIN = 0.05
TOKEN_FACTOR_MAX = 3.0

#: 2 × 2, row by row.
Covariance = tuple[float, float, float, float]


def kind_of(device: str) -> str:
    """The kind of a device, which records are kept by: "cuda" of "cuda:1"."""
    return device.partition(":")[0]


def prior(model_id: str, device: str, *, parameter_count: int) -> ResumeRecord:
    """What is assumed of a model on this kind of device before anything was observed there: `observations` is 0."""
    kind = kind_of(device)
    known_kind = kind if kind in PRIOR_OPERATIONS_PER_S else PRIOR_KIND
    parameters = parameter_count or PRIOR_PARAMETERS
    seconds_per_token = 2.0 * parameters / PRIOR_OPERATIONS_PER_S[known_kind]
    return ResumeRecord(
        model_id=model_id,
        device=kind,
        seconds_per_token=seconds_per_token,
        overhead_s=PRIOR_OVERHEAD_S,
        covariance=_unsure(seconds_per_token),
        observations=0,
        token_s=max(seconds_per_token, 2.0 * parameters / PRIOR_BYTES_PER_S[known_kind]),
    )


def observe_prefill(record: ResumeRecord, *, tokens: int, seconds: float) -> ResumeRecord:
    """The fit after computing `tokens` once more took `seconds`. Nothing is learned from no tokens."""
    if tokens <= 0 or seconds < 0.0:
        return record
    expected_s = record.seconds_per_token * tokens + record.overhead_s
    known = _forgotten(record, seconds / tokens)
    # P x and x' P x of x = (tokens, 1).
    toward_a, toward_b = known[0] * tokens + known[1], known[1] * tokens + known[3]
    doubt = toward_a * tokens + toward_b
    total = doubt + max(SCATTER_S, SCATTER_SHARE * max(expected_s, seconds)) ** 2
    residual_s, bound_s = seconds - expected_s, OUTLIER_DEVIATIONS * sqrt(total)
    if abs(residual_s) > bound_s:
        residual_s = copysign(bound_s, residual_s)
        covariance = _symmetric(*(OUTLIER_DOUBT * known[entry] for entry in (0, 1, 3)))
    else:
        covariance = _symmetric(
            known[0] - toward_a * toward_a / total,
            known[1] - toward_a * toward_b / total,
            known[3] - toward_b * toward_b / total,
        )
    seconds_per_token, overhead_s = _possible(
        record.seconds_per_token + toward_a / total * residual_s,
        record.overhead_s + toward_b / total * residual_s,
        covariance,
    )
    return msgspec.structs.replace(
        record,
        seconds_per_token=seconds_per_token,
        overhead_s=overhead_s,
        covariance=covariance,
        observations=record.observations + 1,
    )


def observe_migration(record: ResumeRecord, *, tokens: int, seconds: float) -> ResumeRecord:
    """The fit after a migration sent `tokens`, and its source stopped after `seconds`. The first one begins anew, from
    what prefills have told, and as unsure of it as of a prior."""
    if tokens <= 0 or seconds < 0.0:
        return record
    if record.migrations == 0:
        record = msgspec.structs.replace(record, covariance=_unsure(record.seconds_per_token))
    record = observe_prefill(record, tokens=tokens, seconds=seconds)
    return msgspec.structs.replace(record, migrations=record.migrations + 1)


def observe_token_time(record: ResumeRecord, token_s: float) -> ResumeRecord:
    """t after a request that took `token_s` per output token (M3); 0 says that it had too few, and is not learned."""
    if token_s <= 0.0:
        return record
    mean_s = token_s
    if record.token_observations > 0:
        weight = max(TOKEN_WEIGHT_MIN, 1.0 / (record.token_observations + 1))
        bounded_s = min(max(token_s, record.token_s / TOKEN_FACTOR_MAX), record.token_s * TOKEN_FACTOR_MAX)
        mean_s = record.token_s + weight * (bounded_s - record.token_s)
    return msgspec.structs.replace(record, token_s=mean_s, token_observations=record.token_observations + 1)


def estimate_s(record: ResumeRecord, *, prompt_tokens: float, output_tokens: float, requests: int) -> float:
    """t_migrate of `requests` together: a (t_in + t_out) + b each; the tokens are sums over all of them."""
    return record.seconds_per_token * (prompt_tokens + output_tokens) + record.overhead_s * requests


def resume_of(record: ResumeRecord, *, requests: int, prompt_tokens: int, running_s: float, now: float) -> Resume:
    """t_migrate of what runs on an instance, and how it grows while that goes on decoding (M2, M3).

    `prompt_tokens` and `running_s` (d) are sums over the `requests`, as their router said them at `now`.
    """
    # What decoding for a second costs to compute again: a / t, as t_out = d / t.
    share = min(1.0, record.seconds_per_token / record.token_s) if record.token_s > 0.0 else 1.0
    prompts_s = estimate_s(record, prompt_tokens=prompt_tokens, output_tokens=0.0, requests=requests)
    return Resume(base_s=prompts_s + share * running_s, growth=share * requests, since_s=now)


def joined(resumes: Iterable[Resume], now: float) -> Resume:
    """The requests of several routers on one instance: theirs together, from `now` on."""
    parts = tuple(resumes)
    return Resume(sum(part.seconds(now) for part in parts), sum(part.growth for part in parts), now)


def _unsure(seconds_per_token: float) -> Covariance:
    """As little as is known of a prior."""
    return (PRIOR_ERROR * seconds_per_token) ** 2, 0.0, 0.0, PRIOR_OVERHEAD_ERROR_S**2


def _forgotten(record: ResumeRecord, observed_s_per_token: float) -> Covariance:
    """The covariance when older observations count less, but never larger than when nothing is known."""
    p_aa, p_ab, _, p_bb = (entry / FORGETTING for entry in record.covariance)
    widest_a = PRIOR_ERROR * max(record.seconds_per_token, observed_s_per_token)
    shrink_a = min(1.0, widest_a / sqrt(p_aa)) if p_aa > 0.0 else 1.0
    shrink_b = min(1.0, PRIOR_OVERHEAD_ERROR_S / sqrt(p_bb)) if p_bb > 0.0 else 1.0
    return _symmetric(p_aa * shrink_a**2, p_ab * shrink_a * shrink_b, p_bb * shrink_b**2)


def _symmetric(p_aa: float, p_ab: float, p_bb: float) -> Covariance:
    """The matrix of these; what rounding made impossible is possible again."""
    p_aa, p_bb = max(0.0, p_aa), max(0.0, p_bb)
    limit = sqrt(p_aa * p_bb)
    p_ab = min(max(p_ab, -limit), limit)
    return p_aa, p_ab, p_ab, p_bb


def _possible(seconds_per_token: float, overhead_s: float, covariance: Covariance) -> tuple[float, float]:
    """The likeliest a and b that are times: where one would be negative, it is held and the other follows."""
    p_aa, p_ab, _, p_bb = covariance
    if overhead_s < 0.0:
        seconds_per_token -= overhead_s * p_ab / p_bb if p_bb > 0.0 else 0.0
        overhead_s = 0.0
    if seconds_per_token < SECONDS_PER_TOKEN_MIN:
        overhead_s += (SECONDS_PER_TOKEN_MIN - seconds_per_token) * p_ab / p_aa if p_aa > 0.0 else 0.0
        seconds_per_token = SECONDS_PER_TOKEN_MIN
    return seconds_per_token, max(0.0, overhead_s)
