"""What crosses which tier next, whatever is where already."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, combinations

import pytest
from whimbrel.wire.messages import Tier, TierReport

from services.storage_agent.core.chunks import CheckpointKey, ChunkId, Layout
from services.storage_agent.core.path import (
    Begin,
    Crossed,
    Fetch,
    Read,
    next_move,
    remaining_s,
    reports,
    source_tier,
)
from services.storage_agent.core.residency import DramCopy, SsdCopy

KEY = CheckpointKey(model_id="m", checkpoint_digest="xxh3:1")
LAYOUT = Layout(partition_bytes=(25, 10), chunk_size_bytes=10)
A, B, C, D = LAYOUT.chunks()


def on_ssd(*stored: ChunkId) -> SsdCopy:
    return SsdCopy(key=KEY, layout=LAYOUT, size_bytes=40, used_s=0.0, missing=set(LAYOUT.chunks()) - set(stored))


def in_dram(*ready: ChunkId) -> DramCopy:
    places = {chunk: number for number, chunk in enumerate(LAYOUT.chunks())}
    return DramCopy(copy_id=1, key=KEY, layout=LAYOUT, size_bytes=35, used_s=0.0, places=places, ready=set(ready))


@pytest.mark.parametrize(
    ("dram", "ssd", "wanted", "move", "source"),
    [
        (None, None, Tier.DRAM, Begin(), Tier.REMOTE),
        (None, None, Tier.SSD, Begin(), Tier.REMOTE),
        (None, on_ssd(), Tier.DRAM, Fetch(chunks=(A, B, C, D), store=()), Tier.REMOTE),
        (None, on_ssd(A, B, C, D), Tier.DRAM, Read(chunks=(A, B, C, D)), Tier.SSD),
        (None, on_ssd(A, B, C, D), Tier.SSD, None, Tier.SSD),
        (None, on_ssd(B, D), Tier.DRAM, Read(chunks=(B, D)), Tier.REMOTE),
        (None, on_ssd(B, D), Tier.SSD, Fetch(chunks=(A, C), store=()), Tier.REMOTE),
        (in_dram(B, D), on_ssd(B, D), Tier.DRAM, Fetch(chunks=(A, C), store=()), Tier.REMOTE),
        (in_dram(A), on_ssd(A, B, C, D), Tier.DRAM, Read(chunks=(B, C, D)), Tier.SSD),
        (in_dram(A), on_ssd(B, C, D), Tier.DRAM, Read(chunks=(B, C, D)), Tier.SSD),
        (in_dram(A, B), on_ssd(C), Tier.SSD, Fetch(chunks=(D,), store=(A, B)), Tier.REMOTE),
        (in_dram(A, B, C, D), None, Tier.DRAM, None, Tier.DRAM),
        (in_dram(A, B, C, D), on_ssd(A), Tier.DRAM, None, Tier.DRAM),
        (in_dram(A, B, C, D), on_ssd(A), Tier.SSD, Fetch(chunks=(), store=(B, C, D)), Tier.DRAM),
        (in_dram(A, B), None, Tier.DRAM, Begin(), Tier.REMOTE),
    ],
)
def test_what_dram_has_is_not_moved_what_the_ssd_has_is_read_and_the_rest_is_fetched(
    dram: DramCopy | None, ssd: SsdCopy | None, wanted: Tier, move: object, source: Tier
) -> None:
    """L1, L2: the fastest tier that has a chunk gives it."""
    assert next_move(dram, ssd, wanted=wanted) == move
    assert source_tier(dram, ssd) is source


def subsets() -> Iterable[tuple[ChunkId, ...]]:
    chunks = list(LAYOUT.chunks())
    return chain.from_iterable(combinations(chunks, size) for size in range(len(chunks) + 1))


@pytest.mark.parametrize("wanted", [Tier.SSD, Tier.DRAM])
def test_moves_lead_to_a_whole_checkpoint_from_every_state_and_move_no_byte_twice(wanted: Tier) -> None:
    """E3: the tier path of a load depends on where its bytes are."""
    for ready in subsets():
        for stored in subsets():
            dram, ssd = in_dram(*ready), on_ssd(*stored)
            moved: list[ChunkId] = []
            for _ in range(4):
                move = next_move(dram, ssd, wanted=wanted)
                if move is None:
                    break
                assert not isinstance(move, Begin)
                moved += move.chunks
                if isinstance(move, Fetch):
                    assert set(move.store) <= dram.ready
                    ssd.missing -= {*move.chunks, *move.store}
                if wanted is Tier.DRAM:
                    dram.ready |= set(move.chunks)
            assert next_move(dram, ssd, wanted=wanted) is None
            assert dram.is_whole if wanted is Tier.DRAM else ssd.is_whole
            assert len(moved) == len(set(moved))
            assert set(moved).isdisjoint(ready)


def test_a_load_reports_the_tiers_that_it_read_from_the_slowest_first() -> None:
    """L10: every load reports actual latency and tier path."""
    crossed = {
        Tier.DRAM: Crossed(size_bytes=9, seconds=0.1),
        Tier.SSD: Crossed(size_bytes=0, seconds=0.5),
        Tier.REMOTE: Crossed(size_bytes=7, seconds=-1e-9),
    }
    assert reports(crossed) == (
        TierReport(tier=Tier.REMOTE, size_bytes=7, seconds=0.0),
        TierReport(tier=Tier.DRAM, size_bytes=9, seconds=0.1),
    )
    assert reports({}) == ()


@pytest.mark.parametrize(
    ("done", "total", "running", "probe", "expected"),
    [
        (25, 100, 2.0, 1.0, 6.0),
        (100, 100, 2.0, 1.0, 0.0),
        (120, 100, 2.0, 1.0, 0.0),
        (0, 100, 2.0, 50.0, 2.0),
        (25, 100, 0.0, 50.0, 1.5),
        (0, 100, 2.0, 0.0, None),
        (0, 0, 2.0, 50.0, None),
    ],
    ids=["half way", "done", "more than done", "nothing moved", "just begun", "nothing known", "size not known"],
)
def test_the_rest_of_a_load_is_estimated_by_its_own_speed_then_by_the_disks(
    done: int, total: int, running: float, probe: float, expected: float | None
) -> None:
    """E1: what remains of the running task is known from its progress."""
    rest_s = remaining_s(done_bytes=done, total_bytes=total, running_s=running, probe_bytes_per_s=probe)
    assert rest_s == (None if expected is None else pytest.approx(expected))
