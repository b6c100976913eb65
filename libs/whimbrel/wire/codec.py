"""Owns the wire form: MessagePack of `[schema version, tagged message]`, decoded strictly, and packed token lists."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import TypeVar, Union, cast

import msgspec

from whimbrel.wire import messages, records
from whimbrel.wire.errors import ProtocolError, WhimbrelError, from_fields
from whimbrel.wire.messages import ErrorReply, Message
from whimbrel.wire.records import Record

# Raised by one when a message changes in a way that older services would misread.
SCHEMA_VERSION = 1

MESSAGES: dict[str, type[Message]] = {
    str(cls.__struct_config__.tag): cls
    for cls in vars(messages).values()
    if isinstance(cls, type) and issubclass(cls, Message) and cls is not Message
}
RECORDS: dict[str, type[Record]] = {
    str(cls.__struct_config__.tag): cls
    for cls in vars(records).values()
    if isinstance(cls, type) and issubclass(cls, Record) and cls is not Record
}

_Decoded = TypeVar("_Decoded")

_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
# The union of all classes is known only at run time, so a type checker is told what its members have in common.
_AnyMessage = cast(type[Message], Union[tuple(MESSAGES.values())])  # noqa: UP007
_AnyRecord = cast(type[Record], Union[tuple(RECORDS.values())])  # noqa: UP007
_message = msgspec.msgpack.Decoder(_AnyMessage)
_record = msgspec.msgpack.Decoder(_AnyRecord)


def encode(message: Message) -> bytes:
    return _encoder.encode((SCHEMA_VERSION, message))


def decode(data: bytes) -> Message:
    """The message in `data`; raises ProtocolError when it is anything else than a whole, well-typed one."""
    return _decode(data, _message)


def encode_record(record: Record) -> bytes:
    return _encoder.encode((SCHEMA_VERSION, record))


def decode_record(data: bytes) -> Record:
    """The durable record in `data`; raises ProtocolError when it is none of ours."""
    return _decode(data, _record)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[_Decoded]) -> _Decoded:
    try:
        version, body = _envelope.decode(data)
        if version != SCHEMA_VERSION:
            raise ProtocolError(size_bytes=len(data), reason=f"schema version {version}, we speak {SCHEMA_VERSION}")
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise ProtocolError(size_bytes=len(data), reason=str(cause)) from cause


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids (or chunk numbers) as little-endian uint32: 4 bytes each, the only form in which they travel."""
    packed = array("I", tokens)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`; raises ProtocolError for a length that is no multiple of 4."""
    if len(data) % 4:
        raise ProtocolError(size_bytes=len(data), reason="packed tokens whose length is no multiple of 4")
    packed = array("I", data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def error_reply(error: WhimbrelError) -> ErrorReply:
    return ErrorReply(code=error.code, fields=error.fields())


def error_of(reply: ErrorReply) -> WhimbrelError:
    """The error that a peer answered with, as its class; raises ProtocolError when the reply is malformed."""
    return from_fields(reply.code, reply.fields)
