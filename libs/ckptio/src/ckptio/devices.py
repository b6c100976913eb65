"""GPUs: whether the CUDA runtime is there, and memory of a GPU (or of the host, with the same face)."""

from __future__ import annotations

import importlib.util
import os
import re
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptio.errors import DeviceError
from ckptio.native import native_status, require_native

if TYPE_CHECKING:
    from ckptio._native import DeviceMemory

# Names another library to load as the CUDA runtime, before all others.
RUNTIME_VARIABLE = "CKPTIO_CUDA_RUNTIME"

_RUNTIMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so")
_HOST = -1
NO_DEVICE = 100  # cudaErrorNoDevice
_CUDA_NAME = re.compile(r"cuda(?::(\d{1,4}))?")
_load_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaStatus:
    """`reason` is empty when there is at least one GPU to load onto."""

    device_count: int
    reason: str = ""


_status: CudaStatus | None = None


def cuda_status() -> CudaStatus:
    """Whether this process can load onto GPUs and, if not, why. Looks again as long as it can not."""
    global _status
    with _load_lock:
        if _status is None:
            found = _find_gpus()
            if found.reason:
                return found
            _status = found
        return _status


def _find_gpus() -> CudaStatus:
    if not native_status().is_loaded:
        return CudaStatus(device_count=0, reason=native_status().reason)
    native = require_native()
    names = _candidates()
    # What somebody else in this process has loaded already comes first: two runtimes do not share contexts.
    if any(not native.load_cuda(name, is_loaded_only=True) for name in names):
        return CudaStatus(device_count=native.cuda_device_count())
    reasons = []
    for name in names:
        reason = native.load_cuda(name)
        if not reason:
            return CudaStatus(device_count=native.cuda_device_count())
        reasons.append(reason)
    return CudaStatus(device_count=0, reason="no CUDA runtime that sees a GPU: " + "; ".join(reasons))


class DeviceBuffer:
    """Memory of one GPU, or of the host, that a checkpoint is loaded into."""

    def __init__(self, memory: DeviceMemory, name: str, *, is_ours: bool) -> None:
        self._memory = memory
        self.device = name
        self._is_ours = is_ours

    @classmethod
    def allocate(cls, device: str, size_bytes: int) -> DeviceBuffer:
        """New memory on "cuda:0" or "host". Raises `DeviceError`, MemoryError."""
        number = device_number(device)
        return cls(require_native().DeviceMemory.allocate(number, max(size_bytes, 1)), device, is_ours=True)

    @classmethod
    def open(cls, device: str, handle: bytes, size_bytes: int) -> DeviceBuffer:
        """Memory that another process allocated on the same GPU; `handle` is its `ipc_handle()`.

        The other process keeps it allocated as long as this buffer is open. Raises `DeviceError`.
        """
        number = _gpu_number(device)
        return cls(require_native().DeviceMemory.open(number, handle, size_bytes), device, is_ours=False)

    @classmethod
    def borrow(cls, device: str, address: int, size_bytes: int, owner: Any) -> DeviceBuffer:
        """Memory of `owner`, such as a tensor, which is kept alive; `address` in the device's terms."""
        number = device_number(device)
        memory = require_native().DeviceMemory.borrow(number, address, size_bytes, owner)
        return cls(memory, device, is_ours=False)

    @property
    def memory(self) -> DeviceMemory:
        """The native object. Raises ValueError when closed."""
        if self._memory.is_closed:
            raise ValueError(f"the buffer on {self.device} is closed")
        return self._memory

    @property
    def size_bytes(self) -> int:
        """Size of the memory."""
        return self.memory.size_bytes

    @property
    def address(self) -> int:
        """Where it starts, in the device's terms."""
        return self.memory.address

    def ipc_handle(self) -> bytes:
        """What another process needs to `open` this memory: 64 bytes.

        Raises `DeviceError`, and ValueError for host memory and for memory that this object did not allocate:
        a handle is of a whole allocation, and a tensor may begin anywhere in one.
        """
        _gpu_number(self.device)
        if not self._is_ours:
            raise ValueError("only memory from DeviceBuffer.allocate can be given to another process")
        return self.memory.ipc_handle()

    def read(self, offset_bytes: int = 0, size_bytes: int | None = None) -> bytearray:
        """A copy of a range in host memory. Raises `DeviceError`."""
        target = bytearray(self.size_bytes - offset_bytes if size_bytes is None else size_bytes)
        self.memory.read_into(target, offset_bytes)
        return target

    def close(self) -> None:
        """Gives the memory back; idempotent. Raises BufferError while a load uses it."""
        self._memory.close()

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)
        if memory is not None and not memory.is_closed:
            warnings.warn(f"unclosed buffer on {self.device}", ResourceWarning, source=self, stacklevel=2)


def device_number(device: str) -> int:
    """The GPU of "cuda" or "cuda:1", -1 for "host" and "cpu".

    Raises ValueError for another name, `DeviceError` when there is no such GPU.
    """
    return _HOST if device in ("host", "cpu") else _gpu_number(device)


def device_error(code: int, operation: str) -> DeviceError:
    """The error for a code of the CUDA runtime, in the runtime's words."""
    return DeviceError(operation, code=code, description=require_native().describe_cuda_error(code))


def _gpu_number(device: str) -> int:
    match = _CUDA_NAME.fullmatch(device)
    if match is None:
        raise ValueError(f"device {device!r}: a GPU is named cuda or cuda:N here, host memory host")
    number = int(match[1] or 0)
    status = cuda_status()
    if number >= status.device_count:
        reason = status.reason or f"there are {status.device_count} GPUs"
        raise DeviceError(f"use of {device}", code=NO_DEVICE, description=reason)
    return number


def _candidates() -> list[str]:
    named = os.environ.get(RUNTIME_VARIABLE)
    return [named] if named else [*_RUNTIMES, *_packaged_runtimes()]


def _packaged_runtimes() -> list[str]:
    """Runtimes that came as Python packages, as those of torch do."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    return [os.fspath(path) for root in roots for path in sorted(Path(root).glob("*/lib/libcudart.so*"))]
