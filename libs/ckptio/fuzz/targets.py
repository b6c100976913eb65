"""What is fuzzed: the four readers of untrusted bytes, each with what must hold whatever it is given.

A target returns whether the input was accepted. Only errors of ckptio may come out of a reader, and what is
accepted must survive being written and read again. No fuzzer is needed here: tests replay the corpus.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from ckptio.errors import CkptioError
from ckptio.index_codec import decode, encode
from ckptio.manifest import Manifest, digest_of
from ckptio.source import SAFETENSORS, find_weights
from ckptio.stock import LENGTH_BYTES, encode_header, parse_header, read_header

SHARD = "model-00001-of-00001.safetensors"


def manifest(raw: bytes) -> bool:
    """A manifest as it is, and again with a digest that fits: otherwise that alone stops every mutant."""
    is_accepted = _manifest(raw)
    try:
        fields = json.loads(raw)
        fields.pop("digest", None)
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        signed = json.dumps(fields | {"digest": digest_of(text.encode())}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return is_accepted
    return _manifest(signed) or is_accepted


def _manifest(raw: bytes) -> bool:
    try:
        accepted = Manifest.from_json(raw, "manifest.json")
    except CkptioError:
        return False
    again = Manifest.from_json(accepted.to_json().encode(), "manifest.json")
    assert again == accepted
    assert 0 <= accepted.total_bytes <= accepted.padded_bytes
    return True


def index(raw: bytes) -> bool:
    """An index: equal after encoding again, every tensor inside its partition."""
    try:
        accepted = decode(raw, "index.msgpack")
    except CkptioError:
        return False
    assert decode(encode(accepted), "index.msgpack") == accepted
    for entry in accepted.values():
        assert entry.offset_bytes + entry.size_bytes <= accepted.partitions[entry.partition].size_bytes
    assert accepted.parameter_count >= 0
    return True


def stock_header(raw: bytes) -> bool:
    """A safetensors file: every tensor inside it, and an equal header when written again."""
    descriptor = os.memfd_create("model.safetensors")
    try:
        os.write(descriptor, raw)
        accepted = read_header(Path(f"/proc/self/fd/{descriptor}"))
    except CkptioError:
        return False
    finally:
        os.close(descriptor)
    end = max((tensor.offset_bytes + tensor.size_bytes for tensor in accepted.tensors), default=0)
    assert end <= len(raw)
    rows = [(tensor.name, tensor.dtype, tensor.shape) for tensor in accepted.tensors]
    header = encode_header(rows, accepted.metadata)
    data_bytes = sum(tensor.size_bytes for tensor in accepted.tensors)
    again = parse_header(header[LENGTH_BYTES:], len(header) + data_bytes, "model.safetensors")
    assert sorted((t.name, t.dtype, t.shape) for t in again.tensors) == sorted(rows)
    return True


class ShardIndex:
    """A shard index in a directory that has one shard; what it accepts is files of that directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / SHARD).write_bytes(encode_header([], {}))

    def __call__(self, raw: bytes) -> bool:
        (self._directory / SAFETENSORS.index).write_bytes(raw)
        try:
            found = find_weights(self._directory, SAFETENSORS)
        except CkptioError:
            return False
        assert found is not None
        assert found.owner_of is not None
        for file in found.files:
            assert file.resolve().is_relative_to(self._directory.resolve())
        return True


def all_targets(directory: Path) -> dict[str, Callable[[bytes], bool]]:
    """The targets by the name of their corpus; `directory` is an empty one to work in."""
    return {
        "manifest": manifest,
        "index": index,
        "stock_header": stock_header,
        "shard_index": ShardIndex(directory),
    }
