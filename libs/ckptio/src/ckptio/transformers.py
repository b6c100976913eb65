"""Models of the transformers package, loaded by ckptio: `ckptio.transformers.load_model`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptio.errors import (
    CorruptCheckpoint,
    MissingFile,
    ModelMismatch,
    PackageMissing,
    PathLike,
    UnsupportedFormat,
)
from ckptio.files import read_bounded
from ckptio.index import Index
from ckptio.layout import Layout, read_layout
from ckptio.manifest import MANIFEST_FILE, digest_of

try:
    import torch
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
except ImportError as error:
    # Whatever of the two is missing, or too old to have what is needed here.
    missing = (error.name or "transformers").partition(".")[0]
    raise PackageMissing("ckptio.transformers", package=missing, extra="transformers") from error

from ckptio.model_binding import DeviceOf, bind, check_places, compute_buffers
from ckptio.model_choice import CONFIG_FILE, model_class_of, stored_dtype, wanted_dtype
from ckptio.model_devices import (
    DeviceMap,
    check_device_map,
    device_of_map,
    made_device_map,
    targets_of_map,
)
from ckptio.targets import check_targets
from ckptio.torch import load_layout

GENERATION_FILE = "generation_config.json"

# Far more than any configuration or modelling code that a model brings.
_TEXT_BYTES_MAX = 64 * 1024 * 1024


def load_model(
    path: PathLike,
    device_map: DeviceMap = None,
    dtype: str | torch.dtype | None = None,
    model_class: Any = None,
    trust_remote_code: bool = False,
) -> Any:
    """The model of a checkpoint directory, converted or stock, as `from_pretrained` of transformers gives it.

    Its parameters are the loaded tensors, without a copy (only `dtype` other than stored costs one; None and
    "auto" keep the stored ones); ties are kept, computed buffers computed, the model is in evaluation mode.
    Where the model of this transformers has other tensors than were published (fused experts, new names),
    they are made from the loaded ones as `from_pretrained` does.
    `device_map` is one device, a map from the names of modules to devices (several need accelerate), or
    "auto", "balanced", "balanced_low_0" or "sequential", which accelerate turns into a map; a partition for
    one device is loaded straight to it. `model_class` (default: the first architecture in config.json) is a
    class, also an Auto class, or its name in transformers.

    All of these are checked before any weight is read: ValueError for what does not exist or leaves a part of
    the model without a device, `PackageMissing` when accelerate is. Raises the errors of `load` too,
    `ModelMismatch` when tensors and model differ, `UnsupportedFormat` for what config.json does not make a
    model of.
    """
    path = Path(path)
    check_device_map(device_map)
    wanted = wanted_dtype(dtype)
    layout = read_layout(path)
    _check_texts(path, layout, trust_remote_code)
    config = _read_config(path, trust_remote_code)
    kind = model_class_of(path, config, model_class, trust_remote_code)
    used = wanted or stored_dtype(layout.index, config)
    model = _skeleton(path, kind, config, used)
    device_map = made_device_map(model, device_map, used)
    device_of = device_of_map(device_map)
    check_places(model, device_of)
    check_targets(targets_of_map(device_map), layout.index.dtype)
    tensors = load_layout(layout, _partition_devices(layout.index, device_of))
    if wanted is not None:
        tensors = _cast(model, tensors, wanted)
    try:
        compute_buffers(model, device_of)
        bind(model, tensors, device_of, path)
    except ModelMismatch:
        if not get_model_conversion_mapping(model, add_legacy=False):
            raise
        model = _converted(path, kind, config, tensors, used, device_map, device_of)
    if model.can_generate() and (path / GENERATION_FILE).exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(os.fspath(path))
    model.eval()
    return _dispatched(model, device_map)


def _check_texts(path: Path, layout: Layout, trust_remote_code: bool) -> None:
    """The files that the model is built from, against their digests in the manifest."""
    if not (path / CONFIG_FILE).is_file():
        if layout.manifest is not None and any(file.name == CONFIG_FILE for file in layout.manifest.files):
            raise MissingFile(path / CONFIG_FILE, named_by=path / MANIFEST_FILE)
        hint = "an adapter; load its base model" if (path / "adapter_config.json").exists() else "no model"
        raise UnsupportedFormat(path, f"no {CONFIG_FILE} here: {hint}")
    for file in () if layout.manifest is None else layout.manifest.files:
        is_code = trust_remote_code and file.name.endswith(".py")
        if file.name not in (CONFIG_FILE, GENERATION_FILE) and not is_code:
            continue
        if not (path / file.name).is_file():
            raise MissingFile(path / file.name, named_by=path / MANIFEST_FILE)
        if digest_of(read_bounded(path / file.name, _TEXT_BYTES_MAX)) != file.digest:
            raise CorruptCheckpoint(path / file.name, "the file does not match the digest in the manifest")


def _read_config(path: Path, trust_remote_code: bool) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(
            os.fspath(path), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # each configuration class checks in its own way
        raise UnsupportedFormat(path / CONFIG_FILE, f"no configuration of a model: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedFormat(path / CONFIG_FILE, "a quantized model; use from_pretrained of transformers")
    return config


def _skeleton(path: Path, kind: Any, config: Any, dtype: torch.dtype) -> Any:
    try:
        with torch.device("meta"):
            return kind._from_config(config, dtype=dtype)
    except Exception as error:  # whatever a strange configuration makes transformers raise
        raise UnsupportedFormat(path / CONFIG_FILE, f"makes no model: {error}") from error


def _converted(
    path: Path,
    kind: Any,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device_map: DeviceMap,
    device_of: DeviceOf,
) -> Any:
    """The model by transformers' own rules for names and layouts that changed; what did not is not copied."""
    devices = dict(device_map) if isinstance(device_map, Mapping) else None
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        dtype=dtype,
        device_map=devices,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    misshapen = sorted(name for name, *_ in report["mismatched_keys"])
    if missing or unexpected or misshapen:
        raise ModelMismatch(
            path, missing=tuple(missing), unexpected=tuple(unexpected), misshapen=tuple(misshapen)
        )
    return model.to(device_of("")) if devices is None else model


def _partition_devices(index: Index, device_of: DeviceOf) -> list[torch.device]:
    """One device per partition: of all of its tensors, or the CPU where they differ or are put together."""
    cpu = torch.device("cpu")
    if index.slices:
        return [cpu] * len(index.partitions)
    wanted: list[set[torch.device]] = [set() for _ in index.partitions]
    for name, partition in zip(index.names, index.partition, strict=True):
        wanted[partition].add(device_of(name) or cpu)
    return [devices.pop() if len(devices) == 1 else cpu for devices in wanted]


def _cast(model: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Floating tensors as `dtype`, but for modules that their model keeps in float32; tied ones stay tied."""
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype.itemsize == 2 else set()
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    done: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}
    cast = {}
    for name, tensor in tensors.items():
        target = torch.float32 if any(key in name.split(".") for key in kept) else dtype
        key = (tensor.data_ptr(), tensor.shape, target)
        if not tensor.is_floating_point():
            cast[name] = tensor
        elif key in done:
            cast[name] = done[key]
        else:
            cast[name] = done[key] = tensor.to(target)
    return cast


def _dispatched(model: Any, device_map: DeviceMap) -> Any:
    """Over several devices, activations have to follow the weights: accelerate puts the hooks for that."""
    if not isinstance(device_map, Mapping) or len(targets_of_map(device_map)) < 2:
        return model
    if hasattr(model, "hf_device_map"):
        return model
    from accelerate import dispatch_model  # type: ignore[import-untyped]

    return dispatch_model(model, device_map=dict(device_map))
