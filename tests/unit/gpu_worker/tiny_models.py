"""Tiny models with random weights: several architectures, tied and not, in 16 and 32 bits; published and converted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckptio

# Small, so that even a tiny model spans several chunks.
CHUNK_BYTES = 64 * 1024
VOCABULARY = 160
SEED = 7

_LLAMA = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip

# Name → model type, dtype, configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "float32", {**_LLAMA, "tie_word_embeddings": False}),
    "llama-tied-bf16": ("llama", "bfloat16", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2-bf16": ("qwen2", "bfloat16", {**_LLAMA, "tie_word_embeddings": False}),
    "opt": (
        "opt", "float32",
        {
            "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "word_embed_proj_dim": 64, "max_position_embeddings": 128,
        },
    ),
    "gpt2-bf16": ("gpt2", "bfloat16", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TinyModel:
    """`source` is what transformers saved, `checkpoint` what ckptio made of it."""

    name: str
    source: Path
    checkpoint: Path

    @property
    def config(self) -> bytes:
        return (self.source / "config.json").read_bytes()


def make_tiny_models(directory: Path) -> dict[str, TinyModel]:
    return {name: _make(name, directory) for name in MODELS}


def _make(name: str, directory: Path) -> TinyModel:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, dtype, fields = MODELS[name]
    torch.manual_seed(SEED)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, vocab_size=VOCABULARY, **special, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    # The usual initial weights are so small that all logits are nearly the same; a trained model decides.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(directory / name / "source")
    ckptio.convert(directory / name / "source", directory / name / "checkpoint", chunk_size_bytes=CHUNK_BYTES)
    return TinyModel(name, directory / name / "source", directory / name / "checkpoint")
