"""Owns what a worker does before its first request, so that this one does not pay for it: imports and first times."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING

import torch
from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.messages import Sampling, StartInference

from services.gpu_worker.core.sequence import Sequence

if TYPE_CHECKING:
    from services.gpu_worker.engines.transformers_engine import TransformersEngine

# What most models that people serve are built from; importing one takes 50 to 700 ms. Others are imported when needed.
COMMON_MODELS = ("llama", "qwen2", "opt")

# Two layers are all it takes for every kind of operation to have run once.
TINY_CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}

# As many as a short chat turn has.
PROMPT_TOKENS = 40
OUTPUT_TOKENS = 3


def prewarm(engine: TransformersEngine, dtype: torch.dtype) -> None:
    """Import the common model classes, and let `engine` answer once, greedily and sampled, from a tiny random model."""
    for name in COMMON_MODELS:
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    engine.prepare(json.dumps(TINY_CONFIG).encode())
    engine.bind_views(engine.random_views(dtype), dtype)
    engine.activate()
    for number, temperature in enumerate((0.0, 1.0)):
        sequence = Sequence(_request(f"prewarm-{number}", temperature), 0.0)
        engine.prefill(sequence, PROMPT_TOKENS // 2)
        while not sequence.is_finished:
            sequence.advance(engine.decode(sequence).token, 0.0)
        engine.forget(sequence.request_id)
    engine.unload()


def _request(request_id: str, temperature: float) -> StartInference:
    return StartInference(
        request_id=request_id,
        epoch=0,
        router_id="none",
        router_epoch=0,
        instance_id="none",
        model_id="none",
        tokens=pack_tokens(range(PROMPT_TOKENS)),
        prompt_tokens=PROMPT_TOKENS,
        output_tokens_max=OUTPUT_TOKENS,
        stop_tokens=(),
        sampling=Sampling(temperature=temperature, top_p=0.9, top_k=50),
    )
