#!/usr/bin/env python3
"""The demo: a cluster on this machine, a cold and a warm answer, rivals that take the model's slot and give it back,
and an answer that moves to another server while it streams.

Ends with status 0 only if everything it says has happened, and leaves nothing running.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from whimbrel.chassis.logging import configure
from whimbrel.cli import figure_3
from whimbrel.cli.cluster import ClusterOptions, LocalCluster
from whimbrel.cli.show import cluster_table, follow_import, migration_sentence, models_table
from whimbrel.client import AdminClient, events
from whimbrel.client.admin import Answer

QUESTION = "What is the capital of France? Answer in one sentence."
MODEL = "smollm2-135m"
RANDOM = "random-360m"
# Two names for one checkpoint, as fine-tunes of two customers would be two models of one size.
RIVALS = ("customer-a", "customer-b")
STAGES = ("queue", "fetch", "load", "bind", "prefill", "first_token")
console = Console(highlight=False)


class DemoFailed(Exception):
    """Something the demo promises did not happen."""


def expect(claim: bool, sentence: str) -> None:
    if not claim:
        raise DemoFailed(sentence)
    console.print(f"  [green]✓[/green] {sentence}")


async def ask(client: AdminClient, model: str, **options: Any) -> Answer:
    """Ask the question and print the answer while it streams."""
    answer = Answer()
    console.print(f"  [dim]{model} ›[/dim] ", end="")
    async for text in client.chat(model, [{"role": "user", "content": QUESTION}], answer, temperature=0, **options):
        console.print(text, end="", markup=False)
    console.print(f"\n  [dim]first token after {answer.first_token_s:.3f} s, bytes from {answer.tier}[/dim]")
    return answer


async def instances(client: AdminClient) -> dict[str, str]:
    """Which model is on which server's slot."""
    cluster = await client.cluster()
    return {
        f"{server['server_id']}/{slot['slot']}": slot["model_id"] or ""
        for server in cluster["servers"]
        for slot in server["slots"]
    }


async def wait_until_gone(client: AdminClient, models: set[str]) -> None:
    """Scale to zero: return when no slot holds any of the models."""
    async with asyncio.timeout(60):
        while models & set((await instances(client)).values()):  # noqa: ASYNC110 - another process holds the truth
            await asyncio.sleep(0.2)


def stage_table(answers: dict[str, Answer]) -> Table:
    columns = ("start", "bytes from", *(f"{stage} ms" for stage in STAGES), "seen by client ms")
    table = Table(*columns, title="where the time went")
    for name, answer in answers.items():
        stages = (f"{answer.stages_ms.get(stage, 0):.0f}" for stage in STAGES)
        table.add_row(name, answer.tier, *stages, f"{1000 * (answer.first_token_s or 0):.0f}")
    return table


async def demo(models: Path, directory: Path) -> None:
    console.rule("1. a cluster: 2 servers × 1 slot")
    options = ClusterOptions(directory=directory, servers=2, slots=1, port=0)
    async with LocalCluster(options, say=lambda line: console.print(f"  [dim]{line}[/dim]")) as cluster:
        async with AdminClient(cluster.url) as client:
            await deploy(client, models)
            answers = await cold_and_warm(client)
            answers["cold again"] = await compete(client)
            await scale_to_zero(client)
        console.rule("what ops tooling saw")
        seen = [received.envelope.type async for received in events(cluster.nats.url, follow=False)]
        console.print("  " + ", ".join(f"{kind} ×{seen.count(kind)}" for kind in dict.fromkeys(seen)))
        promised = {"model.deployed", "load.finished", "instance.ready", "instance.unloaded", "request.finished"}
        expect(promised <= set(seen), "every step was published as an event")
        pids = [child.pid for child in cluster.children.values() if child.pid]
    expect(not any(Path(f"/proc/{pid}").exists() for pid in pids), "the cluster is stopped; no process is left")
    console.print(stage_table(answers))


