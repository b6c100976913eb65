"""Owns the `whimbrel` command line: arguments in, tables or JSON out, exit codes that scripts can use.

Exit codes: 0 done, 1 the cluster refused or failed, 2 wrong usage, 3 the cluster is not there, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from whimbrel import __version__
from whimbrel.chassis.logging import configure
from whimbrel.chassis.servers import ServerFailed, ServerMissing
from whimbrel.cli import bench as bench_command
from whimbrel.cli import explain as explain_command
from whimbrel.cli import imports, operate, show
from whimbrel.cli import scale as scale_command
from whimbrel.cli.cluster import DEFAULT_PORT, AlreadyRunning, ClusterOptions, read_state
from whimbrel.cli.endings import EXIT_REFUSED, EXIT_USAGE, Json, Url, console, error_console, fail, run
from whimbrel.cli.up import down_cluster, run_cluster, start_detached
from whimbrel.client import AdminClient, events
from whimbrel.client.admin import DEFAULT_URL, Answer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Serverless inference for large language models: run a cluster, deploy models, talk to them, watch.",
    pretty_exceptions_enable=False,
)
app.command("bench")(bench_command.bench)
app.command("explain")(explain_command.explain)
app.command("scale")(scale_command.scale)
imports.add_commands(app)
operate.add_commands(app)

Directory = Annotated[Path, typer.Option("--dir", help="Where the cluster keeps its data, logs and state.")]
DEFAULT_DIRECTORY = Path(".whimbrel")


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    # Standard output belongs to answers: tables, or JSON for programs.
    configure("warning", service="cli")
    if version:
        print(f"whimbrel {__version__}")
        raise typer.Exit


@app.command()
def up(
    servers: Annotated[int, typer.Option(help="How many servers (each has its own SSD directory and pool).")] = 2,
    slots: Annotated[int, typer.Option(help="GPU slots (CPU slots without GPUs) per server.")] = 1,
    schedulers: Annotated[int, typer.Option(help="How many schedulers: one leads, the others stand by.")] = 1,
    directory: Directory = DEFAULT_DIRECTORY,
    port: Annotated[int, typer.Option(help="Port of the HTTP API.")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="Address of the HTTP API; there is no authentication yet.")] = "127.0.0.1",
    engine: Annotated[
        str, typer.Option(help="transformers, or echo for rehearsals without a model's cost.")
    ] = "transformers",
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="Device of a slot, such as cuda:0; repeatable, given in turn. Default: cpu."),
    ] = None,
    pool_mib: Annotated[int | None, typer.Option(help="DRAM pool per server, MiB; default a share of memory.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting for every service, such as WB_KEEP_ALIVE_S=5; repeatable."),
    ] = None,
    detach: Annotated[bool, typer.Option(help="Return when the cluster is ready and leave it running.")] = False,
) -> None:
    """Run a whole cluster on this machine: NATS, Redis and the four services."""
    try:
        options = ClusterOptions(
            directory=directory, servers=servers, slots=slots, schedulers=schedulers, port=port, host=host,
            engine=engine, devices=tuple(device or ("cpu",)),
            pool_bytes=None if pool_mib is None else pool_mib * 1024 * 1024,
            environ=_settings(setting or []),
        )  # fmt: skip
        if detach:
            start_detached(options, console)
        else:
            asyncio.run(run_cluster(options, console))
    except ValueError as error:
        raise fail(str(error), EXIT_USAGE) from None
    except (AlreadyRunning, TimeoutError, ServerMissing, ServerFailed, RuntimeError) as error:
        raise fail(str(error), EXIT_REFUSED) from None


@app.command()
def down(directory: Directory = DEFAULT_DIRECTORY, as_json: Json = False) -> None:
    """Stop the cluster that runs in a directory. Its data stays."""
    try:
        stopped = down_cluster(directory)
    except TimeoutError as error:
        raise fail(str(error), EXIT_REFUSED) from None
    if as_json:
        print(json.dumps({"stopped": stopped}))
    else:
        console.print("stopped" if stopped else f"no cluster runs in {directory}")


@app.command()
def delete(model: str, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Take a model away: its instances, every copy, and its place in the repository."""

    async def work() -> dict[str, Any]:
        async with AdminClient(url) as client:
            return await client.delete(model)

    answer = run(work(), url)
    print(json.dumps(answer)) if as_json else console.print(f"{model} is deleted", highlight=False)


