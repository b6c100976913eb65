"""Models of the transformers package, loaded by ckptio: `ckptio.transformers.load_model`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping

from ckptio.errors import CorruptCheckpoint, MissingFile, ModelMismatch, PathLike, UnsupportedFormat
from ckptio.files import read_bounded
from ckptio.index import Index
from ckptio.layout import Layout, read_layout
from ckptio.manifest import MANIFEST_FILE, digest_of
from ckptio.model_binding import DeviceOf, bind, compute_buffers
from ckptio.torch import load_layout

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

# Far more than any configuration or modelling code that a model brings.
_TEXT_BYTES_MAX = 64 * 1024 * 1024

# What torch can make a default of, and so what computed buffers may have.
_DEFAULT_DTYPES = ("float16", "bfloat16", "float32", "float64")

Device = str | int | torch.device
DeviceMap = Device | Mapping[str, Device]


def load_model(
    path: PathLike,
    device_map: DeviceMap | None = None,
    dtype: str | torch.dtype | None = None,
    model_class: Any = None,
    trust_remote_code: bool = False,
) -> Any:
    """The model of a checkpoint directory, converted or stock, as `from_pretrained` of transformers gives it.

    Its parameters are the loaded tensors, without a copy (only `dtype` other than stored costs one; None
    keeps the stored ones); ties are kept, computed buffers computed, the model is in evaluation mode. Where
    the model of this transformers has other tensors than were published (fused experts, new names), they are
    made from the loaded ones as `from_pretrained` does.
    `device_map` is one device or a map from the names of modules to devices (several need accelerate); a
    partition for one device is loaded straight to it. `model_class` (default: the first architecture in
    config.json) may be an Auto class. Raises the errors of `load`, `ModelMismatch` when tensors and model
    differ, `UnsupportedFormat` for what config.json does not make a model of.
    """
    path = Path(path)
    layout = read_layout(path)
    _check_texts(path, layout, trust_remote_code)
    config = _read_config(path, trust_remote_code)
    kind = _model_class(path, config, model_class, trust_remote_code)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    dtype = wanted or _stored_dtype(layout.index, config)
    model = _skeleton(path, kind, config, dtype)
    device_of = _device_of(device_map)
    partition_devices = _partition_devices(layout.index, device_of)
    tensors = _whole(layout.index, load_layout(layout, partition_devices))
    if wanted is not None:
        tensors = _cast(model, tensors, wanted)
    try:
        compute_buffers(model, device_of)
        bind(model, tensors, device_of, path)
    except ModelMismatch:
        if not get_model_conversion_mapping(model, add_legacy=False):
            raise
        model = _converted(path, kind, config, tensors, dtype, device_map, device_of)
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


def _model_class(path: Path, config: Any, model_class: Any, trust_remote_code: bool) -> Any:
    if model_class is not None:
        mapping = getattr(model_class, "_model_mapping", None)
        kind = model_class if mapping is None else mapping.get(type(config), None)
        if kind is None:
            raise UnsupportedFormat(
                path / CONFIG_FILE, f"{model_class.__name__} has no model of type {config.model_type!r}"
            )
        return kind[0] if isinstance(kind, tuple) else kind
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if trust_remote_code and kind is None:
        kind = _remote_class(path, config, names)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        known = f"architecture {names[0]!r} is unknown here" if names else "it names no architecture"
        raise UnsupportedFormat(path / CONFIG_FILE, f"{known}; pass model_class")
    return kind


def _remote_class(path: Path, config: Any, names: list[str]) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    for reference in (getattr(config, "auto_map", None) or {}).values():
        if isinstance(reference, str) and names and reference.endswith(f".{names[0]}"):
            return get_class_from_dynamic_module(reference, os.fspath(path))
    return None


def _stored_dtype(index: Index, config: Any) -> torch.dtype:
    """The dtype that the model computes in: of the first floating tensor, as `from_pretrained` has it."""
    for name in index.dtype:
        if name in _DEFAULT_DTYPES:
            return getattr(torch, name)  # type: ignore[no-any-return]
    return config.dtype or torch.float32


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
    device_map: DeviceMap | None,
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


def _device_of(device_map: DeviceMap | None) -> DeviceOf:
    """The device of a tensor by its name: that of the longest name in the map that it begins with."""
    if not isinstance(device_map, Mapping):
        return lambda _: _device(device_map)
    devices = {name: _device(device) for name, device in device_map.items()}

    def device_of(name: str) -> torch.device | None:
        pieces = name.split(".")
        prefixes = (".".join(pieces[:count]) for count in range(len(pieces), -1, -1))
        return next((devices[prefix] for prefix in prefixes if prefix in devices), None)

    return device_of


def _device(device: Device | None) -> torch.device:
    if device is None:
        return torch.device("cpu")
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _partition_devices(index: Index, device_of: DeviceOf) -> list[torch.device]:
    """One device per partition: of all of its tensors, or the CPU where they differ or are put together."""
    cpu = torch.device("cpu")
    wanted: list[set[torch.device]] = [set() for _ in index.partitions]
    for row, partition in enumerate(index.partition):
        device = None if row in index.slices else device_of(index.names[row])
        wanted[partition].add(device or cpu)
    return [devices.pop() if len(devices) == 1 else cpu for devices in wanted]


def _whole(index: Index, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that were split over GPUs, put together again, tied ones once; all others as they are."""
    whole: dict[str, torch.Tensor] = {}
    known: dict[tuple[tuple[int, int, torch.Size], ...], torch.Tensor] = {}
    for name, rows in index.rows_of_wholes().items():
        parts = [tensors[index.names[row]] for row in rows]
        first = index.slices.get(rows[0])
        if first is None or first.dimension is None:
            whole[name] = parts[0]
            continue
        key = tuple(
            (index.partition[row], part.data_ptr(), part.shape) for row, part in zip(rows, parts, strict=True)
        )
        if key not in known:
            known[key] = torch.cat(parts, dim=first.dimension)
        whole[name] = known[key]
    return whole


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


def _dispatched(model: Any, device_map: DeviceMap | None) -> Any:
    """Over several devices, activations have to follow the weights: accelerate puts the hooks for that."""
    if not isinstance(device_map, Mapping) or len({_device(one) for one in device_map.values()}) < 2:
        return model
    if hasattr(model, "hf_device_map"):
        return model
    from accelerate import dispatch_model  # type: ignore[import-untyped]

    return dispatch_model(model, device_map=dict(device_map))
