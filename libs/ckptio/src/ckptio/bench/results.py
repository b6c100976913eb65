"""What was measured, and the rows of results made of it: medians with their spread, names, ratios; pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptio.bench.ablation import FACTORS, AblationRun
from ckptio.bench.attach import AttachRun
from ckptio.bench.ceiling import REQUEST_BYTES, RawRead
from ckptio.bench.loaders import LOADERS
from ckptio.bench.timing import LoadRun

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """One timed load."""

    temperature: str
    loader: str
    round: int
    run: LoadRun


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSample:
    """The plain read right before the cold load of `loader` in the same round."""

    loader: str
    round: int
    run: RawRead


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationSample:
    """One load onto a device with some factors on."""

    step: str
    round: int
    run: AblationRun


@dataclass(slots=True, kw_only=True)
class Measured:
    """All samples of one checkpoint, in the order they were taken."""

    checkpoint: str
    is_quick: bool
    loads: list[LoadSample] = field(default_factory=list)
    raws: list[RawSample] = field(default_factory=list)
    copies: list[RawRead] = field(default_factory=list)
    attaches: list[AttachRun] = field(default_factory=list)
    ablations: list[AblationSample] = field(default_factory=list)
    ablation_device: str = "host"


def result_rows(measured: Sequence[Measured]) -> list[Row]:
    """The rows of all checkpoints. The first has the plain names, others have theirs appended."""
    rows = []
    for number, one in enumerate(measured):
        suffix = "" if number == 0 else f".{one.checkpoint}"
        rows += _ceiling_rows(one, suffix)
        rows += _headline_rows(one, suffix)
        rows += _ratio_rows(one, suffix)
        rows += _load_rows(one, suffix)
        rows += _attach_rows(one)
        rows += _ablation_rows(one, suffix)
    return rows


def result_row(one: Measured, name: str, unit: str, values: Iterable[float], **params: Any) -> list[Row]:
    """One row as a list, or none when nothing was measured."""
    values = list(values)
    if not values:
        return []
    return [
        {
            "name": name,
            "unit": unit,
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "n": len(values),
            "params": {"checkpoint": one.checkpoint, "quick": one.is_quick, **params},
        }
    ]


def paired_ratios(
    one: Measured, temperature: str, loader: str, over: str, seconds: Callable[[LoadRun], float]
) -> list[float]:
    """Seconds of `loader` over those of `over`, of each round that has both."""
    first = _by_round(one, temperature, loader)
    second = _by_round(one, temperature, over)
    return [
        seconds(first[number]) / seconds(second[number]) for number in sorted(first.keys() & second.keys())
    ]


def ratio_of_bests(one: Measured, temperature: str, loader: str, over: str) -> float | None:
    """The shortest load of `loader` over that of `over`: others' work can only make a load longer.

    A few per cent are lost in the spread of a shared disk; the bests show them where medians do not.
    """
    first = _by_round(one, temperature, loader).values()
    second = _by_round(one, temperature, over).values()
    if not first or not second:
        return None
    return min(run.seconds for run in first) / min(run.seconds for run in second)


def shares_of_ceiling(one: Measured, loader: str) -> list[float]:
    """Bandwidth of each cold load over that of the plain read right before it."""
    loads = _by_round(one, "cold", loader)
    raws = {sample.round: sample.run for sample in one.raws if sample.loader == loader}
    return [
        raws[number].seconds / loads[number].seconds * loads[number].size_bytes / raws[number].size_bytes
        for number in sorted(loads.keys() & raws.keys())
    ]


def _by_round(one: Measured, temperature: str, loader: str) -> dict[int, LoadRun]:
    return {
        sample.round: sample.run
        for sample in one.loads
        if sample.temperature == temperature and sample.loader == loader
    }


def _seconds(run: LoadRun) -> float:
    return run.seconds


def _ceiling_rows(one: Measured, suffix: str) -> list[Row]:
    reads = [sample.run for sample in one.raws]
    rows = result_row(
        one,
        f"ckptio.ceiling.read_bytes_per_s{suffix}",
        "B/s",
        [read.size_bytes / read.seconds for read in reads],
        threads=reads[0].threads if reads else 0,
        request_bytes=REQUEST_BYTES,
        direct=all(read.is_direct for read in reads),
    )
    rows += result_row(
        one,
        f"ckptio.ceiling.copy_bytes_per_s{suffix}",
        "B/s",
        [copy.size_bytes / copy.seconds for copy in one.copies],
        threads=one.copies[0].threads if one.copies else 0,
    )
    return rows


def _headline_rows(one: Measured, suffix: str) -> list[Row]:
    ours = [sample.run for sample in one.loads if sample.loader == "ckptio"]
    cold = list(_by_round(one, "cold", "ckptio").values())
    unverified = list(_by_round(one, "cold", "ckptio.unverified").values())
    rows = result_row(
        one, f"ckptio.cold.share_of_ceiling{suffix}", "1", shares_of_ceiling(one, "ckptio"), verified=True
    )
    overheads = paired_ratios(one, "cold", "ckptio", "ckptio.unverified", _seconds)
    best = ratio_of_bests(one, "cold", "ckptio", "ckptio.unverified")
    rows += result_row(
        one,
        f"ckptio.verify.overhead_share{suffix}",
        "1",
        [ratio - 1 for ratio in overheads],
        temperature="cold",
        of_bests=None if best is None else best - 1,
    )
    shares = paired_ratios(one, "cold", "ckptio", "ckptio.stock", _seconds)
    rows += result_row(
        one,
        f"ckptio.stock.share_of_converted{suffix}",
        "1",
        shares,
        temperature="cold",
        of_bests=ratio_of_bests(one, "cold", "ckptio", "ckptio.stock"),
    )
    peaks = [run.peak_bytes for run in ours if run.peak_bytes is not None]
    rows += result_row(one, f"ckptio.rss_beyond_pool_bytes{suffix}", "B", peaks)
    rows += result_row(one, f"ckptio.cpu_s.cold{suffix}", "s", [run.cpu_s for run in cold], verified=True)
    rows += result_row(
        one, f"ckptio.cpu_s.cold.unverified{suffix}", "s", [run.cpu_s for run in unverified], verified=False
    )
    return rows


def _ratio_rows(one: Measured, suffix: str) -> list[Row]:
    rows = []
    for temperature in ("cold", "warm"):
        for loader in LOADERS.values():
            if loader.is_ours:
                continue
            rows += result_row(
                one,
                f"ckptio.{temperature}.ratio.{loader.name}{suffix}",
                "1",
                paired_ratios(one, temperature, loader.name, "ckptio", _seconds),
                settings=loader.settings,
            )
    return rows


def _load_rows(one: Measured, suffix: str) -> list[Row]:
    rows = []
    for temperature in ("cold", "warm"):
        for loader in LOADERS.values():
            runs = list(_by_round(one, temperature, loader.name).values())
            if not runs:
                continue
            seconds = [run.seconds for run in runs]
            shares = shares_of_ceiling(one, loader.name) if temperature == "cold" else []
            rows += result_row(
                one,
                f"ckptio.{temperature}.load_s.{loader.name}{suffix}",
                "s",
                seconds,
                loader=loader.name,
                temperature=temperature,
                settings=loader.settings,
                size_bytes=runs[0].size_bytes,
                tensors=runs[0].tensor_count,
                bytes_per_s=runs[0].size_bytes / statistics.median(seconds),
                returned_s=_median(runs, lambda run: run.returned_s),
                cpu_s=_median(runs, lambda run: run.cpu_s),
                anonymous_bytes=_median(runs, lambda run: run.anonymous_bytes),
                minor_faults=_median(runs, lambda run: run.minor_faults),
                peak_bytes=_median(
                    [run for run in runs if run.peak_bytes is not None], lambda run: run.peak_bytes or 0
                ),
                resident_bytes=max(run.resident_bytes for run in runs),
                share_of_ceiling=statistics.median(shares) if shares else None,
            )
    return rows


def _median(runs: Sequence[LoadRun], value: Callable[[LoadRun], float]) -> float | None:
    return statistics.median([value(run) for run in runs]) if runs else None


def _attach_rows(one: Measured) -> list[Row]:
    if not one.attaches:
        return []
    params = {"size_bytes": one.attaches[0].size_bytes, "tensors": one.attaches[0].tensor_count}
    rows = result_row(
        one,
        f"ckptio.dram.map_s.{one.checkpoint}",
        "s",
        [statistics.median(run.seconds) for run in one.attaches],
        first_s=statistics.median(run.seconds[0] for run in one.attaches),
        attaches=len(one.attaches[0].seconds),
        **params,
    )
    rows += result_row(
        one,
        f"ckptio.dram.first_map_s.{one.checkpoint}",
        "s",
        [run.seconds[0] for run in one.attaches],
        **params,
    )
    rows += result_row(
        one,
        f"ckptio.dram.map_private_bytes.{one.checkpoint}",
        "B",
        [run.anonymous_bytes for run in one.attaches],
        attaches=len(one.attaches[0].seconds),
        **params,
    )
    return rows


def _ablation_rows(one: Measured, suffix: str) -> list[Row]:
    rows: list[Row] = []
    by_step: dict[str, dict[int, AblationRun]] = {}
    for sample in one.ablations:
        by_step.setdefault(sample.step, {})[sample.round] = sample.run
    for step, runs in by_step.items():
        seconds = [run.seconds for run in runs.values()]
        rows += result_row(
            one, f"ckptio.ablation.load_s.{step}{suffix}", "s", seconds, device=one.ablation_device
        )
    steps = ["none", *(f"to_{factor}" for factor in FACTORS)]
    pairs = [
        (f"gain.{factor}", before, after)
        for factor, before, after in zip(FACTORS, steps, steps[1:], strict=False)
    ]
    pairs += [(f"loss_without.{factor}", f"without_{factor}", steps[-1]) for factor in FACTORS]
    for name, slow, fast in pairs:
        slows, fasts = by_step.get(slow, {}), by_step.get(fast, {})
        ratios = [slows[n].seconds / fasts[n].seconds for n in sorted(slows.keys() & fasts.keys())]
        rows += result_row(one, f"ckptio.ablation.{name}{suffix}", "1", ratios, device=one.ablation_device)
    return rows
