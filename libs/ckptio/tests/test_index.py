"""The index: what is written is read, and what breaks a rule is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptio
from ckptio.dtypes import DTYPES
from ckptio.index import Index, Slice, make_index
from ckptio.index_codec import decode, encode
from ckptio.plan import Extent, Member, chunk_count, plan_layout, size_of

CHUNK_BYTES = 4096


def an_index(extents: list[Extent], gpus: int = 1) -> Index:
    layouts = plan_layout(extents, lambda name: len(name) % gpus)
    digests = [list(range(chunk_count(layout.padded_bytes, CHUNK_BYTES))) for layout in layouts]
    return make_index(extents, layouts, digests, chunk_size_bytes=CHUNK_BYTES, metadata={"format": "pt"})


def a_tensor(name: str, *shape: int, dtype: str = "float32", stride: tuple[int, ...] | None = None) -> Member:
    return Member(
        name=name, dtype=dtype, shape=shape, stride=stride, size_bytes=size_of(dtype, shape, stride)
    )


def alone(member: Member) -> Extent:
    return Extent(size_bytes=member.size_bytes, members=(member,))


def a_small_index() -> Index:
    tied = a_tensor("embed", 4, 8)
    return an_index(
        [
            Extent(size_bytes=128, members=(tied, replace(tied, name="head"))),
            alone(a_tensor("w", 5, 3, stride=(1, 5))),
            alone(a_tensor("empty", 0, 7)),
            alone(a_tensor("scalar", dtype="bfloat16")),
        ]
    )


members = st.builds(
    a_tensor,
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12),
    st.integers(0, 9),
    st.integers(0, 9),
    dtype=st.sampled_from(sorted(DTYPES)),
)


@given(st.lists(members, max_size=12, unique_by=lambda member: member.name), st.integers(1, 3))
def test_an_index_survives_its_bytes(tensors: list[Member], gpus: int) -> None:
    """F3: name -> (partition, offset, size) with dtype, shape and stride."""
    index = an_index([alone(tensor) for tensor in tensors], gpus)
    assert decode(encode(index), "index") == index
    assert {name: entry.shape for name, entry in index.items()} == {t.name: t.shape for t in tensors}


def test_ties_and_strides_survive_the_bytes_of_an_index() -> None:
    index = a_small_index()
    again = decode(encode(index), "index")
    assert again == index
    assert again.aliases == ((0, 1),)
    assert again["head"].offset_bytes == again["embed"].offset_bytes
    assert again["w"].stride == (1, 5)
    assert again["empty"].stride is None
    assert again.parameter_count == 32 + 15 + 0 + 1


@given(st.data())
def test_no_damage_of_an_index_escapes_as_another_error(data: st.DataObject) -> None:
    """F7: damage is a typed error or, in a digest or a name, still a valid index."""
    raw = bytearray(encode(a_small_index()))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(raw) - 1))
        raw[position] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    try:
        decode(bytes(raw), "index")
    except (ckptio.CorruptCheckpoint, ckptio.UnsupportedFormat) as error:
        assert error.path == Path("index")  # noqa: PT017


def changed(**columns: Any) -> bytes:
    table = msgpack.unpackb(encode(a_small_index()))
    return msgpack.packb(table | columns)


def packed(code: str, *values: int) -> bytes:
    size = {"B": 1, "H": 2, "Q": 8}[code]
    return b"".join(value.to_bytes(size, "little") for value in values)


# Rows of the small index: embed and head at 0 (128 bytes), w at 256 (60), empty and scalar at 512 (0 and 2).
@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"offset_bytes": packed("Q", 0, 0, 256, 512, 2**63)}, "after the end"),
        ({"offset_bytes": packed("Q", 0, 0, 64, 512, 512)}, "overlaps"),
        ({"offset_bytes": packed("Q", 0, 0, 260, 512, 512)}, "not aligned"),
        ({"offset_bytes": packed("Q", 0, 0, 256, 0, 512)}, "out of order"),
        ({"offset_bytes": packed("Q", 0, 128, 256, 512, 512)}, "shares no byte"),
        ({"offset_bytes": packed("Q", 0, 0, 256, 512, 513)}, "not aligned to its elements"),
        ({"offset_bytes": packed("Q", 0, 0, 256, 512)}, "unpack requires"),
        ({"size_bytes": packed("Q", 128, 128, 61, 0, 2)}, "its shape needs 60"),
        ({"shape": packed("Q", 4, 8, 4, 8, 2**32, 2**32, 0, 7)}, "overflows"),
        ({"shape": packed("Q", 4, 8, 4, 8, 5, 3, 0, 2**63)}, "overflows"),
        ({"rank": packed("B", 2, 2, 2, 2, 1)}, "unpack requires"),
        ({"partition": packed("H", 0, 0, 0, 0, 1)}, "partition 1 does not exist"),
        ({"dtype": packed("B", 1, 1, 1, 1, 9)}, "dtype code"),
        ({"dtypes": ["bfloat16", "float31"]}, "unknown dtype"),
        ({"stride": [[2, [1, 5]], [2, [1, 5]]]}, "two strides"),
        ({"stride": [[2, [1, -5]]]}, "is not a number"),
        ({"stride": [[2, [1]]]}, "does not fit"),
        ({"stride": [[9, [1, 5]]]}, "is not a number"),
        ({"aliases": []}, "overlaps"),
        ({"aliases": [[0]]}, "has 1 tensors"),
        ({"aliases": [[0, 2]]}, "not consecutive"),
        ({"aliases": [[0, 1], [1, 2]]}, "bad row"),
        ({"aliases": [[0, 1], [3, 4]]}, "empty tensor"),
        ({"names": b"a\0a\0b\0c\0d"}, "twice"),
        ({"names": b"a\0b\0c\0d"}, "4 names"),
        ({"names": b"a\0\0b\0c\0d"}, "empty"),
        ({"names": b"\xff\0b\0c\0d\0e"}, "utf-8"),
        ({"tensor_count": 10**12}, "is not a number"),
        ({"chunk_size_bytes": 1000}, "whole pages"),
        ({"chunk_size_bytes": 0}, "chunk size 0"),
        ({"partitions": [[514, 4096, b""]]}, "0 digests"),
        ({"partitions": [[514, 8192, packed("Q", 1, 2)]]}, "padded size"),
        ({"partitions": []}, "0 partitions"),
        ({"metadata": {"format": 1}}, "metadata"),
        ({"metadata": []}, "metadata"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_an_index_that_breaks_a_rule_is_refused(columns: dict[str, Any], reason: str) -> None:
    """F7: sizes, offsets, products, alignment, names."""
    with pytest.raises(ckptio.CorruptCheckpoint, match=reason) as caught:
        decode(changed(**columns), "somewhere/index.msgpack")
    assert caught.value.path == Path("somewhere/index.msgpack")


@pytest.mark.parametrize("columns", [{"version": 2}, {"format": "other"}], ids=lambda c: next(iter(c)))
def test_an_index_of_another_kind_is_unsupported_not_corrupt(columns: dict[str, Any]) -> None:
    with pytest.raises(ckptio.UnsupportedFormat):
        decode(changed(**columns), "index")


def a_divided_index() -> Index:
    """Over two GPUs: "q" (4 x 6) along dimension 0, "o" (4 x 6) along 1 as 4 and 2, "n" copied, "w" whole."""
    extents, slices = [alone(a_tensor("w", 3))], {}
    for gpu, columns in ((0, 4), (1, 2)):
        for whole, member, dimension, start, shape in (
            ("n", a_tensor(f"n#{gpu}", 5), None, 0, (5,)),
            ("o", a_tensor(f"o#{gpu}", 4, columns), 1, 4 * gpu, (4, 6)),
            ("q", a_tensor(f"q#{gpu}", 2, 6), 0, 2 * gpu, (4, 6)),
        ):
            extents.append(alone(member))
            slices[member.name] = Slice(whole=whole, dimension=dimension, start=start, shape=shape)
    layouts = plan_layout(extents, lambda name: int(name[-1] == "1"))
    digests = [list(range(chunk_count(layout.padded_bytes, CHUNK_BYTES))) for layout in layouts]
    return make_index(
        extents, layouts, digests, chunk_size_bytes=CHUNK_BYTES, metadata={"format": "pt"}, slices=slices
    )


def test_parts_and_copies_of_tensors_survive_the_bytes_of_an_index() -> None:
    """F3: the GPU in the index, also of a tensor that several GPUs share."""
    index = a_divided_index()
    assert decode(encode(index), "index") == index
    assert index.tensor_count == 4
    assert index.parameter_count == 3 + 5 + 24 + 24
    assert {name: entry.name for name, entry in index.of_gpu(1).items()} == {
        "n": "n#1",
        "o": "o#1",
        "q": "q#1",
    }
    assert index.of_gpu(0)["w"].name == "w"
    assert {name: len(rows) for name, rows in index.rows_of_wholes().items()} == dict(w=1, n=2, o=2, q=2)
    with pytest.raises(ValueError, match="GPU 2"):
        index.of_gpu(2)


def test_an_index_without_slices_has_the_bytes_it_always_had() -> None:
    """F7: version 1 stays version 1, also for readers that know no slices."""
    assert msgpack.unpackb(encode(a_small_index()))["slices"] == []


# Rows: w, n#0, o#0, q#0 in partition 0; n#1, o#1, q#1 in partition 1.
@pytest.mark.parametrize(
    ("row", "fields", "reason"),
    [
        (2, ["o", 1, 1, [4, 6]], "starts at 1, the part before it ends at 0"),
        (5, ["o", 1, 5, [4, 6]], "starts at 5, the part before it ends at 4"),
        (5, ["o", 1, 3, [4, 6]], "starts at 3, the part before it ends at 4"),
        (5, ["o", 0, 4, [4, 6]], "differs from the other parts"),
        (5, ["o", 1, 4, [4, 7]], "differs from the other parts"),
        (2, ["p", 1, 0, [4, 6]], "has another name"),
        (5, ["n", 1, 4, [4, 6]], "o#1: a part of 'n' in partition 1 has another name"),
        (5, ["w", 1, 4, [4, 6]], "also split"),
        (5, ["", 1, 4, [4, 6]], "has a zero character"),
        (5, ["o", 64, 4, [4, 6]], "is not a number"),
        (5, ["o", -1, 4, [4, 6]], "is not a number"),
        (5, ["o", 1, 2**64 - 1, [4, 6]], "is not a number"),
        (5, ["o", 1, 4, [4]], "differs from the other parts"),
        (5, ["o", 1, 4, 6], "has no name or shape"),
        (5, [7, 1, 4, [4, 6]], "has no name or shape"),
        (5, ["o", 1, 4], "missing 1 required"),
        (9, ["o", 1, 4, [4, 6]], "is not a number"),
        (1, ["n", None, 1, [5]], "starts at 1"),
        (1, ["n", None, 0, [6]], "copy has shape"),
    ],
)
def test_slices_that_do_not_tile_their_tensor_are_refused(row: int, fields: list[Any], reason: str) -> None:
    """F7: no gap, no overlap, and every part is of the tensor that it says."""
    table = msgpack.unpackb(encode(a_divided_index()))
    slices = {entry[0]: entry for entry in table["slices"]} | {row: [row, *fields]}
    with pytest.raises(ckptio.CorruptCheckpoint, match=reason):
        decode(msgpack.packb(table | {"slices": list(slices.values())}), "index")


def test_a_tensor_with_a_part_missing_is_refused() -> None:
    index = a_divided_index()
    table = msgpack.unpackb(encode(index))
    without = [entry for entry in table["slices"] if entry[0] != 5]
    with pytest.raises(ckptio.CorruptCheckpoint, match=r"o: its parts have 4 of 6 elements"):
        decode(msgpack.packb(table | {"slices": without}), "index")
    twice = [*table["slices"], table["slices"][0]]
    with pytest.raises(ckptio.CorruptCheckpoint, match="two slices"):
        decode(msgpack.packb(table | {"slices": twice}), "index")
    all_in_one = [[row, "o", 7, 0, [4, 6]] for row in (2, 5)]
    with pytest.raises(ckptio.CorruptCheckpoint, match="dimension 7"):
        decode(msgpack.packb(table | {"slices": all_in_one}), "index")


@given(st.data())
def test_no_damage_of_slices_escapes_as_another_error(data: st.DataObject) -> None:
    table = msgpack.unpackb(encode(a_divided_index()))
    anything = st.none() | st.integers(-1, 2**64 - 1) | st.text(max_size=3) | st.lists(st.integers(0, 9))
    for _ in range(data.draw(st.integers(1, 3))):
        entry = data.draw(st.sampled_from(table["slices"]))
        entry[data.draw(st.integers(0, 4))] = data.draw(anything)
    try:
        decode(msgpack.packb(table), "index")
    except ckptio.CorruptCheckpoint as error:
        assert error.path == Path("index")  # noqa: PT017


def test_a_group_of_aliases_stays_in_one_partition() -> None:
    index = a_small_index()
    two = replace(
        index, partition=(0, 1, 1, 1, 1), partitions=index.partitions * 2, offset_bytes=(0, 0, 256, 512, 512)
    )
    with pytest.raises(ValueError, match="two partitions"):
        encode(two)


def test_the_index_of_a_large_model_is_small(a_checkpoint: Callable[..., Path]) -> None:
    """F4: tiny; below 100 bytes a tensor."""
    path = a_checkpoint(*[(16,)] * 300)
    assert (path / "index.msgpack").stat().st_size < 100 * 300
    assert (path / "manifest.json").stat().st_size < 4096
