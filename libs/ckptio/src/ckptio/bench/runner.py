"""Runs the benchmark: makes the checkpoints, takes every sample in its order, checks the bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckptio.bench.ablation import AblationRun, AblationStep, ablation_steps
from ckptio.bench.attach import AttachRun
from ckptio.bench.ceiling import RawRead
from ckptio.bench.checkpoints import MadeCheckpoint, make_checkpoint, remove_formats
from ckptio.bench.loaders import LOADERS, LoaderEntry
from ckptio.bench.machine import available_memory_bytes
from ckptio.bench.processes import MeasurementFailed, answering, measure
from ckptio.bench.results import AblationSample, LoadSample, Measured, RawSample
from ckptio.bench.schedule import Step, plan_steps
from ckptio.bench.specs import CheckpointSpec
from ckptio.bench.timing import LoadRequest, LoadRun
from ckptio.errors import CkptioError
from ckptio.layout import read_layout

# The plain read is tried with each; the one that measured best is the ceiling from then on.
CEILING_THREADS = (1, 2, 4)
CEILING_TRIES = 2
COPY_THREADS = 2

# Fresh processes that attach to one pool, at most: each gives several figures.
ATTACHING_PROCESSES_MAX = 3


class WrongBytes(CkptioError):
    """A loader gave other bytes than the checkpoint holds: its figures mean nothing."""

    def __init__(self, loader: str, checkpoint: str) -> None:
        self.loader = loader
        self.checkpoint = checkpoint
        super().__init__(f"{loader}: the tensors of {checkpoint} are not those of the checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure. `device` is where the ablation loads to."""

    specs: tuple[CheckpointSpec, ...]
    loaders: tuple[str, ...]
    temperatures: tuple[str, ...]
    rounds: int
    seed: int
    directory: Path
    is_kept: bool = False
    is_primed: bool = True
    has_ablation: bool = False
    device: str = "host"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """All samples, and why a loader has none, by loader and checkpoint."""

    measured: list[Measured] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    pool_pages: str = "unknown"


def bytes_to_write(settings: Settings) -> tuple[int, ...]:
    """Bytes of tensors that are written for each checkpoint, when none is there from before."""
    written = []
    for spec in settings.specs:
        entries = _choose_entries(settings.loaders, spec, {})
        formats = {"safetensors", "ckptio", *(entry.format for entry in entries)}
        written.append(len(formats) * spec.size_bytes)
    return tuple(written)


