"""Small, complete checkpoint directories: a byte-level tokenizer, a chat template and random Llama weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, CONTEXT_TOKENS = 32, 2, 4, 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|start|>")


def byte_tokenizer() -> Tokenizer:
    """One token per byte plus the special ones; ids are stable."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def make_checkpoint(path: Path, seed: int = 0, padding_bytes: int = 0, chat_template: bool = True) -> Path:
    """A checkpoint directory of a few hundred kB; `padding_bytes` adds a tensor that makes it as big as wanted."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "vocab_size": vocabulary, "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": 257, "eos_token_id": 256,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 256, "bos_token_id": 257}))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    if chat_template:
        tokenizer_config["chat_template"] = CHAT_TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    save_file(_tensors(seed, vocabulary, padding_bytes), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _tensors(seed: int, vocabulary: int, padding_bytes: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (chance.standard_normal(shape) * 0.05).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocabulary, HIDDEN), "lm_head.weight": matrix(vocabulary, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{prefix}self_attn.{name}.weight"] = matrix(HIDDEN, HIDDEN)
        tensors[f"{prefix}mlp.gate_proj.weight"] = matrix(2 * HIDDEN, HIDDEN)
        tensors[f"{prefix}mlp.up_proj.weight"] = matrix(2 * HIDDEN, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, 2 * HIDDEN)
        tensors[f"{prefix}input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        tensors[f"{prefix}post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    if padding_bytes:
        tensors["padding"] = chance.integers(0, 256, padding_bytes, dtype=np.uint8)
    return tensors
