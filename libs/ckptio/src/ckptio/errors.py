"""The errors of ckptio: one root, fields first, text built from the fields."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PathLike = str | os.PathLike[str]


class CkptioError(Exception):
    """Root of every error that ckptio raises on purpose, besides `OSError`."""


class CorruptCheckpoint(CkptioError):
    """The bytes at `offset_bytes` of `path` are not what was written."""

    def __init__(
        self, path: PathLike, reason: str, *, offset_bytes: int = 0, chunk_index: int | None = None
    ) -> None:
        self.path = Path(path)
        self.reason = reason
        self.offset_bytes = offset_bytes
        self.chunk_index = chunk_index
        chunk = "" if chunk_index is None else f" (chunk {chunk_index})"
        super().__init__(f"{self.path}: {reason}, at offset {offset_bytes}{chunk}")


class TruncatedCheckpoint(CkptioError):
    """`path` ends early: `actual_bytes` are there, `expected_bytes` were written."""

    def __init__(self, path: PathLike, *, expected_bytes: int, actual_bytes: int) -> None:
        self.path = Path(path)
        self.expected_bytes = expected_bytes
        self.actual_bytes = actual_bytes
        self.offset_bytes = actual_bytes
        super().__init__(
            f"{self.path}: truncated at offset {actual_bytes}: {expected_bytes} bytes expected, "
            f"{expected_bytes - actual_bytes} missing"
        )


class ReadFailed(OSError):
    """The device gave up on `path` at `offset_bytes`, in its chunk `chunk_index` (EIO)."""

    def __init__(self, path: PathLike, code: int, *, offset_bytes: int, chunk_index: int) -> None:
        super().__init__(code, f"{os.strerror(code)} (at offset {offset_bytes})", os.fspath(path))
        self.path = Path(path)
        self.offset_bytes = offset_bytes
        self.chunk_index = chunk_index


class UnsupportedFormat(CkptioError):
    """`path` is something that ckptio does not read; `reason` says what it is and what to do."""

    def __init__(self, path: PathLike, reason: str, *, offset_bytes: int = 0) -> None:
        self.path = Path(path)
        self.reason = reason
        self.offset_bytes = offset_bytes
        super().__init__(f"{self.path}: {reason}")


class MissingFile(CkptioError):
    """A file that another one promises is not there, nor are the files `also`, of the same directory."""

    def __init__(self, path: PathLike, *, named_by: PathLike, also: Sequence[PathLike] = ()) -> None:
        self.path = Path(path)
        self.named_by = Path(named_by)
        self.also = tuple(Path(other) for other in also)
        names = ", ".join([os.fspath(self.path), *(other.name for other in self.also)])
        what = "it" if not also else "them"
        super().__init__(f"{names}: missing, named by {self.named_by}; fetch {what} and try again")


class CheckpointExists(CkptioError):
    """The destination is taken, and replacing it was not asked for or would not be safe."""

    def __init__(self, path: PathLike, reason: str = "exists; pass overwrite to replace it") -> None:
        self.path = Path(path)
        self.reason = reason
        super().__init__(f"{self.path}: {reason}")


class ConversionInProgress(CkptioError):
    """Another process is writing the same destination and did not finish within `wait_s`."""

    def __init__(self, path: PathLike, *, wait_s: float) -> None:
        self.path = Path(path)
        self.wait_s = wait_s
        super().__init__(f"{self.path}: another process is writing it; gave up after {wait_s:g} s")


class InsufficientSpace(CkptioError):
    """The file system of `path` cannot hold what is about to be written."""

    def __init__(self, path: PathLike, *, required_bytes: int, available_bytes: int) -> None:
        self.path = Path(path)
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes
        super().__init__(
            f"{self.path}: {required_bytes} bytes needed, {available_bytes} free; "
            f"free {required_bytes - available_bytes} more"
        )


class PoolExhausted(CkptioError):
    """A chunk pool has fewer free chunks than were asked for."""

    def __init__(self, path: PathLike, *, requested_chunks: int, free_chunks: int) -> None:
        self.path = Path(path)
        self.requested_chunks = requested_chunks
        self.free_chunks = free_chunks
        super().__init__(f"{self.path}: {requested_chunks} chunks asked for, {free_chunks} free")


class Cancelled(CkptioError):
    """The caller cancelled the operation; `done_bytes` had been handled by then."""

    def __init__(self, path: PathLike, *, done_bytes: int = 0) -> None:
        self.path = Path(path)
        self.done_bytes = done_bytes
        super().__init__(f"{self.path}: cancelled after {done_bytes} bytes")


class DeviceError(CkptioError):
    """A call of the GPU runtime failed with `code`, which `description` explains."""

    def __init__(self, operation: str, *, code: int, description: str = "") -> None:
        self.operation = operation
        self.code = code
        self.description = description
        words = f": {description}" if description else ""
        super().__init__(f"{operation} failed with device error {code}{words}")


class NativeMissing(CkptioError):
    """The native extension is needed here and did not load."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the native part of ckptio is missing: {reason}")


class UnsaveableTensor(UnsupportedFormat, ValueError):
    """Safetensors does not hold the tensor `name`; a ValueError too, which is what that package raises."""

    def __init__(self, path: PathLike, name: str, reason: str) -> None:
        self.name = name
        super().__init__(path, f"{name}: {reason}")


class SharedTensors(UnsupportedFormat, RuntimeError):
    """The tensors `names` share bytes, which safetensors does not hold; a RuntimeError as in that package."""

    def __init__(self, path: PathLike, names: tuple[str, ...]) -> None:
        self.names = names
        listed = ", ".join(names[:8])
        super().__init__(
            path, f"{listed} share memory, and safetensors would store each; ckptio.save keeps them shared"
        )


class ModelMismatch(CkptioError):
    """The tensors of `path` are not those of the model that its config describes."""

    def __init__(
        self,
        path: PathLike,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        misshapen: tuple[str, ...] = (),
    ) -> None:
        self.path = Path(path)
        self.missing = missing
        self.unexpected = unexpected
        self.misshapen = misshapen
        kinds = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
        listed = "; ".join(
            f"{kind} ({len(names)}): {', '.join(names[:8])}{', …' if len(names) > 8 else ''}"
            for kind, names in kinds.items()
            if names
        )
        super().__init__(f"{self.path}: the tensors do not fit the model of its config: {listed}")


class BadDestination(CkptioError):
    """Nothing is written to `path`; `reason` says why it is the wrong place, and what to do."""

    def __init__(self, path: PathLike, reason: str) -> None:
        self.path = Path(path)
        self.reason = reason
        super().__init__(f"{self.path}: {reason}")


class PackageMissing(CkptioError, ImportError):
    """What was asked for needs the package `package`, which is not installed."""

    def __init__(self, purpose: str, *, package: str, extra: str = "") -> None:
        self.purpose = purpose
        self.package = package
        what = f"'ckptio[{extra}]'" if extra else package
        super().__init__(f"{purpose} needs {package}; install it with: pip install {what}")
        self.name = package


@contextmanager
def needing_torch(purpose: str) -> Iterator[None]:
    """Imports of torch inside, where all else works without it: its absence is `PackageMissing`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise PackageMissing(purpose, package="torch", extra="torch") from error
