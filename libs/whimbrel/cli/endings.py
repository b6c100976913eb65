"""Owns how a command of the command line ends: its answer on standard output, or one sentence and an exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

import httpx
import typer
from rich.console import Console

from whimbrel.client import ApiError

T = TypeVar("T")

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

Url = Annotated[str, typer.Option("--url", envvar="WHIMBREL_URL", help="The router's address.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

error_console = Console(stderr=True)
console = Console()


def fail(message: str, code: int) -> typer.Exit:
    error_console.print("[red]error:[/red]", end=" ")
    error_console.print(message, highlight=False, soft_wrap=True, markup=False)
    return typer.Exit(code)


def run(work: Coroutine[Any, Any, T], url: str, on_interrupt: Callable[[], None] | None = None) -> T:
    """Run a client's work; every failure becomes one sentence and an exit code."""
    try:
        return asyncio.run(work)
    except ApiError as error:
        raise fail(str(error), EXIT_REFUSED) from None
    except httpx.TransportError as error:
        reason = f"no cluster answers at {url} ({error or type(error).__name__}); start one with: whimbrel up"
        raise fail(reason, EXIT_UNREACHABLE) from None
    except KeyboardInterrupt:
        if on_interrupt is not None:
            on_interrupt()
        raise typer.Exit(EXIT_INTERRUPTED) from None
