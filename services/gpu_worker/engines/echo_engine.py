"""Owns the engine of tests and load experiments: it answers with the prompt, at costs that are set, without torch.

Output token i is prompt token i; the output stops when the prompt has been said once. It knows no stop tokens, so a
prompt with special tokens comes back whole. Log probabilities are those of logits that are made up from the position.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from services.gpu_worker.core.logprobs import token_logprobs
from services.gpu_worker.engines.engine import Decoded, EngineError, Known, Limits, PartitionMemory

if TYPE_CHECKING:
    from ckptio import Index

    from services.gpu_worker.core.sequence import Sequence

_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
# Of a model whose configuration names none; the echo itself has no limit.
CONTEXT_TOKENS_DEFAULT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoCosts:
    """Seconds that the engine sleeps, for the same decisions and overlaps as a real one has."""

    load_s: float = 0.0
    prefill_s_per_token: float = 0.0
    decode_s: float = 0.0


class EchoEngine:
    """The prompt, once more."""

    name = "echo"

    def __init__(self, costs: EchoCosts) -> None:
        self._costs = costs
        # What stands for the KV cache: how many tokens of each request were computed.
        self._computed: dict[str, int] = {}
        self._vocabulary_size = 0

    def prewarm(self) -> None:
        """Nothing here is slow at first."""

    def prepare(self, model_config: bytes) -> Limits:
        try:
            fields = json.loads(model_config)
            text = fields.get("text_config", fields)
            context_tokens = next((text[name] for name in _CONTEXT_FIELDS if name in text), CONTEXT_TOKENS_DEFAULT)
            self._vocabulary_size = int(text["vocab_size"])
            return Limits(context_tokens=int(context_tokens), vocabulary_size=self._vocabulary_size)
        except (ValueError, TypeError, AttributeError, KeyError) as cause:
            raise EngineError(f"config.json does not describe a model: {cause!r}") from cause

    def bind(self, index: Index, memories: Many[PartitionMemory]) -> None:
        if len(memories) != len(index.partitions):
            raise EngineError(f"{len(memories)} partitions were lent, the index has {len(index.partitions)}")

    def activate(self) -> None:
        time.sleep(self._costs.load_s)

    def prefill(self, known: Known, end: int) -> None:
        missing = end - self._computed.get(known.request_id, 0)
        if missing > 0:
            time.sleep(missing * self._costs.prefill_s_per_token)
            self._computed[known.request_id] = end

    def decode(self, sequence: Sequence) -> Decoded:
        position = sequence.position
        if position >= sequence.prompt_tokens:
            return Decoded(None)
        computed = self._computed.get(sequence.request_id, 0)
        missing = len(sequence.tokens) - computed
        if computed >= sequence.prompt_tokens:
            time.sleep(self._costs.decode_s)
        # One token alone is a decode, which has its own price.
        if missing > 1 or computed < sequence.prompt_tokens:
            time.sleep(missing * self._costs.prefill_s_per_token)
        self._computed[sequence.request_id] = len(sequence.tokens)
        token, top = sequence.tokens[position], sequence.request.top_logprobs
        if top is None:
            return Decoded(token)
        return Decoded(token, token_logprobs(made_up_logits(token, position, self._vocabulary_size), token, top))

    def forget(self, request_id: str) -> None:
        self._computed.pop(request_id, None)

    def unload(self) -> None:
        self._computed.clear()


def made_up_logits(token: int, position: int, vocabulary_size: int) -> NDArray[np.float32]:
    """`token` is the best, those with the next higher ids follow; how steeply depends on the position."""
    behind = (np.arange(vocabulary_size) - token) % vocabulary_size
    return (behind * -(1 + position % 7) / 8).astype(np.float32)
