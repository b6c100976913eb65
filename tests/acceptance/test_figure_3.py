"""The puzzle that live migration is for, with two real models on real slots, under each policy (C7)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from whimbrel.cli import figure_3
from whimbrel.cli.cluster import LocalCluster
from whimbrel.client import AdminClient

from tests.support.cluster import ROOT
from tools.demo_models import DemoModels


@pytest.fixture(scope="module")
def models() -> Path:
    directory = Path(os.environ.get("WHIMBREL_MODELS", ROOT / ".models"))
    maker = DemoModels(directory)
    maker.make_smollm2()
    maker.make_random()
    return directory


@pytest.mark.timeout(400)
def test_a_moves_while_it_streams_and_b_starts_from_dram_and_both_say_what_they_always_say(
    tmp_path: Path, models: Path
) -> None:
    """C7, C8, G11: with the policies that the figure compares it to, B waits for the SSD or for A, or A is stopped."""
    played: dict[str, figure_3.Played] = {}
    for policy in ("availability", "locality", "preemption"):
        played[policy] = asyncio.run(figure_3.play_with(policy, tmp_path / policy, models))
    played["migration"], said = asyncio.run(play_and_listen(tmp_path / "migration", models))
    for policy, one in played.items():
        print(
            f"{policy}: B began after {one.b.start_s:.2f} s from {one.b.answer.tier}; A's longest pause "
            f"{1000 * one.a.pause_s:.0f} ms, usually {1000 * one.a.gap_s:.0f} ms"
        )
        assert (one.a.text, one.b.text) == said, f"{policy}: both are complete, and as when nobody disturbed them"
    waited, blocked, stopped, migrated = (played[policy] for policy in figure_3.POLICIES)
    assert migrated.migrations == 1
    assert migrated.b.answer.tier == "dram"
    assert waited.b.answer.tier == "ssd"
    assert waited.b.start_s > migrated.b.start_s, "a free slot, and a slow load"
    assert blocked.b.start_s > migrated.b.start_s, "the best server, and an answer of unknown length"
    assert stopped.b.answer.tier == "dram"
    assert stopped.a.pause_s > migrated.a.pause_s, "A is loaded and computed again while its client waits"
    assert blocked.migrations == waited.migrations == stopped.migrations == 0


async def play_and_listen(directory: Path, models: Path) -> tuple[figure_3.Played, tuple[str, str]]:
    """What happened, and what both models say when nobody disturbs them."""
    async with LocalCluster(figure_3.options(directory, "migration")) as cluster, AdminClient(cluster.url) as client:
        await figure_3.deploy(client, models)
        await figure_3.set_up(client)
        return await figure_3.play(client), await figure_3.undisturbed(client)
