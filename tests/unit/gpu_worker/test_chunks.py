"""Chunks that are lent: mapped under a lease, touched early, and given back whole."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import threading
import time

import ckptio
import msgspec
import numpy as np
import pytest
from whimbrel.wire.errors import Conflict
from whimbrel.wire.messages import PartitionChunks

from services.gpu_worker.chunks import LentChunks
from tests.unit.gpu_worker.builders import Lender
from tests.unit.gpu_worker.harness import is_locked
from tests.unit.gpu_worker.tiny_models import TinyModel

PAGE_BYTES = 4096


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


def test_another_content_than_was_lent_is_a_conflict_and_nothing_is_held(
    lender: Lender, model: TinyModel, tiny_models: dict[str, TinyModel]
) -> None:
    """The index would say where tensors are in bytes that are not there."""
    attach = lender.lend(model.checkpoint)
    other = next(each for each in tiny_models.values() if each is not model)
    replaced = msgspec.structs.replace(attach, checkpoint_path=str(other.checkpoint))
    with pytest.raises(Conflict, match="holds another content of m by now"):
        LentChunks.take(replaced)
    assert not is_locked(attach)


def in_memory_of_a_gpu(lender: Lender, model: TinyModel) -> tuple[LentChunks, ckptio.DeviceBuffer, int]:
    """What was lent, with memory that the agent writes to, and the agent's own lock on the lease."""
    attach = lender.lend(model.checkpoint)
    worker, agent = (os.open(attach.lease_path, os.O_RDONLY | os.O_CLOEXEC) for _ in range(2))
    for descriptor in (worker, agent):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    memory = ckptio.DeviceBuffer.allocate("host", PAGE_BYTES)
    return LentChunks(worker, ckptio.read_index(model.checkpoint), [memory]), memory, agent


def test_memory_of_a_gpu_is_not_freed_while_the_agent_writes_to_it(
    lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, memory, agent = in_memory_of_a_gpu(lender, model)
    has_looked, pause = threading.Event(), time.sleep

    def look_again(seconds: float) -> None:
        has_looked.set()
        pause(seconds)

    monkeypatch.setattr(time, "sleep", look_again)
    closing = threading.Thread(target=chunks.close)
    closing.start()
    try:
        assert has_looked.wait(5.0)
        assert memory.memory is not None, "it is still open"
        assert closing.is_alive()
    finally:
        os.close(agent)
        closing.join(5.0)
    assert not closing.is_alive()
    with pytest.raises(ValueError, match="is closed"):
        _ = memory.memory


def test_an_agent_that_never_lets_go_is_not_waited_for_without_end(
    lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gpu_worker.chunks.ALONE_S_MAX", 0.05)
    chunks, memory, agent = in_memory_of_a_gpu(lender, model)
    started_s = time.monotonic()
    chunks.close()
    assert 0.05 <= time.monotonic() - started_s < 5.0
    with pytest.raises(ValueError, match="is closed"):
        _ = memory.memory
    os.close(agent)
