"""The results as a picture: seconds per loader, cold and warm, with their spread and the ceiling."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckptio.errors import CkptioError

_COLOURS = {"cold": "#1f4e79", "warm": "#e08a1e"}
_BAR_HEIGHT = 0.38


class PlotMissing(CkptioError):
    """The package that draws is not installed."""

    def __init__(self) -> None:
        super().__init__("--plot needs matplotlib; install it with `pip install matplotlib`")


class BadPlotPath(CkptioError):
    """No picture can be written to `path`."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"--plot {path}: {reason}")


def check_plotting(path: Path) -> None:
    """Raises `PlotMissing` or `BadPlotPath` early, before anything was measured."""
    require_plotting()
    from matplotlib.backend_bases import FigureCanvasBase

    endings = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in endings:
        raise BadPlotPath(path, f"its ending names no kind of picture; there are: {', '.join(endings)}")
    if path.is_dir():
        raise BadPlotPath(path, "is a directory; give the file to write")
    target = path if path.exists() else path.parent
    if not target.exists():
        raise BadPlotPath(path, f"there is no directory {path.parent}; make it first")
    if not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise BadPlotPath(path, f"{target} cannot be written to")


def require_plotting() -> None:
    """Raises `PlotMissing` when the package that draws is not there."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotMissing from error


def draw_plot(report: dict[str, Any], path: Path) -> None:
    """Draws one panel per checkpoint into `path`; its ending says which kind of file."""
    require_plotting()
    from matplotlib.figure import Figure

    rows = [row for row in report["results"] if ".load_s." in row["name"] and "loader" in row["params"]]
    checkpoints = list(dict.fromkeys(row["params"]["checkpoint"] for row in rows))
    panels = max(len(checkpoints), 1)
    figure = Figure(figsize=(9, 4.2 * panels), layout="constrained")
    for number, checkpoint in enumerate(checkpoints):
        axes = figure.add_subplot(panels, 1, number + 1)
        some = [row for row in rows if row["params"]["checkpoint"] == checkpoint]
        _draw_panel(axes, checkpoint, some, _ceiling_s(report, checkpoint, some))
    figure.savefig(path)


def _draw_panel(axes: Any, checkpoint: str, rows: list[dict[str, Any]], ceiling_s: float | None) -> None:
    cold_first = sorted(rows, key=lambda row: (row["params"]["temperature"], row["median"]))
    loaders = list(dict.fromkeys(row["params"]["loader"] for row in cold_first))
    temperatures = list(dict.fromkeys(row["params"]["temperature"] for row in cold_first))
    for number, temperature in enumerate(temperatures):
        some = [row for row in rows if row["params"]["temperature"] == temperature]
        places = [loaders.index(row["params"]["loader"]) + (number - 0.5) * _BAR_HEIGHT for row in some]
        medians = [row["median"] for row in some]
        spread = [
            [row["median"] - row["min"] for row in some],
            [row["max"] - row["median"] for row in some],
        ]
        axes.barh(
            places,
            medians,
            height=_BAR_HEIGHT,
            xerr=spread,
            capsize=3,
            label=temperature,
            color=_COLOURS[temperature],
        )
    if ceiling_s is not None:
        axes.axvline(ceiling_s, linestyle="--", color="black", label="plain read of the file, cold")
    axes.set_yticks(range(len(loaders)), loaders)
    axes.invert_yaxis()
    axes.set_xlabel("seconds until the bytes are in memory: median, minimum to maximum")
    size_bytes = rows[0]["params"]["size_bytes"]
    axes.set_title(f"{checkpoint}, {size_bytes / 1e9:.2f} GB")
    axes.legend()


def _ceiling_s(report: dict[str, Any], checkpoint: str, rows: list[dict[str, Any]]) -> float | None:
    for row in report["results"]:
        if row["name"].startswith("ckptio.ceiling.read_") and row["params"]["checkpoint"] == checkpoint:
            return float(rows[0]["params"]["size_bytes"] / row["median"])
    return None
