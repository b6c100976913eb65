"""What a model is made as: its class, by whatever names it, and the dtype it computes in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers

from ckptio.errors import UnsupportedFormat
from ckptio.index import Index

CONFIG_FILE = "config.json"

# What torch can make a default of, and so what computed buffers may have.
_DEFAULT_DTYPES = ("float16", "bfloat16", "float32", "float64")


def wanted_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype to turn all weights into, None for that in which they are stored."""
    if dtype is None or dtype == "auto":
        return None
    wanted = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if wanted not in [getattr(torch, name) for name in _DEFAULT_DTYPES]:
        raise ValueError(f"dtype {dtype!r}: a model can have {', '.join(_DEFAULT_DTYPES)}, or 'auto'")
    return wanted


def stored_dtype(index: Index, config: Any) -> torch.dtype:
    """The dtype that the model computes in: of the first floating tensor, as `from_pretrained` has it."""
    for name in index.dtype:
        if name in _DEFAULT_DTYPES:
            return getattr(torch, name)  # type: ignore[no-any-return]
    return config.dtype or torch.float32


def model_class_of(path: Path, config: Any, model_class: Any, trust_remote_code: bool) -> Any:
    """The class of the model: `model_class`, or the first architecture of the configuration.

    Raises `UnsupportedFormat` when the configuration has none, ValueError for a name that transformers does
    not have, TypeError for anything but a class of models.
    """
    if isinstance(model_class, str):
        model_class = _class_named(path, config, model_class, trust_remote_code)
    if model_class is not None:
        mapping = getattr(model_class, "_model_mapping", None)
        kind = model_class if mapping is None else mapping.get(type(config), None)
        if kind is None:
            raise UnsupportedFormat(
                path / CONFIG_FILE, f"{model_class.__name__} has no model of type {config.model_type!r}"
            )
        kind = kind[0] if isinstance(kind, tuple) else kind
        if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
            raise TypeError(f"model_class {model_class!r}: a model class of transformers, or its name")
        return kind
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if trust_remote_code and kind is None:
        kind = _remote_class(path, config, names)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        known = f"architecture {names[0]!r} is unknown here" if names else "it names no architecture"
        raise UnsupportedFormat(path / CONFIG_FILE, f"{known}; pass model_class")
    return kind


def _class_named(path: Path, config: Any, name: str, trust_remote_code: bool) -> Any:
    kind = getattr(transformers, name, None)
    if kind is None and trust_remote_code:
        kind = _remote_class(path, config, [name])
    if kind is None:
        raise ValueError(f"model_class {name!r}: transformers {transformers.__version__} has no such class")
    return kind


def _remote_class(path: Path, config: Any, names: list[str]) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for reference in (getattr(config, "auto_map", None) or {}).values():
        if isinstance(reference, str) and names and reference.endswith(f".{names[0]}"):
            return get_class_from_dynamic_module(reference, os.fspath(path))
    return None
