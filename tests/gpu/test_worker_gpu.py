"""A worker with models on GPUs: the same checks for real ones and, where torch is not needed, for the stand-in."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Sequence as Many
from pathlib import Path

import ckptio
import pytest
from ckptio import Index
from ckptio.manifest import partition_file
from whimbrel.wire.errors import LoadFailed
from whimbrel.wire.messages import ActivateInstance, AttachInstance, AttachInstanceReply, WorkerState

from services.gpu_worker.engines.echo_engine import EchoCosts, EchoEngine
from services.gpu_worker.engines.engine import PartitionMemory
from tests.support.checkpoints import make_checkpoint
from tests.unit.gpu_worker.builders import Lender, a_request, a_sequence
from tests.unit.gpu_worker.harness import Outside, a_worker, is_locked
from tests.unit.gpu_worker.tiny_models import CHUNK_BYTES, TinyModel

# The agent, in so far as it copies: argv are the checkpoint, and for each partition a device and a handle.
AGENT = """
import sys
from contextlib import ExitStack
import ckptio
path, places = sys.argv[1], sys.argv[2:]
index = ckptio.read_index(path)
with (
    ckptio.ChunkPool.create(None, 8 * index.chunk_size_bytes, index.chunk_size_bytes) as pool,
    ckptio.Loader(pool) as loader,
    ExitStack() as stack,
):
    buffers = [
        stack.enter_context(ckptio.DeviceBuffer.open(device, bytes.fromhex(handle), part.padded_bytes))
        for device, handle, part in zip(places[::2], places[1::2], index.partitions, strict=True)
    ]
    loader.load_onto(path, buffers)
