"""Owns the commands for operators of servers: fill and empty their tiers, show their queues, measure their storage."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from whimbrel.cli import show
from whimbrel.cli.endings import EXIT_REFUSED, EXIT_USAGE, Json, Url, console, error_console, fail, run
from whimbrel.client import AdminClient, ApiError
from whimbrel.client.admin import DEFAULT_URL

JsonObject = dict[str, Any]


class TierName(StrEnum):
    """The tiers of a server that can be filled and emptied."""

    SSD = "ssd"
    DRAM = "dram"


Model = Annotated[str, typer.Argument(help="A deployed model.")]
Server = Annotated[str | None, typer.Option("--server", help="A server's id; default: the only one.")]
Servers = Annotated[str | None, typer.Option("--server", help="A server's id; default: all of them.")]
TierOption = Annotated[TierName, typer.Option("--tier", help="Which tier of the server.")]


def prefetch(
    model: Model,
    server: Server = None,
    tier: TierOption = TierName.DRAM,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it there until it is unpinned.")] = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Bring a model into a tier of a server, without starting it; `loads` shows how far it is."""
    answer = _command(server, url, lambda client, place: client.prefetch(place, model, tier.value, pin=pin))
    _tell(answer, f"{model} is on its way into {tier.value} of {answer['server']}", as_json=as_json)


def pin(
    model: Model,
    server: Server = None,
    tier: TierOption = TierName.DRAM,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Keep what is, or comes to be, of a model in a tier of a server."""
    answer = _command(server, url, lambda client, place: client.pin(place, model, tier.value))
    _tell(answer, f"{model} is pinned in {tier.value} of {answer['server']}", as_json=as_json)


def unpin(
    model: Model,
    server: Server = None,
    tier: TierOption = TierName.DRAM,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Let a model be evicted from a tier of a server again."""
    answer = _command(server, url, lambda client, place: client.unpin(place, model, tier.value))
    _tell(answer, f"{model} is not pinned in {tier.value} of {answer['server']} any more", as_json=as_json)


def evict(
    model: Model,
    server: Server = None,
    tier: TierOption = TierName.DRAM,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Give back the room that a model takes in a tier of a server; from the SSD means from DRAM too."""
    answer = _command(server, url, lambda client, place: client.evict(place, model, tier.value))
    _tell(answer, f"{model} is evicted from {tier.value} of {answer['server']}", as_json=as_json)


def loads(server: Servers = None, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Show what servers are loading, how far it is, and what waits."""
    _survey(server, url, lambda client, place: client.loads(place), show.loads_table, as_json=as_json)


def doctor(server: Servers = None, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Measure the storage of servers, and say what makes their loads slower than they could be."""
    _survey(server, url, lambda client, place: client.measure(place), show.doctor_table, as_json=as_json)


def _command(server: str | None, url: str, ask: Callable[[AdminClient, str], Awaitable[JsonObject]]) -> JsonObject:
    """One request to one server."""

    async def work() -> JsonObject | list[str]:
        async with AdminClient(url) as client:
            known = [server] if server is not None else await _server_ids(client)
            return await ask(client, known[0]) if len(known) == 1 else known

    answer = run(work(), url)
    if isinstance(answer, list):
        raise fail(f"name a server with --server: {', '.join(answer) or 'there is none yet'}", EXIT_USAGE)
    return answer


def _tell(answer: JsonObject, sentence: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
    else:
        console.print(sentence, highlight=False, soft_wrap=True)


def _survey(
    server: str | None,
    url: str,
    ask: Callable[[AdminClient, str], Awaitable[JsonObject]],
    table: Callable[[list[JsonObject]], RenderableType],
    *,
    as_json: bool,
) -> None:
    """One request to each server; those that fail are named at the end, and the exit code says so."""

    async def work() -> list[JsonObject | ApiError]:
        async with AdminClient(url) as client:
            places = [server] if server is not None else await _server_ids(client)
            found: list[JsonObject | ApiError] = []
            # One after the other: servers may share a disk, and a measurement should not disturb another.
            for place in places:
                try:
                    found.append(await ask(client, place))
                except ApiError as error:
                    found.append(error)
        return found

    found = run(work(), url)
    answers = [answer for answer in found if not isinstance(answer, ApiError)]
    errors = [answer for answer in found if isinstance(answer, ApiError)]
    if as_json:
        print(json.dumps(answers))
    elif answers:
        console.print(table(answers))
    elif not errors:
        console.print("there is no server yet", highlight=False)
    for error in errors[:-1]:
        error_console.print(str(error), highlight=False, soft_wrap=True, markup=False)
    if errors:
        raise fail(str(errors[-1]), EXIT_REFUSED)


async def _server_ids(client: AdminClient) -> list[str]:
    """Lost ones too: who asks about all servers wants to hear that one is lost."""
    return [server["server_id"] for server in (await client.cluster())["servers"]]


def add_commands(app: typer.Typer) -> None:
    """Those of this module."""
    commands: tuple[Callable[..., None], ...] = (prefetch, pin, unpin, evict, loads, doctor)
    for command in commands:
        app.command()(command)
