"""Tensors into the places of a model that was built on the meta device, without a copy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptio.errors import ModelMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A parameter or persistent buffer: entry `key` of a module's own dictionary `table`."""

    name: str
    table: dict[str, Any]
    key: str
    meta: torch.Tensor


# Place name -> its device, or None for one that nobody said.
DeviceOf = Callable[[str], torch.device | None]


def bind(model: Any, tensors: Mapping[str, torch.Tensor], device_of: DeviceOf, path: Path) -> None:
    """Puts `tensors`, named as in a checkpoint, in the places of `model`; tied places get one parameter.

    Names may have or lack the prefix of the base model, as `from_pretrained` allows. A tensor that is on its
    device already is not copied. Raises `ModelMismatch`, having changed nothing, when a tensor is missing,
    left over, or of another shape than its place.
    """
    prefix = f"{model.base_model_prefix}."
    found: dict[str, tuple[str, torch.Tensor]] = {}
    groups = _groups(model)
    for place in (place for group in groups for place in group):
        for spelling in _spellings(place.name, prefix):
            if spelling in tensors:
                found[place.name] = (spelling, tensors[spelling])
                break
    used = {spelling for spelling, _ in found.values()}
    missing = [group[0].name for group in groups if not any(place.name in found for place in group)]
    misshapen = [
        place.name
        for group in groups
        for place in group
        if place.name in found and found[place.name][1].shape != place.meta.shape
    ]
    unexpected = [name for name in tensors if name not in used and not _is_expected(model, name, prefix)]
    if missing or misshapen or unexpected:
        raise ModelMismatch(
            path, missing=tuple(missing), unexpected=tuple(unexpected), misshapen=tuple(misshapen)
        )
    for group in groups:
        device = _known_device(device_of, group[0].name)
        own = {place.name: found[place.name][1].to(device) for place in group if place.name in found}
        _bind_group(model, group, own)


def check_places(model: Any, device_of: DeviceOf) -> None:
    """Raises ValueError when a tensor of `model` has no device, naming the first ones."""
    names = [group[0].name for group in _groups(model)]
    names += [name for name, _ in model.named_non_persistent_buffers()]
    homeless = [name for name in names if device_of(name) is None]
    if homeless:
        more = f" and {len(homeless) - 4} more" if len(homeless) > 4 else ""
        raise ValueError(f"device_map has no device for {', '.join(homeless[:4])}{more}")


def compute_buffers(model: Any, device_of: DeviceOf) -> None:
    """Gives the buffers that are in no checkpoint (such as rotary frequencies) memory and their values.

    Models compute them where they initialise their weights. These are still on the meta device here, and
    marked as done: initialising them would only take time.
    """
    names = [name for name, _ in model.named_non_persistent_buffers()]
    for name in names:
        table, key = _owner(model, name)
        table[key] = torch.empty_like(table[key], device="cpu")
    for tensor in model.parameters():
        tensor._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = not module._non_persistent_buffers_set
    model.initialize_weights()
    for name in names:
        table, key = _owner(model, name)
        table[key] = table[key].to(_known_device(device_of, name))


def _groups(model: nn.Module) -> Sequence[Sequence[Place]]:
    """Every tensor that a checkpoint has to bring: the places of tied ones together."""
    grouped: dict[int, list[Place]] = {}
    for prefix, module in model.named_modules():
        passing = module._non_persistent_buffers_set
        buffers = {key: value for key, value in module._buffers.items() if key not in passing}
        tables: Iterable[tuple[dict[str, Any], dict[str, Any]]] = (
            (module._parameters, module._parameters),
            (module._buffers, buffers),
        )
        for table, items in tables:
            for key, tensor in items.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    place = Place(name=name, table=table, key=key, meta=tensor)
                    grouped.setdefault(id(tensor), []).append(place)
    return list(grouped.values())


def _bind_group(model: Any, group: Sequence[Place], found: Mapping[str, torch.Tensor]) -> None:
    """Tied places of which the checkpoint has different tensors are not tied, as in `from_pretrained`."""
    first = next(found[place.name] for place in group if place.name in found)
    shared = _as_value(first, group[0].meta)
    for place in group:
        own = found.get(place.name, first)
        if own.data_ptr() == first.data_ptr() or torch.equal(own, first):
            place.table[place.key] = shared
        else:
            place.table[place.key] = _as_value(own, place.meta)
            model.all_tied_weights_keys.pop(place.name, None)


def _as_value(tensor: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    if not isinstance(meta, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=meta.requires_grad and tensor.is_floating_point())


def _is_expected(model: Any, name: str, prefix: str) -> bool:
    """Whether a tensor may be left over: an old buffer, or the head when only the base model is built."""
    if model.base_model is model and not name.startswith(prefix):
        return True
    patterns = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [buffer for buffer, _ in model.named_buffers()]
    for key in ("rotary_emb.inv_freq", "position_ids"):
        # Older versions stored these with every layer; the model computes them.
        if any(buffer.endswith(key) for buffer in buffers):
            patterns.add(rf"(^|\.){re.escape(key)}$")
    return any(re.search(pattern, name) for pattern in patterns)


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    return (name, name.removeprefix(prefix)) if name.startswith(prefix) else (name, prefix + name)


def _known_device(device_of: DeviceOf, name: str) -> torch.device:
    device = device_of(name)
    if device is None:
        raise ValueError(f"device_map has no device for {name}")
    return device


def _owner(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    parent, _, key = name.rpartition(".")
    return model.get_submodule(parent)._buffers, key
