"""Chunks that are lent: mapped under a lease, touched early, and given back whole."""

from __future__ import annotations

import platform
import resource

import ckptio
import numpy as np
import pytest
from whimbrel.wire.messages import PartitionChunks

from services.gpu_worker.chunks import LentChunks
from tests.unit.gpu_worker.builders import Lender
from tests.unit.gpu_worker.harness import is_locked
from tests.unit.gpu_worker.tiny_models import TinyModel

PAGE_BYTES = 4096


@pytest.fixture
def model(tiny_models: dict[str, TinyModel]) -> TinyModel:
    return tiny_models["llama"]


KERNEL = tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.skipif(KERNEL < (5, 14), reason="MADV_POPULATE_READ came with Linux 5.14")
def test_touched_chunks_cost_the_first_reader_no_page_faults(lender: Lender, model: TinyModel) -> None:
    chunks = LentChunks.take(lender.lend(model.checkpoint))
    chunks.touch()
    (mapping,) = chunks.memories
    view = np.frombuffer(mapping, dtype=np.uint8)
    int(view[:: len(view)].sum())
    before = faults()
    int(view[::PAGE_BYTES].sum())
    assert faults() - before <= 2, f"for {len(view) // PAGE_BYTES} pages"
    del view
    chunks.close()


def test_the_pool_cannot_be_written_to_through_what_was_lent(lender: Lender, model: TinyModel) -> None:
    chunks = LentChunks.take(lender.lend(model.checkpoint))
    chunks.touch()
    before = bytes(lender.pool.chunk(0))
    with memoryview(chunks.memories[0]) as view:
        view[:PAGE_BYTES] = bytes(PAGE_BYTES)
    assert bytes(lender.pool.chunk(0)) == before
    chunks.close()


def test_touching_after_the_end_does_nothing(lender: Lender, model: TinyModel) -> None:
    chunks = LentChunks.take(lender.lend(model.checkpoint))
    chunks.close()
    chunks.touch()
    chunks.close()
    assert all(mapping.is_closed for mapping in chunks.memories)


def test_a_view_that_lives_keeps_the_lease(lender: Lender, model: TinyModel) -> None:
    """The agent must never reuse chunks that somebody can still see."""
    attach = lender.lend(model.checkpoint)
    chunks = LentChunks.take(attach)
    views = ckptio.tensors(chunks.index, chunks.memories)
    with pytest.raises(BufferError, match="views of the mapping are alive"):
        chunks.close()
    assert is_locked(attach)
    views.clear()
    chunks.close()
    assert not is_locked(attach)


def test_fewer_bytes_than_the_index_has_are_refused_and_nothing_is_held(lender: Lender, model: TinyModel) -> None:
    attach = lender.lend(model.checkpoint)
    (partition,) = attach.partitions
    small = PartitionChunks(size_bytes=PAGE_BYTES, chunks=partition.chunks[:4])
    fields = {name: getattr(attach, name) for name in attach.__struct_fields__}
    with pytest.raises(Exception, match="partition 0: 4096 bytes lent of"):
        LentChunks.take(attach.__class__(**fields | {"partitions": (small,)}))
    assert not is_locked(attach)
