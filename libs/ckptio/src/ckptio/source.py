"""A published model directory: which files are its weights, and which others belong to it."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ckptio.errors import CorruptCheckpoint, MissingFile, PathLike, UnsupportedFormat
from ckptio.files import FileState, read_bounded
from ckptio.index_rules import check_name
from ckptio.manifest import INDEX_FILE, MANIFEST_FILE, check_file_name
from ckptio.replaceable import is_own_output
from ckptio.stock import StockHeader, StockTensor, read_header

# The index of a sharded checkpoint lists every tensor; a few MB for the largest models there are.
SHARD_INDEX_BYTES_MAX = 64 * 1024 * 1024
CONFIG_BYTES_MAX = 16 * 1024 * 1024
OTHER_FILES_MAX = 10_000

# Weights once more, for other frameworks, and what a training run leaves: not copied with the model.
_OTHER_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "adapter_model.bin",
    "consolidated*.pth",
    "*.gguf",
    "*.onnx",
    "tf_model*.h5",
    "flax_model*.msgpack",
    "rust_model.ot",  # codespell:ignore ot
    "optimizer.pt",
    "training_args.bin",
)
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How a format names its weight files: `preferred` ones win alone, `never` are something else."""

    suffixes: tuple[str, ...]
    index: str
    preferred: tuple[str, ...]
    never: tuple[str, ...] = ()