@app.command()
def models(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """List models, cold ones too, with the tiers that hold them."""

    async def work() -> list[dict[str, Any]]:
        async with AdminClient(url) as client:
            return await client.models()

    found = run(work(), url)
    print(json.dumps(found)) if as_json else console.print(show.models_table(found))


@app.command()
def status(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Show servers, slots, tiers and queues."""

    async def work() -> dict[str, Any]:
        async with AdminClient(url) as client:
            return await client.cluster()

    found = run(work(), url)
    print(json.dumps(found)) if as_json else console.print(show.cluster_table(found))


@app.command()
def chat(
    model: str,
    prompt: Annotated[str | None, typer.Argument(help="One question; without it, a conversation.")] = None,
    max_tokens: Annotated[int, typer.Option(help="The longest answer, tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    url: Url = DEFAULT_URL,
) -> None:
    """Talk to a model; the first answer wakes it."""

    async def turn(client: AdminClient, history: list[dict[str, Any]]) -> None:
        answer = Answer()
        async for text in client.chat(model, history, answer, max_tokens=max_tokens, temperature=temperature):
            print(text, end="", flush=True)
        print()
        history.append({"role": "assistant", "content": answer.text})
        if sys.stderr.isatty():
            error_console.print(show.answer_line(answer), style="dim", highlight=False)

    async def work() -> None:
        history: list[dict[str, Any]] = []
        async with AdminClient(url) as client:
            if prompt is not None:
                return await turn(client, [{"role": "user", "content": prompt}])
            while True:
                try:
                    line = await asyncio.to_thread(input, "> ")
                except EOFError:
                    return None
                if line.strip():
                    history.append({"role": "user", "content": line})
                    await turn(client, history)

    run(work(), url)


@app.command("events")
def events_command(
    follow: Annotated[bool, typer.Option(help="Go on with what comes next.")] = False,
    since: Annotated[str | None, typer.Option(help="How far back, such as 30s, 10m, 2h.")] = None,
    types: Annotated[str, typer.Option("--type", help="Glob over event types, such as 'load.*'.")] = "*",
    nats_url: Annotated[str | None, typer.Option(envvar="WB_NATS_URL", help="Default: the cluster in --dir.")] = None,
    cluster: Annotated[str, typer.Option(envvar="WB_CLUSTER", help="The cluster's prefix.")] = "wb",
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: Json = False,
) -> None:
    """Print public events: what happened to models, loads, instances, servers and requests."""
    state = read_state(directory) or {}
    place = nats_url or state.get("nats_url")
    if not place:
        raise fail(f"no cluster runs in {directory}; name one with --nats-url nats://host:4222", EXIT_USAGE)
    age = None if since is None else _age(since)

    async def work() -> None:
        async for received in events(place, cluster=cluster, types=types, since=age, follow=follow):
            print(show.event_line(received, as_json), flush=True)

    run(work(), place)


def _settings(pairs: list[str]) -> dict[str, str]:
    settings = dict(pair.split("=", 1) for pair in pairs if pair.startswith("WB_") and "=" in pair)
    if len(settings) != len(pairs):
        raise ValueError(f"--set takes WB_NAME=VALUE, each name once, not {' '.join(pairs)!r}")
    return settings


def _age(text: str) -> timedelta:
    units = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
    if text[-1:] not in units or not text[:-1].isdigit():
        raise fail(f"--since takes a number with s, m, h or d, not {text!r}", EXIT_USAGE)
    return timedelta(**{units[text[-1]]: int(text[:-1])})


if __name__ == "__main__":
    app()
