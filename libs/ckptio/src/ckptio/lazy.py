"""An open checkpoint, of which each tensor is read when it is asked for."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Iterator, KeysView, Mapping
from functools import cached_property

import torch

from ckptio.checkpoint import check_chunk
from ckptio.errors import PathLike
from ckptio.files import naming, page_buffer, read_exactly
from ckptio.index import Index, TensorEntry
from ckptio.layout import Layout, read_layout
from ckptio.manifest import Manifest
from ckptio.views import join_slices, tensor_of


def open(path: PathLike, *, verify: bool = True) -> Checkpoint:
    """Opens a checkpoint, converted or stock, for reading single tensors; a context manager.

    With `verify` the first tensor of a chunk (16 MiB, unless converted otherwise) costs reading and digesting
    all chunks that it touches; each chunk is digested once. Later tensors of it, and all of stock
    checkpoints, which have no digests, cost their own bytes only. A tensor that several GPUs share is read
    whole, joined from its slices; `keys` has no others. Raises the errors of `read_layout`.
    """
    return Checkpoint(read_layout(path), verify=verify)


class Checkpoint:
    """The tensors of an open checkpoint by name; make one with `open`. May be used from several threads."""

    def __init__(self, layout: Layout, *, verify: bool = True) -> None:
        self._layout = layout
        self._is_verified = verify and layout.is_verified
        self._verified: set[tuple[int, int]] = set()
        self._buffer: memoryview | None = None
        self._lock = threading.Lock()
        self._descriptors: list[int] = []
        self._is_closed = False
        try:
            for file in layout.files:
                self._descriptors.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise

    @property
    def index(self) -> Index:
        """Where every tensor is; the slices of those that several GPUs share are in it one by one."""
        return self._layout.index

    @property
    def manifest(self) -> Manifest | None:
        """What the checkpoint is; None for a stock one."""
        return self._layout.manifest

    def keys(self) -> KeysView[str]:
        """The names of all tensors, whole ones also where several GPUs share them."""
        return self._rows_of.keys() if self.index.slices else self.index.keys()

    def __getitem__(self, name: str) -> torch.Tensor:
        """Reads one tensor into memory of its own; tied ones are tied only when they are loaded together.

        `name` may be that of a slice as well ("lm_head.weight#0"), which reads it alone.
        Raises KeyError, `CorruptCheckpoint`, `TruncatedCheckpoint`, OSError, and ValueError after `close`.
        """
        self._check_alive()
        rows = self._rows_of.get(name) if self.index.slices else None
        entries = [self.index.entry(row) for row in rows] if rows else [self.index[name]]
        part = self.index.slices.get(rows[0]) if rows else None
        if part is not None and part.dimension is not None:
            return join_slices(entries, [self._bytes_of(entry) for entry in entries], part.dimension)
        return tensor_of(entries[0], self._bytes_of(entries[0]))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return self.index.tensor_count

    def __contains__(self, name: object) -> bool:
        return name in self.keys() or name in self.index

    def close(self) -> None:
        """Closes the files; tensors stay. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            self._buffer = None
            while self._descriptors:
                os.close(self._descriptors.pop())

    def __enter__(self) -> Checkpoint:
        self._check_alive()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warnings.warn("unclosed ckptio checkpoint", ResourceWarning, source=self, stacklevel=2)
            self.close()

    @cached_property
    def _rows_of(self) -> Mapping[str, tuple[int, ...]]:
        return self.index.rows_of_wholes()

    def _bytes_of(self, entry: TensorEntry) -> torch.Tensor:
        raw = torch.empty(entry.size_bytes, dtype=torch.uint8)
        target = memoryview((ctypes.c_ubyte * entry.size_bytes).from_address(raw.data_ptr())).cast("B")
        with self._lock:
            self._check_alive()
            with naming(self._layout.files[entry.partition]):
                self._read(entry, target)
        return raw

    def _check_alive(self) -> None:
        if self._is_closed:
            raise ValueError("the checkpoint is closed")

    def _read(self, entry: TensorEntry, target: memoryview) -> None:
        if not target:
            return
        if not self._is_verified:
            self._read_range(entry.partition, entry.offset_bytes, target)
            return
        chunk_size_bytes = self.index.chunk_size_bytes
        done = 0
        while done < len(target):
            number, start = divmod(entry.offset_bytes + done, chunk_size_bytes)
            piece = target[done : done + chunk_size_bytes - start]
            if (entry.partition, number) in self._verified:
                self._read_range(entry.partition, entry.offset_bytes + done, piece)
            else:
                piece[:] = self._verified_chunk(entry.partition, number)[start : start + len(piece)]
            done += len(piece)

    def _verified_chunk(self, partition: int, number: int) -> memoryview:
        part = self.index.partitions[partition]
        offset_bytes = number * self.index.chunk_size_bytes
        if self._buffer is None:
            self._buffer = page_buffer(self.index.chunk_size_bytes)
        chunk = self._buffer[: part.padded_bytes - offset_bytes]
        self._read_range(partition, offset_bytes, chunk)
        check_chunk(chunk, part.digests[number], self._layout.files[partition], offset_bytes, number)
        self._verified.add((partition, number))
        return chunk

    def _read_range(self, partition: int, offset_bytes: int, target: memoryview) -> None:
        read_exactly(self._descriptors[partition], target, offset_bytes, self._layout.files[partition])
