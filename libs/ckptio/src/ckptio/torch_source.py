"""Torch checkpoints (.bin, .pt, .pth) as input: state dicts in pickles that may hold nothing but weights.

One shard is open at a time. A shard in torch's zip format is mapped, so its bytes stay the page cache's; one
in the format before torch 1.6 cannot be, and is in memory while it is open.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ckptio.errors import CorruptCheckpoint, TruncatedCheckpoint, UnsupportedFormat
from ckptio.plan import Extent, load_order
from ckptio.source import Found
from ckptio.state_dict import make_extents, plain_tensor
from ckptio.writer import Bytes

_SNIFF_BYTES = 512
_ZIP_START = b"PK\x03\x04"
_PICKLE_START = b"\x80"

# What torch and its unpickler raise for bytes that are no checkpoint.
_BAD_BYTES = (RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardExtent:
    """Extent number `number` of a shard; `payload` opens the shard when its bytes are wanted."""

    file: Path
    number: int
    extent: Extent
    payload: Bytes


def open_torch(found: Found) -> tuple[ShardExtent, ...]:
    """What the shards hold, shard after shard, each in load order; tensors that share bytes are one extent.

    Raises `UnsupportedFormat` for code in a pickle and for what is no tensor, by name, `CorruptCheckpoint`,
    `TruncatedCheckpoint`.
    """
    shards = _Shards(found.owner_of)
    extents: list[ShardExtent] = []
    owner: dict[str, Path] = {}
    for file in found.files:
        for number, extent in enumerate(shards.open(file)[0]):
            for member in extent.members:
                if member.name in owner:
                    other = owner[member.name].name
                    raise CorruptCheckpoint(file, f"tensor {member.name!r} is also in {other}")
                owner[member.name] = file
            payload = _ShardBytes(shards, file, number)
            extents.append(ShardExtent(file=file, number=number, extent=extent, payload=payload))
    for name, file in (found.owner_of or {}).items():
        if name not in owner:
            raise CorruptCheckpoint(file, f"tensor {name!r} is missing, the index says it is here")
    return tuple(_in_order(extents))


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of one torch file, mapped where its format allows that."""
    is_zip = _check_start(path)
    if is_zip:
        _check_zip(path)
    try:
        table = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise _refusal(path, str(error)) from error
    except (*_BAD_BYTES, struct.error) as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise CorruptCheckpoint(path, f"torch cannot read it ({reason}); fetch it again") from error
    return {name: plain_tensor(name, tensor, path) for name, tensor in _state_dict_in(table, path).items()}


class _Shards:
    """Keeps the shard open that was asked for last."""

    def __init__(self, owner_of: Mapping[str, Path] | None) -> None:
        self._owner_of = owner_of
        self._file: Path | None = None
        self._state = (0, 0)
        self._open: tuple[list[Extent], list[Bytes]] = ([], [])

    def open(self, file: Path) -> tuple[list[Extent], list[Bytes]]:
        if file != self._file:
            # The one before goes first: two may be more than fits.
            self._file, self._open = None, ([], [])
            self._state = _state_of(file)
            extents, payloads = make_extents(self._owned(read_state_dict(file), file))
            self._file, self._open = file, (extents, list(payloads))
        return self._open

    def check_unchanged(self) -> None:
        """Raises when the open shard was written to: its mapping would give other bytes, or crash."""
        assert self._file is not None
        if _state_of(self._file) != self._state:
            raise CorruptCheckpoint(self._file, "the file changed while it was read; start again")

    def _owned(self, tensors: Mapping[str, torch.Tensor], file: Path) -> Mapping[str, torch.Tensor]:
        if self._owner_of is None:
            return tensors
        for name in tensors:
            if name not in self._owner_of:
                raise CorruptCheckpoint(file, f"tensor {name!r} is not in the index of the checkpoint")
        return {name: tensor for name, tensor in tensors.items() if self._owner_of[name] == file}


