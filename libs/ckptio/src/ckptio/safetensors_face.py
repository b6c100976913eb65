"""Single safetensors files, with the signatures of safetensors.torch: a drop-in for its two functions."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from ckptio.dtypes import DTYPES
from ckptio.errors import PathLike, SharedTensors, UnsaveableTensor, UnsupportedFormat
from ckptio.files import opened, page_buffer, sync_directory, write_exactly
from ckptio.layout import read_layout
from ckptio.plan import CHUNK_SIZE_BYTES
from ckptio.publish import check_space
from ckptio.state_dict import check_state_dict, make_extents, plain_tensor
from ckptio.stock import encode_header
from ckptio.targets import Device, target_of
from ckptio.torch import load_layout

# How the safetensors package may be told to read.
_BACKENDS = ("mmap", "pread")


def load_file(
    filename: PathLike, device: Device = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """Reads one safetensors file with the threads of ckptio; what it stores, as safetensors gives it.

    A tensor that the file holds unaligned is copied, all others are views of one storage. A number as device
    is a GPU. `backend` says how safetensors would read ("mmap", "pread"); here it changes nothing. Raises
    FileNotFoundError, `TruncatedCheckpoint`, `CorruptCheckpoint`, or `UnsupportedFormat` for
    anything else than such a file: a directory is for `ckptio.load`.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"backend {backend!r}: safetensors has {' and '.join(_BACKENDS)}")
    path = Path(filename)
    if not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    if path.is_dir():
        raise UnsupportedFormat(path, "a directory, and this reads one file; use ckptio.load for it")
    layout = read_layout(path)
    loaded = load_layout(layout, target_of(device))
    # The names of tied tensors are only noted in such a file, and its own package leaves them out.
    for rows in layout.index.aliases:
        for row in rows[1:]:
            del loaded[layout.index.names[row]]
    return loaded


def save_file(
    tensors: Mapping[str, torch.Tensor], filename: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file: complete and on the device, or not there at all.

    Memory in use is one chunk beside the tensors. Raises TypeError for anything but a map of names to
    tensors, `SharedTensors` (a RuntimeError) when tensors share bytes, `UnsaveableTensor` (a ValueError) for
    what is sparse, not contiguous, or of a dtype that the format does not have, `InsufficientSpace`, OSError.
    Nothing of an old file is lost when it fails.
    """
    check_state_dict(tensors, filename, call="save_file(tensors, filename)")
    path = Path(filename)
    plain = {name: _plain(name, tensor, path) for name, tensor in tensors.items()}
    _refuse_shared(plain, path)
    # Large elements first: then each tensor is aligned to its elements, whatever the sizes.
    names = sorted(plain, key=lambda name: (-plain[name].element_size(), name))
    header = _header(((name, plain[name]) for name in names), metadata, path)
    size_bytes = len(header) + sum(tensor.numel() * tensor.element_size() for tensor in plain.values())
    check_space(path.parent, size_bytes)
    with _replacing(path) as descriptor:
        write_exactly(descriptor, memoryview(header))
        buffer = page_buffer(CHUNK_SIZE_BYTES)
        for name in names:
            _write(descriptor, plain[name], buffer)


def _plain(name: str, tensor: object, path: Path) -> torch.Tensor:
    try:
        plain = plain_tensor(name, tensor, path)
    except UnsupportedFormat as error:
        raise UnsaveableTensor(path, name, error.reason.removeprefix(f"{name}: ")) from error
    if not plain.is_contiguous():
        raise UnsaveableTensor(
            path, name, "not contiguous; call .contiguous() on it, or ckptio.save keeps its strides"
        )
    return plain


def _refuse_shared(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    for extent in make_extents(tensors)[0]:
        if len(extent.members) > 1:
            raise SharedTensors(path, tuple(member.name for member in extent.members))


def _header(
    tensors: Iterable[tuple[str, torch.Tensor]], metadata: Mapping[str, str] | None, path: Path
) -> bytes:
    rows = []
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if DTYPES[dtype].stock is None:
            raise UnsaveableTensor(path, name, f"safetensors has no {dtype}; ckptio.save has it")
        rows.append((name, dtype, tuple(tensor.shape)))
    texts = {} if metadata is None else metadata
    is_map = isinstance(texts, Mapping)
    if not is_map or not all(isinstance(text, str) for pair in texts.items() for text in pair):
        raise TypeError("metadata must be a map of strings")
    try:
        return encode_header(rows, texts)
    except ValueError as error:
        raise UnsaveableTensor(path, "header", str(error)) from error


@contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """A descriptor of a new file that takes the place of `path` at the end, and only if all went well."""
    temporary = path.parent / f".{path.name}.ckptio-tmp-{os.getpid()}"
    try:
        with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            yield descriptor
            os.fsync(descriptor)
        os.rename(temporary, path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _write(descriptor: int, tensor: torch.Tensor, buffer: memoryview) -> None:
    raw = tensor.reshape(-1).view(torch.uint8)
    for offset in range(0, len(raw), len(buffer)):
        source = raw[offset : offset + len(buffer)]
        piece = buffer[: len(source)]
        torch.frombuffer(piece, dtype=torch.uint8).copy_(source)
        write_exactly(descriptor, piece)
