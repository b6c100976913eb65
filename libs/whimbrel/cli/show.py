"""Owns how the command line shows things: tables for people, lines for events, a bar for imports."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from whimbrel.client import AdminClient, Received
from whimbrel.client.admin import Answer


def size(size_bytes: float) -> str:
    """Bytes for people, in decimal units as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if unit in ("B", "kB", "MB") else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


async def follow_import(
    client: AdminClient, job_id: str, model: str, console: Console, *, quiet: bool
) -> dict[str, Any]:
    """Show an import's progress until it ends; returns its last status. Raises ApiError when it failed."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    status: dict[str, Any] = {}
    stage = "queued"
    with Progress(*columns, console=console, disable=quiet) as progress:
        task = progress.add_task(f"{model}: {stage}", total=None)
        async for status in client.follow_job(job_id):
            if status["stage"] not in (stage, "finished"):
                # Rate and time left are of one stage: a disk's say nothing of a network's.
                progress.reset(task, total=None)
            stage = status["stage"]
            progress.update(
                task,
                description=f"{model}: {stage}",
                completed=status["done_bytes"],
                total=status["total_bytes"] or None,
            )
    return status


def models_table(models: list[dict[str, Any]]) -> Table:
    """`instances` says how many there are, how many its demand asks for, and the bounds."""
    table = Table("model", "state", "size", "parameters", "instances", "wait", "resident in")
    for model in models:
        residency = ", ".join(f"{server}: {tier}" for server, tier in sorted(model["residency"].items()))
        parameters = f"{model['parameter_count'] / 1e6:.0f} M" if model["parameter_count"] else "-"
        table.add_row(
            model["model"], model["state"], size(model["size_bytes"]), parameters,
            instances_of(model), str(model["waiting_requests"]), residency or "repository only",
        )  # fmt: skip
    return table


def instances_of(model: dict[str, Any]) -> str:
    scaling = model["scaling"]
    bounds = f"{scaling['min_instances']}–{scaling['max_instances']}"
    return f"{len(model['instances'])} of {model['desired_instances']} ({bounds})"


def cluster_table(cluster: dict[str, Any]) -> RenderableType:
    table = Table("server", "slot", "device", "state", "model", "requests", "in DRAM", "pool used", "loading")
    for server in cluster["servers"]:
        dram = ", ".join(entry["model_id"] for entry in server["resident"] if entry["tier"] == "dram") or "-"
        used = server["pool_size_bytes"] - server["pool_free_bytes"]
        pool = f"{size(used)} of {size(server['pool_size_bytes'])}"
        for slot in server["slots"]:
            state = slot["state"] if slot["is_alive"] and server["is_alive"] else "lost"
            table.add_row(
                server["server_id"], str(slot["slot"]), slot["device"], state, slot["model_id"] or "-",
                str(slot["active_requests"]), dram, pool, str(len(server["tasks"])),
            )  # fmt: skip
        if not server["slots"]:
            table.add_row(server["server_id"], "-", "-", "no worker", "-", "0", dram, pool, str(len(server["tasks"])))
    waiting = f"{cluster['waiting_requests']} requests wait; {len(cluster['routers'])} routers"
    out = [f"{server['server_id']} is {_taken_out(server)}" for server in cluster["servers"] if _taken_out(server)]
    leader = f"; {cluster['scheduler_id']} leads" if cluster["scheduler_id"] else ""
    policy = [f"policy {cluster['policy']}{leader}, epoch {cluster['scheduler_epoch']}"] if cluster["policy"] else []
    return Group(table, *_estimates(cluster["servers"]), *map(Text, [*out, waiting, *policy]))


def _taken_out(server: dict[str, Any]) -> str:
    if server["is_draining"]:
        return "draining: nothing is placed there, and what is there goes"
    return "cordoned: nothing is placed there" if server["is_cordoned"] else ""


def _estimates(servers: list[dict[str, Any]]) -> list[RenderableType]:
    """How well loads were foretold lately; nothing before the first load."""
    table = Table("server", "loads from", "bandwidth", "loads seen", "error p90", "of the time")
    for server in servers:
        for tier, quality in sorted(server["estimates"].items()):
            bandwidth = server["bandwidth_bytes_per_s"].get(tier)
            table.add_row(
                server["server_id"], tier, "-" if bandwidth is None else f"{size(bandwidth)}/s",
                str(quality["observations"]), f"{quality['error_s_p90']:.2f} s", f"{quality['error_share_p90']:.0%}",
            )  # fmt: skip
    return [table] if table.row_count else []


def loads_table(answers: list[dict[str, Any]]) -> RenderableType:
    """The queues of servers, running tasks first."""
    table = Table("server", "model", "for", "stage", "done", "running", "left")
    for answer in answers:
        for load in answer["loads"]:
            remaining_s = load["remaining_s"]
            table.add_row(
                answer["server"], load["model_id"], "request" if load["instance_id"] else "prefetch",
                f"{load['stage']} from {load['source_tier']}",
                f"{size(load['done_bytes'])} of {size(load['total_bytes'])}", f"{load['running_s']:.1f} s",
                "-" if remaining_s is None else f"{remaining_s:.1f} s",
            )  # fmt: skip
    servers = ", ".join(answer["server"] for answer in answers)
    return table if table.row_count else f"nothing is loading on {servers}"


def doctor_table(answers: list[dict[str, Any]]) -> RenderableType:
    """The storage of servers as measured, then what makes loads slower than they could be."""
    table = Table("server", "direct", "buffered", "uses", "pool", "pages", "locked")
    lines = []
    for answer in answers:
        table.add_row(
            answer["server"], f"{size(answer['ssd_direct_bytes_per_s'])}/s",
            f"{size(answer['ssd_buffered_bytes_per_s'])}/s", "direct" if answer["is_direct"] else "buffered",
            size(answer["pool_size_bytes"]), "huge" if answer["has_huge_pages"] else "small",
            "yes" if answer["is_locked"] else "no",
        )  # fmt: skip
        lines.append(f"{answer['server']}: its SSD directory is {answer['ssd_directory']}")
        lines += [f"{answer['server']}: {warning}" for warning in answer["warnings"]]
    return Group(table, *(Text(line) for line in lines))


def answer_line(answer: Answer) -> str:
    first = f"first token {answer.first_token_s:.3f} s" if answer.first_token_s is not None else "no token"
    stages = ", ".join(f"{name} {ms:.0f} ms" for name, ms in answer.stages_ms.items())
    return f"[{first}; from {answer.tier or '?'} on {answer.server or '?'}; {stages}]"


def event_line(received: Received, as_json: bool) -> str:
    envelope, data = received.envelope, msgspec.to_builtins(received.event)
    if as_json:
        plain = msgspec.json.decode(msgspec.json.encode(envelope))
        return msgspec.json.encode({**plain, "sequence": received.sequence}).decode()
    details = " ".join(f"{name}={value}" for name, value in data.items())
    return f"{envelope.time:%H:%M:%S.%f} {envelope.type:<22} {details}"


def migration_sentence(migration: dict[str, Any]) -> str:
    """What became of a migration, or how far it is."""
    model, server = migration["model"], migration["destination_server_id"]
    match migration["state"]:
        case "finished":
            rounds = "1 round" if migration["rounds"] == 1 else f"{migration['rounds']} rounds"
            told = f"{model} has moved to {server} in {rounds}, {migration['sent_tokens']} tokens"
        case "abandoned":
            told = f"{model} stays where it is: {migration['end']}"
        case "requeued":
            told = f"{model} was stopped, and {server} was lost: its requests start again from their tokens"
        case state:
            told = f"{model} is on its way to {server}: {state}"
    return told


def migrations_table(migrations: list[dict[str, Any]]) -> Table:
    table = Table("model", "from", "to", "state", "why", "rounds", "tokens", "since")
    for one in migrations:
        slots = ",".join(map(str, one["destination_slots"]))
        why = f"for {one['for_model_id']}" if one["for_model_id"] else one["reason"]
        table.add_row(
            one["model"], f"{one['source_server_id']}/{one['source_slot']}",
            f"{one['destination_server_id']}/{slots}", f"{one['state']} {one['end']}".strip(), why, str(one["rounds"]),
            str(one["sent_tokens"]), f"{one['age_s']:.1f} s",
        )  # fmt: skip
    return table