def run_benchmark(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Measures everything in `settings`; raises `WrongBytes`, or what our own loader raised.

    A peer that fails is left out with its reason.
    """
    outcome = Outcome()
    threads = 0
    for spec in settings.specs:
        entries = _choose_entries(settings.loaders, spec, outcome.left_out)
        formats = ["ckptio", *(entry.format for entry in entries)]
        with _removed_afterwards(settings, spec, formats):
            made = make_checkpoint(spec, settings.directory, formats, say)
            usable = _without_refused(entries, made, outcome.left_out)
            if "cold" in settings.temperatures and not threads:
                threads = _best_threads(made, say)
            measured = Measured(checkpoint=spec.name, is_quick=spec.is_quick, ablation_device=settings.device)
            outcome.measured.append(measured)
            _take_samples(settings, made, usable, threads, measured, outcome, say)
    return outcome


@contextmanager
def _removed_afterwards(settings: Settings, spec: CheckpointSpec, formats: Sequence[str]) -> Iterator[None]:
    """What is not there yet goes again at the end, whatever ends it, unless all is kept."""
    path = settings.directory / spec.directory_name
    kinds = dict.fromkeys(("safetensors", *formats))
    new = tuple(kind for kind in kinds if not (path / kind).exists())
    try:
        yield
    finally:
        if not settings.is_kept:
            remove_formats(path, new)


def _choose_entries(
    names: Sequence[str], spec: CheckpointSpec, left_out: dict[str, str]
) -> list[LoaderEntry]:
    entries = []
    for entry in (LOADERS[name] for name in names):
        if not entry.is_installed:
            left_out[entry.name] = f"{entry.module} is not installed"
        elif entry.needs_model and not spec.is_model:
            left_out[f"{entry.name} {spec.name}"] = "not a whole model"
        else:
            entries.append(entry)
    return entries


def _without_refused(
    entries: Sequence[LoaderEntry], made: MadeCheckpoint, left_out: dict[str, str]
) -> list[LoaderEntry]:
    for entry in entries:
        if entry.format in made.refused:
            left_out[f"{entry.name} {made.spec.name}"] = made.refused[entry.format]
    return [entry for entry in entries if entry.format not in made.refused]


def _best_threads(made: MadeCheckpoint, say: Callable[[str], None]) -> int:
    best: dict[int, float] = {}
    for threads in CEILING_THREADS * CEILING_TRIES:
        read = _read_raw(made, "ckptio", threads)
        best[threads] = max(best.get(threads, 0.0), read.size_bytes / read.seconds)
    for threads, bytes_per_s in best.items():
        say(f"plain read, {threads} threads: {bytes_per_s / 1e9:.2f} GB/s at best")
    return max(best, key=lambda threads: best[threads])


def _read_raw(made: MadeCheckpoint, kind: str, threads: int) -> RawRead:
    files = [str(file) for file in read_layout(made.place(kind)).files]
    return RawRead(**measure("read_raw", {"files": files, "threads": threads}))


def _take_samples(
    settings: Settings,
    made: MadeCheckpoint,
    entries: Sequence[LoaderEntry],
    threads: int,
    measured: Measured,
    outcome: Outcome,
    say: Callable[[str], None],
) -> None:
    names = [entry.name for entry in entries]
    prime_bytes = _prime_bytes(made.spec.size_bytes) if settings.is_primed else 0
    failed: set[str] = set()
    for step in plan_steps(names, settings.temperatures, rounds=settings.rounds, seed=settings.seed):
        entry = LOADERS[step.loader]
        if step.loader in failed:
            continue
        if step.is_raw:
            raw = _read_raw(made, entry.format, threads)
            measured.raws.append(RawSample(loader=step.loader, round=step.round, run=raw))
            continue
        try:
            run = _time_load(entry, step, made, prime_bytes)
        except MeasurementFailed as error:
            if entry.is_ours:
                raise
            failed.add(step.loader)
            outcome.left_out[f"{entry.name} {made.spec.name}"] = error.reason
            say(f"{made.spec.name} {entry.name}: left out, {error.reason}")
            continue
        measured.loads.append(
            LoadSample(temperature=step.temperature, loader=step.loader, round=step.round, run=run)
        )
        outcome.pool_pages = run.pool_pages or outcome.pool_pages
        say(_progress(made, step, run, settings.rounds))
    for _ in range(settings.rounds):
        request = {"size_bytes": made.spec.size_bytes, "threads": COPY_THREADS}
        measured.copies.append(RawRead(**measure("copy_memory", request)))
    _measure_attaches(made, measured, settings.rounds, say)
    if settings.has_ablation:
        _measure_ablation(settings, made, measured, say)


def _prime_bytes(size_bytes: int) -> int:
    """Twice the checkpoint, for a loader that clones; less where the machine has not that much to spare."""
    spare_bytes = available_memory_bytes() - 2 * size_bytes
    return max(0, min(2 * size_bytes, spare_bytes // 2))


def _time_load(entry: LoaderEntry, step: Step, made: MadeCheckpoint, prime_bytes: int) -> LoadRun:
    request = LoadRequest(
        loader=entry.name,
        temperature=step.temperature,
        place=str(made.place(entry.format)),
        prime_bytes=prime_bytes,
        is_checked=step.round == 0,
    )
    run = LoadRun(**measure("load", asdict(request), entry.environment.get(step.temperature)))
    if request.is_checked and run.digest != made.digest:
        raise WrongBytes(entry.name, made.spec.name)
    return run


def _progress(made: MadeCheckpoint, step: Step, run: LoadRun, rounds: int) -> str:
    speed = run.size_bytes / run.seconds / 1e9
    place = f"{made.spec.name} round {step.round + 1}/{rounds} {step.temperature} {step.loader}"
    still = (
        f", {run.resident_bytes} bytes were cached"
        if step.temperature == "cold" and run.resident_bytes
        else ""
    )
    return f"{place}: {run.seconds:.3f} s, {speed:.2f} GB/s{still}"


def _measure_attaches(
    made: MadeCheckpoint, measured: Measured, rounds: int, say: Callable[[str], None]
) -> None:
    with answering("hold", {"checkpoint": str(made.place("ckptio"))}) as place:
        for _ in range(min(rounds, ATTACHING_PROCESSES_MAX)):
            run = AttachRun(**measure("attach", place))
            if run.digest != made.digest:
                raise WrongBytes("ckptio.dram", made.spec.name)
            measured.attaches.append(run)
    seconds = statistics.median(run.seconds[0] for run in measured.attaches)
    say(f"{made.spec.name} from the pool of another process: {seconds * 1e3:.1f} ms the first time")


def _measure_ablation(
    settings: Settings, made: MadeCheckpoint, measured: Measured, say: Callable[[str], None]
) -> None:
    steps: Sequence[AblationStep] = ablation_steps()
    for number in range(settings.rounds):
        for step in steps:
            request = {
                "place": str(made.place("ckptio")),
                "factors": list(step.factors),
                "device": settings.device,
            }
            run = AblationRun(**measure("ablation", request))
            measured.ablations.append(AblationSample(step=step.name, round=number, run=run))
            say(f"{made.spec.name} ablation {step.name}: {run.seconds:.3f} s")
