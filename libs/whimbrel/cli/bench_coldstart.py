"""Owns the coldstart benchmark: HTTP request to first content delta, from SSD, from DRAM, and warm.

One server with one slot, whose pool cannot hold both big models. Each round asks the larger model (which pushes the
small one out of DRAM), then the small one (cold, from SSD), a tiny one (which takes the slot but leaves DRAM alone),
the small one again (cold, from DRAM), and once more (warm). So the three figures are interleaved. The SSD copy is
dropped from the page cache before each cold start from SSD, and read raw right after it: that is the device's ceiling.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from whimbrel.cli.cluster import ClusterOptions, LocalCluster
from whimbrel.cli.measure import result
from whimbrel.client import AdminClient, ApiError
from whimbrel.client.admin import Answer

# Of one length, and different from each other at the first word, so that a warm request shares with the one before it
# only what every chat shares: the template's system prompt.
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Which river flows through the city of Vienna, and where to?",
    "How many legs does a spider have? Answer in one word.",
    "Name one planet that is larger than the earth, please.",
    "Who wrote the play about Romeo and Juliet? One sentence.",
    "When does water boil at the level of the sea, roughly?",
    "Is the moon larger or smaller than the earth? Tell me why.",
)
SMALL, LARGE, TINY = "smollm2-135m", "random-360m", "tiny-llama"
CHUNK_BYTES = 16 * 1024 * 1024
EVICT_S_MAX = 120.0
EVICT_POLL_S = 0.05
STAGES = ("queue", "fetch", "load", "bind", "prefill")
TARGETS = {
    "coldstart.ssd.first_token_s": 0.6,
    "coldstart.dram.first_token_s": 0.4,
    "coldstart.warm.first_token_s": 0.2,
}


async def measure(directory: Path, models: Path, rounds: int, console: Console) -> list[dict[str, Any]]:
    """The results of `rounds` rounds. Raises FileNotFoundError when the demo models are not there."""
    require_models(models)
    # Room for the larger model and half of the small one: loading one always evicts the other.
    pool_chunks = _chunks(models / LARGE) + _chunks(models / SMALL) // 2
    options = ClusterOptions(directory=directory, servers=1, slots=1, port=0, pool_bytes=pool_chunks * CHUNK_BYTES)
    seconds: dict[str, list[float]] = defaultdict(list)
    stages: dict[str, list[float]] = defaultdict(list)
    questions = itertools.cycle(QUESTIONS)
    async with LocalCluster(options) as cluster, AdminClient(cluster.url) as client:
        for name in (SMALL, LARGE, TINY):
            await client.deploy_and_wait(name, str((models / name).resolve()), keep_alive_s=600)
        # The first start copies the model to the server's SSD and meets its class for the first time.
        await _ask(client, SMALL, next(questions))
        for number in range(rounds):
            await _ask(client, LARGE, next(questions))
            # What the larger model left of it in DRAM would not have to be read.
            await evict(client, SMALL, "dram")
            drop_from_page_cache(directory / "servers")
            for case, before in (("ssd", None), ("dram", TINY), ("warm", None)):
                if before is not None:
                    await _ask(client, before, next(questions))
                answer = await _ask(client, SMALL, next(questions))
                _check(answer, case)
                assert answer.first_token_s is not None
                seconds[case].append(answer.first_token_s)
                if case == "ssd":
                    stages["ssd.ceiling"].append(raw_read_s(_copy_of(directory, SMALL)))
                for stage in STAGES:
                    stages[f"{case}.stage.{stage}"].append(answer.stages_ms.get(stage, 0.0) / 1000)
            console.print(
                f"round {number + 1}/{rounds}: " + ", ".join(f"{case} {s[-1]:.3f} s" for case, s in seconds.items()),
                style="dim",
                highlight=False,
            )
    rows = [result(f"coldstart.{case}.first_token_s", "s", values, model=SMALL) for case, values in seconds.items()]
    return rows + [result(f"coldstart.{name}_s", "s", values) for name, values in stages.items()]


async def evict(client: AdminClient, model: str, tier: str) -> None:
    """Take a model out of a tier of the one server; its instance may need a moment to go first."""
    deadline_s = time.monotonic() + EVICT_S_MAX
    while True:
        try:
            await client.evict("s0", model, tier)
            return
        except ApiError as error:
            if error.code != "conflict" or time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(EVICT_POLL_S)


def require_models(models: Path) -> None:
    """Raises FileNotFoundError, with what to do, when the demo models are not there."""
    for name in (SMALL, LARGE, TINY):
        if not (models / name / "config.json").exists():
            raise FileNotFoundError(
                f"{models / name} is missing; make it with: python tools/demo_models.py --out {models}"
            )


async def _ask(client: AdminClient, model: str, question: str) -> Answer:
    return await client.ask(model, question, max_tokens=8, temperature=0)


def _check(answer: Answer, case: str) -> None:
    """A figure under the wrong heading would be worse than none."""
    expected = {"ssd": "ssd", "dram": "dram", "warm": "gpu"}[case]
    if answer.tier != expected:
        raise RuntimeError(
            f"expected a start from {expected}, the cluster says {answer.tier!r}; stages {answer.stages_ms}"
        )


def raw_read_s(path: Path) -> float:
    """Seconds that the device needs for the same bytes: direct reads of 16 MiB, one after another, into one buffer."""
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            started, offset_bytes = time.perf_counter(), 0
            while size_bytes := os.preadv(handle, [buffer], offset_bytes):
                offset_bytes += size_bytes
            return time.perf_counter() - started
        finally:
            os.close(handle)


def _copy_of(directory: Path, model: str) -> Path:
    """The partition of a model on the server's SSD."""
    return next((directory / "servers").glob(f"**/{model}/partition_0.bin"))


def drop_from_page_cache(folder: Path) -> None:
    """Ask the kernel to forget every file below `folder`, so that the next read comes from the device."""
    _for_each_file(folder, lambda handle: os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED))


def _for_each_file(folder: Path, action: Callable[[int], None]) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                action(handle)
            finally:
                os.close(handle)


def _chunks(model: Path) -> int:
    size_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    return -(-size_bytes // CHUNK_BYTES)
