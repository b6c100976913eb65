"""The results as text: per checkpoint and temperature one line per loader, then the figures with a target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]


def results_text(report: dict[str, Any]) -> str:
    """A table for a terminal of the report that `--json` prints."""
    machine = report["machine"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} processors, {machine['memory_bytes'] / 2**30:.1f} GiB,"
        f" {machine['file_system']}, {machine['pool_pages']} pages in the pool, at {report['commit']}"
    ]
    rows = report["results"]
    loads = [row for row in rows if ".load_s." in row["name"] and "loader" in row["params"]]
    groups = dict.fromkeys((row["params"]["checkpoint"], row["params"]["temperature"]) for row in loads)
    for checkpoint, temperature in groups:
        some = [
            row
            for row in loads
            if (row["params"]["checkpoint"], row["params"]["temperature"]) == (checkpoint, temperature)
        ]
        lines += ["", *_load_lines(checkpoint, temperature, some, rows)]
    figures = [row for row in rows if row not in loads]
    lines += ["", *_aligned([_FIGURE_HEADER, *(_figure(row) for row in figures)])]
    for loader, reason in report["run"]["left_out"].items():
        lines.append(f"left out: {loader}: {reason}")
    return "\n".join(lines)


_LOAD_HEADER = ("loader", "seconds", "min - max", "returned", "GB/s", "of ceiling", "ckptio is", "cpu s", "n")
_FIGURE_HEADER = ("figure", "unit", "median", "min", "max", "n")


def _load_lines(checkpoint: str, temperature: str, loads: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    size_bytes = loads[0]["params"]["size_bytes"]
    quick = " (quick)" if loads[0]["params"]["quick"] else ""
    title = f"{checkpoint}{quick}, {temperature}, {size_bytes / 1e9:.2f} GB"
    cells = [_LOAD_HEADER]
    for row in sorted(loads, key=lambda row: row["median"]):
        params = row["params"]
        ratio = _ratio(rows, checkpoint, temperature, params["loader"])
        share = params["share_of_ceiling"]
        cells.append(
            (
                params["loader"],
                f"{row['median']:.3f}",
                f"{row['min']:.3f} - {row['max']:.3f}",
                f"{params['returned_s']:.3f}",
                f"{params['bytes_per_s'] / 1e9:.2f}",
                "" if share is None else f"{share:.0%}",
                "" if ratio is None else f"{ratio:.2f} x",
                f"{params['cpu_s']:.2f}",
                str(row["n"]),
            )
        )
    return [title, *_aligned(cells)]


def _ratio(rows: Sequence[Row], checkpoint: str, temperature: str, loader: str) -> float | None:
    start = f"ckptio.{temperature}.ratio.{loader}"
    for row in rows:
        if row["name"] in (start, f"{start}.{checkpoint}") and row["params"]["checkpoint"] == checkpoint:
            return float(row["median"])
    return None


def _figure(row: Row) -> tuple[str, ...]:
    numbers = (f"{row[key]:.4g}" for key in ("median", "min", "max"))
    return (row["name"], row["unit"], *numbers, str(row["n"]))


def _aligned(cells: Iterable[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell: the first to the left, numbers to the right."""
    table = [list(line) for line in cells]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
