"""Writes the weights of a benchmark checkpoint, block by block, in the format each loader reads."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import ckptio
from ckptio.bench.specs import CheckpointSpec
from ckptio.files import opened, start_writeback, write_exactly
from ckptio.stock import encode_header, read_header

if TYPE_CHECKING:
    import torch

FORMATS = ("safetensors", "ckptio", "torch", "tensorizer")
CKPTIO_DIRECTORY = "checkpoint"
TORCH_FILE = "pytorch_model.bin"
TENSORIZER_FILE = "model.tensors"

# Random numbers are made this many at a time: 64 MB as float32.
_BLOCK_ELEMENTS = 16 * 1024 * 1024

# The usual spread of weights, so that a model made of them computes without overflow.
_DEVIATION = 0.02


def write_format(kind: str, spec: CheckpointSpec, stock: Path, destination: Path) -> None:
    """Writes format `kind` of `spec` into the directory `destination`; all but safetensors from `stock`.

    `stock` is the directory of the safetensors format. Raises OSError, and for tensorizer RuntimeError where
    it cannot hold the checkpoint.
    """
    writers: dict[str, Callable[[], None]] = {
        "safetensors": lambda: _write_stock(spec, destination),
        "ckptio": lambda: _convert(stock, destination),
        "torch": lambda: _write_torch(stock / spec.weights_file, destination / TORCH_FILE),
        "tensorizer": lambda: _write_tensorizer(stock / spec.weights_file, destination / TENSORIZER_FILE),
    }
    writers[kind]()


def _write_stock(spec: CheckpointSpec, directory: Path) -> None:
    """Random weights from a fixed seed, streamed: the same bytes on every machine."""
    import torch

    for name, content in spec.files.items():
        (directory / name).write_text(json.dumps(content, indent=1))
    generator = torch.Generator().manual_seed(len(spec.tensors))
    header = encode_header(((t.name, t.dtype, t.shape) for t in spec.tensors), {"format": "pt"})
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with opened(directory / spec.weights_file, flags) as descriptor:
        write_exactly(descriptor, memoryview(header))
        written = len(header)
        for tensor in spec.tensors:
            dtype = getattr(torch, tensor.dtype)
            elements = tensor.size_bytes // dtype.itemsize
            for start in range(0, elements, _BLOCK_ELEMENTS):
                block = torch.empty(min(_BLOCK_ELEMENTS, elements - start))
                block = block.normal_(0, _DEVIATION, generator=generator).to(dtype)
                raw = memoryview((ctypes.c_char * block.nbytes).from_address(block.data_ptr()))
                write_exactly(descriptor, raw)
                start_writeback(descriptor, written, len(raw))
                written += len(raw)
        os.fsync(descriptor)


def _convert(stock: Path, directory: Path) -> None:
    ckptio.convert(stock, directory / CKPTIO_DIRECTORY)


def _write_torch(stock: Path, path: Path) -> None:
    import torch

    with _mapped_tensors(stock) as tensors:
        torch.save(tensors, path)
    with opened(path) as descriptor:
        os.fsync(descriptor)


def _write_tensorizer(stock: Path, path: Path) -> None:
    from tensorizer import TensorSerializer

    with _mapped_tensors(stock) as tensors:
        serializer = TensorSerializer(os.fspath(path))
        try:
            serializer.write_state_dict(tensors)
        finally:
            serializer.close()
    with opened(path) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _mapped_tensors(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a safetensors file over its pages, each with a storage of its own; nothing is copied."""
    import torch

    header = read_header(path)
    with opened(path) as descriptor:
        # A private writable mapping: torch warns about read-only memory.
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    tensors = {}
    for tensor in header.tensors:
        dtype = getattr(torch, tensor.dtype)
        flat = torch.frombuffer(
            mapped, dtype=dtype, count=tensor.size_bytes // dtype.itemsize, offset=tensor.offset_bytes
        )
        tensors[tensor.name] = flat.view(tensor.shape)
    yield tensors
