"""The five factors of the paper's loader, added one by one and left out one by one (L7)."""

from __future__ import annotations

import ctypes
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ckptio.bench.page_cache import set_temperature
from ckptio.bench.pooled import pool_for
from ckptio.bench.timing import weight_files
from ckptio.devices import DeviceBuffer
from ckptio.layout import read_layout
from ckptio.load_plan import Factors

# The device that needs no GPU.
HOST = "host"

FACTORS = ("bulk", "direct", "threads", "pinned", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationStep:
    """A set of factors that are on."""

    name: str
    factors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRun:
    """One load onto a device with some factors on."""

    seconds: float
    size_bytes: int


def ablation_steps() -> tuple[AblationStep, ...]:
    """`none`, then one more factor each, up to all; then all without one each."""
    steps = [AblationStep(name="none", factors=())]
    for count in range(1, len(FACTORS) + 1):
        steps.append(AblationStep(name=f"to_{FACTORS[count - 1]}", factors=FACTORS[:count]))
    for left_out in FACTORS:
        factors = tuple(factor for factor in FACTORS if factor != left_out)
        steps.append(AblationStep(name=f"without_{left_out}", factors=factors))
    return tuple(steps)


def run_step(place: Path, factors: tuple[str, ...], device: str) -> AblationRun:
    """Loads the checkpoint at `place`, cold, through a pool onto `device` ("host" or "cuda:0")."""
    parts = read_layout(place).index.partitions
    chosen = Factors(**{factor: factor in factors for factor in FACTORS})
    with ExitStack() as stack:
        buffers = [stack.enter_context(DeviceBuffer.allocate(device, part.padded_bytes)) for part in parts]
        _, loader = stack.enter_context(pool_for(place, chosen))
        if device == HOST:
            # Memory of a GPU costs no page faults; neither must what stands in for it.
            for buffer in buffers:
                ctypes.memset(buffer.address, 1, buffer.size_bytes)
        set_temperature(weight_files(place), "cold")
        start = time.monotonic()
        # Digests are those of whole chunks, which loads without bulk reads do not have.
        loader.load_onto(place, buffers, verify=False)
        seconds = time.monotonic() - start
    return AblationRun(seconds=seconds, size_bytes=sum(part.padded_bytes for part in parts))
