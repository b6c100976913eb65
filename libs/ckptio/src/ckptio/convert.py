"""Conversion of a published checkpoint, once, when a model is registered (F1), and the plan of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ckptio.errors import PathLike
from ckptio.inputs import Input, opened_input
from ckptio.manifest import MANIFEST_FILE, Manifest
from ckptio.partitioning import Partitioning
from ckptio.plan import CHUNK_SIZE_BYTES
from ckptio.publish import LOCK_WAIT_S, SPACE_MARGIN_BYTES, check_outside, publishing
from ckptio.replaceable import why_not_replaceable
from ckptio.resume import Journal
from ckptio.source import lone_shard_warning
from ckptio.writer import Progress, write_checkpoint


def convert(
    source: PathLike,
    destination: PathLike,
    *,
    source_name: str | None = None,
    revision: str | None = None,
    partition_of: Callable[[str], int] | None = None,
    partitioning: Partitioning | int | None = None,
    chunk_size_bytes: int = CHUNK_SIZE_BYTES,
    overwrite: bool = False,
    resume: bool = False,
    wait_s: float = LOCK_WAIT_S,
    progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Manifest:
    """Converts a model directory or one weight file into a checkpoint at `destination`.

    Safetensors (one file, shards, an adapter) are read, or torch `.bin`, `.pt` and `.pth` files where there
    are none; those in the format before torch 1.6 are in memory one at a time. `source_name` and `revision`
    (default: the path) are recorded in the manifest. `partitioning` is a plan of `ckptio.partitioning`, or a
    number of GPUs to divide the tensors over; `partition_of` gives the GPU of a tensor directly. With
    `resume` a conversion that was stopped or ran out of space leaves a hidden directory, and the next one of
    the same source goes on from there. A second converter of the same destination waits up to `wait_s`.
    Nothing is visible at `destination` until all of it is on the device. Raises `CheckpointExists`,
    `BadDestination` (inside the source), `ConversionInProgress`, `InsufficientSpace`, `Cancelled`, for torch
    files without torch `PackageMissing`, and for a bad source or a plan that does not fit it `MissingFile`,
    `UnsupportedFormat`, `CorruptCheckpoint`, `TruncatedCheckpoint`.
    """
    check_outside(Path(destination), Path(source))
    with opened_input(
        Path(source), source_name=source_name, revision=revision, partitioning=partitioning
    ) as opened:
        opened = _with_gpus(opened, partition_of)
        fingerprint = opened.fingerprint(opened.layouts(), chunk_size_bytes) if resume else None
        with publishing(
            Path(destination),
            marker=MANIFEST_FILE,
            overwrite=overwrite,
            cancelled=cancelled,
            wait_s=wait_s,
            fingerprint=fingerprint,
        ) as directory:
            return write_checkpoint(
                directory,
                opened.content,
                partition_of=opened.gpu_of.__getitem__ if opened.gpu_of else None,
                chunk_size_bytes=chunk_size_bytes,
                progress=progress,
                cancelled=cancelled,
                journal=None if fingerprint is None else Journal(directory, fingerprint),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """A tensor, or a part of one, and the partition it goes to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """What a conversion would write. `required_bytes` has a margin; `available_bytes` may be unknown."""

    source_kind: str
    architecture: str | None
    tensors: tuple[PlannedTensor, ...]
    partition_bytes: tuple[int, ...]
    ties: tuple[tuple[str, ...], ...]
    files: tuple[str, ...]
    weights: tuple[Path, ...]
    required_bytes: int
    available_bytes: int | None
    warnings: tuple[str, ...]


def plan_conversion(
    source: PathLike,
    destination: PathLike | None = None,
    *,
    partition_of: Callable[[str], int] | None = None,
    partitioning: Partitioning | int | None = None,
) -> ConversionPlan:
    """What `convert` would do with these arguments; reads headers and writes nothing.

    Raises what `convert` raises for a bad source.
    """
    if destination is not None:
        check_outside(Path(destination), Path(source))
    with opened_input(Path(source), partitioning=partitioning) as opened:
        opened = _with_gpus(opened, partition_of)
        content = opened.content
        layouts = opened.layouts()
        tensors = [
            PlannedTensor(
                name=member.name,
                dtype=member.dtype,
                shape=member.shape,
                size_bytes=member.size_bytes,
                partition=number,
            )
            for number, layout in enumerate(layouts)
            for placement in layout.placements
            for member in content.extents[placement.extent].members
        ]
        other_bytes = sum(os.stat(path).st_size for _, path in content.other_files)
        required_bytes = sum(layout.padded_bytes for layout in layouts) + other_bytes + SPACE_MARGIN_BYTES
        available_bytes = None if destination is None else _available_bytes(Path(destination))
        return ConversionPlan(
            source_kind=content.source.kind,
            architecture=content.architecture,
            tensors=tuple(tensors),
            partition_bytes=tuple(layout.size_bytes for layout in layouts),
            ties=tuple(
                tuple(member.name for member in extent.members)
                for extent in content.extents
                if len(extent.members) > 1
            ),
            files=tuple(name for name, _ in content.other_files),
            weights=opened.weights,
            required_bytes=required_bytes,
            available_bytes=available_bytes,
            warnings=_warnings(opened, destination, required_bytes, available_bytes),
        )


def _with_gpus(opened: Input, partition_of: Callable[[str], int] | None) -> Input:
    if partition_of is None:
        return opened
    if opened.gpu_of is not None:
        raise ValueError("give partition_of or partitioning, not both")
    names = [extent.members[0].name for extent in opened.content.extents]
    return replace(opened, gpu_of={name: partition_of(name) for name in names})


def _available_bytes(destination: Path) -> int:
    status = os.statvfs(_existing_above(destination))
    return status.f_bavail * status.f_frsize


def _existing_above(destination: Path) -> Path:
    """The nearest directory, or whatever it is, above `destination` that there is already."""
    directory = Path(os.path.abspath(destination)).parent
    while not directory.exists():
        directory = directory.parent
    return directory


def _warnings(
    opened: Input, destination: PathLike | None, required_bytes: int, available_bytes: int | None
) -> tuple[str, ...]:
    warnings = [f"{name}: other weights, not converted and not copied" for name in opened.ignored]
    warnings += [text for text in map(lone_shard_warning, opened.weights) if text and opened.is_one_file]
    if available_bytes is not None and available_bytes < required_bytes:
        missing_bytes = required_bytes - available_bytes
        warnings.append(f"{destination}: {missing_bytes} bytes more must be free before this can work")
    if destination is not None:
        warnings += _destination_warnings(Path(destination))
    return tuple(warnings)


def _destination_warnings(destination: Path) -> list[str]:
    warnings = []
    parent = _existing_above(destination)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        warnings.append(f"{destination}: cannot be made, because {parent} cannot be written to")
    if os.path.lexists(destination):
        reason = why_not_replaceable(destination, MANIFEST_FILE)
        kept = (
            f"{reason}: it is never replaced"
            if reason
            else "exists; it is kept unless overwriting is asked for"
        )
        warnings.append(f"{destination}: {kept}")
    return warnings
