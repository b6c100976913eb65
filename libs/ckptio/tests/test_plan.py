"""Layout, grouping and chunk plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptio.plan import (
    ALIGNMENT_BYTES,
    ChunkRead,
    Extent,
    Member,
    choose_direct,
    group_overlaps,
    load_order,
    plan_chunks,
    plan_layout,
    size_of,
)


def an_extent(name: str, size_bytes: int) -> Extent:
    member = Member(name=name, dtype="uint8", shape=(size_bytes,), size_bytes=size_bytes)
    return Extent(size_bytes=size_bytes, members=(member,))


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 2)), max_size=20))
def test_extents_are_aligned_disjoint_and_in_order(sizes: list[tuple[int, int]]) -> None:
    """F2: tensors of one GPU lie one after the other in its partition."""
    extents = [an_extent(f"{number}.{gpu}", size) for number, (size, gpu) in enumerate(sizes)]
    layouts = plan_layout(extents, lambda name: int(name.split(".")[1]))
    placed = []
    for partition, layout in enumerate(layouts):
        end = 0
        for placement in layout.placements:
            assert placement.offset_bytes % ALIGNMENT_BYTES == 0
            assert end <= placement.offset_bytes < end + ALIGNMENT_BYTES
            end = placement.offset_bytes + extents[placement.extent].size_bytes
            assert sizes[placement.extent][1] == partition
            placed.append(placement.extent)
        assert layout.size_bytes == end
        assert layout.padded_bytes % 4096 == 0
        assert 0 <= layout.padded_bytes - layout.size_bytes < 4096
    assert sorted(placed) == list(range(len(sizes)))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=25))
def test_groups_are_the_connected_sets_of_overlapping_spans(raw: list[tuple[int, int]]) -> None:
    spans = [(start, start + size) for start, size in raw]
    group_of = {number: i for i, group in enumerate(group_overlaps(spans)) for number in group}
    assert sorted(group_of) == list(range(len(spans)))
    for a, (a_start, a_end) in enumerate(spans):
        for b, (b_start, b_end) in enumerate(spans):
            if a != b and max(a_start, b_start) < min(a_end, b_end):
                assert group_of[a] == group_of[b]
    for group in group_overlaps(spans):
        end = spans[group[0]][1]
        for number in group[1:]:
            assert spans[number][0] < end
            end = max(end, spans[number][1])


@given(st.integers(0, 200_000), st.sampled_from([4096, 8192, 65536]))
def test_chunks_cover_a_partition_without_gap(size_bytes: int, chunk_size_bytes: int) -> None:
    chunks = plan_chunks(size_bytes, chunk_size_bytes)
    assert [chunk.offset_bytes for chunk in chunks] == [n * chunk_size_bytes for n in range(len(chunks))]
    assert sum(chunk.size_bytes for chunk in chunks) == size_bytes
    assert all(0 < chunk.size_bytes <= chunk_size_bytes for chunk in chunks)


def test_chunks_that_are_in_the_page_cache_are_not_read_directly() -> None:
    """L3: direct I/O where it pays."""
    chunks = [ChunkRead(offset_bytes=0, size_bytes=1000)] * 4
    assert choose_direct([0, 500, 900, 1000], chunks) == (True, True, False, False)


def test_layers_are_ordered_by_number() -> None:
    names = ["layers.10.w", "layers.2.w", "embed", "layers.2.b", "layers.02.w"]
    assert sorted(names, key=load_order) == [
        "embed",
        "layers.2.b",
        "layers.02.w",
        "layers.2.w",
        "layers.10.w",
    ]


@pytest.mark.parametrize(
    ("shape", "stride", "size_bytes"),
    [
        ((), None, 4),
        ((3, 5), None, 60),
        ((0, 2**40), None, 0),
        ((3, 5), (1, 3), 60),
        ((3, 5), (100, 2), 4 * (1 + 200 + 8)),
        ((7, 4), (0, 1), 16),
        ((1, 2), (2**60, 1), 8),
    ],
)
def test_size_is_the_span_from_first_to_last_element(
    shape: tuple[int, ...], stride: tuple[int, ...] | None, size_bytes: int
) -> None:
    assert size_of("float32", shape, stride) == size_bytes


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((2**32, 2**32), None),
        ((2**62,), None),
        ((2**62, 2**62, 0), None),
        ((-1,), None),
        ((2, 2), (1,)),
        ((2, 2), (1, -1)),
        ((2,), (2**62,)),
    ],
)
def test_sizes_that_overflow_are_refused(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> None:
    """F7: nothing is allocated for a shape whose product does not fit."""
    with pytest.raises(ValueError, match=r"shape|stride"):
        size_of("float32", shape, stride)
