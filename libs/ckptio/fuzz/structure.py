"""Mutants of a document by its structure: a value replaced by another that is likely to be mishandled."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

Way = tuple[Any, ...]

_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        1,
        -1,
        255,
        2**31,
        2**32,
        2**53 + 1,
        2**63 - 1,
        2**63,
        2**64 - 1,
        1.5,
        1e300,
        float("nan"),
    ),
    *("", "a", "../a", "/a", "a/b", ".", "a\0b", "ä" * 40, "\u2028"),
    *([], [0], [[]], [-1, 2**63], ["a"], {}, {"a": 1}, {"a": {"a": []}}),
)
_MORE_IN_MSGPACK: tuple[Any, ...] = (b"", b"\xff", b"\xff" * 8, struct.pack("<Q", 2**63), -(2**63))
_MORE_IN_JSON: tuple[Any, ...] = (2**70, -(2**70), 10**4000, "\ud800", "n" * 5000)


def places(document: Any, path: Way = ()) -> Iterator[Way]:
    """The way to every value of a document, the document itself first."""
    yield path
    items = document.items() if isinstance(document, dict) else ()
    items = enumerate(document) if isinstance(document, list) else items
    for key, value in items:
        yield from places(value, (*path, key))


def replaced(document: Any, path: Way, value: Any) -> Any:
    """A copy of `document` with `value` at `path`."""
    if not path:
        return value
    copy = document.copy()
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


def without(document: Any, path: Way) -> Any:
    """A copy of `document` that lacks what is at `path`, which must not be empty."""
    copy = document.copy()
    if len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = without(copy[path[0]], path[1:])
    return copy


def _encode_json(document: Any) -> bytes:
    return json.dumps(document).encode()


def _decode_stock(raw: bytes) -> Any:
    (length,) = struct.unpack_from("<Q", raw)
    return [json.loads(raw[8 : 8 + length]), raw[8 + length :].decode("latin-1")]


def _encode_stock(document: Any) -> bytes:
    header = _encode_json(document[0])
    return struct.pack("<Q", len(header)) + header + document[1].encode("latin-1")


# Target -> how its input is taken apart and put together.
CODECS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes], tuple[Any, ...]]] = {
    "manifest": (json.loads, _encode_json, _VALUES + _MORE_IN_JSON),
    "index": (msgpack.unpackb, msgpack.packb, _VALUES + _MORE_IN_MSGPACK),
    "stock_header": (_decode_stock, _encode_stock, _VALUES + _MORE_IN_JSON),
    "shard_index": (json.loads, _encode_json, _VALUES + _MORE_IN_JSON),
}

# What a damaged or made-up document makes its own encoder say.
_NOT_A_DOCUMENT = (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError, RecursionError)
_NOT_A_DOCUMENT += (struct.error, msgpack.UnpackException)


def mutants(target: str, raw: bytes) -> Iterator[bytes]:
    """Every mutant that differs from `raw` in one place."""
    decode, encode, values = CODECS[target]
    document = decode(raw)
    for path in places(document):
        for value in values:
            try:
                yield encode(replaced(document, path, value))
            except _NOT_A_DOCUMENT:
                continue
        if path:
            try:
                yield encode(without(document, path))
            except _NOT_A_DOCUMENT:
                continue


def mutate(target: str, raw: bytes, seed: int) -> bytes | None:
    """A mutant by chance; None when `raw` is not even a document."""
    decode, encode, values = CODECS[target]
    chance = random.Random(seed)
    try:
        document = decode(raw)
        for _ in range(chance.randint(1, 3)):
            path = chance.choice(list(places(document)))
            old = document
            for key in path:
                old = old[key]
            if isinstance(old, int | float) and chance.random() < 0.5:
                document = replaced(document, path, old + chance.choice((-1, 1, 4096, 2**40)))
            elif isinstance(old, bytes) and len(old) and chance.random() < 0.7:
                place = chance.randrange(len(old))
                changed = old[:place] + bytes([chance.randrange(256)]) + old[place + 1 :]
                document = replaced(document, path, changed)
            else:
                document = replaced(document, path, chance.choice(values))
        return encode(document)
    except _NOT_A_DOCUMENT:
        return None