@dataclass(frozen=True, slots=True)
class _ShardBytes:
    """The bytes of one extent of a shard that may have to be opened first."""

    shards: _Shards
    file: Path
    number: int

    def read_into(self, target: memoryview, offset_bytes: int) -> None:
        payload = self.shards.open(self.file)[1][self.number]
        self.shards.check_unchanged()
        payload.read_into(target, offset_bytes)


def _state_of(file: Path) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _in_order(extents: Iterable[ShardExtent]) -> list[ShardExtent]:
    """By shard, so that each is opened once for writing, and in load order within it."""
    keyed = [(load_order(item.extent.members[0].name), item) for item in extents]
    first: dict[Path, tuple[object, ...]] = {}
    for key, item in keyed:
        first[item.file] = min(first.get(item.file, key), key)
    keyed.sort(key=lambda pair: (first[pair[1].file], os.fspath(pair[1].file), pair[0]))
    return [item for _, item in keyed]


def _check_start(path: Path) -> bool:
    """Whether the file is a zip archive; raises for what is no torch file at all."""
    with open(path, "rb") as file:
        start = file.read(_SNIFF_BYTES)
    text = start.lstrip().lower()
    if not start:
        raise TruncatedCheckpoint(path, expected_bytes=len(_ZIP_START), actual_bytes=0)
    if text.startswith(b"version https://git-lfs"):
        raise UnsupportedFormat(path, "a git-lfs pointer, not the file itself; fetch it with `git lfs pull`")
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        raise UnsupportedFormat(path, "a web page, not a torch file; the download went wrong, repeat it")
    if start.startswith(b"GGUF"):
        raise UnsupportedFormat(path, "a GGUF file, not a torch file; save the model as safetensors first")
    if not start.startswith((_ZIP_START, _PICKLE_START)):
        raise UnsupportedFormat(path, "not a torch file: neither a zip archive nor a pickle")
    return start.startswith(_ZIP_START)


def _check_zip(path: Path) -> None:
    """The directory of the archive is there and names stored records: only those can be mapped."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        # NotImplementedError is what zipfile says of a version or method that it does not know.
        size_bytes = os.stat(path).st_size
        reason = f"the zip archive is cut off or damaged ({error}); fetch it again"
        raise CorruptCheckpoint(path, reason, offset_bytes=size_bytes) from error
    names = {record.filename.rpartition("/")[2] for record in records}
    if "constants.pkl" in names:
        raise UnsupportedFormat(path, "a TorchScript program, not weights; save its state dict instead")
    if "data.pkl" not in names:
        raise UnsupportedFormat(path, "a zip archive, but torch did not write it: no data.pkl inside")
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED:
            raise UnsupportedFormat(
                path, f"{record.filename} is compressed, torch stores it plainly; save it with torch again"
            )


def _refusal(path: Path, message: str) -> UnsupportedFormat | CorruptCheckpoint:
    wanted = re.search(r"(?:GLOBAL|class) (\S+)", message)
    if wanted is None:
        reason = message.strip().split("\n")[-1][:200]
        return CorruptCheckpoint(path, f"the pickle is not valid ({reason}); fetch it again")
    return UnsupportedFormat(
        path,
        f"its pickle would run {wanted[1]}, and weights need no code, so it is not loaded. If you trust its "
        "origin, load it in torch yourself and save the state dict as safetensors",
    )


def _state_dict_in(table: object, path: Path) -> dict[str, object]:
    """The state dict that was saved: the table itself, or its entry "state_dict" when it has no tensors."""
    if not isinstance(table, dict):
        raise UnsupportedFormat(path, f"holds a {type(table).__name__}, not a state dict; save one instead")
    inner = table.get("state_dict")
    has_tensors = any(isinstance(value, torch.Tensor) for value in table.values())
    if isinstance(inner, dict) and not has_tensors:
        table = inner
    for name in table:
        if not isinstance(name, str):
            raise UnsupportedFormat(path, f"entry {name!r} has no name that is text: this is no state dict")
    return table
