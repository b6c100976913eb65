"""Owns the tiers benchmark: how good load estimates are, how well tiers overlap, how fast DRAM is given to a slot.

Estimates: two models of different size are loaded at once from the SSD onto two slots of one server, again and again,
so that one of them waits for the other; the estimate of each load (q + n/b) is held against what it took, by the
events of the cluster itself. Overlap: a cold load from the repository against only bringing it to the SSD, which is its
slowest tier alone.
DRAM: a checkpoint of 3 GB, of which a slot that had another model meanwhile gets the tensors again.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console

from whimbrel.cli.bench_coldstart import (
    LARGE,
    QUESTIONS,
    SMALL,
    TINY,
    drop_from_page_cache,
    evict,
    require_models,
)
from whimbrel.cli.cluster import ClusterOptions, LocalCluster
from whimbrel.cli.measure import result
from whimbrel.client import AdminClient, events
from whimbrel.wire.events import LoadSucceeded, ModelPrefetched, ModelPrefetchFailed, PublicEvent

MIB = 1024 * 1024
# Estimates count from here on: a server has to have been seen at work (see docs/operations.md).
LOADS_TO_LEARN = 10
# Good is a small share of what a load takes, or a time that nobody notices.
GOOD_SHARE, GOOD_S = 0.15, 0.04
BIG = "qwen1.5b"
WAIT_S_MAX = 120.0
TARGETS = {
    "tiers.estimate_error.p90_share": GOOD_SHARE,
    "tiers.estimate_error.p90_s": GOOD_S,
    "tiers.pipeline.ratio_to_slowest_tier": 1.15,
    "tiers.dram_attach_s": 0.1,
}


async def measure(directory: Path, models: Path, rounds: int, console: Console) -> list[dict[str, Any]]:
    """The results of `rounds` rounds of each part. Raises FileNotFoundError when the demo models are not there."""
    require_models(models)
    rows = await _measure_estimates(directory / "estimates", models, rounds, console)
    rows += await _measure_overlap(directory / "overlap", models, rounds, console)
    return rows + await _measure_dram(directory / "dram", models, rounds, console)


# --- estimates ---


async def _measure_estimates(directory: Path, models: Path, rounds: int, console: Console) -> list[dict[str, Any]]:
    options = ClusterOptions(directory=directory, servers=1, slots=2, port=0, engine="echo", pool_bytes=2048 * MIB)
    errors: list[tuple[float, float]] = []
    async with LocalCluster(options) as cluster, AdminClient(cluster.url) as client:
        for name in (SMALL, LARGE):
            # Unloaded after each answer: the next round is cold again.
            await client.deploy_and_wait(name, str((models / name).resolve()), keep_alive_s=0)
        async with _happening(cluster.nats.url) as happened:
            learned = LOADS_TO_LEARN // 2 + 1
            for number in range(learned + rounds):
                for name in (SMALL, LARGE):
                    await evict(client, name, "dram")
                drop_from_page_cache(directory / "servers")
                await asyncio.gather(*(client.ask(name, "hello", max_tokens=1) for name in (LARGE, SMALL)))
                loads = [await _next(happened, LoadSucceeded) for _ in range(2)]
                if number >= learned:
                    errors += [(load.estimate_s, load.observed_s) for load in loads]
                told = (f"{load.model_id} {load.observed_s:.3f} s (est. {load.estimate_s:.3f})" for load in loads)
                line = f"load {number + 1}/{learned + rounds}: {', '.join(told)}"
                console.print(line, style="dim", highlight=False)
    shares = [abs(estimate - observed) / observed for estimate, observed in errors]
    seconds = [abs(estimate - observed) for estimate, observed in errors]
    good = [share <= GOOD_SHARE or error_s <= GOOD_S for share, error_s in zip(shares, seconds, strict=True)]
    return [
        result("tiers.estimate_error.p90_share", "1", [_p90(shares)], loads=len(shares)),
        result("tiers.estimate_error.p90_s", "s", [_p90(seconds)], loads=len(shares)),
        result("tiers.estimate_error.share", "1", shares),
        result("tiers.estimate_error.good_share", "1", [sum(good) / len(good)], loads=len(shares)),
    ]


def _p90(values: list[float]) -> float:
    return sorted(values)[max(0, -(-len(values) * 9 // 10) - 1)]


# --- overlap ---


async def _measure_overlap(directory: Path, models: Path, rounds: int, console: Console) -> list[dict[str, Any]]:
    options = ClusterOptions(directory=directory, servers=1, slots=1, port=0, engine="echo", pool_bytes=1024 * MIB)
    ready_s: list[float] = []
    alone_s: list[float] = []
    async with LocalCluster(options) as cluster, AdminClient(cluster.url) as client:
        await client.deploy_and_wait(LARGE, str((models / LARGE).resolve()), keep_alive_s=0)
        await client.ask(LARGE, "hello", max_tokens=1)
        async with _happening(cluster.nats.url) as happened:
            for number in range(rounds):
                await evict(client, LARGE, "ssd")
                drop_from_page_cache(directory / "repository")
                started_s = time.perf_counter()
                await client.prefetch("s0", LARGE, "ssd")
                prefetched = await _next(happened, ModelPrefetched, ModelPrefetchFailed)
                assert isinstance(prefetched, ModelPrefetched), prefetched
                alone_s.append(time.perf_counter() - started_s)
                await evict(client, LARGE, "ssd")
                drop_from_page_cache(directory / "repository")
                await client.ask(LARGE, "hello", max_tokens=1)
                load = await _next(happened, LoadSucceeded)
                assert load.source_tier == "remote", load
                ready_s.append(load.observed_s)
                console.print(
                    f"overlap {number + 1}/{rounds}: ready {ready_s[-1]:.3f} s, to the SSD alone {alone_s[-1]:.3f} s",
                    style="dim",
                    highlight=False,
                )
    ratios = [ready / alone for ready, alone in zip(ready_s, alone_s, strict=True)]
    return [
        result("tiers.pipeline.ratio_to_slowest_tier", "1", ratios, model=LARGE),
        result("tiers.pipeline.remote_to_ready_s", "s", ready_s, model=LARGE),
        result("tiers.pipeline.remote_to_ssd_s", "s", alone_s, model=LARGE),
    ]


# --- DRAM ---


async def _measure_dram(directory: Path, models: Path, rounds: int, console: Console) -> list[dict[str, Any]]:
    source = _make_big(directory / "source", models, console)
    options = ClusterOptions(
        directory=directory / "cluster", servers=1, slots=1, port=0, pool_bytes=3584 * MIB, ssd_bytes=8192 * MIB
    )
    attach_s: list[float] = []
    grown_bytes: list[float] = []
    questions = itertools.cycle(QUESTIONS)
    async with LocalCluster(options) as cluster, AdminClient(cluster.url) as client:
        for name, place in ((BIG, source), (TINY, models / TINY)):
            await client.deploy_and_wait(name, str(place.resolve()), keep_alive_s=600)
        shutil.rmtree(source)
        await client.ask(BIG, next(questions), max_tokens=1)
        worker = cluster.children["worker-s0-0"]
        for number in range(rounds):
            await client.ask(TINY, next(questions), max_tokens=1)
            before_bytes = private_bytes(worker.pid)
            answer = await client.ask(BIG, next(questions), max_tokens=1)
            if answer.tier != "dram":
                raise RuntimeError(f"expected a start from dram, the cluster says {answer.tier!r}")
            # What is mapped, bound and activated; the skeleton is built at the same time, and is not in it.
            attach_s.append((answer.stages_ms.get("load", 0.0) + answer.stages_ms.get("bind", 0.0)) / 1000)
            grown_bytes.append(private_bytes(worker.pid) - before_bytes)
            console.print(
                f"dram {number + 1}/{rounds}: {attach_s[-1]:.4f} s, {grown_bytes[-1] / 1e6:.0f} MB private",
                style="dim",
                highlight=False,
            )
    return [
        result("tiers.dram_attach_s", "s", attach_s, model=BIG),
        result("tiers.dram_attach.private_bytes", "B", grown_bytes, model=BIG),
    ]


def _make_big(directory: Path, models: Path, console: Console) -> Path:
    """A model of 3.1 GB of random weights that can be asked: the tokenizer is the small one's."""
    from ckptio.bench.checkpoints import make_checkpoint
    from ckptio.bench.specs import checkpoint_spec

    directory.mkdir(parents=True)
    spec = checkpoint_spec(BIG)
    made = make_checkpoint(spec, directory, ["safetensors"], lambda line: console.print(line, style="dim"))
    place = made.place("safetensors")
    for file in (models / SMALL).iterdir():
        if file.suffix in (".json", ".jinja") and file.name not in ("config.json", "generation_config.json"):
            shutil.copy(file, place / file.name)
    return place


def private_bytes(pid: int | None) -> int:
    """Memory that a process shares with nobody: what a copy of the weights would show in."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1]) * 1024
    return total


# --- asking and hearing ---


@asynccontextmanager
async def _happening(nats_url: str) -> AsyncIterator[asyncio.Queue[PublicEvent]]:
    """The cluster's events from now on."""
    queue: asyncio.Queue[PublicEvent] = asyncio.Queue()

    async def listen() -> None:
        async with aclosing(events(nats_url, since=timedelta(0))) as stream:
            async for received in stream:
                queue.put_nowait(received.event)

    task = asyncio.create_task(listen())
    await asyncio.sleep(0)  # from this moment on, whenever the subscription is made
    try:
        yield queue
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _next(queue: asyncio.Queue[PublicEvent], *kinds: type[PublicEvent]) -> Any:
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            event = await queue.get()
            if isinstance(event, kinds):
                return event
