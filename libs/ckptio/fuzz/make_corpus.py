"""Makes the corpus: real encodings, small, and mutants of them that each reach another rule."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgpack

import ckptio
from ckptio.index import IndexPartition
from ckptio.index_codec import encode
from ckptio.stock import encode_header

CORPUS = Path(__file__).parent / "corpus"
PAGE_BYTES = 4096

Named = Iterator[tuple[str, bytes]]


def main() -> None:
    """Writes every input to its place, and removes what was there."""
    shutil.rmtree(CORPUS, ignore_errors=True)
    sources = {
        "manifest": manifests(),
        "index": indexes(),
        "stock_header": stock_headers(),
        "shard_index": shard_indexes(),
    }
    for target, inputs in sources.items():
        (CORPUS / target).mkdir(parents=True)
        for name, raw in inputs:
            (CORPUS / target / name).write_bytes(raw)


def manifests() -> Named:
    with tempfile.TemporaryDirectory() as directory:
        source, converted = Path(directory, "source"), Path(directory, "converted")
        source.mkdir()
        (source / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (source / "model.safetensors").write_bytes(encode_header([("w", "uint8", (3,))], {}) + b"abc")
        ckptio.convert(source, converted, source_name="org/model", revision="main")
        raw = (converted / "manifest.json").read_bytes()
    fields = json.loads(raw)
    yield "real", raw
    yield "cut", raw[: len(raw) // 2]
    yield "empty", b""
    yield "array", b"[]"
    yield "deep", b"[" * 1200
    changes: dict[str, dict[str, object]] = {
        "version": {"format_version": 2},
        "format": {"format": "other"},
        "total": {"total_bytes": 4},
        "count": {"tensor_count": -1},
        "huge": {"tensor_count": 2**63},
        "float": {"tensor_count": 1.0},
        "dtype": {"dtypes": ["uint9"]},
        "dtypes": {"dtypes": "uint8"},
        "partitions": {"partitions": []},
        "partition": {"partitions": [{"file": "../x", "size_bytes": 3, "padded_bytes": 4096}]},
        "padded": {"partitions": [{"file": "partition_0.bin", "size_bytes": 3, "padded_bytes": 3}]},
        "files": {"files": [{"name": "/etc/passwd", "size_bytes": 1, "digest": ""}]},
        "twice": {"files": [{"name": "a", "size_bytes": 1, "digest": ""}] * 2},
        "null": {"source": None},
    }
    for name, change in changes.items():
        yield name, json.dumps(fields | change, separators=(",", ":")).encode()


def an_index() -> ckptio.Index:
    """Two partitions, a tie, a view with a stride, a scalar, a tensor without elements."""
    return ckptio.Index(
        chunk_size_bytes=PAGE_BYTES,
        partitions=(
            IndexPartition(size_bytes=5000, padded_bytes=2 * PAGE_BYTES, digests=(1, 2)),
            IndexPartition(size_bytes=4, padded_bytes=PAGE_BYTES, digests=(3,)),
        ),
        names=("embed", "head", "view", "none", "scalar"),
        partition=(0, 0, 0, 0, 1),
        offset_bytes=(0, 0, 2, 4864, 0),
        size_bytes=(4800, 4800, 24, 0, 4),
        dtype=("bfloat16", "bfloat16", "bfloat16", "int64", "float32"),
        shape=((60, 40), (60, 40), (2, 3), (0, 7), ()),
        stride={2: (1, 5)},
        aliases=((0, 1, 2),),
        metadata={"format": "pt"},
    )


def indexes() -> Named:
    raw = encode(an_index())
    table = msgpack.unpackb(raw)
    yield "real", raw
    yield "cut", raw[: len(raw) // 2]
    yield "empty", b""
    yield "bomb", b"\xdd\xff\xff\xff\xff"
    yield "deep", b"\x91" * 1200
    changes: dict[str, dict[str, object]] = {
        "version": {"version": 2},
        "count": {"tensor_count": 4_000_000},
        "chunk": {"chunk_size_bytes": 0},
        "partition": {"partition": struct.pack("<5H", 0, 0, 0, 0, 9)},
        "order": {"partition": struct.pack("<5H", 1, 0, 0, 0, 1)},
        "overflow": {"shape": struct.pack("<8Q", *[2**63] * 8)},
        "offset": {"offset_bytes": struct.pack("<5Q", 0, 0, 2, 4864, 2**64 - 1)},
        "unaligned": {"offset_bytes": struct.pack("<5Q", 0, 0, 1, 4864, 0)},
        "digests": {"partitions": [[5000, 8192, b""], [4, 4096, b""]]},
        "stride": {"stride": [[2, [2**62, 2**62]]]},
        "rank": {"stride": [[2, [1]]]},
        "row": {"stride": [[2**40, [1, 5]]]},
        "aliases": {"aliases": [[0, 2]]},
        "overlap": {"aliases": []},
        "slice": {"slices": [[3, "whole", 0, 0, [4, 7]]]},
        "names": {"names": b"a\0a\0b\0c\0d"},
        "text": {"names": b"\xff\0b\0c\0d\0e"},
        "dtype": {"dtypes": ["bfloat16", "float32", "nothing"]},
        "codes": {"dtype": bytes([9, 9, 9, 9, 9])},
        "metadata": {"metadata": {"a": 1}},
        "type": {"partitions": 7},
    }
    for name, change in changes.items():
        yield name, msgpack.packb(table | change)
    yield "key", msgpack.packb({key: value for key, value in table.items() if key != "aliases"})


def a_file(table: object, data: bytes = b"", length: int | None = None) -> bytes:
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def stock_headers() -> Named:
    rows = [
        ("a", "uint8", (3,)),
        ("b", "bfloat16", (2, 2)),
        ("c", "float4_e2m1fn_x2", (2, 1)),
        ("d", "int64", ()),
    ]
    raw = encode_header(rows, {"format": "pt", "tied": "a"}) + bytes(3 + 8 + 2 + 8)
    good = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    yield "real", raw
    yield "none", encode_header([], {})
    yield "cut", raw[:-1]
    yield "longer", raw + b"x"
    yield "empty", b""
    yield "lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    yield "html", b"<!DOCTYPE html><html>"
    yield "zip", b"PK\x03\x04"
    yield "length", a_file({"a": good}, b"1234", length=2**63)
    yield "like_pickle", a_file(json.dumps({"a": good}).encode().ljust(640), b"1234")
    yield "deep", a_file(b'{"a":' + b"[" * 1200)
    yield "digits", a_file(b'{"a":' + b"9" * 4400 + b"}")
    yield "twice", a_file(b'{"a": 1, "a": 2}')
    changes: dict[str, dict[str, object]] = {
        "overflow": {"shape": [2**32, 2**32]},
        "zero_overflow": {"shape": [2**62, 2**62, 0], "data_offsets": [0, 0]},
        "negative": {"shape": [-4]},
        "bool": {"shape": [True], "data_offsets": [0, 1]},
        "float": {"shape": [4.0]},
        "dtype": {"dtype": "U9"},
        "dtype_list": {"dtype": ["U8"]},
        "three": {"data_offsets": [0, 2, 4]},
        "shape_map": {"shape": {"4": 4}},
        "gap": {"data_offsets": [1, 5]},
        "packed": {"dtype": "F4", "shape": []},
    }
    for name, change in changes.items():
        yield name, a_file({"a": good | change}, b"1234")
    yield "surrogate", a_file({"\ud800": good}, b"1234")
    yield "metadata", a_file({"__metadata__": {"a": 1}})
    yield "metadata_surrogate", a_file({"__metadata__": {"a": "\ud800"}})


def shard_indexes() -> Named:
    shard = "model-00001-of-00001.safetensors"
    yield "real", json.dumps({"metadata": {"total_size": 4}, "weight_map": {"a": shard, "b": shard}}).encode()
    yield "empty", b""
    yield "array", b"[]"
    yield "deep", b"[" * 1200
    yield "lfs", b"version https://git-lfs.github.com/spec/v1\n"
    yield "cut", b'{"weight_map": {"a": "'
    yield "text", b"\xff\xfe{}"
    names: dict[str, object] = {
        "missing": "other.safetensors",
        "parent": "../x",
        "absolute": "/etc/passwd",
        "inside": "sub/x.safetensors",
        "dot": ".",
        "none": "",
        "zero": "a\0b",
        "surrogate": "\ud800",
        "number": 3,
        "list": [shard],
    }
    for name, file in names.items():
        yield name, json.dumps({"weight_map": {"a": file}}).encode()
    yield "no_map", b"{}"
    yield "no_names", b'{"weight_map": {}}'
    yield "map_of_lists", b'{"weight_map": []}'


if __name__ == "__main__":
    main()
