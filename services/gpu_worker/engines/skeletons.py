"""Owns skeletons: models without their weights, built from a configuration alone, and kept for the next time.

A skeleton has every module and every computed buffer (such as rotary frequencies), and parameters on torch's meta
device. Binding replaces these by views of the mapped chunks; unbinding puts them back, so that a skeleton can be kept.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from services.gpu_worker.engines.engine import EngineError, Limits

# Skeletons of models that take turns on a slot; each is some hundred kilobytes of Python objects per layer.
SKELETONS_MAX = 4


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or persistent buffer of one module: `table` is the module's own dictionary."""

    table: dict[str, Any]
    name: str
    meta: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """`tensors` lists, for each distinct tensor of the model, its names (tied ones have several) and its places."""

    key: str
    model: Any
    limits: Limits
    tensors: tuple[tuple[tuple[str, ...], tuple[Slot, ...]], ...]
    base_prefix: str

    def bind(self, views: Mapping[str, Tensor]) -> None:
        """Put `views` (by checkpoint name) in place of the meta tensors. Raises EngineError, having bound nothing."""
        found = [self._find(names, views) for names, _ in self.tensors]
        for (names, slots), view in zip(self.tensors, found, strict=True):
            meta = slots[0].meta
            if view.shape != meta.shape:
                shapes = f"{list(view.shape)}, the model needs {list(meta.shape)}"
                raise EngineError(f"tensor {names[0]!r} of the checkpoint has the shape {shapes}")
        for (_, slots), view in zip(self.tensors, found, strict=True):
            _place(slots, view)

    def replace(self, convert: Any) -> None:
        """Replace every bound tensor by `convert(tensor)`, once for those that are tied; None keeps it."""
        for _, slots in self.tensors:
            converted = convert(slots[0].table[slots[0].name])
            if converted is not None:
                _place(slots, converted)

    def unbind(self) -> None:
        """Let go of every view. By hand and not by dropping the model: a reference cycle would keep it for a while."""
        for _, slots in self.tensors:
            for slot in slots:
                slot.table[slot.name] = slot.meta

    def _find(self, names: tuple[str, ...], views: Mapping[str, Tensor]) -> Tensor:
        for name in names:
            for known in _spellings(name, self.base_prefix):
                if known in views:
                    return views[known]
        raise EngineError(f"tensor {names[0]!r} of the model is not in the checkpoint; import the model again")


class SkeletonCache:
    """The last few skeletons that are not in use, by digest of their configuration."""

    def __init__(self, skeletons_max: int = SKELETONS_MAX) -> None:
        self._skeletons_max = skeletons_max
        self._skeletons: OrderedDict[str, Skeleton] = OrderedDict()

    def __len__(self) -> int:
        return len(self._skeletons)

    def take(self, model_config: bytes) -> Skeleton:
        """A kept skeleton, or a new one. Raises EngineError for a configuration that nobody can build from."""
        kept = self._skeletons.pop(_digest(model_config), None)
        return build_skeleton(model_config) if kept is None else kept

    def give_back(self, skeleton: Skeleton) -> None:
        """Keep an unbound skeleton; the one that was not needed for longest goes when there are too many."""
        self._skeletons[skeleton.key] = skeleton
        self._skeletons.move_to_end(skeleton.key)
        if len(self._skeletons) > self._skeletons_max:
            self._skeletons.popitem(last=False)


def build_skeleton(model_config: bytes) -> Skeleton:
    """Build a causal language model from the bytes of its config.json. Code that a checkpoint brings is never run.

    Raises EngineError for an unknown model type, a quantised model, or a configuration that makes no model.
    """
    config = _parse(model_config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
        _compute_buffers(model)
    except Exception as cause:  # whatever a strange configuration makes transformers raise
        raise EngineError(f"config.json of type {config.model_type!r} makes no model: {cause}") from cause
    model.eval()
    model.requires_grad_(False)
    text_config = config.get_text_config()
    limits = Limits(
        context_tokens=int(getattr(text_config, "max_position_embeddings", 2**31 - 1)),
        vocabulary_size=int(text_config.vocab_size),
    )
    return Skeleton(
        key=_digest(model_config),
        model=model,
        limits=limits,
        tensors=_tensors(model),
        base_prefix=model.base_model_prefix,
    )


def _digest(model_config: bytes) -> str:
    return hashlib.sha256(model_config).hexdigest()


def _parse(model_config: bytes) -> Any:
    try:
        fields = json.loads(model_config)
        model_type = fields.pop("model_type")
    except (ValueError, KeyError, AttributeError, TypeError) as cause:
        raise EngineError(f"config.json is no model configuration: {cause!r}") from cause
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise EngineError(f"model type {model_type!r} is not supported; use a text generation model of transformers")
    if fields.get("quantization_config") is not None:
        raise EngineError("quantised checkpoints are not supported; import the model in its original precision")
    fields.pop("auto_map", None)
    try:
        return AutoConfig.for_model(model_type, **fields)
    except Exception as cause:  # each configuration class checks in its own way
        raise EngineError(f"config.json of type {model_type!r} is not valid: {cause}") from cause


def _compute_buffers(model: Any) -> None:
    """Give computed buffers memory and values, as loading by transformers does: they are in no checkpoint."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        parent, _, own_name = name.rpartition(".")
        model.get_submodule(parent)._buffers[own_name] = torch.empty_like(buffer, device="cpu")
    # On meta tensors this costs nothing; buffers get the values that their modules define.
    model.initialize_weights()


def _tensors(model: nn.Module) -> tuple[tuple[tuple[str, ...], tuple[Slot, ...]], ...]:
    """Every tensor that a checkpoint has to bring, tied ones once."""
    grouped: dict[int, tuple[list[str], list[Slot]]] = {}
    for prefix, module in model.named_modules():
        buffers = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for table, items in ((module._parameters, module._parameters), (module._buffers, buffers)):
            for name, tensor in list(items.items()):
                if tensor is not None:
                    names, slots = grouped.setdefault(id(tensor), ([], []))
                    names.append(f"{prefix}.{name}" if prefix else name)
                    slots.append(Slot(table, name, tensor))
    return tuple((tuple(names), tuple(slots)) for names, slots in grouped.values())


def _place(slots: Iterable[Slot], view: Tensor) -> None:
    """One parameter object for all places of a tied tensor, so that they stay tied."""
    placed: Tensor | None = None
    for slot in slots:
        if placed is None:
            placed = nn.Parameter(view, requires_grad=False) if isinstance(slot.meta, nn.Parameter) else view
        slot.table[slot.name] = placed


def _spellings(name: str, base_prefix: str) -> tuple[str, ...]:
    """The names under which a checkpoint may hold a tensor: as it is, or saved from the model without its head."""
    prefix = f"{base_prefix}."
    return (name, name.removeprefix(prefix)) if name.startswith(prefix) else (name, prefix + name)
