"""Writes docs/benchmarks.md from the results in docs/bench: figures are never typed in by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "bench"
REPORT = ROOT / "docs" / "benchmarks.md"

# What we set out to reach. Below: at most; above: at least.
TARGETS: dict[str, str] = {
    "coldstart.ssd.first_token_s": "≤ 0.6",
    "coldstart.dram.first_token_s": "≤ 0.4",
    "coldstart.warm.first_token_s": "≤ 0.2",
    "tiers.estimate_error.p90_share": "≤ 0.15",
    "tiers.pipeline.ratio_to_slowest_tier": "≤ 1.15",
    "tiers.dram_attach_s": "≤ 0.1",
    "sched.pure.tasks_per_s": "≥ 5,000",
    "sched.durable.tasks_per_s": "≥ 3,000",
    "sched.durable.p99_s": "≤ 0.05",
    "sched.placement_s.p99": "≤ 0.001",
    "sched.growth.exponent": "≤ 1.0",
    "migrate.pause_tpots.p50": "≤ 3",
    "migrate.pause_tpots.p99": "≤ 8",
    "migrate.bytes_per_token": "≤ 6",
    "migrate.failover_s.p50": "≤ 2 + prefill",
    "migrate.estimate_error.p90_share": "≤ 0.20",
    "migrate.estimate_error.within_20pct_or_20ms": "≥ 0.9",
    "migrate.equal_share.transformers.fp32": "≥ 1",
    "ckptio.cold.share_of_ceiling": "≥ 0.93",
    "ckptio.cold.ratio.safetensors": "≥ 1.4",
    "ckptio.cold.ratio.torch": "≥ 1.5",
    "ckptio.cold.ratio.transformers": "≥ 2.5",
    "ckptio.cold.ratio.runai": "≥ 1.0",
    "ckptio.cold.ratio.tensorizer": "≥ 1.0",
    "ckptio.cold.ratio.fastsafetensors": "≥ 1.0",
    "ckptio.warm.ratio.safetensors": "≥ 2.0",
    "ckptio.warm.ratio.runai": "≥ 1.4",
    "ckptio.cold.ratio.safetensors.lora": "≥ 1.7",
    "ckptio.warm.ratio.safetensors.lora": "≥ 3",
    "ckptio.dram.map_s.qwen1.5b": "≤ 0.010",
    "ckptio.dram.map_s.many": "≤ 0.030",
    "ckptio.verify.overhead_share": "≤ 0.05",
    "ckptio.stock.share_of_converted": "≥ 0.9",
    "ckptio.rss_beyond_pool_bytes": "≤ 67,108,864",
    "ckptio.cpu_s.cold": "≤ 0.4",
    "ckptio.cpu_s.cold.unverified": "≤ 0.1",
}

GROWTH = "sched.growth.task_s."

HEAD = """# Benchmarks

Written by `make bench-report` from the JSON in `docs/bench`, which `make bench` makes anew. Machines are shared and
noisy: a median stands with the least and the most that was seen, in n measurements; ratios are of neighbours in the
same run. A ratio to another loader is its time over ours, with the bytes really in memory for both. `of bests`
compares the shortest loads of all rounds, since a few per cent are lost in the spread.
"""


def main() -> int:
    """Writes the report; `--check` only says whether it is up to date."""
    text = HEAD + "".join(_part(path) for path in sorted(RESULTS.glob("*.json")))
    if "--check" in sys.argv[1:]:
        is_current = REPORT.exists() and REPORT.read_text() == text
        if not is_current:
            print(f"{REPORT} is not what {RESULTS} says; run make bench-report", file=sys.stderr)
        return 0 if is_current else 1
    REPORT.write_text(text)
    return 0


def _part(path: Path) -> str:
    run = json.loads(path.read_text())
    machine = run["machine"]
    lines = [f"\n## {path.stem}\n"]
    lines.append(
        f"Commit {run['commit'][:12]}; {machine['cpu']}, {machine['cores']} processors, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, device {machine['device']}. "
        f"[All rows](bench/{path.name})"
        + (f", [as a picture](bench/{path.stem}.svg)." if path.with_suffix(".svg").exists() else ".")
    )
    lines.append("\n| name | unit | median | least – most | n | target |\n|---|---|---|---|---|---|")
    lines += [_row(row) for row in run["results"] if _is_worth_a_line(row)]
    return "\n".join(lines) + "\n" + _growth(run["results"])


def _growth(rows: list[dict[str, Any]]) -> str:
    """The time of a load task over servers, as a picture; nothing for other parts."""
    points = [(row["params"]["servers"], row["median"]) for row in rows if row["name"].startswith(GROWTH)]
    if not points:
        return ""
    servers = ", ".join(f'"{count:,}"' for count, _ in points)
    times = ", ".join(f"{seconds * 1e6:.0f}" for _, seconds in points)
    return (
        "\n```mermaid\nxychart-beta\n"
        '    title "Processor time of a load task over servers"\n'
        f'    x-axis "servers" [{servers}]\n'
        '    y-axis "µs"\n'
        f"    line [{times}]\n```\n"
    )


def _is_worth_a_line(row: dict[str, Any]) -> bool:
    return ".stage." not in row["name"] and ".ablation.load_s." not in row["name"]


def _row(row: dict[str, Any]) -> str:
    of_bests = row.get("params", {}).get("of_bests")
    median = _figure(row["median"]) + (f" (of bests {_figure(of_bests)})" if of_bests is not None else "")
    spread = f"{_figure(row['min'])} – {_figure(row['max'])}"
    return f"| {row['name']} | {row['unit']} | {median} | {spread} | {row['n']} | {TARGETS.get(row['name'], '–')} |"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(main())
