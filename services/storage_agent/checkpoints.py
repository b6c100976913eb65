"""Owns what the agent knows of checkpoints by their small files: their digest, their footprint, parsed once each."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import ckptio
from ckptio.checkpoint import read_checkpoint
from ckptio.manifest import INDEX_FILE, digest_of, partition_file

from services.storage_agent.core.chunks import CheckpointKey, Layout

# Parsed indexes kept in memory. One of 4,000 tensors is a few MB, so this is some hundred MB at the very worst.
CHECKPOINTS_OPEN_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint directory whose small files are parsed and agree with each other."""

    key: CheckpointKey
    path: Path
    manifest: ckptio.Manifest
    index: ckptio.Index


def checkpoint_digest(manifest: ckptio.Manifest) -> str:
    """The digest of a checkpoint's content: weights and every other file, but not where they came from (F7).

    The index holds a digest of every chunk, so its own digest stands for all the weights.
    """
    parts = [manifest.index_digest]
    parts += sorted(f"{file.name}\0{file.size_bytes}\0{file.digest}" for file in manifest.files)
    return digest_of("\n".join(parts).encode())


def layout_of(index: ckptio.Index) -> Layout:
    """How the checkpoint is cut up."""
    return Layout(
        partition_bytes=tuple(part.padded_bytes for part in index.partitions), chunk_size_bytes=index.chunk_size_bytes
    )


def footprint_bytes(manifest: ckptio.Manifest) -> int:
    """What the directory takes of a tier's budget; the manifest itself is a few kB and is not counted."""
    return manifest.padded_bytes + manifest.index_size_bytes + sum(file.size_bytes for file in manifest.files)


def file_sizes(manifest: ckptio.Manifest) -> dict[str, int]:
    """Every file besides the manifest, with the size that it must have."""
    sizes = {file.name: file.size_bytes for file in manifest.files}
    sizes[INDEX_FILE] = manifest.index_size_bytes
    sizes |= {partition_file(k): part.padded_bytes for k, part in enumerate(manifest.partitions)}
    return sizes


class OpenCheckpoints:
    """Parsed small files by key, the least recently used forgotten first."""

    def __init__(self, checkpoints_max: int = CHECKPOINTS_OPEN_MAX) -> None:
        self._checkpoints_max = checkpoints_max
        self._open: OrderedDict[CheckpointKey, Checkpoint] = OrderedDict()

    def get(self, key: CheckpointKey) -> Checkpoint | None:
        checkpoint = self._open.get(key)
        if checkpoint is not None:
            self._open.move_to_end(key)
        return checkpoint

    def put(self, checkpoint: Checkpoint) -> None:
        self._open[checkpoint.key] = checkpoint
        self._open.move_to_end(checkpoint.key)
        if len(self._open) > self._checkpoints_max:
            self._open.popitem(last=False)

    def forget(self, key: CheckpointKey) -> None:
        self._open.pop(key, None)


def open_checkpoint(path: Path, model_id: str) -> Checkpoint:
    """Parse the small files of `path`; raises ckptio's errors and OSError. Blocking: milliseconds for big indexes."""
    manifest, index = read_checkpoint(path)
    key = CheckpointKey(model_id=model_id, checkpoint_digest=checkpoint_digest(manifest))
    return Checkpoint(key=key, path=path, manifest=manifest, index=index)
