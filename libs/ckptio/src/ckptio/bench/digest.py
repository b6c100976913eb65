"""One digest over all tensors of a checkpoint, the same whichever loader brought them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ckptio.files import opened, page_buffer, read_exactly
from ckptio.stock import read_header

if TYPE_CHECKING:
    import torch

_PIECE_BYTES = 16 * 1024 * 1024


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """XXH3-64 over name, dtype, shape and bytes of every tensor, in order of name."""
    state = xxhash.xxh3_64()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        size_bytes = tensor.numel() * tensor.element_size()
        _add_label(state, name, str(tensor.dtype).removeprefix("torch."), tensor.shape)
        if size_bytes:
            state.update((ctypes.c_char * size_bytes).from_address(tensor.data_ptr()))
    return state.hexdigest()


def stock_digest(path: Path) -> str:
    """The same digest, straight from the bytes of a safetensors file."""
    state = xxhash.xxh3_64()
    buffer = page_buffer(_PIECE_BYTES)
    with opened(path) as descriptor:
        for tensor in sorted(read_header(path).tensors, key=lambda tensor: tensor.name):
            _add_label(state, tensor.name, tensor.dtype, tensor.shape)
            for start in range(0, tensor.size_bytes, _PIECE_BYTES):
                piece = buffer[: min(_PIECE_BYTES, tensor.size_bytes - start)]
                read_exactly(descriptor, piece, tensor.offset_bytes + start, path)
                state.update(piece)
    return state.hexdigest()


def _add_label(state: xxhash.xxh3_64, name: str, dtype: str, shape: Iterable[int]) -> None:
    state.update(repr((name, dtype, tuple(shape))).encode())
