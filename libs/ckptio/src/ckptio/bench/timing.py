"""Times one load in this process, until its bytes are really in memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptio.bench.digest import tensors_digest
from ckptio.bench.loaders import LOADERS
from ckptio.bench.page_cache import set_temperature
from ckptio.bench.usage import Meter
from ckptio.native import require_native

_PRIMING_THREADS = 2
_WARMING_ELEMENTS = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One load to time. `prime_bytes` of memory are touched and given back right before it."""

    loader: str
    temperature: str
    place: str
    prime_bytes: int = 0
    is_checked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """What one load took.

    `returned_s` is until the loader returned, `seconds` until the bytes were in private or pool memory.
    `resident_bytes` is what the page cache had of the files before. `digest` is empty when not asked for.
    """

    returned_s: float
    seconds: float
    size_bytes: int
    tensor_count: int
    cpu_s: float
    anonymous_bytes: int
    minor_faults: int
    peak_bytes: int | None
    resident_bytes: int
    digest: str = ""
    pool_pages: str = ""
    pool_prefault_s: float = 0.0


def time_load(request: LoadRequest) -> LoadRun:
    """Loads once, as asked; raises whatever the loader raises."""
    entry = LOADERS[request.loader]
    place = Path(request.place)
    with entry.prepare(place, request.temperature) as prepared:
        _warm_torch()
        with _primed(request.prime_bytes):
            resident = set_temperature(weight_files(place), request.temperature)
            gc.collect()
        meter = Meter()
        start = time.monotonic()
        loaded = prepared.load()
        returned_s = time.monotonic() - start
        tensors = loaded.tensors
        if prepared.must_clone:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        seconds = time.monotonic() - start
        usage = meter.read()
        pool = prepared.pool
        run = LoadRun(
            returned_s=returned_s,
            seconds=seconds,
            size_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
            tensor_count=len(tensors),
            cpu_s=usage.cpu_s,
            anonymous_bytes=usage.anonymous_bytes,
            minor_faults=usage.minor_faults,
            peak_bytes=usage.peak_bytes,
            resident_bytes=resident,
            digest=tensors_digest(tensors) if request.is_checked else "",
            pool_pages="" if pool is None else "huge" if pool.has_huge_pages else "small",
            pool_prefault_s=0.0 if pool is None else pool.prefault_s,
        )
        del tensors, loaded
    return run


def weight_files(place: Path) -> tuple[Path, ...]:
    """Every file that a loader may read."""
    if place.is_file():
        return (place,)
    return tuple(sorted(file for file in place.rglob("*") if file.is_file()))


def _warm_torch() -> None:
    """Torch starts its threads with the first large copy: no loader is to pay for that."""
    import torch

    torch.empty(_WARMING_ELEMENTS).clone()


@contextmanager
def _primed(size_bytes: int) -> Iterator[None]:
    """Holds memory while the load is prepared, and gives it back at its start.

    A virtual machine may hand free memory to its host, whose return is slow and not the loader's doing. What
    was just given back is still there, so that loaders of fresh memory are not measured at their worst.
    """
    if size_bytes == 0:
        yield
        return
    with require_native().Mapping.anonymous(size_bytes) as mapping:
        mapping.advise_huge_pages()
        mapping.prefault(_PRIMING_THREADS)
        yield
