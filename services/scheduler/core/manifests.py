"""Owns what the scheduler reads in a checkpoint's manifest; the rest of it is for others (F4)."""

from __future__ import annotations

import msgspec


class PartitionFacts(msgspec.Struct, frozen=True, kw_only=True):
    size_bytes: int


class ManifestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters, architecture, and the bytes of each partition in their order."""

    parameter_count: int
    architecture: str | None
    partitions: tuple[PartitionFacts, ...] = ()

    @property
    def partition_bytes(self) -> tuple[int, ...]:
        return tuple(partition.size_bytes for partition in self.partitions)


def facts_of(manifest: bytes) -> ManifestFacts:
    """Raises msgspec.DecodeError for what is no manifest."""
    return msgspec.json.decode(manifest, type=ManifestFacts)
