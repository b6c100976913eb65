"""What the command line says: sizes, stage times, benchmark results."""

from __future__ import annotations

import json

import pytest
from whimbrel.cli import measure, show
from whimbrel.client.admin import Answer, parse_server_timing, parse_tier

from tests.support.cluster import whimbrel


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (269_060_552, "269 MB"), (3_100_000_000, "3.1 GB"), (2e12, "2.0 TB")],
)
def test_sizes_are_for_people(size_bytes: float, text: str) -> None:
    assert show.size(size_bytes) == text


def test_server_timing_is_read_and_foreign_entries_are_passed_over() -> None:
    assert parse_tier("queue;dur=1, tier;desc=dram") == "dram"
    assert parse_tier("queue;dur=1") == ""
    assert parse_server_timing(" queue;dur=1.5, load;dur=20, cache;desc=hit, first_token;dur=99.25") == {
        "queue": 1.5,
        "load": 20.0,
        "first_token": 99.25,
    }


def test_a_result_has_the_median_and_the_spread() -> None:
    row = measure.result("part.figure_s", "s", [3.0, 1.0, 2.0], model="m")
    assert (row["median"], row["min"], row["max"], row["n"]) == (2.0, 1.0, 3.0, 3)
    assert row["params"] == {"model": "m"}


def test_a_report_says_where_it_was_measured_and_is_json() -> None:
    report = json.loads(json.dumps(measure.report("sched", [measure.result("a", "s", [1.0])])))
    assert report.keys() == {"part", "commit", "machine", "results"}
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["memory_bytes"] > 0
    assert report["machine"]["cpu"]


def test_an_answer_without_a_token_says_so() -> None:
    assert "no token" in show.answer_line(Answer())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--servers", "0"], "servers"),
        (["up", "--set", "nonsense"], "WB_NAME=VALUE"),
        (["events", "--since", "soon", "--nats-url", "nats://127.0.0.1:9"], "--since"),
        (["bench", "nothing"], "coldstart"),
    ],
)
def test_wrong_usage_is_exit_code_two_and_a_sentence(arguments: list[str], words: str) -> None:
    # A process of its own: the command line sets up logging, which would outlive this test.
    done = whimbrel(*arguments, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
