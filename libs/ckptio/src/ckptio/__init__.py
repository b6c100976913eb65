"""ckptio: a checkpoint format made for loading, and a loader that reads it at the speed of the device.

Everything pure works without the native extension and without torch; both are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckptio.checkpoint import read_index, read_manifest, verify
from ckptio.convert import ConversionPlan, convert, plan_conversion
from ckptio.copier import ChunkCopier
from ckptio.devices import CudaStatus, DeviceBuffer, cuda_status
from ckptio.errors import (
    BadDestination,
    Cancelled,
    CheckpointExists,
    CkptioError,
    ConversionInProgress,
    CorruptCheckpoint,
    DeviceError,
    InsufficientSpace,
    MissingFile,
    ModelMismatch,
    NativeMissing,
    PackageMissing,
    PoolExhausted,
    ReadFailed,
    SharedTensors,
    TruncatedCheckpoint,
    UnsaveableTensor,
    UnsupportedFormat,
    needing_torch,
)
from ckptio.export import export
from ckptio.index import Index, IndexPartition, Slice, TensorEntry
from ckptio.layout import Layout, read_layout
from ckptio.load_plan import Factors, LoadReport, TierReport
from ckptio.loaded import Loaded
from ckptio.loader import Loader
from ckptio.manifest import FileInfo, Manifest, PartitionInfo, Source
from ckptio.mapping import map_chunks
from ckptio.native import NativeStatus, native_status
from ckptio.partitioning import Partitioning, balanced, by_device_map, by_tensor_parallel
from ckptio.plan import CHUNK_SIZE_BYTES
from ckptio.pool import ChunkPool, PoolReport
from ckptio.reader import Reader, ReadReport
from ckptio.writer import Progress

if TYPE_CHECKING:
    from ckptio import transformers
    from ckptio._native import CancelToken, Mapping
    from ckptio.lazy import Checkpoint, open
    from ckptio.safetensors_face import load_file, save_file
    from ckptio.state_dict import save
    from ckptio.torch import load, tensors

__version__ = "0.1.0"

__all__ = [
    "CHUNK_SIZE_BYTES",
    "BadDestination",
    "CancelToken",
    "Cancelled",
    "Checkpoint",
    "CheckpointExists",
    "ChunkCopier",
    "ChunkPool",
    "CkptioError",
    "ConversionInProgress",
    "ConversionPlan",
    "CorruptCheckpoint",
    "CudaStatus",
    "DeviceBuffer",
    "DeviceError",
    "Factors",
    "FileInfo",
    "Index",
    "IndexPartition",
    "InsufficientSpace",
    "Layout",
    "LoadReport",
    "Loaded",
    "Loader",
    "Manifest",
    "Mapping",
    "MissingFile",
    "ModelMismatch",
    "NativeMissing",
    "NativeStatus",
    "PackageMissing",
    "PartitionInfo",
    "Partitioning",
    "PoolExhausted",
    "PoolReport",
    "Progress",
    "ReadFailed",
    "ReadReport",
    "Reader",
    "SharedTensors",
    "Slice",
    "Source",
    "TensorEntry",
    "TierReport",
    "TruncatedCheckpoint",
    "UnsaveableTensor",
    "UnsupportedFormat",
    "balanced",
    "by_device_map",
    "by_tensor_parallel",
    "convert",
    "cuda_status",
    "export",
    "load",
    "load_file",
    "map_chunks",
    "native_status",
    "open",
    "plan_conversion",
    "read_index",
    "read_layout",
    "read_manifest",
    "save",
    "save_file",
    "tensors",
    "transformers",
    "verify",
]

# Names whose module costs an import of torch, or needs the extension.
_LATE = {
    "Checkpoint": "ckptio.lazy",
    "open": "ckptio.lazy",
    "load_file": "ckptio.safetensors_face",
    "save_file": "ckptio.safetensors_face",
    "CancelToken": "ckptio._native",
    "Mapping": "ckptio._native",
    "load": "ckptio.torch",
    "save": "ckptio.state_dict",
    "tensors": "ckptio.torch",
}


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    if name == "transformers":
        return importlib.import_module("ckptio.transformers")
    if name not in _LATE:
        raise AttributeError(f"module 'ckptio' has no attribute {name!r}")
    if _LATE[name] == "ckptio._native":
        from ckptio.native import require_native

        return getattr(require_native(), name)
    with needing_torch(f"ckptio.{name}"):
        return getattr(importlib.import_module(_LATE[name]), name)
