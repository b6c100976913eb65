"""A checkpoint in a chunk pool: its tensors, as long as its chunks are leased."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ckptio.layout import Layout
from ckptio.load_plan import LoadReport
from ckptio.pool import ChunkPool

if TYPE_CHECKING:
    import torch

    from ckptio._native import Mapping


class Loaded:
    """What `Loader.load` gives: close it, or use it in a `with`, and its chunks may go when room is needed.

    `chunks` are the pool's chunks of each partition, in order: what another process needs to map them.
    """

    def __init__(
        self,
        *,
        layout: Layout,
        chunks: tuple[tuple[int, ...], ...],
        report: LoadReport,
        pool: ChunkPool,
        release: Callable[[], None],
    ) -> None:
        self.layout = layout
        self.chunks = chunks
        self.report = report
        self._pool = pool
        self._release = release
        self._mappings: list[Mapping] = []
        self._tensors: dict[str, torch.Tensor] | None = None
        self._lock = threading.RLock()
        self._is_closed = False

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors by the names of the index, over the pool, without a copy; writes to them stay private.

        What a plan split over GPUs is here in its parts ("weight#0"); see `Index.of_gpu`.
        """
        from ckptio.torch import tensors

        with self._lock:
            if self._is_closed:
                raise ValueError("the load is closed, its chunks may hold something else")
            if self._tensors is None:
                if not self._mappings:
                    self._mappings = [
                        self._pool.map_chunks(indices, part.padded_bytes)
                        for indices, part in zip(self.chunks, self.layout.index.partitions, strict=True)
                    ]
                self._tensors = tensors(self.layout.index, self._mappings)
            return self._tensors

    def close(self) -> None:
        """Ends the leases; idempotent. Raises BufferError while anybody holds one of the tensors."""
        with self._lock:
            if self._is_closed:
                return
            self._tensors = None
            if any(mapping.views for mapping in self._mappings):
                raise BufferError(
                    f"tensors of {self.layout.files[0].parent} are still in use; delete or clone them before "
                    "the load is closed"
                )
            for mapping in self._mappings:
                mapping.close()
            self._is_closed = True
            self._release()

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except BufferError:
            # What went wrong inside matters more; the traceback may well hold the tensors.
            if kind is None:
                raise

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warnings.warn("unclosed load of a checkpoint", ResourceWarning, source=self, stacklevel=2)
            with suppress(BufferError):
                self.close()
