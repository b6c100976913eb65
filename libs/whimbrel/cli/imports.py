"""Owns the commands about imports: deploy a model and watch how far it is, go on watching, cancel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from whimbrel.cli import show
from whimbrel.cli.endings import EXIT_REFUSED, EXIT_USAGE, Json, Url, console, error_console, fail, run
from whimbrel.cli.scale import KeepAlive, MaxInstances, MinInstances, TargetConcurrency, scaling_of
from whimbrel.client import AdminClient
from whimbrel.client.admin import DEFAULT_URL, JOB_POLL_S
from whimbrel.wire.errors import InvalidRequest
from whimbrel.wire.sources import parse_source


def deploy(
    model: Annotated[str, typer.Argument(help="The name clients will use.")],
    source: Annotated[
        str,
        typer.Option(
            "--source",
            help="A directory that the storage agents can read, hf://org/name\\[@revision], s3://bucket/prefix, or "
            "http(s)://host/directory/.",
        ),
    ],
    keep_alive_s: KeepAlive = None,
    min_instances: MinInstances = None,
    max_instances: MaxInstances = None,
    target_concurrency: TargetConcurrency = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint, publish it in the repository, and serve it under a name."""
    if not source.strip():
        raise fail("--source is empty; name a directory, a hub model or a URL", EXIT_USAGE)
    place = source if "://" in source else str(Path(source).resolve())
    try:
        parse_source(place)
    except InvalidRequest as error:
        raise fail(f"--source {error.reason}", EXIT_USAGE) from None

    scaling = scaling_of(min_instances, max_instances, target_concurrency)

    async def start() -> str:
        async with AdminClient(url) as client:
            return str((await client.deploy(model, place, keep_alive_s, scaling))["job_id"])

    job = run(start(), url)
    error_console.print(f"job {job}", style="dim", highlight=False)
    status = _follow(job, model, url, as_json=as_json)
    if as_json:
        print(json.dumps(status))
    else:
        console.print(f"{model} is deployed; try: whimbrel chat {model} 'Hello'", highlight=False)


def watch(
    job: Annotated[str, typer.Argument(help="The id of an import, as deploy told it; models --json has it too.")],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Show how far an import is until it ends."""
    status = _follow(job, None, url, as_json=as_json)
    print(json.dumps(status)) if as_json else console.print(f"{status['model']} is deployed", highlight=False)


def cancel(
    job: Annotated[str, typer.Argument(help="The id of an import, as deploy told it; models --json has it too.")],
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """End an import; nothing of it is published. Returns when the storage agent has stopped."""

    async def work() -> dict[str, Any]:
        async with AdminClient(url) as client:
            status = await client.cancel(job)
            while status["stage"] not in ("failed", "finished"):
                await asyncio.sleep(JOB_POLL_S)
                status = await client.job(job)
        return status

    status = run(work(), url)
    error = status.get("error") or {}
    if as_json:
        print(json.dumps(status))
    if status["stage"] == "finished":
        raise fail(f"job {job} had finished already; to undo it: whimbrel delete {status['model']}", EXIT_REFUSED)
    if error.get("code") != "cancelled":
        raise fail(f"job {job} had failed already: {error.get('message', 'its reason is not known')}", EXIT_REFUSED)
    if not as_json:
        console.print(f"the import of {status['model']} is cancelled", highlight=False)


def _follow(job: str, model: str | None, url: str, *, as_json: bool) -> dict[str, Any]:
    """The last status of a job that finished. Interrupted, it leaves the job alone and says what can be done."""

    async def work() -> dict[str, Any]:
        async with AdminClient(url) as client:
            name = model or str((await client.job(job))["model"])
            return await show.follow_import(client, job, name, error_console, quiet=as_json)

    def on_interrupt() -> None:
        place = "" if url == DEFAULT_URL else f" --url {url}"
        error_console.print(
            f"the import goes on; to watch it: whimbrel watch {job}{place}\n"
            f"to cancel it: whimbrel cancel {job}{place}",
            highlight=False, soft_wrap=True, markup=False,
        )  # fmt: skip

    return run(work(), url, on_interrupt)


def add_commands(app: typer.Typer) -> None:
    """Those of this module."""
    commands: tuple[Callable[..., None], ...] = (deploy, watch, cancel)
    for command in commands:
        app.command()(command)
