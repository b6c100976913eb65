"""From bytes in the pool of one process to usable tensors in another, and proof that nothing was copied."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptio.bench.digest import tensors_digest
from ckptio.bench.pooled import pool_for
from ckptio.bench.usage import Meter
from ckptio.plan import CHUNK_SIZE_BYTES

if TYPE_CHECKING:
    import torch

    from ckptio._native import Mapping

# Enough for a median; each takes milliseconds.
ATTACHES = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlace:
    """Where another process finds a checkpoint: the pool, and per partition its chunks and size."""

    pool: str
    checkpoint: str
    chunks: tuple[tuple[int, ...], ...]
    padded_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRun:
    """Seconds of each attach, first one first; `anonymous_bytes` is the private memory that they cost."""

    seconds: tuple[float, ...]
    anonymous_bytes: int
    minor_faults: int
    size_bytes: int
    tensor_count: int
    digest: str


def hold(checkpoint: str, answer: Callable[[dict[str, object]], None]) -> None:
    """Loads a checkpoint into a pool, answers where it is, and keeps it until standard input ends."""
    with pool_for(Path(checkpoint)) as (pool, loader), loader.load(checkpoint) as loaded:
        place = PoolPlace(
            pool=str(pool.path),
            checkpoint=checkpoint,
            chunks=loaded.chunks,
            padded_bytes=tuple(part.padded_bytes for part in loaded.layout.index.partitions),
        )
        answer(asdict(place))
        sys.stdin.read()


def attach(place: PoolPlace) -> AttachRun:
    """Reads the index, maps the chunks and makes the tensors, several times; the last ones are digested."""
    from ckptio.layout import read_layout
    from ckptio.mapping import map_chunks
    from ckptio.torch import tensors

    seconds = []
    meter = Meter()
    views: dict[str, torch.Tensor] = {}
    mappings: list[Mapping] = []
    for _ in range(ATTACHES):
        # Giving up the tensors of the attach before is no part of the next.
        views, mappings = {}, []
        start = time.monotonic()
        layout = read_layout(place.checkpoint)
        mappings = [
            map_chunks(place.pool, CHUNK_SIZE_BYTES, chunks, size_bytes)
            for chunks, size_bytes in zip(place.chunks, place.padded_bytes, strict=True)
        ]
        views = tensors(layout.index, mappings)
        seconds.append(time.monotonic() - start)
    usage = meter.read()
    return AttachRun(
        seconds=tuple(seconds),
        anonymous_bytes=usage.anonymous_bytes,
        minor_faults=usage.minor_faults,
        size_bytes=sum(view.numel() * view.element_size() for view in views.values()),
        tensor_count=len(views),
        digest=tensors_digest(views),
    )
