"""The wire form: what is encoded comes back, and nothing else gets in."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whimbrel.wire import codec, messages, records
from whimbrel.wire.errors import ProtocolError
from whimbrel.wire.messages import Message, PlaceModel

PLACE = PlaceModel(request_id="r", model_id="m", router_id="router-1", waited_s=0.5)


def sample(annotation: object) -> object:
    """Some valid value of a field's type, made from the type alone so that a new message is covered by existing."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return sample(arguments[0])
    if origin is tuple:
        return tuple(sample(argument) for argument in arguments if argument is not Ellipsis)
    if origin is dict:
        return {sample(arguments[0]): sample(arguments[1])}
    if arguments:
        return sample(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return build(annotation)
    if isinstance(annotation, type) and hasattr(annotation, "__members__"):
        return next(iter(annotation))
    return {str: "id-1", int: 1, float: 1.0, bool: True, bytes: b"\x01\x00\x00\x00"}[annotation]  # type: ignore[index]


def build(cls: type[msgspec.Struct]) -> msgspec.Struct:
    hints = typing.get_type_hints(cls, include_extras=True)
    return cls(**{name: sample(hints[name]) for name in cls.__struct_fields__})


@pytest.mark.parametrize("cls", codec.MESSAGES.values(), ids=codec.MESSAGES)
def test_every_message_comes_back_equal(cls: type[Message]) -> None:
    message = build(cls)
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("cls", codec.RECORDS.values(), ids=codec.RECORDS)
def test_every_record_comes_back_equal_and_names_its_place(cls: type[records.Record]) -> None:
    """P1: a record knows the table and the key it is stored under."""
    record = build(cls)
    assert codec.decode_record(codec.encode_record(record)) == record
    assert record.key()
    assert cls is records.Forget or cls.table


@pytest.mark.parametrize("cls", [c for c in codec.MESSAGES.values() if c.__struct_fields__], ids=lambda c: c.__name__)
def test_a_missing_or_wrongly_typed_or_extra_field_is_a_protocol_error(cls: type[Message]) -> None:
    whole = msgspec.to_builtins(build(cls), builtin_types=(bytes,))
    required = [field.name for field in msgspec.structs.fields(cls) if field.required]
    broken = [{**whole, "surprise": 1}]
    broken += [{key: value for key, value in whole.items() if key != name} for name in required]
    broken += [{**whole, name: {"not": ["this"]}} for name in required]
    for body in broken:
        with pytest.raises(ProtocolError):
            codec.decode(msgspec.msgpack.encode((codec.SCHEMA_VERSION, body)))


def test_an_unknown_tag_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="nonsense"):
        codec.decode(msgspec.msgpack.encode((codec.SCHEMA_VERSION, {"type": "nonsense"})))


def test_another_schema_version_is_refused_by_number() -> None:
    with pytest.raises(ProtocolError, match="schema version 99"):
        codec.decode(msgspec.msgpack.encode((99, PLACE)))


@given(st.binary(max_size=200))
def test_no_bytes_whatever_raise_anything_but_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=str(len(data))):
        codec.decode(data)


@given(st.integers(min_value=0, max_value=len(codec.encode(PLACE)) - 1))
def test_a_cut_message_is_a_protocol_error(length: int) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(PLACE)[:length])


@given(st.lists(st.integers(min_value=0, max_value=2**32 - 1)))
def test_tokens_travel_as_four_bytes_each(tokens: list[int]) -> None:
    """G2: tokens are the state that moves, so they are kept compact."""
    packed = codec.pack_tokens(tokens)
    assert len(packed) == 4 * len(tokens)
    assert codec.unpack_tokens(packed) == tokens


def test_tokens_are_little_endian_whatever_the_machine() -> None:
    assert codec.pack_tokens([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_packed_tokens_of_odd_length_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="multiple of 4"):
        codec.unpack_tokens(b"\x01\x00\x00")


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        PLACE.model_id = "other"  # type: ignore[misc]


def test_every_message_says_who_sends_it_or_belongs_to_a_pair() -> None:
    """A reply exists only with its question, so that the registry can't drift."""
    names = {cls.__name__ for cls in codec.MESSAGES.values()}
    for name in names:
        if name.endswith("Reply") and name != "ErrorReply":
            assert name.removesuffix("Reply") in names
    assert messages.Ack in codec.MESSAGES.values()
