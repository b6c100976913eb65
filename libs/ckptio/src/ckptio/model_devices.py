"""Which device each module of a model goes to, as `device_map` says it."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from ckptio.errors import PackageMissing
from ckptio.model_binding import DeviceOf
from ckptio.targets import Device, target_of

DeviceMap = Device | Mapping[str, Device]

# Maps that accelerate makes for the memory of this machine; the first two are one, as in transformers.
_MADE = ("auto", "balanced", "balanced_low_0", "sequential")


def check_device_map(device_map: DeviceMap) -> None:
    """Raises ValueError for a device that does not exist or is the disk, `PackageMissing` for accelerate."""
    is_made = isinstance(device_map, str) and device_map in _MADE
    devices = () if is_made else _devices(device_map)
    if (is_made or len(set(devices)) > 1) and not _is_there("accelerate"):
        what = repr(device_map) if is_made else "with several devices"
        raise PackageMissing(f"device_map {what}", package="accelerate")


def made_device_map(model: Any, device_map: DeviceMap, dtype: torch.dtype) -> DeviceMap:
    """The map itself, or that of accelerate for its name, from the free memory of GPUs and host.

    Raises ValueError when the model does not fit them: nothing goes to disk.
    """
    if not isinstance(device_map, str) or device_map not in _MADE:
        return device_map
    from accelerate import infer_auto_device_map  # type: ignore[import-untyped]
    from accelerate.utils import get_balanced_memory  # type: ignore[import-untyped]

    unsplit = sorted(model._no_split_modules or ())
    memory = None
    if device_map != "sequential":
        memory = get_balanced_memory(
            model,
            no_split_module_classes=unsplit,
            dtype=dtype,
            low_zero=device_map == "balanced_low_0",
        )
    made = dict(infer_auto_device_map(model, max_memory=memory, no_split_module_classes=unsplit, dtype=dtype))
    if "disk" in made.values():
        rest = ", ".join(name for name, device in made.items() if device == "disk")
        raise ValueError(f"device_map {device_map!r}: no memory is left for {rest}; ckptio offloads nothing")
    return made


def device_of_map(device_map: DeviceMap) -> DeviceOf:
    """The device of a tensor by its name: that of the longest name in the map that it begins with."""
    if not isinstance(device_map, Mapping):
        target = target_of(device_map)
        return lambda _: target
    devices = {name: target_of(device) for name, device in device_map.items()}

    def device_of(name: str) -> torch.device | None:
        pieces = name.split(".")
        prefixes = (".".join(pieces[:count]) for count in range(len(pieces), -1, -1))
        return next((devices[prefix] for prefix in prefixes if prefix in devices), None)

    return device_of


def targets_of_map(device_map: DeviceMap) -> set[torch.device]:
    """All devices that the map names."""
    return set(_devices(device_map))


def _devices(device_map: DeviceMap) -> list[torch.device]:
    devices = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    if any(device == "disk" for device in devices):
        raise ValueError(
            "device_map names the disk, and ckptio offloads nothing; "
            "give GPUs and 'cpu', or use from_pretrained of transformers"
        )
    return [target_of(device) for device in devices]


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # somebody put None in its place
        return False
