"""The checkpoints of the benchmark as names and shapes; pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from ckptio.plan import size_of

# Part of the fingerprint: raise it when the way the files are written changes.
SPEC_VERSION = 1

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor; `dtype` is torch's name without the prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return size_of(self.dtype, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """A checkpoint to make: the weights file, its tensors in file order, and the small JSON files beside it.

    `is_model` says whether transformers has a model class for it.
    """

    name: str
    weights_file: str
    tensors: tuple[TensorSpec, ...]
    files: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    is_model: bool = False
    is_quick: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def directory_name(self) -> str:
        """The quick one lies beside the full one."""
        return f"{self.name}-quick" if self.is_quick else self.name

    @property
    def fingerprint(self) -> str:
        """Changes whenever the files on disk would."""
        text = repr((SPEC_VERSION, self.weights_file, self.tensors, self.files))
        return xxhash.xxh3_64_hexdigest(text.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The sizes of a transformer."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    key_value_heads: int
    positions: int

    @property
    def key_value_hidden(self) -> int:
        """Width of keys and values."""
        return self.hidden // self.heads * self.key_value_heads


_QWEN = Dimensions(
    layers=28,
    hidden=1536,
    intermediate=8960,
    vocabulary=151936,
    heads=12,
    key_value_heads=2,
    positions=131072,
)
_QWEN_QUICK = Dimensions(
    layers=4, hidden=1536, intermediate=8960, vocabulary=32768, heads=12, key_value_heads=2, positions=4096
)
_TINY = Dimensions(
    layers=2, hidden=256, intermediate=1024, vocabulary=4096, heads=4, key_value_heads=2, positions=512
)
_OPT = Dimensions(
    layers=24, hidden=2048, intermediate=8192, vocabulary=50272, heads=32, key_value_heads=32, positions=2048
)
_OPT_QUICK = Dimensions(
    layers=4, hidden=2048, intermediate=8192, vocabulary=8192, heads=32, key_value_heads=32, positions=2048
)

CHECKPOINTS = ("qwen1.5b", "opt1.3b", "lora", "many")

# A few MB, for tests; not offered in the help.
TINY = "tiny"


def checkpoint_spec(name: str, *, is_quick: bool = False) -> CheckpointSpec:
    """The checkpoint called `name`; raises ValueError when there is none of that name."""
    match name:
        case "qwen1.5b":
            return _qwen(name, _QWEN_QUICK if is_quick else _QWEN, is_quick)
        case "opt1.3b":
            return _opt(name, _OPT_QUICK if is_quick else _OPT, is_quick)
        case "lora":
            return _lora(name, _QWEN, rank=8 if is_quick else 64, is_quick=is_quick)
        case "many":
            return _many(name, count=500 if is_quick else 4000, is_quick=is_quick)
        case "tiny":
            return _qwen(name, _TINY, is_quick)
    raise ValueError(f"there is no checkpoint {name!r}; there are: {', '.join(CHECKPOINTS)}")


def _named(dtype: str, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in shapes)


def _linear_shapes(sizes: Dimensions) -> dict[str, tuple[int, int]]:
    """Linear layer of a Qwen2 block -> (outputs, inputs)."""
    hidden, narrow, wide = sizes.hidden, sizes.key_value_hidden, sizes.intermediate
    outputs = (hidden, narrow, narrow, hidden, wide, wide, hidden)
    inputs = (hidden, hidden, hidden, hidden, hidden, hidden, wide)
    return dict(zip(LINEAR_LAYERS, zip(outputs, inputs, strict=True), strict=True))


def _block_of(linear: str) -> str:
    return "mlp" if linear in ("gate_proj", "up_proj", "down_proj") else "self_attn"


def _qwen(name: str, sizes: Dimensions, is_quick: bool) -> CheckpointSpec:
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (sizes.vocabulary, sizes.hidden))
    ]
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}"
        shapes.append((f"{prefix}.input_layernorm.weight", (sizes.hidden,)))
        for linear, (outputs, inputs) in _linear_shapes(sizes).items():
            shapes.append((f"{prefix}.{_block_of(linear)}.{linear}.weight", (outputs, inputs)))
            if linear in ("q_proj", "k_proj", "v_proj"):
                shapes.append((f"{prefix}.self_attn.{linear}.bias", (outputs,)))
        shapes.append((f"{prefix}.post_attention_layernorm.weight", (sizes.hidden,)))
    shapes.append(("model.norm.weight", (sizes.hidden,)))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.key_value_heads,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.positions,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    return CheckpointSpec(
        name=name,
        weights_file="model.safetensors",
        tensors=_named("bfloat16", shapes),
        files={"config.json": config},
        is_model=True,
        is_quick=is_quick,
    )


def _opt(name: str, sizes: Dimensions, is_quick: bool) -> CheckpointSpec:
    hidden, wide = sizes.hidden, sizes.intermediate
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("model.decoder.embed_tokens.weight", (sizes.vocabulary, hidden)),
        # The model keeps two rows before the first position.
        ("model.decoder.embed_positions.weight", (sizes.positions + 2, hidden)),
    ]
    for layer in range(sizes.layers):
        prefix = f"model.decoder.layers.{layer}"
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            shapes += [
                (f"{prefix}.self_attn.{part}.weight", (hidden, hidden)),
                (f"{prefix}.self_attn.{part}.bias", (hidden,)),
            ]
        shapes += [(f"{prefix}.fc1.weight", (wide, hidden)), (f"{prefix}.fc1.bias", (wide,))]
        shapes += [(f"{prefix}.fc2.weight", (hidden, wide)), (f"{prefix}.fc2.bias", (hidden,))]
        for norm in ("self_attn_layer_norm", "final_layer_norm"):
            shapes += [(f"{prefix}.{norm}.weight", (hidden,)), (f"{prefix}.{norm}.bias", (hidden,))]
    for part in ("weight", "bias"):
        shapes.append((f"model.decoder.final_layer_norm.{part}", (hidden,)))
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": wide,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.positions,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }
    return CheckpointSpec(
        name=name,
        weights_file="model.safetensors",
        tensors=_named("float16", shapes),
        files={"config.json": config},
        is_model=True,
        is_quick=is_quick,
    )


def _lora(name: str, sizes: Dimensions, *, rank: int, is_quick: bool) -> CheckpointSpec:
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for layer in range(sizes.layers):
        for linear, (outputs, inputs) in _linear_shapes(sizes).items():
            prefix = f"base_model.model.model.layers.{layer}.{_block_of(linear)}.{linear}"
            shapes += [
                (f"{prefix}.lora_A.weight", (rank, inputs)),
                (f"{prefix}.lora_B.weight", (outputs, rank)),
            ]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(LINEAR_LAYERS),
    }
    return CheckpointSpec(
        name=name,
        weights_file="adapter_model.safetensors",
        tensors=_named("bfloat16", shapes),
        files={"adapter_config.json": config},
        is_quick=is_quick,
    )


def _many(name: str, *, count: int, is_quick: bool) -> CheckpointSpec:
    """Sizes that fit no page and no sector: odd numbers of elements, 0.3 kB to 300 kB, 150 kB on average."""
    generator = random.Random(4000)
    tensors = []
    for number in range(count):
        # Wide elements first, so that all tensors of the safetensors file are aligned.
        dtype, bytes_max = ("float32", 300_000) if number < count // 4 else ("bfloat16", 300_000)
        item_bytes = size_of(dtype, ())
        elements = generator.randrange(150, bytes_max // item_bytes) | 1
        tensors.append(TensorSpec(name=f"block.{number}.weight", dtype=dtype, shape=(elements,)))
    return CheckpointSpec(
        name=name, weights_file="model.safetensors", tensors=tuple(tensors), is_quick=is_quick
    )
