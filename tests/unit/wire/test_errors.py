"""Errors: one class, one code, one sentence; the same on both sides of the bus."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from whimbrel.wire import codec, errors
from whimbrel.wire.errors import ERRORS, ProtocolError, WhimbrelError
from whimbrel.wire.messages import ErrorReply

VALUES = {str: "x", int: 3, float: 1.5}


def build(cls: type[WhimbrelError]) -> WhimbrelError:
    hints = typing.get_type_hints(cls)
    return cls(**{name: VALUES[hints[name]] for name in (field.name for field in dataclasses.fields(cls))})  # type: ignore[index]


@pytest.mark.parametrize("cls", ERRORS.values(), ids=ERRORS)
def test_an_error_crosses_the_bus_as_its_class(cls: type[WhimbrelError]) -> None:
    error = build(cls)
    reply = codec.decode(codec.encode(codec.error_reply(error)))
    assert isinstance(reply, ErrorReply)
    again = codec.error_of(reply)
    assert type(again) is cls
    assert again.fields() == error.fields()
    assert str(again) == str(error)


@pytest.mark.parametrize("cls", ERRORS.values(), ids=ERRORS)
def test_the_sentence_is_made_from_the_fields(cls: type[WhimbrelError]) -> None:
    error = build(cls)
    assert "{" not in str(error)
    assert str(error) == error.args[0]


def test_every_error_class_is_registered_under_its_own_code() -> None:
    classes = {
        cls
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, WhimbrelError) and cls is not WhimbrelError
    }
    assert classes == set(ERRORS.values())
    assert len(ERRORS) == len(classes)


@pytest.mark.parametrize(
    ("code", "fields"),
    [("no_such_code", {}), ("queue_full", {"queue": "x"}), ("model_not_found", {"model_id": "m", "extra": 1})],
    ids=["unknown code", "missing field", "extra field"],
)
def test_a_malformed_error_reply_is_a_protocol_error(code: str, fields: dict[str, str | int | float | None]) -> None:
    with pytest.raises(ProtocolError):
        codec.error_of(ErrorReply(code=code, fields=fields))
