"""Owns torch's view of what was lent: tensors over mapped chunks and over memory of GPUs, without a copy."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import ckptio
import torch
from ckptio.views import base_of, make_views
from torch import Tensor

from services.gpu_worker.engines.engine import EngineError

if TYPE_CHECKING:
    from ckptio import DeviceBuffer, Index

    from services.gpu_worker.engines.engine import PartitionMemory


class _DeviceArray:
    """All bytes of a buffer, in the protocol by which libraries show each other memory of a GPU (version 3).

    Torch keeps this object, and so the buffer, as long as a tensor sees the memory. Whoever closes the buffer before
    that frees it under the tensors.
    """

    def __init__(self, buffer: DeviceBuffer) -> None:
        self._buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": (buffer.size_bytes,),
            "typestr": "|u1",
            # Torch takes only what may be written to.
            "data": (buffer.address, False),
            "strides": None,
            "version": 3,
        }


def partition_tensors(index: Index, memories: Many[PartitionMemory]) -> dict[str, Tensor]:
    """Every tensor by its name, each where its partition is. Raises EngineError when torch cannot see a GPU."""
    if not any(isinstance(memory, ckptio.DeviceBuffer) for memory in memories):
        return ckptio.tensors(index, [memory for memory in memories if not isinstance(memory, ckptio.DeviceBuffer)])
    return make_views(index, [_base(memory) for memory in memories])


def _base(memory: PartitionMemory) -> Tensor:
    """All bytes of a partition as one tensor."""
    if not isinstance(memory, ckptio.DeviceBuffer):
        return base_of(memory.pin(), memory.size_bytes)
    if not torch.cuda.is_available():
        raise EngineError(f"torch {torch.__version__} sees no GPU; install a build of torch with CUDA on this worker")
    # Before torch is asked whose memory this is: it starts CUDA late.
    torch.cuda.init()  # type: ignore[no-untyped-call]
    base = torch.as_tensor(_DeviceArray(memory), device=torch.device(memory.device))
    # Told another device than the memory's, torch would make a copy in silence, and the agent would fill the original.
    assert base.data_ptr() == memory.address
    return base