SAFETENSORS = Naming(
    suffixes=(".safetensors",),
    index="model.safetensors.index.json",
    preferred=("model.safetensors", "adapter_model.safetensors"),
)
TORCH = Naming(
    suffixes=(".bin", ".pt", ".pth"),
    index="pytorch_model.bin.index.json",
    preferred=("pytorch_model.bin", "adapter_model.bin"),
    never=("training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTensor:
    """One tensor to convert, and the file that has its bytes."""

    tensor: StockTensor
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StockSource:
    """All that a published safetensors checkpoint consists of."""

    tensors: tuple[ShardTensor, ...]
    metadata: Mapping[str, str]
    architecture: str | None
    other_files: tuple[tuple[str, Path], ...]
    ignored: tuple[str, ...] = ()
    states: Mapping[Path, FileState]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The weight files of a source; `owner_of` tells the file of each tensor where an index does."""

    files: tuple[Path, ...]
    owner_of: Mapping[str, Path] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """What lies beside the weights: files to copy, by relative name, and other weights, which are ignored."""

    architecture: str | None = None
    other_files: tuple[tuple[str, Path], ...] = ()
    ignored: tuple[str, ...] = ()


def open_source(source: Path) -> StockSource:
    """Finds and checks the safetensors of `source`, a directory or one file, before anything is written.

    Raises `MissingFile` for shards that are named but not there, and the errors of `stock.read_header`.
    """
    found = find_weights(source, SAFETENSORS)
    if found is None:
        if find_weights(source, TORCH) is not None:
            raise UnsupportedFormat(
                source, f"torch weights; convert them first: ckptio convert {source} DESTINATION"
            )
        raise UnsupportedFormat(source, "no safetensors file here; save the model as safetensors first")
    headers = {file: read_header(file) for file in found.files}
    metadata: dict[str, str] = {}
    for header in headers.values():
        metadata.update(header.metadata)
    rest = find_rest(source, found.files)
    return StockSource(
        tensors=_select_tensors(headers, found.owner_of),
        metadata=metadata,
        architecture=rest.architecture,
        other_files=rest.other_files,
        ignored=rest.ignored,
        states={file: header.state for file, header in headers.items() if header.state is not None},
    )


def recorded_ties(stock: StockSource, path: Path) -> dict[str, list[str]]:
    """Kept tensor -> names tied to it: safetensors stores one of them and notes the others as metadata.

    Raises `CorruptCheckpoint` for a name that no tensor can have.
    """
    sizes = {shard.tensor.name: shard.tensor.size_bytes for shard in stock.tensors}
    ties: dict[str, list[str]] = {}
    for name, kept in stock.metadata.items():
        if name == "format" or name in sizes or sizes.get(kept, 0) == 0:
            continue
        try:
            check_name(name)
        except ValueError as error:
            raise CorruptCheckpoint(path, f"__metadata__ ties {kept!r} to a bad name: {error}") from error
        ties.setdefault(kept, []).append(name)
    return ties


def lone_shard_warning(file: Path) -> str:
    """What to know when `file` alone is converted and is named as one of several shards; else empty."""
    match = _SHARD_NAME.fullmatch(file.name)
    if match is None or int(match["count"]) < 2:
        return ""
    return f"{file}: only one of {int(match['count'])} shards; give the directory to convert the whole model"


def find_weights(source: Path, naming: Naming) -> Found | None:
    """The weight files of one format, None when `source` has none. An index wins over stray files.

    Raises FileNotFoundError, `MissingFile` with all that an index or the names of shards promise,
    `CorruptCheckpoint` for a bad index, `UnsupportedFormat` when it is not clear which files to use.
    """
    if not source.exists():
        raise FileNotFoundError(2, "No such model directory or file", os.fspath(source))
    if source.is_file():
        if source.name.endswith(".index.json"):
            raise UnsupportedFormat(
                source, f"an index of shards, not weights; give its directory, {source.parent}"
            )
        return Found(files=(source,))
    if (source / INDEX_FILE).exists() and (source / MANIFEST_FILE).exists():
        raise UnsupportedFormat(source, "is already a ckptio checkpoint; use it as it is")
    indexes = sorted(path for suffix in naming.suffixes for path in source.glob(f"*{suffix}.index.json"))
    preferred = source / naming.index
    if preferred in indexes or len(indexes) == 1:
        index_path = preferred if preferred in indexes else indexes[0]
        owner_of = {name: source / file for name, file in _read_shard_index(index_path).items()}
        files = _existing(sorted(set(owner_of.values())), index_path)
        return Found(files=files, owner_of=owner_of)
    return _find_by_name(source, naming)


def _find_by_name(source: Path, naming: Naming) -> Found | None:
    files = sorted(
        path
        for path in source.iterdir()
        if path.suffix in naming.suffixes and not any(fnmatch(path.name, name) for name in naming.never)
    )
    for name in naming.preferred:
        if source / name in files:
            return Found(files=(source / name,))
    matches = [_SHARD_NAME.fullmatch(file.name) for file in files]
    if files and all(matches):
        return Found(files=_complete_set(source, files, matches))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        kind = naming.suffixes[0].removeprefix(".")
        raise UnsupportedFormat(source, f"several {kind} files and no index that says which to use: {names}")
    return Found(files=tuple(files)) if files else None


def _complete_set(source: Path, files: list[Path], matches: list[re.Match[str] | None]) -> tuple[Path, ...]:
    """All of the files named "-00001-of-00003": without an index only their names tell the count."""
    sets = {(match["stem"], match["count"], match["suffix"]) for match in matches if match is not None}
    if len(sets) > 1:
        raise UnsupportedFormat(source, "shards of several checkpoints and no index that says which to use")
    stem, count, suffix = sets.pop()
    names = [f"{stem}-{number:05d}-of-{count}{suffix}" for number in range(1, int(count) + 1)]
    return _existing([source / name for name in names], files[0])


def _read_shard_index(path: Path) -> dict[str, str]:
    table = read_json_object(path, SHARD_INDEX_BYTES_MAX)
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CorruptCheckpoint(path, "weight_map is not a map of tensor names to file names")
    if not weight_map:
        raise CorruptCheckpoint(path, "weight_map names no tensors")
    for name in set(weight_map.values()):
        try:
            check_file_name(name)
        except ValueError as error:
            raise CorruptCheckpoint(path, f"weight_map: {error}") from error
    return weight_map


def read_json_object(path: Path, size_bytes_max: int, *, is_strict: bool = False) -> dict[str, object]:
    """A JSON object from a small file; raises `CorruptCheckpoint` for anything else.

    With `is_strict` also for a key that occurs twice, of which JSON readers keep the last.
    """
    raw = read_bounded(path, size_bytes_max)
    try:
        table = json.loads(raw, object_pairs_hook=_without_repeats if is_strict else None)
    except (ValueError, RecursionError) as error:
        place = getattr(error, "pos", None) or getattr(error, "start", None) or 0
        raise CorruptCheckpoint(path, f"not valid JSON ({error})", offset_bytes=place) from error
    if not isinstance(table, dict):
        raise CorruptCheckpoint(path, "not a JSON object")
    return table


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} occurs more than once")
    return table


def _select_tensors(
    headers: Mapping[Path, StockHeader], owner_of: Mapping[str, Path] | None
) -> tuple[ShardTensor, ...]:
    found: dict[str, ShardTensor] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if owner_of is not None and tensor.name not in owner_of:
                raise CorruptCheckpoint(file, f"tensor {tensor.name!r} is not in the index of the checkpoint")
            if owner_of is not None and owner_of[tensor.name] != file:
                continue
            if tensor.name in found:
                raise CorruptCheckpoint(
                    file, f"tensor {tensor.name!r} is also in {found[tensor.name].file.name}"
                )
            found[tensor.name] = ShardTensor(tensor=tensor, file=file)
    for name, file in (owner_of or {}).items():
        if name not in found:
            raise CorruptCheckpoint(file, f"tensor {name!r} is missing, the index says it is here")
    return tuple(found.values())


def _read_architecture(source: Path) -> str | None:
    path = source / "config.json"
    if not path.is_file():
        return None
    architectures = read_json_object(path, CONFIG_BYTES_MAX).get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    return None


def find_rest(source: Path, weights: Collection[Path]) -> Rest:
    """All beside `weights` that belongs to a model. Links are followed: hub caches consist of them.

    Directories that are checkpoints or exports of ckptio are left out. Raises `UnsupportedFormat` for a file
    whose name the format needs for itself.
    """
    if source.is_file():
        return Rest()
    found: list[tuple[str, Path]] = []
    ignored: list[str] = []
    for directory, subdirectories, names in os.walk(source):
        subdirectories[:] = sorted(name for name in subdirectories if not name.startswith("."))
        # What ckptio made of this or another model is no part of it.
        own = [name for name in subdirectories if is_own_output(Path(directory) / name)]
        ignored += [(Path(directory) / name).relative_to(source).as_posix() for name in own]
        subdirectories[:] = [name for name in subdirectories if name not in own]
        for name in sorted(names):
            path = Path(directory) / name
            relative = path.relative_to(source).as_posix()
            if name.startswith(".") or path in weights or not stat.S_ISREG(path.stat().st_mode):
                continue
            if any(fnmatch(name, pattern) for pattern in _OTHER_WEIGHTS):
                if not name.endswith(".index.json"):
                    ignored.append(relative)
                continue
            _refuse_reserved(relative, path)
            found.append((relative, path))
            if len(found) > OTHER_FILES_MAX:
                raise UnsupportedFormat(source, f"more than {OTHER_FILES_MAX} files besides the weights")
    return Rest(architecture=_read_architecture(source), other_files=tuple(found), ignored=tuple(ignored))


def _refuse_reserved(relative: str, path: PathLike) -> None:
    try:
        relative.encode()
    except UnicodeEncodeError:
        raise UnsupportedFormat(path, "has a name that is not UTF-8; rename it") from None
    if relative in (MANIFEST_FILE, INDEX_FILE) or re.fullmatch(r"partition_\d+\.bin", relative):
        raise UnsupportedFormat(path, "has a name that ckptio needs for itself; rename it")


def _existing(paths: Sequence[Path], named_by: Path) -> tuple[Path, ...]:
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise MissingFile(missing[0], named_by=named_by, also=missing[1:])
    return tuple(paths)
