"""Owns the log probabilities of a token: what the model itself thought of it and of the best alternatives.

They are the log-softmax of the model's own logits, before penalties, bias, temperature and the cuts of sampling, as in
vLLM's default (`logprobs_mode=raw_logprobs`): they say the same of a token however it was sampled. Ties go to the lower
token id.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from whimbrel.wire.logprobs import LOGPROB_MIN, pack_logprob

from services.gpu_worker.core.sampling import keep_top_k


def token_logprobs(logits: NDArray[np.float32], token: int, top: int) -> bytes:
    """The packed record of `token` with the `top` best tokens, from finite best logits of shape (vocabulary size,)."""
    assert 0 <= top <= len(logits)
    best = float(logits.max())
    total = best + float(np.log(np.exp(logits.astype(np.float64) - best).sum()))
    ids = _best(logits, top)
    return pack_logprob(
        max(float(logits[token]) - total, LOGPROB_MIN),
        [(int(other), max(float(logits[other]) - total, LOGPROB_MIN)) for other in ids],
    )


def _best(logits: NDArray[np.float32], top: int) -> NDArray[np.int64]:
    """The ids of the best logits, the best first."""
    if top == 0:
        return np.empty(0, dtype=np.int64)
    kept = keep_top_k(logits, top)
    ids = np.arange(len(logits)) if kept is None else np.flatnonzero(kept)
    return ids[np.argsort(-logits[ids], kind="stable")]
