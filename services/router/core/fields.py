"""Owns typed reading of untyped JSON: each reader returns its type or raises InvalidRequest that names the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

from whimbrel.wire.errors import InvalidRequest

T = TypeVar("T")


def refuse(field: str, reason: str) -> NoReturn:
    raise InvalidRequest(field=field, reason=reason)


def read_object(value: object, field: str) -> dict[str, object]:
    if not isinstance(value, dict):
        refuse(field, f"must be an object, not {describe(value)}")
    return cast("dict[str, object]", value)


def read_list(value: object, field: str) -> list[object]:
    if not isinstance(value, list):
        refuse(field, f"must be an array, not {describe(value)}")
    return cast("list[object]", value)


def read_text(value: object, field: str) -> str:
    if not isinstance(value, str):
        refuse(field, f"must be a string, not {describe(value)}")
    return value


def read_flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        refuse(field, f"must be true or false, not {describe(value)}")
    return value


def read_whole(value: object, field: str, minimum: int, maximum: int) -> int:
    """An integer of [minimum, maximum]; 3.0 is one, true is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(field, f"must be a whole number, not {describe(value)}")
    if not minimum <= value <= maximum:
        refuse(field, f"must be between {minimum} and {maximum}, not {value}")
    return value


def read_number(value: object, field: str, minimum: float, maximum: float) -> float:
    """A number of [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(field, f"must be a number, not {describe(value)}")
    if not minimum <= value <= maximum:
        refuse(field, f"must be between {minimum} and {maximum}, not {value}")
    return float(value)


def read_optional(given: dict[str, object], name: str, read: Callable[[object, str], T]) -> T | None:
    """The field's value as `read` has it; None when it is not given."""
    return read(given[name], name) if name in given else None


def describe(value: object) -> str:
    """What a JSON value is, for a sentence."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return f"the number {value}"
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"
