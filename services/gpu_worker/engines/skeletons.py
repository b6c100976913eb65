"""Owns skeletons: models without their weights, built from a configuration alone, and kept for the next time.

A skeleton has every module and every computed buffer (such as rotary frequencies), and parameters on torch's meta
device. Binding replaces these by views of the mapped chunks; unbinding puts them back, so that a skeleton can be kept.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from services.gpu_worker.engines.engine import EngineError, Limits

# Skeletons of models that take turns on a slot; each is some hundred kilobytes of Python objects per layer.
SKELETONS_MAX = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is: a parameter or persistent buffer of one module. `table` is the module's own dictionary."""

    module: nn.Module
    table: dict[str, Any]
    name: str
    meta: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """`tensors` lists, for each distinct tensor of the model, its names and places, of which tied ones have several."""

    key: str
    model: Any
    limits: Limits
    tensors: tuple[tuple[tuple[str, ...], tuple[Place, ...]], ...]
    base_prefix: str

    def bind(self, views: Mapping[str, Tensor]) -> None:
        """Put `views` (by checkpoint name) in place of the meta tensors. Raises EngineError, having bound nothing."""
        found = [self._find(names, views) for names, _ in self.tensors]
        for (names, places), view in zip(self.tensors, found, strict=True):
            meta = places[0].meta
            if view.shape != meta.shape:
                shapes = f"{list(view.shape)}, the model needs {list(meta.shape)}"
                raise EngineError(f"tensor {names[0]!r} of the checkpoint has the shape {shapes}")
        for (_, places), view in zip(self.tensors, found, strict=True):
            _put(places, view)

    def convert(self, dtype: torch.dtype, may_stay: Callable[[nn.Module], bool]) -> None:
        """Copy every floating tensor of another dtype to `dtype`, unless it may stay as it is in all of its places."""
        for _, places in self.tensors:
            tensor = places[0].table[places[0].name]
            if tensor.dtype == dtype or not tensor.is_floating_point():
                continue
            if not all(may_stay(place.module) and place.name == "weight" for place in places):
                _put(places, tensor.to(dtype))

    def unbind(self) -> None:
        """Let go of every view. By hand and not by dropping the model: a reference cycle would keep it for a while."""
        for _, places in self.tensors:
            for place in places:
                place.table[place.name] = place.meta

    def _find(self, names: tuple[str, ...], views: Mapping[str, Tensor]) -> Tensor:
        for name in names:
            for known in _spellings(name, self.base_prefix):
                if known in views:
                    return views[known]
        raise EngineError(f"tensor {names[0]!r} of the model is not in the checkpoint; import the model again")


class SkeletonCache:
    """The last few skeletons that are not in use, by digest of their configuration. New ones are given to `adapt`."""

    def __init__(self, adapt: Callable[[nn.Module], None], skeletons_max: int = SKELETONS_MAX) -> None:
        self._adapt = adapt
        self._skeletons_max = skeletons_max
        self._skeletons: OrderedDict[str, Skeleton] = OrderedDict()

    def __len__(self) -> int:
        return len(self._skeletons)

    def take(self, model_config: bytes) -> Skeleton:
        """A kept skeleton, or a new one. Raises EngineError for a configuration that nobody can build from."""
        kept = self._skeletons.pop(_digest(model_config), None)
        if kept is not None:
            return kept
        skeleton = build_skeleton(model_config)
        self._adapt(skeleton.model)
        return skeleton

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
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(_pack)
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


def _pack(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of a pass over several tokens the head gets the last one, as a view with the strides of all of them. For those
    torch multiplies by a copy of the weights, the largest matrix of the model, which costs more than all the rest.
    `contiguous()` would copy nothing: a single row counts as contiguous whatever its strides."""
    return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs)


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
    # Modules give their buffers the values where they initialise their weights. These are not wanted: initialising
    # meta tensors is Python code in torch, and would take most of the time that a skeleton needs.
    for tensor in model.parameters():
        tensor._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = not module._non_persistent_buffers_set
    model.initialize_weights()


def _tensors(model: nn.Module) -> tuple[tuple[tuple[str, ...], tuple[Place, ...]], ...]:
    """Every tensor that a checkpoint has to bring, tied ones once."""
    grouped: dict[int, tuple[list[str], list[Place]]] = {}
    for prefix, module in model.named_modules():
        buffers = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for table, items in ((module._parameters, module._parameters), (module._buffers, buffers)):
            for name, tensor in list(items.items()):
                if tensor is not None:
                    names, places = grouped.setdefault(id(tensor), ([], []))
                    names.append(f"{prefix}.{name}" if prefix else name)
                    places.append(Place(module, table, name, tensor))
    return tuple((tuple(names), tuple(places)) for names, places in grouped.values())


def _put(places: tuple[Place, ...], tensor: Tensor) -> None:
    """One parameter object for all places of a tied tensor, so that they stay tied."""
    is_parameter = isinstance(places[0].meta, nn.Parameter)
    value = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
    for place in places:
        place.table[place.name] = value


def _spellings(name: str, base_prefix: str) -> tuple[str, ...]:
    """The names under which a checkpoint may hold a tensor: as it is, or saved from the model without its head."""
    prefix = f"{base_prefix}."
    return (name, name.removeprefix(prefix)) if name.startswith(prefix) else (name, prefix + name)
