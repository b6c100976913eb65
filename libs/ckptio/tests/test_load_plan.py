"""The pieces of a load: all bytes once, in an order that serves every GPU."""

from __future__ import annotations

import pytest

from ckptio.index import Index, IndexPartition
from ckptio.load_plan import TierReport, plan_pieces

CHUNK_BYTES = 8192


def an_index(*sizes_bytes: int, offsets: tuple[int, ...] = ()) -> Index:
    """An index with a partition of each size, and one-byte tensors at `offsets` of the first."""
    return Index(
        chunk_size_bytes=CHUNK_BYTES,
        partitions=tuple(
            IndexPartition(size_bytes=size, padded_bytes=size, digests=tuple(range(-(-size // CHUNK_BYTES))))
            for size in sizes_bytes
        ),
        names=tuple(f"t{offset}" for offset in offsets),
        partition=(0,) * len(offsets),
        offset_bytes=offsets,
        size_bytes=(1,) * len(offsets),
        dtype=("uint8",) * len(offsets),
        shape=((1,),) * len(offsets),
    )


@pytest.mark.parametrize("sizes_bytes", [(0,), (4096,), (8192,), (20480,), (20480, 4096, 40960), (0, 8192)])
@pytest.mark.parametrize("is_bulk", [True, False])
def test_every_byte_is_read_once(sizes_bytes: tuple[int, ...], is_bulk: bool) -> None:
    """F2, L7: with and without bulk reads."""
    index = an_index(*sizes_bytes, offsets=(0, 256, 5000, 9000, 16384))
    pieces = plan_pieces(index, CHUNK_BYTES, is_bulk=is_bulk)
    for partition, size_bytes in enumerate(sizes_bytes):
        end = 0
        for piece in pieces:
            if piece.partition == partition:
                assert piece.chunk.offset_bytes == end
                assert piece.chunk.size_bytes > 0
                assert piece.chunk.offset_bytes // CHUNK_BYTES == piece.chunk_index
                assert piece.offset_in_chunk(CHUNK_BYTES) + piece.chunk.size_bytes <= CHUNK_BYTES
                end += piece.chunk.size_bytes
        assert end == size_bytes


def test_chunks_of_all_partitions_take_turns() -> None:
    """L5: every GPU gets its first chunk before any gets its second."""
    pieces = plan_pieces(an_index(3 * CHUNK_BYTES, CHUNK_BYTES, 2 * CHUNK_BYTES), CHUNK_BYTES, is_bulk=True)
    assert [(piece.partition, piece.chunk_index) for piece in pieces] == [
        *((0, 0), (1, 0), (2, 0)),
        *((0, 1), (2, 1)),
        (0, 2),
    ]
    assert [piece.digest for piece in pieces if piece.partition == 0] == [0, 1, 2]


def test_without_bulk_reads_each_tensor_is_one_read_cut_at_whole_pages() -> None:
    """L7: that is what a loader without chunks does."""
    pieces = plan_pieces(an_index(16384, offsets=(0, 100, 4096, 4200, 9000)), CHUNK_BYTES, is_bulk=False)
    assert [piece.chunk.offset_bytes for piece in pieces] == [0, 4096, 8192]


def test_bandwidth_and_its_share_are_of_what_moved() -> None:
    """L10."""
    report = TierReport(tier="SSD", size_bytes=3000, seconds=1.5, ceiling_bytes_per_s=4000.0)
    assert (report.bandwidth_bytes_per_s, report.share_of_ceiling) == (2000.0, 0.5)
    idle = TierReport(tier="SSD", size_bytes=0, seconds=0.0)
    assert (idle.bandwidth_bytes_per_s, idle.share_of_ceiling) == (0.0, None)
