"""Owns which files of a published model an import needs: its weights in one format, its config, its tokenizer.

Published models come with the same weights for several frameworks, pictures and papers; none of that is fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fnmatch import fnmatch

CONFIG_FILE = "config.json"
SAFETENSORS_FILE = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"

# The small files a model's directory may have beside its weights, asked for one by one where nothing can be listed.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)

_COMPANION_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-\d{5}")
# Weight files that a training run or another framework leaves beside the model's.
_NO_WEIGHTS = ("consolidated*", "training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*")
# Formats in the order of preference: suffix, the one file, the index of shards.
_FORMATS = (
    (".safetensors", SAFETENSORS_FILE, SAFETENSORS_INDEX),
    (".bin", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    (".pth", "", ""),
    (".pt", "", ""),
)


def needed_files(names: Iterable[str]) -> list[str]:
    """Those of the relative `names` that an import needs, sorted; without weights among them there are none to find."""
    top = sorted(name for name in names if "/" not in name and not name.startswith("."))
    weights = _weights(top)
    companions = [
        name
        for name in top
        if any(fnmatch(name, pattern) for pattern in _COMPANION_PATTERNS) and not name.endswith(".index.json")
    ]
    return sorted({*weights, *companions})


def is_weights(name: str) -> bool:
    """Whether the file has tensors, by its name."""
    return name.endswith(tuple(suffix for suffix, _, _ in _FORMATS))


def shards_of(index: bytes) -> list[str]:
    """The files that an index of shards names, sorted; raises ValueError when it is none, or names a path."""
    table = json.loads(index)
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError("it has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if "/" in name or name.startswith(".") or not is_weights(name):
            raise ValueError(f"it names {name[:100]!r}, which is no weight file beside it")
    return names


def _weights(names: list[str]) -> list[str]:
    for suffix, whole, index in _FORMATS:
        found = [name for name in names if name.endswith(suffix) and not any(fnmatch(name, no) for no in _NO_WEIGHTS)]
        if not found:
            continue
        if index in names:
            shards = [name for name in found if _SHARD.fullmatch(name.removesuffix(suffix))]
            return [*(shards or found), index]
        return [whole] if whole in found else found
    return []