"""


class LookingEngine(EchoEngine):
    """The echo, except that it reads back what was bound when all of it should be there."""

    def __init__(self) -> None:
        super().__init__(EchoCosts())
        self.memories: list[PartitionMemory] = []
        self.sizes_bytes: list[int] = []
        self.seen: list[bytes] = []

    def bind(self, index: Index, memories: Many[PartitionMemory]) -> None:
        super().bind(index, memories)
        self.memories = list(memories)
        self.sizes_bytes = [part.size_bytes for part in index.partitions]

    def activate(self) -> None:
        raws = [m.read() if isinstance(m, ckptio.DeviceBuffer) else bytes(m) for m in self.memories]
        self.seen = [bytes(raw[:size_bytes]) for raw, size_bytes in zip(raws, self.sizes_bytes, strict=True)]

    def unload(self) -> None:
        super().unload()
        self.memories = []


@pytest.fixture
def model(tmp_path: Path) -> TinyModel:
    """One partition of a few chunks; made without torch, which takes long to import."""
    source = make_checkpoint(tmp_path / "source")
    ckptio.convert(source, tmp_path / "whole", chunk_size_bytes=CHUNK_BYTES)
    return TinyModel("whole", source, tmp_path / "whole")


@pytest.fixture
def parted(model: TinyModel, tmp_path: Path) -> TinyModel:
    """The same over two partitions: the first layer and what comes before it, and the rest."""
    first = ("model.embed_tokens.", "model.layers.0.")
    ckptio.convert(
        model.source,
        tmp_path / "parted",
        chunk_size_bytes=CHUNK_BYTES,
        partition_of=lambda name: 0 if name.startswith(first) else 1,
    )
    return TinyModel("parted", model.source, tmp_path / "parted")


def bytes_of(model: TinyModel) -> list[bytes]:
    """What the partitions hold, without padding."""
    parts = ckptio.read_index(model.checkpoint).partitions
    files = [model.checkpoint / partition_file(number) for number in range(len(parts))]
    return [file.read_bytes()[: part.size_bytes] for file, part in zip(files, parts, strict=True)]


async def fill(attach: AttachInstance, reply: AttachInstanceReply) -> None:
    """Copy the checkpoint as the agent does: in another process, through the handles that the worker gave."""
    places = [
        word
        for partition, handle in zip(attach.partitions, reply.handles, strict=True)
        for word in (partition.device, handle.hex())
    ]
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, attach.checkpoint_path, *places)
    async with asyncio.timeout(60):
        assert await agent.wait() == 0


async def attach(outside: Outside, message: AttachInstance) -> AttachInstanceReply:
    reply = await outside.ask(message)
    assert isinstance(reply, AttachInstanceReply)
    return reply


async def load(outside: Outside, devices: Many[str], agent_epoch: int = 1) -> AttachInstance:
    """Until the instance is ready."""
    await outside.tell(outside.prepare())
    message = outside.attach(devices=devices, agent_epoch=agent_epoch)
    await fill(message, await attach(outside, message))
    assert is_locked(message), "the chunks are used until every byte is on the GPU"
    await outside.ask(ActivateInstance(instance_id="inst-1"))
    await outside.until(lambda: outside.state_of("inst-1") is WorkerState.READY)
    return message


async def test_the_agent_fills_memory_that_the_worker_allocated(lender: Lender, model: TinyModel) -> None:
    """L6: two processes; the handle is all that goes from one to the other."""
    engine = LookingEngine()
    async with a_worker(lender, model, engine, device="cuda:0") as outside:
        message = await load(outside, ["cuda:0"])
        assert engine.seen == bytes_of(model)
        assert is_locked(message), "it tells that the instance lives, whoever has the chunks"
        assert outside.beat.device == "cuda:0"
        assert await outside.answer(a_request()) == [5, 6, 7]
        await outside.ask(outside.unload())
        await outside.until(outside.has_ended)


async def test_each_partition_goes_to_its_own_device(lender: Lender, parted: TinyModel, gpus: int) -> None:
    """L5: partition k on the device that the agent names for it, all on one worker."""
    engine = LookingEngine()
    second = f"cuda:{gpus - 1}"
    async with a_worker(lender, parted, engine, device="cuda:0") as outside:
        message = await load(outside, ["cuda:0", second])
        assert engine.seen == bytes_of(parted)
        assert is_locked(message)
        devices = [memory.device for memory in engine.memories if isinstance(memory, ckptio.DeviceBuffer)]
        assert devices == ["cuda:0", second]


async def test_a_model_half_on_a_gpu_keeps_its_lease(lender: Lender, parted: TinyModel) -> None:
    engine = LookingEngine()
    async with a_worker(lender, parted, engine, device="cuda:0") as outside:
        message = outside.attach(devices=["cuda:0", "cpu"])
        reply = await attach(outside, message)
        assert len(reply.handles) == 1
        await outside.ask(ActivateInstance(instance_id="inst-1"))
        await outside.until(lambda: outside.state_of("inst-1") is WorkerState.READY)
        assert engine.seen[1] == bytes_of(parted)[1]
        assert is_locked(message)
        await outside.ask(outside.unload())
        await outside.until(lambda: not is_locked(message))


async def test_a_repeated_attach_gets_the_same_handles(lender: Lender, model: TinyModel) -> None:
    async with a_worker(lender, model, device="cuda:0") as outside:
        message = outside.attach(devices=["cuda:0"])
        first = await attach(outside, message)
        assert len(first.handles) == 1
        assert await attach(outside, message) == first


async def test_the_next_life_of_the_agent_fills_the_same_memory(lender: Lender, model: TinyModel) -> None:
    """A GPU has no room for a model twice, and the agent that is gone writes to it no more."""
    engine = LookingEngine()
    async with a_worker(lender, model, engine, device="cuda:0") as outside:
        first = outside.attach(devices=["cuda:0"], agent_epoch=1)
        before = await attach(outside, first)
        second = outside.attach(devices=["cuda:0"], agent_epoch=2)
        after = await attach(outside, second)
        assert after == before
        await outside.until(lambda: not is_locked(first))
        assert is_locked(second)
        await fill(second, after)
        await outside.ask(ActivateInstance(instance_id="inst-1"))
        await outside.until(lambda: outside.state_of("inst-1") is WorkerState.READY)
        assert engine.seen == bytes_of(model)
        await outside.ask(outside.unload())
        await outside.until(outside.has_ended)


async def test_instances_take_turns_on_a_gpu_and_leave_nothing(lender: Lender, model: TinyModel) -> None:
    engine = LookingEngine()
    async with a_worker(lender, model, engine, device="cuda:0") as outside:
        for number in range(3):
            instance_id = f"inst-{number}"
            message = outside.attach(instance_id, devices=["cuda:0"])
            await attach(outside, message)
            await outside.ask(ActivateInstance(instance_id=instance_id))
            await outside.until(lambda i=instance_id: outside.state_of(i) is WorkerState.READY)
            (memory,) = engine.memories
            assert isinstance(memory, ckptio.DeviceBuffer)
            await outside.ask(outside.unload(instance_id))
            await outside.until(lambda i=instance_id: outside.has_ended(i))
    with pytest.raises(ValueError, match="is closed"):
        _ = memory.address


async def test_a_gpu_that_is_not_there_ends_the_load_and_is_named(lender: Lender, model: TinyModel, gpus: int) -> None:
    async with a_worker(lender, model, device="cuda:0") as outside:
        message = outside.attach(devices=[f"cuda:{gpus}"])
        with pytest.raises(LoadFailed, match=f"cuda:{gpus}"):
            await outside.ask(message)
        assert not is_locked(message)
        await load(outside, ["cuda:0"])


def test_a_worker_of_a_gpu_that_is_not_there_does_not_start(gpus: int) -> None:
    environ = {"WB_SERVER_ID": "s", "WB_ENGINE": "echo", "WB_DEVICE": f"cuda:{gpus}", "PYTHONPATH": ".:libs"}
    done = subprocess.run(
        [sys.executable, "-m", "services.gpu_worker"],
        cwd=Path(__file__).parents[2],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert (
        f"WB_DEVICE: there is no cuda:{gpus} (this machine has cuda:0 to cuda:{gpus - 1})" in done.stdout + done.stderr
    )


# --- with torch, on a real GPU ---


def needs_torch_with_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU")


def test_torch_sees_the_memory_without_a_copy(model: TinyModel) -> None:
    needs_torch_with_cuda()
    import torch

    from services.gpu_worker.engines.partition_tensors import partition_tensors

    index = ckptio.read_index(model.checkpoint)
    (part,) = index.partitions
    on_host = ckptio.load(model.checkpoint)
    with (
        ckptio.ChunkPool.create(None, 8 * CHUNK_BYTES, CHUNK_BYTES) as pool,
        ckptio.Loader(pool) as loader,
        ckptio.DeviceBuffer.allocate("cuda:0", part.padded_bytes) as buffer,
    ):
        views = partition_tensors(index, [buffer])
        # The bytes come after the views were made: a copy would not have them.
        loader.load_onto(model.checkpoint, [buffer])
        assert views.keys() == on_host.keys()
        for name, view in views.items():
            assert view.device == torch.device("cuda:0")
            assert buffer.address <= view.data_ptr() < buffer.address + buffer.size_bytes
            assert torch.equal(view.cpu(), on_host[name]), name
        del view
        views.clear()


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]], ids="-".join)
def test_greedy_answers_on_a_gpu_are_those_of_the_cpu(lender: Lender, parted: TinyModel, devices: list[str]) -> None:
    """Also with a model over two devices, one of which may be the CPU: a stand-in for a second GPU."""
    needs_torch_with_cuda()
    from services.gpu_worker.chunks import LentChunks
    from services.gpu_worker.engines.engine import Precision
    from services.gpu_worker.engines.transformers_engine import TransformersEngine

    def answer(engine: TransformersEngine, devices: Many[str]) -> list[int]:
        chunks = LentChunks.take(lender.lend(parted.checkpoint, devices=devices))
        for memory, raw in zip(chunks.memories, bytes_of(parted), strict=True):
            if isinstance(memory, ckptio.DeviceBuffer):
                copy_onto(memory, raw)
        engine.prepare(parted.config)
        engine.bind(chunks.index, chunks.memories)
        engine.activate()
        sequence = a_sequence(prompt=prompt, output_tokens_max=20)
        while not sequence.is_finished:
            sequence.advance(engine.decode(sequence).token, 0.0)
        engine.forget(sequence.request_id)
        engine.unload()
        chunks.close()
        return list(sequence.output)

    seed = int(os.environ.get("WHIMBREL_TEST_SEED", "3"))
    print(f"seed {seed}")
    prompt = [random.Random(seed).randrange(3, 150) for _ in range(12)]
    on_cpu = answer(TransformersEngine(precision=Precision.FLOAT32, threads=2), ["cpu", "cpu"])
    engine = TransformersEngine(precision=Precision.FLOAT32, threads=2, device="cuda:0")
    engine.prewarm()
    for _ in range(2):  # the second time with a kept skeleton
        assert answer(engine, devices) == on_cpu


def copy_onto(memory: ckptio.DeviceBuffer, raw: bytes) -> None:
    """Fill memory of this process, which it may not open by its own handle, through torch."""
    import torch

    from services.gpu_worker.engines.partition_tensors import _base

    target = _base(memory)
    target[: len(raw)].copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    torch.cuda.synchronize()


async def test_the_heartbeat_has_the_memory_of_the_gpu(lender: Lender, model: TinyModel) -> None:
    needs_torch_with_cuda()
    import torch

    async with a_worker(lender, model, device="cuda:0") as outside:
        _, size_bytes = torch.cuda.mem_get_info(0)
        assert outside.beat.memory_size_bytes == size_bytes
        assert 0 < outside.beat.memory_free_bytes <= size_bytes
