"""Owns the migrate benchmark: what a client sees of a move, what it costs the network, and how soon a killed worker's
stream goes on.

Two servers with one slot each and the small demo model. A long answer streams; at a random token it is moved to the
other server, or its worker is killed. The pause is the longest gap between two pieces of text from then until the
routers have switched, over the usual gap of the same answer. Bytes are those of all token lists that crossed the bus
for the move, as the bus carried them, over the tokens of the request at that time. How equal moved answers are to
undisturbed ones is measured on the engine alone (`exactness.py`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
from nats.aio.msg import Msg
from rich.console import Console

from whimbrel.cli.bench_coldstart import SMALL, require_models
from whimbrel.cli.cluster import ClusterOptions, LocalCluster
from whimbrel.cli.measure import result
from whimbrel.cli.watching import Seen, watch
from whimbrel.client import AdminClient
from whimbrel.wire.codec import decode
from whimbrel.wire.messages import ResumeInference, StartInference
from whimbrel.wire.subjects import Subjects

QUESTION = "Tell me a long story about a bird that flies over the sea."
ANSWER_TOKENS = 500
# Not in the first tokens, which say nothing of the usual gap, and not in the last ones.
FIRST_TOKEN, LAST_TOKEN = 50, 400
SEED = 6
# As many are not counted, and shorter: both servers meet the model, and resumes are learned from.
LEARNING = 10
LEARNING_TOKENS = 160
PROMPTS_PER_ROUND, PROMPTS_MAX = 10, 100
RESTART_S_MAX = 60.0
TARGETS = {
    "migrate.pause_tpots.p50": 3.0,
    "migrate.pause_tpots.p99": 8.0,
    "migrate.bytes_per_token": 6.0,
    "migrate.failover_s.p50": 2.0,
    "migrate.estimate_error.p90_share": 0.20,
    "migrate.estimate_error.within_20pct_or_20ms": 0.9,
    "migrate.equal_share.transformers.fp32": 1.0,
}


class Carried:
    """Bytes of token lists on the bus, by request."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = defaultdict(int)
        self.tokens: dict[str, int] = defaultdict(int)

    async def hear(self, received: Msg) -> None:
        match decode(received.data):
            case ResumeInference(request_id=request_id, position=position, tokens=tokens):
                self.bytes[request_id] += len(tokens)
                self.tokens[request_id] = max(self.tokens[request_id], position + len(tokens) // 4)
            case StartInference(request_id=request_id, base_tokens=base, tokens=tokens) if base > 0:
                self.bytes[request_id] += len(tokens)
                self.tokens[request_id] = max(self.tokens[request_id], base + len(tokens) // 4)

    def per_token(self) -> list[float]:
        return [self.bytes[request_id] / self.tokens[request_id] for request_id in self.tokens]


async def measure(directory: Path, models: Path, rounds: int, console: Console) -> list[dict[str, Any]]:
    """The results of `rounds` moves and a third as many kills. Raises FileNotFoundError without the demo models."""
    require_models(models)
    chance = random.Random(SEED)
    options = ClusterOptions(directory=directory, servers=2, slots=1, port=0)
    moved: list[Seen] = []
    killed: list[Seen] = []
    # Estimate and actual.
    resumed: list[tuple[float, float]] = []
    carried = Carried()
    async with LocalCluster(options) as cluster, AdminClient(cluster.url) as client:
        bus = await nats.connect(cluster.nats.url)
        await bus.subscribe(Subjects().all_to_workers(), cb=carried.hear)
        try:
            await client.deploy_and_wait(SMALL, str((models / SMALL).resolve()), keep_alive_s=600)
            for number in range(LEARNING + rounds):
                tokens = LEARNING_TOKENS if number < LEARNING else ANSWER_TOKENS
                at = chance.randint(FIRST_TOKEN, min(LAST_TOKEN, tokens - FIRST_TOKEN))
                one = await _answer(client, at, lambda: _move(client), tokens)
                ended = (await client.migrations())[0]
                told = f"token {at}: pause {1000 * one.pause_s:.0f} ms, usual gap {1000 * one.gap_s:.1f} ms"
                console.print(f"move {number + 1}: {ended['state']}, {told}", style="dim", highlight=False)
                if number >= LEARNING and ended["state"] == "finished":
                    moved.append(one)
                    resumed.append((ended["resume_estimate_s"], ended["resume_s"]))
            for number in range(max(1, rounds // 3)):
                at = chance.randint(FIRST_TOKEN, LAST_TOKEN)
                one = await _answer(client, at, lambda: _kill(cluster, client))
                killed.append(one)
                console.print(
                    f"kill {number + 1}: token {at}, goes on after {one.pause_s:.2f} s", style="dim", highlight=False
                )
                await _until_two_servers(client)
        finally:
            await bus.close()
    errors_s = [abs(estimate_s - actual_s) for estimate_s, actual_s in resumed]
    errors = [error_s / max(actual_s, 1e-3) for error_s, (_, actual_s) in zip(errors_s, resumed, strict=True)]
    within = [float(error <= 0.2 or error_s <= 0.02) for error, error_s in zip(errors, errors_s, strict=True)]
    pauses = [one.pause_s / one.gap_s for one in moved]
    equal = await asyncio.to_thread(
        _equal_shares, models / SMALL, min(PROMPTS_MAX, PROMPTS_PER_ROUND * rounds), console
    )
    params = {"model": SMALL, "tokens": ANSWER_TOKENS}
    return [
        result("migrate.pause_tpots.p50", "1", [statistics.median(pauses)], moves=len(pauses), **params),
        result("migrate.pause_tpots.p99", "1", [_quantile(pauses, 0.99)], moves=len(pauses), **params),
        result("migrate.pause_s", "s", [one.pause_s for one in moved], **params),
        result("migrate.gap_s", "s", [one.gap_s for one in moved], **params),
        result("migrate.bytes_per_token", "B", carried.per_token(), **params),
        result("migrate.failover_s.p50", "s", [one.pause_s for one in killed], **params),
        result("migrate.estimate_error.p90_share", "1", [_quantile(errors, 0.9)], moves=len(errors), **params),
        result("migrate.estimate_error.p90_s", "s", [_quantile(errors_s, 0.9)], moves=len(errors), **params),
        result("migrate.estimate_error.within_20pct_or_20ms", "1", [sum(within) / len(within)], moves=len(errors)),
        *equal,
    ]


def _equal_shares(model: Path, count: int, console: Console) -> list[dict[str, Any]]:
    """How many answers are, token by token, what they are when nobody moves them; and, of the others, how many parted
    at a tie."""
    # Imported here and not above: with torch it takes seconds, which whoever measures something else need not wait.
    from whimbrel.cli.exactness import OUTPUT_TOKENS, PRECISIONS, compare, prompts

    results = []
    for name, precision in PRECISIONS.items():
        compared = compare(model, precision, prompts(count), SEED, console)
        shares = {
            "equal_share": [one.is_equal for one in compared],
            "equal_or_tie_share": [one.is_equal or one.is_tie for one in compared],
        }
        for share, ones in shares.items():
            params = {"model": model.name, "tokens": OUTPUT_TOKENS, "prompts": count}
            results.append(result(f"migrate.{share}.transformers.{name}", "1", [sum(ones) / count], **params))
    return results


async def _answer(
    client: AdminClient,
    at: int = 0,
    disturb: Callable[[], Awaitable[object]] | None = None,
    tokens: int = ANSWER_TOKENS,
) -> Seen:
    return await watch(client, SMALL, QUESTION, max_tokens=tokens, at=at, disturb=disturb)


async def _move(client: AdminClient) -> None:
    server = await _server_of(client)
    assert server, f"{SMALL} runs nowhere"
    begun = await client.migrate(SMALL, "s1" if server == "s0" else "s0")
    async for _ in client.follow_migration(begun["migration_id"]):
        pass


async def _kill(cluster: LocalCluster, client: AdminClient) -> None:
    """Returns when its request runs elsewhere."""
    server = await _server_of(client)
    assert server, f"{SMALL} runs nowhere"
    os.kill(cluster.children[f"worker-{server}-0"].pid, signal.SIGKILL)
    async with asyncio.timeout(RESTART_S_MAX):
        while await _server_of(client) in ("", server):  # noqa: ASYNC110 - another process holds the truth
            await asyncio.sleep(0.1)


async def _server_of(client: AdminClient) -> str:
    """The server where the model runs its request; empty while it runs nowhere."""
    for server in (await client.cluster())["servers"]:
        for slot in server["slots"]:
            if slot["model_id"] == SMALL and slot["active_requests"]:
                return str(server["server_id"])
    return ""


async def _until_two_servers(client: AdminClient) -> None:
    async with asyncio.timeout(RESTART_S_MAX):
        while True:
            slots = [slot for server in (await client.cluster())["servers"] for slot in server["slots"]]
            if sum(slot["is_alive"] for slot in slots) == 2:
                return
            await asyncio.sleep(0.2)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
