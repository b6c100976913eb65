"""Owns the puzzle of the paper's Figure 3 on a real cluster: two servers of one slot, two models, one request too many.

Server s0 has model A in DRAM and B on its SSD, and a free slot. Server s1 has both in DRAM, and A streams there. Then B
is asked for. Whoever looks for a free slot loads B on s0 from the SSD; whoever wants it fast waits on s1, or stops A
there; and with live migration A moves to s0 while it streams, and B starts on s1.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from whimbrel.cli.cluster import MIB, ClusterOptions, LocalCluster
from whimbrel.cli.watching import Seen, watch
from whimbrel.client import AdminClient

#: The four timelines of the figure.
POLICIES = ("availability", "locality", "preemption", "migration")
MODEL_A, MODEL_B = "smollm2-135m", "random-360m"
QUESTION_A = "Tell me a long story about a bird that flies over the sea."
QUESTION_B = "What is a whimbrel?"
TOKENS_A, TOKENS_B = 180, 8
# B comes when A has said so much: with preemption, nobody is stopped in the first two seconds.
ASKED_AT = 70
PREFETCH_S_MAX = 60.0
# Nobody is asked twice in that time, so each begins cold.
KEEP_ALIVE_S = 0.5
EMPTY_S_MAX = 60.0
POOL_BYTES = 1280 * MIB
# In the figure, loading from an SSD takes much longer than computing a few hundred tokens again. With a small model and
# a fast disk it does not, so loads may use no more of it than a shared or networked one would give.
SSD_BYTES_PER_S_MAX = 200_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What the two clients saw, and where the models were in the end."""

    a: Seen
    b: Seen
    server_of_b: str
    migrations: int


def options(directory: Path, policy: str) -> ClusterOptions:
    environ = {
        "WB_POLICY": policy,
        "WB_SSD_BYTES_PER_S_MAX": str(SSD_BYTES_PER_S_MAX),
        # So that an answer is the same however it was split into prefill and decode.
        "WB_DTYPE": "float32",
    }
    return ClusterOptions(directory=directory, servers=2, slots=1, port=0, pool_bytes=POOL_BYTES, environ=environ)


async def play_with(policy: str, directory: Path, models: Path) -> Played:
    """The puzzle on a cluster of its own that decides by this policy."""
    async with LocalCluster(options(directory, policy)) as cluster, AdminClient(cluster.url) as client:
        await deploy(client, models)
        await set_up(client)
        return await play(client)


async def deploy(client: AdminClient, models: Path) -> None:
    for name in (MODEL_A, MODEL_B):
        await client.deploy_and_wait(name, str((models / name).resolve()), keep_alive_s=KEEP_ALIVE_S)


async def set_up(client: AdminClient) -> None:
    """Bring the bytes of both models where the figure has them, and have the scheduler learn what prefills take."""
    for server, model, tier in (("s0", MODEL_A, "dram"), ("s1", MODEL_A, "dram"), ("s0", MODEL_B, "ssd")):
        await _bring(client, server, model, tier)
    await _bring(client, "s1", MODEL_B, "dram")
    for question in (QUESTION_A, QUESTION_A * 4):
        await watch(client, MODEL_A, question, max_tokens=2)


async def undisturbed(client: AdminClient) -> tuple[str, str]:
    """What both models say when they have the cluster for themselves."""
    a = await watch(client, MODEL_A, QUESTION_A, max_tokens=TOKENS_A)
    b = await watch(client, MODEL_B, QUESTION_B, max_tokens=TOKENS_B)
    return a.text, b.text


async def play(client: AdminClient) -> Played:
    """A streams on s1, and B is asked for."""
    await _until_empty(client)
    await client.cordon("s0")
    asked: list[Seen] = []

    async def ask_b() -> None:
        await client.uncordon("s0")
        asked.append(await watch(client, MODEL_B, QUESTION_B, max_tokens=TOKENS_B))

    known = len(await client.migrations())
    a = await watch(client, MODEL_A, QUESTION_A, max_tokens=TOKENS_A, at=ASKED_AT, disturb=ask_b)
    (b,) = asked
    return Played(a=a, b=b, server_of_b=b.answer.server, migrations=len(await client.migrations()) - known)


async def _until_empty(client: AdminClient) -> None:
    async with asyncio.timeout(EMPTY_S_MAX):
        while any(slot["model_id"] for server in (await client.cluster())["servers"] for slot in server["slots"]):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def _bring(client: AdminClient, server: str, model: str, tier: str) -> None:
    await client.prefetch(server, model, tier)
    async with asyncio.timeout(PREFETCH_S_MAX):
        while await _tier_of(client, server, model) != tier:  # noqa: ASYNC110 - another process holds the truth
            await asyncio.sleep(0.1)


async def _tier_of(client: AdminClient, server: str, model: str) -> str:
    """Where its bytes are on the server, all of them."""
    for entry in (await client.cluster())["servers"]:
        if entry["server_id"] == server:
            for resident in entry["resident"]:
                if resident["model_id"] == model:
                    held = resident["dram_bytes"] if resident["tier"] == "dram" else resident["ssd_bytes"]
                    return str(resident["tier"]) if held >= resident["size_bytes"] else ""
    return ""
