"""The manifest of a checkpoint: all that a scheduler needs to know without touching weights (F4)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import xxhash

from ckptio.dtypes import DTYPES
from ckptio.errors import CorruptCheckpoint, PathLike, UnsupportedFormat
from ckptio.index import Index
from ckptio.index_codec import FORMAT_VERSION, INDEX_BYTES_MAX
from ckptio.index_rules import PARTITIONS_MAX, TENSORS_MAX
from ckptio.plan import PADDING_BYTES, SIZE_BYTES_MAX, round_up

MANIFEST_FORMAT = "ckptio"
MANIFEST_FILE = "manifest.json"
INDEX_FILE = "index.msgpack"

# The limit of every file system that matters.
FILE_NAME_BYTES_MAX = 255

# A manifest lists one line per copied file; a few kB is usual, and more than this is not one.
MANIFEST_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the bytes came from: `name` a path or hub id, `kind` "safetensors", "torch" or "state_dict"."""

    name: str
    kind: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInfo:
    """The bytes for one GPU: true size, and size of the file."""

    file: str
    size_bytes: int
    padded_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """A file that travels with the weights (config, tokenizer, …); `name` is relative, with slashes."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint at a glance; `dtypes` are those that occur."""

    partitions: tuple[PartitionInfo, ...]
    tensor_count: int
    parameter_count: int
    dtypes: tuple[str, ...]
    architecture: str | None
    source: Source
    index_size_bytes: int
    index_digest: str
    files: tuple[FileInfo, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def total_bytes(self) -> int:
        """True bytes of all partitions: `n` of the loading-time estimate."""
        return sum(partition.size_bytes for partition in self.partitions)

    @property
    def padded_bytes(self) -> int:
        """Bytes of all partition files."""
        return sum(partition.padded_bytes for partition in self.partitions)

    def to_json(self) -> str:
        """Canonical text; its last field is a digest of all others."""
        fields = {
            "format": MANIFEST_FORMAT,
            "format_version": self.format_version,
            "total_bytes": self.total_bytes,
        }
        fields |= {key: value for key, value in asdict(self).items() if key != "format_version"}
        return json.dumps(fields | {"digest": _digest_of(fields)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, path: PathLike = MANIFEST_FILE) -> Manifest:
        """The manifest in `text`; `path` is only for messages.

        Raises `UnsupportedFormat` for something else or another version, `CorruptCheckpoint` for a damaged
        one.
        """
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpoint(path, f"not valid JSON ({error})") from error
        if not isinstance(fields, dict) or fields.get("format") != MANIFEST_FORMAT:
            raise UnsupportedFormat(path, "this is not a manifest of ckptio; convert the model first")
        if fields.get("format_version") != FORMAT_VERSION:
            version = fields.get("format_version")
            raise UnsupportedFormat(path, f"format version {version!r}; this ckptio reads {FORMAT_VERSION}")
        if not _has_own_digest(fields):
            raise CorruptCheckpoint(
                path, "the manifest does not match its own digest; it was damaged or edited"
            )
        try:
            return _from_fields(fields)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(path, f"the manifest is not valid ({error!r})") from error


def make_manifest(
    index: Index, raw_index: bytes, *, architecture: str | None, source: Source, files: tuple[FileInfo, ...]
) -> Manifest:
    """The manifest of a checkpoint whose encoded index is `raw_index`."""
    return Manifest(
        partitions=tuple(
            PartitionInfo(file=partition_file(k), size_bytes=part.size_bytes, padded_bytes=part.padded_bytes)
            for k, part in enumerate(index.partitions)
        ),
        tensor_count=index.tensor_count,
        parameter_count=index.parameter_count,
        dtypes=tuple(sorted(set(index.dtype))),
        architecture=architecture,
        source=source,
        index_size_bytes=len(raw_index),
        index_digest=digest_of(raw_index),
        files=files,
    )


def partition_file(partition: int) -> str:
    """File name of a partition."""
    return f"partition_{partition}.bin"


def digest_of(raw: bytes | memoryview) -> str:
    """A digest as manifests spell it."""
    return spell_digest(xxhash.xxh3_64_intdigest(raw))


def spell_digest(digest: int) -> str:
    """Text form of an XXH3-64 digest."""
    return f"xxh3:{digest:016x}"


def check_file_name(name: str) -> None:
    """Raises ValueError when `name` could leave the directory it is relative to, or is no plain file name."""
    pieces = name.split("/")
    if any(len(piece.encode()) > FILE_NAME_BYTES_MAX for piece in pieces):
        raise ValueError(f"file name {name[:40]!r}… is longer than {FILE_NAME_BYTES_MAX} bytes")
    if not name or "\\" in name or "\0" in name or any(piece in ("", ".", "..") for piece in pieces):
        raise ValueError(f"file name {name!r} is not a plain relative name")


def check_agreement(manifest: Manifest, index: Index, path: PathLike) -> None:
    """Raises `CorruptCheckpoint` when the manifest and the index of one checkpoint disagree."""
    expected = replace(
        make_manifest(index, b"", architecture=None, source=manifest.source, files=manifest.files),
        architecture=manifest.architecture,
        index_size_bytes=manifest.index_size_bytes,
        index_digest=manifest.index_digest,
    )
    if manifest != expected:
        raise CorruptCheckpoint(path, "the manifest and the index disagree about tensors or partitions")


def _has_own_digest(fields: dict[str, Any]) -> bool:
    recorded = fields.pop("digest", None)
    return bool(recorded == _digest_of(fields))


def _digest_of(fields: dict[str, Any]) -> str:
    return digest_of(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def _from_fields(fields: dict[str, Any]) -> Manifest:
    partitions = tuple(_partition(k, item) for k, item in enumerate(fields["partitions"]))
    if not 1 <= len(partitions) <= PARTITIONS_MAX:
        raise ValueError(f"{len(partitions)} partitions")
    files = tuple(_file(item) for item in fields["files"])
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file occurs twice")
    architecture = fields["architecture"]
    manifest = Manifest(
        partitions=partitions,
        tensor_count=_integer(fields["tensor_count"], TENSORS_MAX),
        parameter_count=_integer(fields["parameter_count"], SIZE_BYTES_MAX),
        dtypes=tuple(_dtype(name) for name in fields["dtypes"]),
        architecture=None if architecture is None else _text(architecture),
        source=_source(fields["source"]),
        index_size_bytes=_integer(fields["index_size_bytes"], INDEX_BYTES_MAX),
        index_digest=_text(fields["index_digest"]),
        files=files,
    )
    if fields["total_bytes"] != manifest.total_bytes:
        raise ValueError(f"total_bytes {fields['total_bytes']} is not the sum of the partitions")
    return manifest


def _partition(number: int, item: dict[str, Any]) -> PartitionInfo:
    info = PartitionInfo(
        file=_text(item["file"]),
        size_bytes=_integer(item["size_bytes"], SIZE_BYTES_MAX - PADDING_BYTES),
        padded_bytes=_integer(item["padded_bytes"], SIZE_BYTES_MAX),
    )
    if info.file != partition_file(number):
        raise ValueError(f"partition {number} has file name {info.file!r}")
    if info.padded_bytes != round_up(info.size_bytes, PADDING_BYTES):
        raise ValueError(f"partition {number} has padded size {info.padded_bytes}")
    return info


def _file(item: dict[str, Any]) -> FileInfo:
    info = FileInfo(
        name=_text(item["name"]),
        size_bytes=_integer(item["size_bytes"], SIZE_BYTES_MAX),
        digest=_text(item["digest"]),
    )
    check_file_name(info.name)
    return info


def _source(item: dict[str, Any]) -> Source:
    revision = item["revision"]
    return Source(
        name=_text(item["name"]),
        kind=_text(item["kind"]),
        revision=None if revision is None else _text(revision),
    )


def _dtype(name: object) -> str:
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}")
    return str(name)


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is not text")
    value.encode()  # JSON can spell half a character, which nothing can write; that is a ValueError too
    return value


def _integer(value: object, maximum: int) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        raise ValueError(f"{value!r} is not a number from 0 to {maximum}")
    return value
