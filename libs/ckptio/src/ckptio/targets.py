"""The devices that tensors are loaded to: what names them, and whether they are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ckptio.devices import NO_DEVICE, cuda_status
from ckptio.errors import DeviceError

# A number is a GPU, as for safetensors; None is the CPU.
Device = str | int | torch.device | None

_INVALID_DEVICE = 101  # cudaErrorInvalidDevice


def target_of(device: Device) -> torch.device:
    """The device of torch for its name, its number as a GPU, or None, the CPU.

    Raises ValueError for a name that torch does not know, TypeError for anything else.
    """
    if device is None:
        return torch.device("cpu")
    if isinstance(device, bool) or not isinstance(device, str | int | torch.device):
        raise TypeError(f"device {device!r}: a name such as 'cuda:0', the number of a GPU, or a torch.device")
    try:
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device {device!r} is none of torch's; 'cpu', 'cuda:0' or the number of a GPU are"
        ) from error


def targets_of(device: Device | Sequence[Device], count: int) -> list[torch.device]:
    """The device of each of `count` partitions, where one stands for all. Raises as `target_of` does."""
    if device is None or isinstance(device, str | int | torch.device):
        return [target_of(device)] * count
    if not isinstance(device, Sequence):
        raise TypeError(f"device {device!r}: one device, or a list with one for each partition")
    if len(device) != count:
        raise ValueError(f"{len(device)} devices for {count} partitions")
    return [target_of(one) for one in device]


def check_targets(targets: Iterable[torch.device], dtypes: Iterable[str] = ()) -> None:
    """Raises `DeviceError` for a device that is not there, or that has no tensors of one of `dtypes`.

    It costs nothing beside what it saves: reading a checkpoint for a device that cannot take it.
    """
    names = sorted(set(dtypes))
    for target in set(targets):
        if target.type == "cuda":
            _check_gpu(target)
        elif target.type not in ("cpu", "meta"):
            _check_other(target, names)


def are_one(targets: Iterable[torch.device]) -> bool:
    """Whether all are the same device; "cuda" is the GPU that is current. To be called after the check."""
    numbers = {
        (target.type, torch.cuda.current_device() if target == torch.device("cuda") else target.index)
        for target in targets
    }
    return len(numbers) == 1


def _check_gpu(target: torch.device) -> None:
    if not torch.cuda.is_available():
        reason = cuda_status().reason or f"torch {torch.__version__} sees no GPU"
        if torch.version.cuda is None and torch.version.hip is None:
            reason = f"torch {torch.__version__} is built without CUDA"
        raise DeviceError(f"use of {target}", code=NO_DEVICE, description=reason)
    count = torch.cuda.device_count()
    if target.index is not None and target.index >= count:
        raise DeviceError(f"use of {target}", code=_INVALID_DEVICE, description=f"torch sees {count} GPUs")


def _check_other(target: torch.device, dtypes: Sequence[str]) -> None:
    for name in ("uint8", *dtypes):
        dtype = getattr(torch, name, None)
        try:
            torch.empty(0, dtype=dtype, device=target)
        except Exception as error:  # each kind of device refuses in its own way
            reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
            raise DeviceError(
                f"a tensor of {name} on {target}", code=NO_DEVICE, description=reason
            ) from error
