"""Owns models whose tensors are on several devices: what goes into a module is moved to where the module is.

A partition holds whole layers, so that between two devices little more has to move than the hidden states of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Spread:
    """A model whose tensors are bound. `device` is where its inputs go; `close` takes the moving out again."""

    def __init__(self, model: nn.Module) -> None:
        devices = _devices(model)
        self.device = next(iter(devices), torch.device("cpu"))
        self._hooks = []
        for module in model.modules():
            own = _devices(module) if len(devices) > 1 else devices
            _move_buffers(module, next(iter(own), self.device))
            # What is on one device as a whole: layers, whose sums need all their terms there, and what is in them.
            if len(devices) > 1 and len(own) == 1:
                move = _mover(next(iter(own)))
                self._hooks.append(module.register_forward_pre_hook(move, with_kwargs=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _devices(module: nn.Module) -> dict[torch.device, None]:
    """Of the parameters of the module and of those in it, in their order."""
    return dict.fromkeys(parameter.device for parameter in module.parameters())


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Put what the module computed for itself, such as rotary frequencies, where its tensors are."""
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers.get(name)
        if buffer is not None:
            module._buffers[name] = buffer.to(device)


def _mover(device: torch.device) -> Any:
    def move(_: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return _moved(arguments, device), {name: _moved(value, device) for name, value in named.items()}

    return move


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device) for item in value)
    return value
