"""Owns the command that scales a model, and the options about it that deploying has too."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from whimbrel.cli.endings import EXIT_USAGE, Json, Url, console, fail, run
from whimbrel.client import AdminClient
from whimbrel.client.admin import DEFAULT_URL

KeepAlive = Annotated[
    float | None,
    typer.Option("--keep-alive-s", "--keep-alive", min=0, help="Keep an idle instance this long, seconds."),
]
MinInstances = Annotated[
    int | None,
    typer.Option("--min-instances", "--min", min=0, help="Always have so many instances; 0 scales to zero."),
]
MaxInstances = Annotated[
    int | None, typer.Option("--max-instances", "--max", min=1, help="Never start more instances.")
]
TargetConcurrency = Annotated[
    int | None,
    typer.Option("--target-concurrency", "--target", min=1, help="Start another above so many requests each."),
]


def scale(
    model: Annotated[str, typer.Argument(help="A deployed model.")],
    min_instances: MinInstances = None,
    max_instances: MaxInstances = None,
    target_concurrency: TargetConcurrency = None,
    keep_alive_s: KeepAlive = None,
    url: Url = DEFAULT_URL,
    as_json: Json = False,
) -> None:
    """Change how many instances a model may have, and how long idle ones stay. What isn't given stays as it is."""
    scaling = scaling_of(min_instances, max_instances, target_concurrency)
    if scaling is None and keep_alive_s is None:
        raise fail("nothing to change; give some of --min, --max, --target, --keep-alive", EXIT_USAGE)

    async def work() -> dict[str, Any]:
        async with AdminClient(url) as client:
            return await client.scale(model, scaling, keep_alive_s)

    answer = run(work(), url)
    print(json.dumps(answer)) if as_json else console.print(_sentence(answer), highlight=False, soft_wrap=True)


def scaling_of(
    min_instances: int | None, max_instances: int | None, target_concurrency: int | None
) -> dict[str, int] | None:
    """What was given of it, as the admin API takes it; None when nothing was."""
    fields = {
        "min_instances": min_instances,
        "max_instances": max_instances,
        "target_concurrency": target_concurrency,
    }
    return {name: value for name, value in fields.items() if value is not None} or None


def _sentence(answer: dict[str, Any]) -> str:
    scaling = answer["scaling"]
    return (
        f"{answer['model']} has {scaling['min_instances']} to {scaling['max_instances']} instances, another one above "
        f"{scaling['target_concurrency']} requests each; idle ones stay {answer['keep_alive_s']:g} s; "
        f"its demand asks for {answer['desired_instances']} now"
    )
