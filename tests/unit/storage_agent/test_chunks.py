"""How a checkpoint is cut up, and in which order its chunks are loaded."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.storage_agent.core.chunks import ChunkId, Layout


def a_layout(*partition_bytes: int) -> Layout:
    return Layout(partition_bytes=partition_bytes, chunk_size_bytes=10)


def test_the_last_chunk_of_a_partition_may_be_short() -> None:
    layout = a_layout(25, 10)
    assert (layout.size_bytes, layout.chunk_count, layout.counts()) == (35, 4, (3, 1))
    assert [layout.bytes_of(ChunkId(0, number)) for number in range(3)] == [10, 10, 5]
    assert layout.bytes_of(ChunkId(1, 0)) == 10
    assert [layout.offset_bytes(ChunkId(0, number)) for number in range(3)] == [0, 10, 20]


def test_partitions_take_turns_so_that_every_gpu_gets_its_first_chunks() -> None:
    """L5: partitions are loaded in parallel."""
    assert list(a_layout(25, 10, 20).chunks()) == [
        ChunkId(0, 0), ChunkId(1, 0), ChunkId(2, 0), ChunkId(0, 1), ChunkId(2, 1), ChunkId(0, 2),
    ]  # fmt: skip


@given(st.lists(st.integers(0, 60), max_size=5), st.randoms(use_true_random=False))
def test_the_bytes_of_some_chunks_are_the_sum_of_theirs(partition_bytes: list[int], chance: random.Random) -> None:
    layout = a_layout(*partition_bytes)
    some = {chunk for chunk in layout.chunks() if chance.random() < 0.5}
    assert layout.bytes_in(some) == sum(layout.bytes_of(chunk) for chunk in some)
    assert layout.bytes_in(set(layout.chunks())) == layout.size_bytes


def test_a_checkpoint_without_partitions_has_no_chunks() -> None:
    assert list(a_layout().chunks()) == list(a_layout(0).chunks()) == []
    assert a_layout().size_bytes == a_layout().chunk_count == 0


@pytest.mark.parametrize(
    ("chunk", "is_there"),
    [
        ((0, 2), True),
        ((1, 0), True),
        ((0, 3), False),
        ((1, 1), False),
        ((2, 0), False),
        ((-1, 0), False),
        ((0, -1), False),
    ],
)
def test_a_layout_knows_its_own_chunks(chunk: tuple[int, int], is_there: bool) -> None:
    assert a_layout(25, 10).has(ChunkId(*chunk)) is is_there
