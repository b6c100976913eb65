"""The command `ckptio bench`: its options, its report on standard output, its progress on standard error."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptio.bench.loaders import LOADERS
from ckptio.bench.page_cache import TEMPERATURES
from ckptio.bench.specs import CHECKPOINTS, checkpoint_spec
from ckptio.devices import device_number
from ckptio.errors import CkptioError
from ckptio.native import require_native

if TYPE_CHECKING:
    from ckptio.bench.runner import Outcome, Settings

# All else that measuring needs is imported where it begins: the command `ckptio` adds these options to its
# own whatever it is asked for.

DEFAULT_CHECKPOINTS = ("qwen1.5b", "lora", "many")
QUICK_CHECKPOINTS = ("qwen1.5b",)
ROUNDS_MAX = 1000

# Of the full checkpoints, in GB, for the help: working them out takes longer than all other help.
SIZES_GB = {"qwen1.5b": 3.1, "opt1.3b": 2.6, "lora": 0.15, "many": 0.6}

_DEVICE = re.compile(r"host|cpu|cuda(:\d{1,4})?")
_ROUNDS = 5
_QUICK_ROUNDS = 1


def add_parser(subparsers: Any) -> None:
    """Adds the command `bench`."""
    command = subparsers.add_parser(
        "bench",
        help="measure loading on this machine, beside every other loader that is installed",
        description=_description(),
    )
    _add_options(command)
    command.set_defaults(run=run)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command alone; 0 when it measured, 1 when bytes were wrong or the system refused."""
    try:
        parser = argparse.ArgumentParser(prog="python -m ckptio.bench", description=_description())
        _add_options(parser)
        return run(parser.parse_args(arguments))
    except (CkptioError, OSError) as error:
        print(f"ckptio: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ckptio: interrupted", file=sys.stderr)
        return 130


def run(options: argparse.Namespace) -> int:
    """Measures and prints; raises what the benchmark raises, and KeyboardInterrupt also when terminated."""
    from ckptio.bench.checkpoints import exclusive
    from ckptio.bench.plot import check_plotting, draw_plot
    from ckptio.bench.runner import bytes_to_write, run_benchmark
    from ckptio.bench.table import results_text

    require_native()
    device_number(options.device)
    if options.plot is not None:
        check_plotting(options.plot)
    settings = _settings(options)
    written = bytes_to_write(settings)
    _say(
        f"seed {settings.seed}, {settings.rounds} rounds; writes up to {sum(written)} bytes "
        f"({sum(written) / 1e9:.1f} GB) below {settings.directory}"
    )
    with _termination_as_interrupt():
        with exclusive(settings.directory):
            outcome = run_benchmark(settings, _say)
            report = _report(settings, outcome)
        print(json.dumps(report) if options.json else results_text(report), flush=True)
        if options.plot is not None:
            draw_plot(report, options.plot)
    return 0


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does: processes are ended and checkpoints removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it gets signals
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _description() -> str:
    sizes = ", ".join(f"{name} {size:g}" for name, size in SIZES_GB.items())
    return (
        "Makes checkpoints with random weights and times every installed loader, in fresh processes and "
        "random order, beside a plain read of the same file. Each checkpoint is written once for each format "
        f"that the loaders read, up to four times (GB of one: {sizes}), and removed afterwards unless --keep "
        "is given."
    )


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--checkpoints",
        type=_names(CHECKPOINTS, checkpoint_spec),
        help=f"which, comma between: {', '.join(CHECKPOINTS)} (default: {','.join(DEFAULT_CHECKPOINTS)}; "
        f"quick {','.join(QUICK_CHECKPOINTS)})",
    )
    command.add_argument(
        "--loaders",
        type=_names(tuple(LOADERS), LOADERS.__getitem__),
        default=tuple(LOADERS),
        help=f"which, comma between: {', '.join(LOADERS)} (default: all that are installed)",
    )
    command.add_argument(
        "--rounds",
        type=_rounds,
        help=f"how often each is measured (default: {_ROUNDS}, quick {_QUICK_ROUNDS})",
    )
    command.add_argument("--seed", type=int, default=1, help="decides the order of the measurements")
    command.add_argument(
        "--dir", type=Path, default=None, help="where to make the checkpoints (default: the user's cache)"
    )
    command.add_argument("--keep", action="store_true", help="keep the checkpoints for the next run")
    command.add_argument("--quick", action="store_true", help="smaller checkpoints, fewer rounds")
    temperature = command.add_mutually_exclusive_group()
    temperature.add_argument("--cold", action="store_true", help="only with the page cache dropped")
    temperature.add_argument("--warm", action="store_true", help="only with the file in the page cache")
    command.add_argument(
        "--no-prime",
        action="store_true",
        help="do not hold memory until the load starts: shows what fresh memory costs in a virtual machine",
    )
    command.add_argument(
        "--ablation", action="store_true", help="also with the factors of the loader added one by one"
    )
    command.add_argument(
        "--device", type=_device, default="host", help="where the ablation loads to: host or cuda:N"
    )
    command.add_argument("--json", action="store_true", help="one JSON object on standard output")
    command.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the seconds of every loader")


def _names(known: Sequence[str], check: Callable[[str], object]) -> Callable[[str], tuple[str, ...]]:
    """Parser of a comma-separated list."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        for name in names:
            try:
                check(name)
            except (KeyError, ValueError):
                raise argparse.ArgumentTypeError(
                    f"there is no {name!r}; there are: {', '.join(known)}"
                ) from None
        if not names:
            raise argparse.ArgumentTypeError("name at least one")
        return names

    return parse


def _device(text: str) -> str:
    if _DEVICE.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no device; give host or cuda:N")
    return text


def _rounds(text: str) -> int:
    rounds = int(text)
    if not 1 <= rounds <= ROUNDS_MAX:
        raise argparse.ArgumentTypeError(f"{rounds} rounds, 1 to {ROUNDS_MAX} are possible")
    return rounds


def _settings(options: argparse.Namespace) -> Settings:
    from ckptio.bench.runner import Settings

    checkpoints = options.checkpoints or (QUICK_CHECKPOINTS if options.quick else DEFAULT_CHECKPOINTS)
    chosen = [name for name in TEMPERATURES if getattr(options, name)]
    return Settings(
        specs=tuple(checkpoint_spec(name, is_quick=options.quick) for name in checkpoints),
        loaders=options.loaders,
        temperatures=tuple(chosen) or TEMPERATURES,
        rounds=options.rounds or (_QUICK_ROUNDS if options.quick else _ROUNDS),
        seed=options.seed,
        directory=options.dir or _cache_directory(),
        is_kept=options.keep,
        is_primed=not options.no_prime,
        has_ablation=options.ablation,
        device=options.device,
    )


def _cache_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "ckptio" / "bench"


def _report(settings: Settings, outcome: Outcome) -> dict[str, Any]:
    from ckptio.bench.machine import commit, machine_facts
    from ckptio.bench.results import result_rows

    device = settings.device if settings.has_ablation and settings.device != "host" else "cpu"
    machine = machine_facts(settings.directory, device) | {"pool_pages": outcome.pool_pages}
    return {
        "part": "ckptio",
        "commit": commit(),
        "machine": machine,
        "run": {
            "seed": settings.seed,
            "rounds": settings.rounds,
            "primed": settings.is_primed,
            "left_out": outcome.left_out,
        },
        "results": result_rows(outcome.measured),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
