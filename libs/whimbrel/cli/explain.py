"""Owns the command that explains a model: its state in words, then the terms of every server in its decisions."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from whimbrel.cli import show
from whimbrel.cli.endings import Json, Url, console, run
from whimbrel.client import AdminClient
from whimbrel.client.admin import DEFAULT_URL


def explain(
    model: Annotated[str, typer.Argument(help="A deployed model.")], url: Url = DEFAULT_URL, as_json: Json = False
) -> None:
    """Tell why a model is where it is, or waits, and what would be decided now."""

    async def work() -> dict[str, Any]:
        async with AdminClient(url) as client:
            return await client.explain(model)

    answer = run(work(), url)
    print(json.dumps(answer)) if as_json else console.print(explanation(answer))


def explanation(answer: dict[str, Any]) -> RenderableType:
    """The sentence, then both decisions."""
    parts: list[RenderableType] = [Text(answer["sentence"]), Text("")]
    if answer["last"] is None:
        parts.append(Text("nothing was decided yet"))
    else:
        parts += _decision(answer["last"], f"{_age(answer['last']['age_s'])} ago")
    return Group(*parts, Text(""), *_decision(answer["now"], "now"))


def _decision(decision: dict[str, Any], when: str) -> list[RenderableType]:
    policy = f" (policy {decision['policy']})" if decision["policy"] else ""
    parts: list[RenderableType] = [Text(f"{when}: {_outcome(decision)}{policy}")]
    if decision["candidates"]:
        return [*parts, *_candidates(decision)]
    if not decision["policy"]:
        parts.append(Text("a scheduler that led before decided so; its reasons are not kept"))
    return parts


def _outcome(decision: dict[str, Any]) -> str:
    server = decision["server_id"]
    match decision["outcome"]:
        case "placed":
            return f"placed on {server}"
        case "never_fits":
            need, capacity = show.size(decision["need_bytes"]), show.size(decision["capacity_bytes"])
            return f"too large for every server ({need}, {capacity} at most)"
        case "deferred":
            return f"deferred, to wait for {server}" if server else "deferred until a slot is released"
    return str(decision["outcome"])


def _candidates(decision: dict[str, Any]) -> list[RenderableType]:
    """A line per server, its terms adding up to what servers are compared by. Lines, as a table of them is too wide."""
    chosen = decision["server_id"] if decision["outcome"] == "placed" else None
    lines: list[RenderableType] = []
    for candidate in decision["candidates"]:
        mark = "→" if candidate["server_id"] == chosen else " "
        lines.append(Text(f"{mark} {candidate['server_id']}: {_terms(candidate)}"))
    if any(candidate["is_prior"] for candidate in decision["candidates"]):
        lines.append(Text("  (~ nothing was loaded there from that tier yet: a guess)"))
    return lines


def _terms(candidate: dict[str, Any]) -> str:
    load_s = candidate["queue_s"] + candidate["transfer_s"] + candidate["overhead_s"]
    prior = "~" if candidate["is_prior"] else ""
    terms = (
        f"{_seconds(candidate['queue_s'])} queue + {prior}{_seconds(candidate['transfer_s'])} for "
        f"{show.size(candidate['size_bytes'])} from {candidate['source_tier']} + "
        f"{_seconds(candidate['overhead_s'])} overhead"
    )
    doubt = "; a load just failed here, so it comes last" if candidate["is_avoided"] else ""
    if candidate["refusal"]:
        return f"{candidate['refusal']} (a load there: {_seconds(load_s)} = {terms}){doubt}"
    first = _first(candidate)
    if first:
        terms += f" + {_seconds(candidate['total_s'] - load_s)} for what goes first: {first}"
    slots = ", ".join(map(str, candidate["slots"]))
    return f"{_seconds(candidate['total_s'])} = {terms}; slot {slots}{doubt}"


def _first(candidate: dict[str, Any]) -> str:
    """What must go before the load."""
    evicted = [f"idle {instance_id}" for instance_id in candidate["evicted"]]
    moves = [f"{move['instance_id']} to {move['server_id']}" for move in candidate["moves"]]
    stopped = [f"{instance_id}, which is stopped" for instance_id in candidate["stopped"]]
    return ", ".join(evicted + moves + stopped)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def _age(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