async def deploy(client: AdminClient, models: Path) -> None:
    console.rule("2. three models for two slots")
    for name, folder in ((MODEL, MODEL), *((rival, RANDOM) for rival in RIVALS)):
        # A rival gives its slot back soon after its last answer; the demo model may stay.
        keep_alive_s = 600.0 if name == MODEL else 3.0
        started = await client.deploy(name, str((models / folder).resolve()), keep_alive_s)
        await follow_import(client, started["job_id"], name, console, quiet=not sys.stdout.isatty())
    console.print(models_table(await client.models()))
    expect(not any((await instances(client)).values()), "three models are deployed and none holds a slot")


async def cold_and_warm(client: AdminClient) -> dict[str, Answer]:
    console.rule("3. the first request wakes the model")
    cold = await ask(client, MODEL)
    expect("Paris" in cold.text, "the cold answer names Paris")
    expect(cold.tier not in ("", "gpu"), f"the model was cold: its bytes came from the tier {cold.tier}")
    console.rule("4. the same question, warm")
    warm = await ask(client, MODEL)
    expect(warm.text == cold.text and warm.tier == "gpu", "the warm answer is the same, from the loaded instance")
    return {"cold": cold, "warm": warm}


async def compete(client: AdminClient) -> Answer:
    console.rule("5. a rival takes the free slot, a second one takes the demo model's")
    for rival in RIVALS:
        answer = await ask(client, rival, max_tokens=4)
        expect(answer.finish_reason == "length", f"{rival} answered (its weights are random, its words too)")
    console.print(cluster_table(await client.cluster()))
    expect(MODEL not in (await instances(client)).values(), f"{MODEL} was idle and made room")
    console.rule("6. the demo model takes a slot back: its bytes are still in DRAM")
    again = await ask(client, MODEL)
    expect("Paris" in again.text and again.tier == "dram", "the answer is there again, this time from DRAM")
    return again


async def scale_to_zero(client: AdminClient) -> None:
    console.rule("7. rivals that nobody asks give their slots back")
    await wait_until_gone(client, set(RIVALS))
    expect(list((await instances(client)).values()).count("") == 1, "a slot is free again")


async def move_while_it_streams(models: Path, directory: Path) -> None:
    """The paper's Figure 3: model A moves away while its client reads on, so that B can start where its bytes are."""
    console.rule("8. live migration: A streams on s1, B is asked for, whose bytes are in s1's memory")
    options = figure_3.options(directory / "migration", "migration")
    async with LocalCluster(options) as cluster, AdminClient(cluster.url) as client:
        await figure_3.deploy(client, models)
        await figure_3.set_up(client)
        played = await figure_3.play(client)
        for migration in await client.migrations():
            console.print(f"  {migration_sentence(migration)}, while it streamed")
        said = await figure_3.undisturbed(client)
    expect(played.migrations == 1 and played.b.answer.tier == "dram", "A moved to s0, and B started on s1 from DRAM")
    expect((played.a.text, played.b.text) == said, "both said, word for word, what they say when nobody disturbs them")
    await compare(models, directory, played)


async def compare(models: Path, directory: Path, migrated: figure_3.Played) -> None:
    """The same puzzle, solved as others do."""
    table = Table("policy", "B's first word after", "its bytes from", "A's longest pause", "between two words usually")
    for policy in figure_3.POLICIES:
        one = migrated if policy == "migration" else await figure_3.play_with(policy, directory / policy, models)
        table.add_row(
            policy, f"{one.b.start_s:.2f} s", one.b.answer.tier, f"{1000 * one.a.pause_s:.0f} ms",
            f"{1000 * one.a.gap_s:.0f} ms",
        )  # fmt: skip
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=Path(".models"), help="made by tools/demo_models.py")
    arguments = parser.parse_args()
    configure("warning", service="demo")
    with tempfile.TemporaryDirectory(prefix="whimbrel-demo-") as directory:
        try:
            asyncio.run(demo(arguments.models, Path(directory) / "1"))
            asyncio.run(move_while_it_streams(arguments.models, Path(directory) / "2"))
        except (DemoFailed, TimeoutError) as error:
            console.print(f"[red]✗ {error}[/red]")
            for log in sorted(Path(directory).glob("*/logs/*.log")):
                console.print(f"[dim]--- {log.name}[/dim]\n{log.read_text()[-1500:]}", markup=False)
            return 1
    console.print("[bold green]demo done[/bold green]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
