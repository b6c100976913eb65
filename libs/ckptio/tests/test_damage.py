"""Every damage at every entry point: a typed error that names file and place, and nothing half done.

One table of (damage, entry point) -> error and file, over three kinds of checkpoint: one published file, two
published shards with an index, and a converted checkpoint. What is undamaged must load in the same process
right after each error.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgpack
import pytest
import torch

import ckptio
from ckptio import lazy
from ckptio.errors import CkptioError, CorruptCheckpoint, MissingFile, TruncatedCheckpoint, UnsupportedFormat
from ckptio.layout import read_layout
from ckptio.loader import Loader
from ckptio.manifest import Manifest, digest_of
from ckptio.safetensors_face import load_file
from ckptio.stock import encode_header

CHUNK_BYTES = 8192
TENSOR_BYTES = 5000
GIT_LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 12345\n"
WEB_PAGE = b"<!DOCTYPE html>\n<html><body>Not found</body></html>\n"

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SINGLE, SHARDS, PARTITION = "model.safetensors", "model.safetensors.index.json", "partition_0.bin"


def convert(path: Path) -> None:
    destination = path.parent / "converted"
    try:
        ckptio.convert(path, destination, chunk_size_bytes=CHUNK_BYTES)
    except (CkptioError, OSError):
        left = [entry.name for entry in path.parent.iterdir() if "converted" in entry.name]
        assert left == [], "a failed conversion left something behind"
        raise


def open_all(path: Path) -> None:
    with lazy.open(path) as checkpoint:
        for name in checkpoint:
            checkpoint[name]


def read_into_pool(path: Path) -> None:
    layout = read_layout(path)
    with ckptio.ChunkPool.create(None, 1 << 20, CHUNK_BYTES) as pool, ckptio.Reader() as reader:
        for file, part in zip(layout.files, layout.index.partitions, strict=True):
            chunks = pool.allocate(-(-part.padded_bytes // CHUNK_BYTES))
            digests = part.digests if layout.is_verified else None
            reader.read(pool, file, chunks, part.padded_bytes, digests=digests)


def load_by_loader(path: Path) -> None:
    with ckptio.ChunkPool.create(None, 1 << 20, CHUNK_BYTES) as pool, Loader(pool, threads=2) as loader:
        try:
            with loader.load(path) as loaded:
                assert len(loaded.tensors) == 3
        finally:
            loader.drop()
            assert (loader.leases, pool.free_chunks) == (0, pool.chunk_count)


def load_single(path: Path) -> None:
    load_file(path / SINGLE)


ENTRY_POINTS: dict[str, Callable[[Path], object]] = {
    "convert": convert,
    "load": ckptio.load,
    "load_file": load_single,
    "loader": load_by_loader,
    "open": open_all,
    "reader": read_into_pool,
    "verify": ckptio.verify,
}
STOCK = ("convert", "load", "open")
CONVERTED = ("verify", "load", "loader", "open", "reader")
# The other files of a model are read by verification alone.
WHOLE = ("verify",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """`apply` damages a checkpoint of `kind`; each of `entries` then raises `error` about `file`."""

    name: str
    kind: str
    apply: Callable[[Path], None]
    error: type[CkptioError]
    file: str
    entries: tuple[str, ...]
    says: str = ""


def cut(file: str, missing_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / file, (path / file).stat().st_size - missing_bytes)


def keep(file: str, size_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / file, size_bytes)


def zero_tail(file: str, zero_bytes: int) -> Callable[[Path], None]:
    """What a crash leaves where sizes were written but data was not."""

    def apply(path: Path) -> None:
        raw = (path / file).read_bytes()
        (path / file).write_bytes(raw[:-zero_bytes] + bytes(zero_bytes))

    return apply


def append(file: str, raw: bytes) -> Callable[[Path], None]:
    return lambda path: (path / file).write_bytes((path / file).read_bytes() + raw) and None


def flip(file: str, offset_bytes: int) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        raw = bytearray((path / file).read_bytes())
        raw[offset_bytes] ^= 1
        (path / file).write_bytes(raw)

    return apply


def remove(file: str) -> Callable[[Path], None]:
    return lambda path: (path / file).unlink()


def replaced(file: str, raw: bytes) -> Callable[[Path], None]:
    return lambda path: (path / file).write_bytes(raw) and None


def header(length: int | None = None, **item: object) -> bytes:
    fields = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | item
    raw = json.dumps({"t.0": fields}).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + b"1234"


def re_indexed(**columns: object) -> Callable[[Path], None]:
    """An index that says something else, with digests that agree: not an accident, but an attack or a bug."""

    def apply(path: Path) -> None:
        table = msgpack.unpackb((path / "index.msgpack").read_bytes())
        raw = msgpack.packb(table | columns)
        (path / "index.msgpack").write_bytes(raw)
        manifest = Manifest.from_json((path / "manifest.json").read_bytes(), path)
        signed = replace(manifest, index_size_bytes=len(raw), index_digest=digest_of(raw))
        (path / "manifest.json").write_text(signed.to_json())

    return apply


def stock_damages(kind: str, file: str, entries: tuple[str, ...]) -> list[Damage]:
    """What happens to one weight file, alone or as the second of two shards."""
    rows: list[tuple[str, Callable[[Path], None], type[CkptioError], str]] = [
        ("one byte short", cut(file, 1), TruncatedCheckpoint, "1 missing"),
        ("one tensor short", cut(file, TENSOR_BYTES), TruncatedCheckpoint, f"{TENSOR_BYTES} missing"),
        ("one page short", cut(file, 4096), TruncatedCheckpoint, "4096 missing"),
        ("cut in its header", keep(file, 40), TruncatedCheckpoint, "offset 40"),
        ("cut in its length", keep(file, 5), TruncatedCheckpoint, "offset 5"),
        ("empty", keep(file, 0), TruncatedCheckpoint, "offset 0"),
        ("zeros after its end", append(file, bytes(4096)), CorruptCheckpoint, "4096 bytes after"),
        ("all zeros", replaced(file, bytes(20_000)), UnsupportedFormat, "no header"),
        ("bit flipped in its length", flip(file, 0), CorruptCheckpoint, "at offset"),
        ("bit flipped in its header", flip(file, 9), CorruptCheckpoint, "at offset"),
        ("git-lfs pointer", replaced(file, GIT_LFS), UnsupportedFormat, "git lfs pull"),
        ("web page", replaced(file, WEB_PAGE), UnsupportedFormat, "web page"),
        (
            "shape that overflows",
            replaced(file, header(shape=[2**32, 2**32])),
            CorruptCheckpoint,
            "overflows",
        ),
        (
            "empty shape that overflows",
            replaced(file, header(shape=[2**40, 2**40, 0], data_offsets=[0, 0])),
            CorruptCheckpoint,
            "overflows",
        ),
        ("header of 2^63 bytes", replaced(file, header(length=2**63)), CorruptCheckpoint, str(2**63)),
        ("offsets beyond its end", replaced(file, header(data_offsets=[0, 2**62])), CorruptCheckpoint, "0"),
    ]
    return [
        Damage(
            name=f"{kind}: {name}",
            kind=kind,
            apply=apply,
            error=error,
            file=file,
            entries=entries,
            says=says,
        )
        for name, apply, error, says in rows
    ]


def converted_damages() -> list[Damage]:
    both = ("index.msgpack", "manifest.json")
    rows: list[tuple[str, Callable[[Path], None], type[CkptioError], str, tuple[str, ...], str]] = [
        (
            "partition one byte short",
            cut(PARTITION, 1),
            TruncatedCheckpoint,
            PARTITION,
            CONVERTED,
            "1 missing",
        ),
        (
            "partition one tensor short",
            cut(PARTITION, TENSOR_BYTES),
            TruncatedCheckpoint,
            PARTITION,
            CONVERTED,
            f"{TENSOR_BYTES} missing",
        ),
        (
            "partition one page short",
            cut(PARTITION, 4096),
            TruncatedCheckpoint,
            PARTITION,
            CONVERTED,
            "4096 missing",
        ),
        ("partition empty", keep(PARTITION, 0), TruncatedCheckpoint, PARTITION, CONVERTED, "offset 0"),
        (
            "partition longer",
            append(PARTITION, b"x"),
            CorruptCheckpoint,
            PARTITION,
            CONVERTED,
            "1 bytes more",
        ),
        (
            "partition with a tail of zeros",
            zero_tail(PARTITION, 6000),
            CorruptCheckpoint,
            PARTITION,
            CONVERTED,
            "chunk 1",
        ),
        ("bit in a partition", flip(PARTITION, 9000), CorruptCheckpoint, PARTITION, CONVERTED, "offset 8192"),
        ("partition missing", remove(PARTITION), MissingFile, PARTITION, CONVERTED, "manifest"),
        (
            "partition is a pointer",
            replaced(PARTITION, GIT_LFS),
            TruncatedCheckpoint,
            PARTITION,
            CONVERTED,
            "missing",
        ),
        ("index missing", remove("index.msgpack"), MissingFile, "index.msgpack", CONVERTED, "manifest"),
        (
            "manifest missing",
            remove("manifest.json"),
            UnsupportedFormat,
            "checkpoint",
            CONVERTED,
            "no manifest",
        ),
        ("config missing", remove("config.json"), MissingFile, "config.json", WHOLE, "manifest"),
        (
            "config one byte short",
            cut("config.json", 1),
            TruncatedCheckpoint,
            "config.json",
            WHOLE,
            "1 missing",
        ),
        ("bit in the config", flip("config.json", 3), CorruptCheckpoint, "config.json", WHOLE, "digest"),
        (
            "shape that overflows",
            re_indexed(shape=struct.pack("<3Q", 2**63, 2**63, 2**63)),
            CorruptCheckpoint,
            "index.msgpack",
            CONVERTED,
            "overflows",
        ),
        (
            "tensor beyond its partition",
            re_indexed(offset_bytes=struct.pack("<3Q", 0, 5120, 2**40)),
            CorruptCheckpoint,
            "index.msgpack",
            CONVERTED,
            "after the end of its partition",
        ),
        (
            "tensor over another",
            re_indexed(offset_bytes=struct.pack("<3Q", 0, 4096, 10240)),
            CorruptCheckpoint,
            "index.msgpack",
            CONVERTED,
            "overlaps",
        ),
    ]
    for file in both:
        rows += [
            (f"{file} empty", keep(file, 0), CkptioError, file, CONVERTED, ""),
            # Two bytes, because the last one of a manifest is a line end, without which it says the same.
            (f"{file} two bytes short", cut(file, 2), CkptioError, file, CONVERTED, ""),
            (f"{file} with a tail of zeros", zero_tail(file, 16), CorruptCheckpoint, file, CONVERTED, ""),
            (f"bit in {file}", flip(file, 60), CorruptCheckpoint, file, CONVERTED, ""),
            (f"{file} is a pointer", replaced(file, GIT_LFS), CkptioError, file, CONVERTED, ""),
            (f"{file} is a web page", replaced(file, WEB_PAGE), CkptioError, file, CONVERTED, ""),
            (f"{file} is zeros", replaced(file, bytes(4096)), CkptioError, file, CONVERTED, ""),
        ]
    return [
        Damage(
            name=f"converted: {name}",
            kind="converted",
            apply=apply,
            error=error,
            file=file,
            entries=entries,
            says=says,
        )
        for name, apply, error, file, entries, says in rows
    ]


def shard_index_damages() -> list[Damage]:
    rows: list[tuple[str, Callable[[Path], None], type[CkptioError], str, str]] = [
        ("first shard missing", remove(ONE), MissingFile, ONE, SHARDS),
        ("last shard missing", remove(TWO), MissingFile, TWO, SHARDS),
        ("index empty", keep(SHARDS, 0), CorruptCheckpoint, SHARDS, "not valid JSON"),
        ("index cut", cut(SHARDS, 1), CorruptCheckpoint, SHARDS, "not valid JSON"),
        ("index is a pointer", replaced(SHARDS, GIT_LFS), CkptioError, SHARDS, ""),
        ("index is a web page", replaced(SHARDS, WEB_PAGE), CkptioError, SHARDS, ""),
        (
            "index that leaves the directory",
            replaced(SHARDS, b'{"weight_map": {"t.0": "../x.safetensors"}}'),
            CorruptCheckpoint,
            SHARDS,
            "file name",
        ),
    ]
    return [
        Damage(
            name=f"sharded: {name}",
            kind="sharded",
            apply=apply,
            error=error,
            file=file,
            entries=STOCK,
            says=says,
        )
        for name, apply, error, file, says in rows
    ]


DAMAGES = [
    *stock_damages("single", SINGLE, (*STOCK, "load_file", "loader")),
    # Of the second of two shards every other row will do: each file goes through the same reader.
    *stock_damages("sharded", TWO, STOCK)[::2],
    *shard_index_damages(),
    *converted_damages(),
]
CASES = [pytest.param(d, entry, id=f"{d.name}-{entry}") for d in DAMAGES for entry in d.entries]


# The files of each kind of checkpoint, made once: a conversion waits for the disk.
_BUILT: dict[str, dict[str, bytes]] = {}


@pytest.fixture
def build(
    write_model: Callable[..., Path], some_tensors: Callable, tmp_path: Path, tmpfs_path: Path
) -> Callable[[str], Path]:
    """Builder of an undamaged checkpoint of a kind."""

    def make(kind: str) -> Path:
        if kind not in _BUILT:
            shards = 2 if kind == "sharded" else 1
            path = write_model(tmp_path / kind, some_tensors(*[(TENSOR_BYTES,)] * 3), shards=shards)
            if kind == "converted":
                ckptio.convert(path, tmp_path / "checkpoint", chunk_size_bytes=CHUNK_BYTES)
                path = tmp_path / "checkpoint"
            _BUILT[kind] = {file.name: file.read_bytes() for file in path.iterdir()}
        path = tmpfs_path / "checkpoint"
        path.mkdir()
        restore(path, kind)
        return path

    return make


def restore(path: Path, kind: str) -> None:
    for name, raw in _BUILT[kind].items():
        (path / name).write_bytes(raw)


def assert_same(got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert all(got[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize(("damage", "entry"), CASES)
def test_damage_is_named_and_the_next_good_load_works(damage: Damage, entry: str, build: Callable) -> None:
    """F7: a typed error with file and place, no crash, nothing half done, and the next good one works."""
    path = build(damage.kind)
    expected = ckptio.load(path)
    damage.apply(path)
    with pytest.raises(damage.error) as caught:
        ENTRY_POINTS[entry](path)
    assert type(caught.value).__module__ == "ckptio.errors"
    assert caught.value.path.name == damage.file  # type: ignore[attr-defined]
    assert str(caught.value.path) in str(caught.value)  # type: ignore[attr-defined]
    assert isinstance(caught.value, MissingFile) or caught.value.offset_bytes >= 0  # type: ignore[attr-defined]
    assert damage.says in str(caught.value)
    restore(path, damage.kind)
    ENTRY_POINTS[entry](path)
    assert_same(ckptio.load(path), expected)


def test_the_table_has_every_damage_at_every_entry_point_that_reads_it() -> None:
    """A row that lost its entries would test nothing."""
    assert all(damage.entries for damage in DAMAGES)
    assert len({damage.name for damage in DAMAGES}) == len(DAMAGES)
    assert set(ENTRY_POINTS) == {entry for damage in DAMAGES for entry in damage.entries}


@pytest.mark.parametrize("file", ["index.msgpack", "manifest.json"])
def test_every_bit_of_what_describes_a_checkpoint_matters(file: str, build: Callable) -> None:
    """F7: a bit flipped in every third byte, from a different start in each file, and in the last bytes."""
    path = build("converted")
    raw = (path / file).read_bytes()
    for offset_bytes in (*range(len(file) % 3, len(raw), 3), len(raw) - 2, len(raw) - 1):
        damaged = bytearray(raw)
        damaged[offset_bytes] ^= 1 << offset_bytes % 8
        (path / file).write_bytes(damaged)
        with pytest.raises((CorruptCheckpoint, UnsupportedFormat, TruncatedCheckpoint)) as caught:
            read_layout(path)
        assert caught.value.path.name == file, offset_bytes
    (path / file).write_bytes(raw)
    ckptio.verify(path)


def test_any_bit_of_a_stock_header_is_an_error_or_another_valid_header(build: Callable) -> None:
    """F7: stock has no digests, so a bit in a name passes; none crashes or reads beyond the file."""
    path = build("single") / SINGLE
    raw = path.read_bytes()
    header_bytes = 8 + int.from_bytes(raw[:8], "little")
    refused = 0
    for offset_bytes in range(header_bytes):
        damaged = bytearray(raw)
        damaged[offset_bytes] ^= 1 << offset_bytes * 5 % 8
        path.write_bytes(damaged)
        try:
            index = read_layout(path).index
        except (CorruptCheckpoint, UnsupportedFormat, TruncatedCheckpoint) as error:
            assert error.path == path  # noqa: PT017
            refused += 1
            continue
        assert all(entry.offset_bytes + entry.size_bytes <= len(raw) for entry in index.values())
    assert refused > header_bytes // 2


def test_a_file_of_zeros_or_a_sparse_one_is_refused_whatever_its_size(tmp_path: Path) -> None:
    """A download that reserved its size and never wrote, larger than memory."""
    path = tmp_path / "model.safetensors"
    path.touch()
    os.truncate(path, 1 << 42)
    with pytest.raises(UnsupportedFormat, match="not a safetensors file"):
        ckptio.load(path)
    start = encode_header([("t", "uint8", (1 << 41,))], {})
    with open(path, "r+b") as file:
        file.write(start)
    with pytest.raises(CorruptCheckpoint, match="after the last tensor"):
        ckptio.load(path)
