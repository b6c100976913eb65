"""Owns the commands for operators of servers: fill and empty tiers, show queues, measure storage, take servers out."""

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
Place = Annotated[str, typer.Argument(help="A server's id, as status shows it.")]
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


def cordon(server: Place, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Place nothing on a server from now on; what runs there goes on."""
    answer = _command(server, url, lambda client, place: client.cordon(place))
    _tell(answer, f"{server} is cordoned; it keeps {_instances(answer['instances'])}", as_json=as_json)


def uncordon(server: Place, url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Let a server that was cordoned or drained take part again."""
    answer = _command(server, url, lambda client, place: client.uncordon(place))
    _tell(answer, f"{server} takes part again", as_json=as_json)


def drain(
    server: Place,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the server is empty.")] = False,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Cordon a server and empty it: idle instances go at once, others move, or go when their requests have ended."""
    if not wait:
        answer = _command(server, url, lambda client, place: client.drain(place))
        left = answer["instances"]
        _tell(answer, f"{server} is drained of {_instances(left)}" if left else f"{server} is empty", as_json=as_json)
        return

    async def work() -> None:
        told: list[str] = []
        async with AdminClient(url) as client:
            async for left in client.follow_drain(server):
                if left and left != told:
                    error_console.print(f"{server} still has {_instances(left)}", highlight=False, soft_wrap=True)
                told = left

    def on_interrupt() -> None:
        error_console.print(f"it goes on; to take the server back: whimbrel uncordon {server}", highlight=False)

    run(work(), url, on_interrupt)
    _tell({"server": server, "instances": []}, f"{server} is empty", as_json=as_json)


def migrate(
    what: Annotated[str, typer.Argument(help="A model, an instance or a request.")],
    to: Annotated[str, typer.Option("--to", help="A server's id, or SERVER/SLOT.")],
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it has ended.")] = True,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Move a running instance to another place, with its requests; their clients notice a short pause at most."""
    server, slash, slot = to.partition("/")
    if slash and not slot.isdigit():
        raise fail(f"--to {to} is neither SERVER nor SERVER/SLOT, such as server-1/0", EXIT_USAGE)

    async def work() -> JsonObject:
        async with AdminClient(url) as client:
            begun = await client.migrate(what, server, int(slot) if slot else None)
            if not wait:
                return begun
            return [status async for status in client.follow_migration(begun["migration_id"])][-1]

    status = run(work(), url)
    _tell(status, show.migration_sentence(status), as_json=as_json)
    if status["state"] in ("abandoned", "requeued"):
        raise typer.Exit(EXIT_REFUSED)


def migrations(url: Url = DEFAULT_URL, as_json: Json = False) -> None:
    """Show the migrations on their way, and those that ended lately."""

    async def work() -> list[JsonObject]:
        async with AdminClient(url) as client:
            return await client.migrations()

    found = run(work(), url)
    if as_json:
        print(json.dumps(found))
    elif found:
        console.print(show.migrations_table(found))
    else:
        console.print("nothing has moved lately", highlight=False)


def _instances(instance_ids: list[str]) -> str:
    return ", ".join(instance_ids) or "no instance"


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
    commands: tuple[Callable[..., None], ...] = (
        prefetch, pin, unpin, evict, loads, doctor, cordon, uncordon, drain, migrate, migrations,
    )  # fmt: skip
    for command in commands:
        app.command()(command)
